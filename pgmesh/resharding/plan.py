"""The plan of a transfer of one tensor between two layouts: what each rank sends, receives and copies. Pure arithmetic.

A rank holds one part of the source and wants one part of the target, so two ranks exchange at most one range of one
region. A rank receives no more than its *floor*: the size of its target part without what it holds already. If several
ranks hold a source part, they share what is wanted of it.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pgmesh._util.formatting import count_of
from pgmesh.drawing.styled_text import columns, plain
from pgmesh.errors import RankError, ShapeError
from pgmesh.layout import Layout
from pgmesh.resharding.sharding import Part, Placements, Region, Sharding, overlaps, size_of

MOST_ROUNDS = 50
"""Most rounds of ``balance``."""

MOST_ROWS = 64
"""``str(plan)`` lists each rank of at most so many."""


class Transfer(NamedTuple):
    """Elements that one rank sends to another: ``start`` to ``stop`` of a region in row-major order."""

    peer: int
    """The other rank."""
    region: Region
    """A part of the whole tensor: its intervals along each dimension."""
    start: int
    """The first element of the region that is sent."""
    stop: int
    """The first element after it that is not sent."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class RankPlan:
    """The transfers of one rank.

    Args:
        rank: the rank.
        held: the region of its shard of the source; None outside the source.
        wanted: the region of its shard of the target; None outside the target.
        sends: what it sends, by destination.
        receives: what it receives, by sender.
        copied: the region that it holds and wants; None if there is none.
        itemsize: bytes of an element.
        leaving: number of elements that it sends to other hosts.
        floor: number of elements of the source that it wants and does not hold.
    """

    rank: int
    held: Region | None
    wanted: Region | None
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    copied: Region | None
    itemsize: int
    leaving: int
    floor: int

    @property
    def sent(self) -> int:
        """Number of elements that it sends."""
        return sum(each.size for each in self.sends)

    @property
    def received(self) -> int:
        """Number of elements that it receives."""
        return sum(each.size for each in self.receives)


