"""The plan of a transfer of one tensor between two layouts: what each rank sends, receives and copies. Pure arithmetic.

A rank holds one part of the source and wants one part of the target, so two ranks exchange at most one range of one
region. A rank receives no more than its *floor*: the size of its target part without what it holds already. If several
ranks hold a source part, they share what is wanted of it (``shares.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pgmesh._util.formatting import count_of
from pgmesh.errors import ShapeError
from pgmesh.layout import Layout
from pgmesh.resharding.sharding import Part, Placements, Region, Sharding, size_of
from pgmesh.resharding.shares import HostMap, Shares, Transfer, split_evenly

MOST_ROUNDS = 50
"""Most rounds of ``balance``."""

MOST_ROWS = 64
"""``str(plan)`` lists each rank of at most so many."""


@dataclass(frozen=True)
class RankPlan:
    """The transfers of one rank.

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
        hosts: the ranks of each host, such as ``mesh.hosts()`` or ``[range(0, 8), range(8, 16)]``. Default:
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
        self.source = Sharding(self.shape, layout_of(source), source_placements)
        self.target = Sharding(self.shape, layout_of(target), target_placements)
        self._hosts = hosts if hosts is None or isinstance(hosts, HostMap) else HostMap(hosts)
        self._shares: dict[Part, Shares] = {}
        self._balanced: dict[Part, list[int]] = {}  # by balance: the shares of a part's replicas, if they are not equal

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of source and target."""
        return tuple(dict.fromkeys((*self.source.layout.ranks(), *self.target.layout.ranks())))

    def of(self, rank: int) -> RankPlan:
        """The plan of one rank: the elements that it sends, receives and copies.

        >>> ReshardPlan((8,), Layout(2), [0], Layout(2, ranks=[1, 2]), [0]).of(1).receives
        (Transfer(peer=0, region=(((0, 4),),), start=0, stop=4),)
        """
        held = self.source.part_of(rank) if rank in self.source.layout else None
        sends = [] if held is None else self._shares_of(held).sent_by(rank)
        leaving = sum(each.stop - each.start for each in sends if self._leaves(rank, each.peer))
        copied, floor, receives = None, 0, []
        if rank in self.target.layout:
            region = self.target.region_of(rank)
            floor = size_of(region)
            for part, overlap in self.source.parts_in(region):
                if part == held:
                    copied, floor = overlap, floor - size_of(overlap)
                elif self.source.replicas == 1:
                    receives.append(Transfer(self.source.rank_of(part, 0), overlap, 0, size_of(overlap)))
                else:
                    senders = self._shares_of(part).received_by(rank)
                    receives += [Transfer(sender, overlap, start, stop) for sender, start, stop in senders]
        return RankPlan(rank, tuple(sends), tuple(receives), copied, floor, self.itemsize, leaving)

    def _shares_of(self, part: Part) -> Shares:
        if part not in self._shares:
            self._shares[part] = Shares(self.source, self.target, part, self._hosts, self._balanced.get(part))
        return self._shares[part]

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

    Each plan alone gives the replicas of a part equal shares. But a rank may hold replicas of some tensors, and the
    only copy of others. So the shares of one part after the other are set by what its replicas send of all other parts,
    in several rounds, until they stay.

    Args:
        plans: plans that have computed nothing yet, each with the number of tensors that it is for.
    """
    if all(plan.source.replicas == 1 for plan, _ in plans) or len(plans) == 1:
        return
    load: dict[int, int] = {}  # by rank: the bytes that it sends
    shared: list[tuple[ReshardPlan, Part, int, tuple[int, ...]]] = []  # with the bytes of an element, and the replicas
    for plan, count in plans:
        whole = tuple(((0, size),) if size else () for size in plan.shape)
        for part, _ in plan.source.parts_in(whole):
            total, ranks = Shares(plan.source, plan.target, part).total, plan.source.ranks_of(part)
            itemsize = plan.itemsize * count
            plan._balanced[part] = split_evenly(total, [0] * len(ranks))
            for rank, share in zip(ranks, plan._balanced[part]):
                load[rank] = load.get(rank, 0) + share * itemsize
            if total and len(ranks) > 1:
                shared.append((plan, part, itemsize, ranks))
    for _ in range(MOST_ROUNDS):
        before = dict(load)
        for plan, part, itemsize, ranks in shared:
            shares = plan._balanced[part]
            others = [load[rank] - share * itemsize for rank, share in zip(ranks, shares)]
            plan._balanced[part] = split_evenly(sum(shares), [other // itemsize for other in others])
            for rank, other, share in zip(ranks, others, plan._balanced[part]):
                load[rank] = other + share * itemsize
        if load == before:
            break


def layout_of(mesh: Any) -> Layout:
    """The layout of a mesh, or the layout itself."""
    layout = getattr(mesh, "layout", mesh)
    if not isinstance(layout, Layout):
        raise ShapeError(f"source and target are a ProcessGroupMesh or a Layout, not {mesh!r}.")
    return layout
