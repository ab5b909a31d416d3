"""The plan of a transfer of one tensor between two layouts: what each rank sends, receives and copies. Pure arithmetic.

A rank holds one part of the source and wants one part of the target, so two ranks exchange at most one range of one
region. The floor of what a rank receives is the size of its target part without what it holds already.

All replicas of a source part could send it. The elements that are wanted of a part are arranged on a line: those for
the first rank, for the second rank, and so on. The line is cut into equal shares, one for each replica, so that the
replicas send the same, to one element. With ``hosts``, a replica first serves the ranks of its own host, as far as its
share reaches. Only the rest is on the line. The line is a few runs of equal ranks, whatever the number of ranks.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pgmesh._util.formatting import count_of
from pgmesh.errors import PlaceError, ShapeError
from pgmesh.layout import Layout
from pgmesh.resharding.sharding import Part, Placements, Region, Sharding, size_of

MOST_SWEEPS = 50
"""``balance`` pours again so many times at most."""

MOST_ROWS = 64
"""``str(plan)`` lists each rank of at most so many."""


class Transfer(NamedTuple):
    """Elements that one rank sends to another: ``start`` to ``stop`` of a region in row-major order."""

    peer: int
    region: Region
    start: int
    stop: int


@dataclass(frozen=True)
class RankPlan:
    """What one rank does.

    Args:
        rank: the rank.
        sends: what it sends, by destination.
        receives: what it receives, by sender.
        copied: the region that it holds and wants; None if there is none.
        floor: number of elements of its target part that it does not hold.
        itemsize: bytes of an element.
        leaving: number of elements that it sends to other hosts.
    """

    rank: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    copied: Region | None
    floor: int
    itemsize: int
    leaving: int

    @property
    def sent(self) -> int:
        """Number of elements that it sends."""
        return sum(each.stop - each.start for each in self.sends)

    @property
    def received(self) -> int:
        """Number of elements that it receives."""
        return sum(each.stop - each.start for each in self.receives)

    def __str__(self) -> str:
        sent, received, floor, leaving = (
            f"{elements * self.itemsize:,}" for elements in (self.sent, self.received, self.floor, self.leaving)
        )
        return (
            f"rank {self.rank} sends {sent} bytes to {count_of(len(self.sends), 'rank')}, {leaving} of them to other "
            f"hosts, and receives {received} bytes from {count_of(len(self.receives), 'rank')} (floor {floor})"
        )


class ReshardPlan:
    """The transfer of a tensor from one layout to another. Each rank computes its own part of it, alone.

    Args:
        shape: global shape of the tensor.
        source: a mesh or Layout of the ranks that hold the tensor.
        source_placements: DTensor placements on it, or by axis: ``{"tp": 0}`` shards dimension 0 along axis tp.
        target: a mesh or Layout of the ranks that want it. The two may have any ranks in common.
        target_placements: the same for the target.
        itemsize: bytes of an element.
        hosts: the ranks of each host, such as ``launch.placement().hosts`` or ``[range(0, 8), range(8, 16)]``. Default:
            all ranks are on one host.

    Raises:
        AxisError: there is no such axis.
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
        hosts: Any = None,
    ) -> None:
        if any(size < 0 for size in shape):
            raise ShapeError(f"the sizes of a shape are 0 or more, not {tuple(shape)}.")
        self.shape, self.itemsize = tuple(shape), itemsize
        self.source = Sharding(self.shape, _layout_of(source), source_placements)
        self.target = Sharding(self.shape, _layout_of(target), target_placements)
        self._hosts = hosts if hosts is None or isinstance(hosts, HostMap) else HostMap(hosts)
        self._shares: dict[Part, _Shares] = {}
        self._balanced: dict[Part, list[int]] = {}  # by balance: the shares of a part's replicas, if they are not equal

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of source and target."""
        return tuple(dict.fromkeys((*self.source.layout.ranks(), *self.target.layout.ranks())))

    def of(self, rank: int) -> RankPlan:
        """What one rank sends, receives and copies.

        >>> ReshardPlan((8,), Layout(2), [0], Layout(2, ranks=[1, 2]), [0]).of(1).receives
        (Transfer(peer=0, region=(((0, 4),),), start=0, stop=4),)
        """
        copied, floor, receives = None, 0, []
        if rank in self.target.layout:
            region = self.target.region_of(rank)
            floor = size_of(region)
            for part, overlap in self.source.parts_in(region):
                if rank in self.source.layout and self.source.part_of(rank) == part:
                    copied, floor = overlap, floor - size_of(overlap)
                elif self.source.replicas == 1:
                    receives.append(Transfer(self.source.rank_of(part, 0), overlap, 0, size_of(overlap)))
                else:
                    for holder, start, stop in self._shares_of(part).received_by(rank):
                        receives.append(Transfer(holder, overlap, start, stop))
        sends = self._shares_of(self.source.part_of(rank)).sent_by(rank) if rank in self.source.layout else ()
        leaving = sum(each.stop - each.start for each in sends if self._leaves(rank, each.peer))
        return RankPlan(rank, tuple(sends), tuple(receives), copied, floor, self.itemsize, leaving)

    def _leaves(self, rank: int, other: int) -> bool:
        """True if two ranks are on different hosts."""
        return self._hosts is not None and not self._hosts.near(rank, other)

    def svg(self) -> str:
        """A picture of who sends what to whom, as SVG. It has the first ranks of each side, at most ``MOST_ROWS``.

        >>> plan = ReshardPlan((8,), Layout(tp=2), {"tp": 0}, Layout(tp=4, ranks=range(2, 6)), {"tp": 0}, itemsize=4)
        >>> plan.svg().count("<path")
        4
        """
        from pgmesh.drawing import transfers

        sides, sent = [], {}
        for word, side in (("source", self.source), ("target", self.target)):
            ends = []
            for rank in itertools.islice(side.layout, MOST_ROWS):
                plan = self.of(rank)
                elements = f"sends {plan.sent * self.itemsize:,}", f"receives {plan.received * self.itemsize:,}"
                label = side.layout.label_of(rank) + (f", host {self._hosts.number(rank)}" if self._hosts else "")
                ends.append(transfers.End(rank, label, f"{elements[word == 'target']} bytes"))
                for each in plan.sends:
                    amount = (each.stop - each.start) * self.itemsize
                    sent[rank, each.peer] = transfers.Sent(amount, self._leaves(rank, each.peer))
            sizes = " ".join(f"{axis}={size}" for axis, size in zip(side.layout.axes, side.layout.shape))
            sides.append((f"{word}: {sizes}", ends))
        dashed = ", dashed: to another host" if self._hosts else ""
        notes = [f"a line: what one rank sends to another; thicker is more{dashed}"]
        if any(len(side.layout) > MOST_ROWS for side in (self.source, self.target)):
            notes.append(f"a sample: the first {MOST_ROWS} ranks of each side")
        title = f"shape {self.shape}, {count_of(self.itemsize, 'byte')} each"
        return transfers.drawing(title, notes, (sides[0], sides[1]), sent).svg()

    def _shares_of(self, part: Part) -> _Shares:
        if part not in self._shares:
            self._shares[part] = _Shares(self.source, self.target, part, self._hosts, self._balanced.get(part))
        return self._shares[part]

    def __str__(self) -> str:
        plans = [self.of(rank) for rank in sorted(self.ranks)[:MOST_ROWS]]
        table = [(each.rank, each.sent, each.leaving, each.received, each.floor) for each in plans]
        rows = [[str(rank), *(f"{n * self.itemsize:,}" for n in counts)] for rank, *counts in table]
        if len(self.ranks) <= MOST_ROWS:
            rows.append(["all", *(f"{sum(column) * self.itemsize:,}" for column in [*zip(*table)][1:])])
        rows = [["rank", "sends", "to other hosts", "receives", "floor"], *rows]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(word.rjust(width) for word, width in zip(row, widths)) for row in rows]
        if len(self.ranks) > MOST_ROWS:
            lines.append(f"and {len(self.ranks) - MOST_ROWS:,} more ranks: print(plan.of(rank)) shows one")
        size = count_of(self.itemsize, "byte")
        title = f"shape {self.shape}, {size} each, from {self.source.layout!r} to {self.target.layout!r}"
        return "\n".join([title, *lines])


def balance(plans: Sequence[tuple[ReshardPlan, int]]) -> None:
    """Set the shares of the replicas so that over several tensors the greatest sender sends least.

    Each plan alone shares evenly among the replicas of a part. But ranks may hold replicas of some tensors and the only
    copy of others. What one rank alone holds is its load. What several hold is poured on their loads like water, part
    by part, again and again until the levels stay.

    Args:
        plans: plans that have computed nothing yet, each with the number of tensors that it is for.
    """
    load: dict[int, int] = {}  # bytes that each rank sends
    shared: list[tuple[ReshardPlan, Part, int, tuple[int, ...]]] = []
    if all(plan.source.replicas == 1 for plan, _ in plans) or len(plans) == 1:
        return
    for plan, count in plans:
        everything = tuple(((0, size),) if size else () for size in plan.shape)
        for part, _ in plan.source.parts_in(everything):
            total = _Shares(plan.source, plan.target, part, None, None).total
            holders, each = plan.source.ranks_of(part), plan.itemsize * count
            plan._balanced[part] = [
                total * (i + 1) // len(holders) - total * i // len(holders) for i in range(len(holders))
            ]
            for holder, share in zip(holders, plan._balanced[part]):
                load[holder] = load.get(holder, 0) + share * each
            if total and len(holders) > 1:
                shared.append((plan, part, each, holders))
    for _ in range(MOST_SWEEPS):
        before = dict(load)
        for plan, part, each, holders in shared:
            shares = plan._balanced[part]
            others = [load[holder] - share * each for holder, share in zip(holders, shares)]
            plan._balanced[part] = poured(sum(shares), [other // each for other in others])
            for holder, other, share in zip(holders, others, plan._balanced[part]):
                load[holder] = other + share * each
        if load == before:
            break


def poured(total: int, levels: Sequence[int]) -> list[int]:
    """What each vessel gets of a total that is poured into connected vessels filled to these levels.

    >>> poured(10, [0, 7, 4])
    [7, 0, 3]
    """
    order = sorted(range(len(levels)), key=lambda i: levels[i])
    for n in range(len(order), 0, -1):
        level, extra = divmod(total + sum(levels[i] for i in order[:n]), n)
        if level >= levels[order[n - 1]]:
            break
    shares = [0] * len(levels)
    for place, i in enumerate(order[:n]):
        shares[i] = level + (place < extra) - levels[i]
    return shares


class HostMap:
    """The host of each rank.

    Args:
        hosts: the ranks of each host.
    """

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        self.hosts = hosts
        self._host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}

    def near(self, rank: int, other: int) -> bool:
        """True if two ranks are on one host."""
        return self.number(rank) == self.number(other)

    def number(self, rank: int) -> int:
        """The number of a rank's host.

        Raises:
            PlaceError: no host has the rank.
        """
        if rank not in self._host_of:
            raise PlaceError(
                f"hosts= has no host for rank {rank}. Give the ranks of each host, as in [[0, 1], [2, 3]]."
            )
        return self._host_of[rank]


def _layout_of(mesh: Any) -> Layout:
    """The layout of a mesh, or the layout itself."""
    layout = getattr(mesh, "layout", mesh)
    if not isinstance(layout, Layout):
        raise ShapeError(f"source and target are a ProcessGroupMesh or a Layout, not {mesh!r}.")
    return layout


class _Run(NamedTuple):
    """Consecutive slots that want as many elements each."""

    position: int  # of the first element on the line
    slot: int  # the first
    size: int


class _Shares:
    """How the replicas of one source part share what is wanted of it.

    A *slot* is a rank that wants some of the part: the target parts that overlap it, in order, each with its replicas.
    """

    def __init__(
        self, source: Sharding, target: Sharding, part: Part, hosts: HostMap | None, balanced: list[int] | None
    ) -> None:
        self._source, self._target = source, target
        self._holders = source.ranks_of(part)
        wanted = target.parts_in(source.region_of_part(part))
        self._regions = [overlap for _, overlap in wanted]
        self._parts = [each for each, _ in wanted]
        self._numbers = {each: number for number, each in enumerate(self._parts)}
        sizes = [size_of(overlap) for overlap in self._regions]
        # by slot, the elements that are not on the line: all of a holder's, and those that its host's replicas send
        own = self._slots(set(self._holders)).values()
        self._off_line = {slot: sizes[slot // target.replicas] for slot in own}
        self.total, n = sum(sizes) * target.replicas - sum(self._off_line.values()), len(self._holders)
        shares = poured(self.total, [0] * n) if balanced is None else [*balanced]
        self._near: list[tuple[int, int, int, int]] = []  # the holder's number, slot, start, stop
        if hosts is not None and n > 1:
            self._serve_hosts(hosts, sizes, shares)
        self._ends = list(itertools.accumulate(shares, initial=0))  # on the line, of each holder's share
        self._runs = [*self._line(sizes)]

    def _slot(self, rank: int) -> int:
        """The slot of a rank; -1 if it wants nothing of the part."""
        number = self._numbers.get(self._target.part_of(rank)) if rank in self._target.layout else None
        return -1 if number is None else number * self._target.replicas + self._target.replica_of(rank)

    def _slots(self, ranks: set[int]) -> dict[int, int]:
        """The slots of those of these ranks that want some of the part."""
        if len(ranks) < len(self._parts) * self._target.replicas:
            return {rank: slot for rank in ranks if (slot := self._slot(rank)) >= 0}
        wanting = itertools.chain.from_iterable(map(self._target.ranks_of, self._parts))  # fewer: go through these
        return {rank: slot for slot, rank in enumerate(wanting) if rank in ranks}

    def _serve_hosts(self, hosts: HostMap, sizes: Sequence[int], shares: list[int]) -> None:
        """Let each holder serve the ranks of its own host first, as far as its share reaches."""
        by_host: dict[int, list[int]] = {}
        for holder, rank in enumerate(self._holders):
            by_host.setdefault(hosts.number(rank), []).append(holder)
        slot_of = self._slots({rank for number in by_host for rank in hosts.hosts[number]})
        for number, holders in by_host.items():
            slots = sorted(slot_of[rank] for rank in hosts.hosts[number] if rank in slot_of)
            for slot in (slot for slot in slots if slot not in self._off_line):
                start, size = 0, sizes[slot // self._target.replicas]
                for holder in holders:
                    stop = min(start + shares[holder], size)
                    if start < stop:
                        self._near.append((holder, slot, start, stop))
                        shares[holder] -= stop - start
                        start = self._off_line[slot] = stop

    def _line(self, sizes: Sequence[int]) -> Iterator[_Run]:
        """The runs of the line, and an empty one at its end."""
        position, special = 0, sorted(self._off_line)
        for number, size in enumerate(sizes):
            slot, end = number * self._target.replicas, (number + 1) * self._target.replicas
            for each in special[bisect.bisect_left(special, slot) : bisect.bisect_left(special, end)]:
                yield _Run(position, slot, size)
                position += (each - slot) * size
                yield _Run(position, each, size - self._off_line[each])
                position += size - self._off_line[each]
                slot = each + 1
            yield _Run(position, slot, size)
            position += (end - slot) * size
        yield _Run(position, len(sizes) * self._target.replicas, 0)

    def received_by(self, rank: int) -> list[tuple[int, int, int]]:
        """The ranks that send to a rank, each with the start and the stop of what it sends."""
        slot = self._slot(rank)
        found = [(self._holders[holder], start, stop) for holder, to, start, stop in self._near if to == slot]
        run = self._runs[bisect.bisect_right(self._runs, slot, key=lambda run: run.slot) - 1]
        low = run.position + (slot - run.slot) * run.size
        shift = self._off_line.get(slot, 0) - low
        holder = bisect.bisect_right(self._ends, low) - 1
        while run.size and self._ends[holder] < low + run.size:
            start, stop = max(low, self._ends[holder]), min(low + run.size, self._ends[holder + 1])
            if start < stop:
                found.append((self._holders[holder], start + shift, stop + shift))
            holder += 1
        return found

    def sent_by(self, rank: int) -> list[Transfer]:
        """What a holder sends."""
        holder = self._source.replica_of(rank)
        found = [self._transfer(slot, start, stop) for by, slot, start, stop in self._near if by == holder]
        low, high = self._ends[holder : holder + 2]
        first = bisect.bisect_right(self._runs, low, key=lambda run: run.position) - 1
        for run, after in itertools.pairwise(self._runs[first:]):
            if low == high or run.position >= high:
                break
            skipped = max(low - run.position, 0) // run.size if run.size else after.slot - run.slot
            for slot in range(run.slot + skipped, after.slot):
                position = run.position + (slot - run.slot) * run.size
                if position >= high:
                    break
                shift = self._off_line.get(slot, 0) - position
                found.append(self._transfer(slot, max(low, position) + shift, min(high, position + run.size) + shift))
        return found

    def _transfer(self, slot: int, start: int, stop: int) -> Transfer:
        number, replica = divmod(slot, self._target.replicas)
        return Transfer(self._target.rank_of(self._parts[number], replica), self._regions[number], start, stop)