class ReshardPlan:
    """The transfer of a tensor from one layout to another. Each rank computes its own part of it, alone.

    Args:
        shape: global shape of the tensor.
        source: a mesh or Layout of the ranks that hold the tensor.
        source_placements: DTensor placements on it, or by axis: ``{"tp": 0}`` shards dimension 0 along axis tp.
        target: a mesh or Layout of the ranks that want it. The two may have any ranks in common.
        target_placements: the same for the target.
        itemsize: bytes of an element.
        hosts: the ranks of each host, such as ``mesh.hosts()`` or ``[range(0, 8), range(8, 16)]``. Default:
            all ranks are on one host.

    Raises:
        AxisError: there is no such axis.
        RankError: a rank is on no host.
        ShapeError: there is no such dimension, a placement is ``Partial``, or the number of placements is wrong.

    >>> from pgmesh.resharding import ReshardPlan
    >>> trainer, generator = Layout(fsdp=2, tp=2), Layout(dp=2, tp=2, ranks=range(2, 6))
    >>> print(ReshardPlan((8, 4), trainer, {"tp": 0}, generator, {"tp": 1}, itemsize=2, hosts=[range(4), range(4, 6)]))
    shape (8, 4), 2 bytes each, from Layout(fsdp=2, tp=2) to Layout(dp=2, tp=2, ranks=range(2, 6))
    rank  sends  to other hosts  receives  floor
       0     24               8         0      0
       1     24               8         0      0
       2     24              24        16     16
       3     24              24        16     16
       4      0               0        32     32
       5      0               0        32     32
     all     96              64        96     96
    """

    def __init__(
        self,
        shape: Sequence[int],
        source: Any,
        source_placements: Placements,
        target: Any,
        target_placements: Placements,
        *,
        itemsize: int = 1,
        hosts: Sequence[Iterable[int]] | None = None,
    ) -> None:
        if any(size < 0 for size in shape):
            raise ShapeError(f"the sizes of a shape are 0 or more, not {tuple(shape)}.")
        self.shape, self.itemsize = tuple(shape), itemsize
        self.source = Sharding(self.shape, layout_of(source), source_placements)
        self.target = Sharding(self.shape, layout_of(target), target_placements)
        self.ranks = tuple(dict.fromkeys((*self.source.layout.ranks(), *self.target.layout.ranks())))
        """The ranks of source and target."""
        self._hosts = [self.ranks] if hosts is None else [tuple(ranks) for ranks in hosts]
        self._host_of = {rank: number for number, ranks in enumerate(self._hosts) for rank in ranks}
        for rank in self.ranks:
            if rank not in self._host_of:
                raise RankError(f"hosts= has no host for rank {rank}. Give the ranks of each, as in [[0, 1], [2, 3]].")
        self._shares: dict[Part, Shares] = {}

    def of(self, rank: int) -> RankPlan:
        """The plan of one rank: the elements that it sends, receives and copies.

        >>> ReshardPlan((8,), Layout(2), [0], Layout(2, ranks=[1, 2]), [0]).of(1).receives
        (Transfer(peer=0, region=(((0, 4),),), start=0, stop=4),)
        """
        mine, held, sends = None, None, list[Transfer]()
        if rank in self.source.layout:
            mine = self.source.part_of(rank)
            held = self.source.region_of_part(mine)
            sends += self._shares_of(mine).sent_by(rank)
        wanted, copied, receives, floor = None, None, list[Transfer](), 0
        if rank in self.target.layout:
            wanted = self.target.region_of(rank)
            for part, overlap in self.source.parts_in(wanted):
                if part == mine:
                    copied = overlap
                else:
                    floor += size_of(overlap)
                    receives += self._shares_of(part).received_by(rank)
        leaving = sum(each.size for each in sends if self._host_of[each.peer] != self._host_of[rank])
        return RankPlan(rank, held, wanted, tuple(sends), tuple(receives), copied, self.itemsize, leaving, floor)

    def _shares_of(self, part: Part) -> Shares:
        """The shares of the replicas of a part of the source."""
        if part not in self._shares:
            self._shares[part] = Shares(self, part)
        return self._shares[part]

    def __str__(self) -> str:
        ranks = sorted(self.ranks)[:MOST_ROWS]
        counts = [(each.sent, each.leaving, each.received, each.floor) for each in map(self.of, ranks)]
        rows = [["rank", "sends", "to other hosts", "receives", "floor"]]
        rows += [[str(rank), *map(self._bytes_of, row)] for rank, row in zip(ranks, counts)]
        if len(self.ranks) <= MOST_ROWS:
            rows.append(["all", *(self._bytes_of(sum(column)) for column in zip(*counts))])
        lines = [plain(columns([[(word, "") for word in row] for row in rows], [True] * len(rows[0])))]
        if len(self.ranks) > MOST_ROWS:
            lines.append(f"and {len(self.ranks) - MOST_ROWS:,} more ranks: print(plan.of(rank)) shows one")
        size = count_of(self.itemsize, "byte")
        title = f"shape {self.shape}, {size} each, from {self.source.layout!r} to {self.target.layout!r}"
        return "\n".join([title, *lines])

    def _bytes_of(self, count: int) -> str:
        return f"{count * self.itemsize:,}"


# -- the shares of replicas ----------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of the line of a part, and the number of the replica that sends them."""

    start: int
    stop: int
    replica: int


class Cut:
    """The pieces of a line so far, and what is left of the share of each replica.

    Args:
        counts: number of elements that each replica sends.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.pieces: list[Piece] = []
        self._left = [*counts]

    def give(self, replica: int, start: int, stop: int) -> int:
        """Give these elements to a replica, as far as its share goes; return the first one that it does not get."""
        size = min(self._left[replica], stop - start)
        if size:
            self.pieces.append(Piece(start, start + size, replica))
            self._left[replica] -= size
        return start + size


class Slots(NamedTuple):
    """The slots on the line of a source part that belong to one part of the target, one for each of its replicas."""

    part: Part  # of the target
    overlap: Region  # what it wants of the source part
    size: int  # number of elements of one slot
    start: int  # start of the first slot on the line; the others follow it


class Shares:
    """The shares of the replicas of one source part in what other ranks want of it.

    Each replica of a part could send all of it. The elements that each rank wants of the part, one rank after the
    other, are the *line*. The elements of one rank are its *slot*. The line is cut into *pieces*:

    - A replica that wants some of the part has it: its slot is in no piece.
    - Then each replica serves the slots of ranks on its own host, until its share is used up.
    - What is left of the line is cut in the order of the replicas.

    A million ranks can want a part. So there is no list of slots: their positions on the line are computed.

    Args:
        plan: the plan.
        part: the part of its source.

    Ranks 0 and 1 are replicas of 8 elements. Ranks 1 and 2 want one half each, so these are slots 0 to 4 and 4 to 8 of
    the line. Rank 1 has its half, and each replica sends one half of the other:

    >>> plan = ReshardPlan((8,), Layout(dp=2), None, Layout(tp=2, ranks=[1, 2]), {"tp": 0})
    >>> for piece in Shares(plan, ()).pieces:
    ...     print(piece)
    Piece(start=4, stop=6, replica=0)
    Piece(start=6, stop=8, replica=1)
    """

    def __init__(self, plan: ReshardPlan, part: Part) -> None:
        self._plan, self._target = plan, plan.target
        self.replicas = plan.source.ranks_of(part)
        self._wanted: list[Slots] = []
        self._end = 0  # of the line
        for wanted, overlap in self._target.parts_in(plan.source.region_of_part(part)):
            self._wanted.append(Slots(wanted, overlap, size_of(overlap), self._end))
            self._end += self._wanted[-1].size * self._target.replicas
        self._slots_of = {each.part: each for each in self._wanted}
        self._own = self._slots(self.replicas)
        self.total = self._end - sum(stop - start for start, stop in self._own.values())
        """Number of elements that the replicas send."""
        self.counts = split_evenly(self.total, [0] * len(self.replicas))
        """Number of elements that each replica sends. ``balance`` changes it."""

        self.weight = plan.itemsize
        """Bytes that an element stands for. ``balance`` multiplies it by the number of tensors."""

    def bytes_sent(self) -> dict[int, int]:
        """Bytes that each replica sends."""
        return {rank: count * self.weight for rank, count in zip(self.replicas, self.counts)}

    def received_by(self, rank: int) -> Iterator[Transfer]:
        """The transfers that a rank receives from the replicas."""
        if slot := self._slot(rank):
            region = self._slots_of[self._target.part_of(rank)].overlap
            for _, i, start, stop in overlaps([slot], self.pieces):
                yield Transfer(self.replicas[self.pieces[i].replica], region, start - slot[0], stop - slot[0])

    def sent_by(self, rank: int) -> Iterator[Transfer]:
        """The transfers that a replica sends."""
        number = self._plan.source.replica_of(rank)
        for start, stop, replica in self.pieces:
            while replica == number and start < stop:  # a piece may have elements of several slots
                slots = self._wanted[bisect.bisect(self._wanted, start, key=lambda each: each.start) - 1]
                number_of_slot, first = divmod(start - slots.start, slots.size)
                last = min(first + stop - start, slots.size)
                yield Transfer(self._target.ranks_of(slots.part)[number_of_slot], slots.overlap, first, last)
                start += last - first

    @cached_property
    def pieces(self) -> list[Piece]:
        """All pieces, in the order of the line."""
        cut = Cut(self.counts)
        if len(self._plan._hosts) > 1:
            self._serve_own_hosts(cut)
        taken = sorted([*self._own.values(), *((piece.start, piece.stop) for piece in cut.pieces)])
        starts, stops = zip(*taken) if taken else ((), ())
        replica = 0
        for start, stop in zip((0, *stops), (*starts, self._end)):  # the intervals between those that are taken
            while (start := cut.give(replica, start, stop)) < stop:  # the share of this replica is used up
                replica += 1
        return sorted(cut.pieces)

    def _serve_own_hosts(self, cut: Cut) -> None:
        """Let the replicas serve the slots of ranks on their own hosts."""
        hosts, host_of = self._plan._hosts, self._plan._host_of
        replicas_on = defaultdict[int, list[int]](list)  # by host, the numbers of the replicas there
        for number, rank in enumerate(self.replicas):
            replicas_on[host_of[rank]].append(number)
        for rank, (start, stop) in self._slots([rank for host in replicas_on for rank in hosts[host]]).items():
            if rank not in self._own:
                for number in replicas_on[host_of[rank]]:
                    start = cut.give(number, start, stop)

    def _slots(self, ranks: Sequence[int]) -> dict[int, tuple[int, int]]:
        """The slots of these ranks, without those that want nothing of the part."""
        if len(ranks) > len(self._wanted) * self._target.replicas:  # fewer ranks want the part: go through those
            some = {*ranks}
            ranks = [rank for each in self._wanted for rank in self._target.ranks_of(each.part) if rank in some]
        return {rank: slot for rank in ranks if (slot := self._slot(rank))}

    def _slot(self, rank: int) -> tuple[int, int] | None:
        """The slot of a rank on the line; None if it wants nothing of the part."""
        slots = self._slots_of.get(self._target.part_of(rank)) if rank in self._target.layout else None
        if slots is None:
            return None
        start = slots.start + self._target.replica_of(rank) * slots.size
        return start, start + slots.size


def split_evenly(total: int, loads: Sequence[int]) -> list[int]:
    """The parts of a total that, added to these loads, make the greatest sum least.

    >>> split_evenly(10, [0, 7, 4])
    [7, 0, 3]
    """
    order = sorted(range(len(loads)), key=lambda i: loads[i])
    # The n least loaded ones get a part each, which brings them to the same level: the most n whose loads are below it.
    for n in range(len(order), 0, -1):
        level, extra = divmod(total + sum(loads[i] for i in order[:n]), n)
        if level >= loads[order[n - 1]]:
            break
    parts = [0] * len(loads)
    for place, i in enumerate(order[:n]):
        parts[i] = level + (place < extra) - loads[i]  # the first ones get 1 more, if the total is not divisible by n
    return parts


def balance(plans: Mapping[ReshardPlan, int]) -> None:
    """Set the shares of the replicas so that over several tensors the greatest sender sends least.

    Each plan alone gives the replicas of a part equal shares. But a rank may hold replicas of some tensors, and the
    only copy of others. So the shares of one part after the other are set by what its replicas send of all other parts,
    in several rounds, until they stay.

    Args:
        plans: the number of tensors of each plan. The plans have computed nothing yet.
    """
    if all(plan.source.replicas == 1 for plan in plans):
        return
    load: Counter[int] = Counter()  # by rank: the bytes that it sends
    shared: list[Shares] = []
    for plan, count in plans.items():
        for shares in map(plan._shares_of, plan.source.parts()):
            shares.weight *= count
            load.update(shares.bytes_sent())
            if len(shares.replicas) > 1:
                shared.append(shares)
    for _ in range(MOST_ROUNDS):
        before = load.copy()
        for shares in shared:
            load.subtract(shares.bytes_sent())
            shares.counts = split_evenly(shares.total, [load[rank] // shares.weight for rank in shares.replicas])
            load.update(shares.bytes_sent())
        if load == before:
            break


def layout_of(mesh: Any) -> Layout:
    """The layout of a mesh, or the layout itself."""
    layout = getattr(mesh, "layout", mesh)
    if not isinstance(layout, Layout):
        raise ShapeError(f"source and target are a ProcessGroupMesh or a Layout, not {mesh!r}.")
    return layout
