"""The plan of a transfer of one tensor between two layouts: what each rank sends, receives and copies. Pure arithmetic.

A rank holds one part of the source and wants one part of the target, so two ranks exchange at most one region. A rank
receives no more than its *floor*: the size of its target part without what it holds already. The ranks that hold a
source part, its *replicas*, serve the *takers*, those that want some of it, in turn, and together if they are more;
takers on other hosts only if none is on theirs.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pgmesh.errors import RankError, ShapeError
from pgmesh.layout import Layout
from pgmesh.resharding.sharding import Part, Placements, Region, Sharding, size_of, split


class Transfer(NamedTuple):
    """Elements that one rank sends to another."""

    peer: int
    """The other rank."""
    region: Region
    """A part of the whole tensor: its intervals along each dimension."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return size_of(self.region)


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
        leaving: number of elements that it sends to other hosts.
        floor: number of elements of the source that it wants and does not hold.
    """

    rank: int
    held: Region | None
    wanted: Region | None
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    copied: Region | None
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


class Served(NamedTuple):
    """The replicas that serve the takers of one part of the source.

    Args:
        near: by host, the replicas there; none if all ranks are on one.
        by_all: the replicas, and the number of takers.
        holding: the slots of replicas that want some of the part themselves.
    """

    near: Mapping[int, Sequence[int]]
    by_all: tuple[Sequence[int], int]
    holding: Sequence[int]


class ReshardPlan:
    """The transfer of a tensor from one layout to another. Each rank computes its own part of it, alone.

    Args:
        shape: global shape of the tensor.
        source: a mesh or Layout of the ranks that hold the tensor.
        source_placements: DTensor placements on it, or by axis: ``{"tp": 0}`` shards dimension 0 along axis tp.
        target: a mesh or Layout of the ranks that want it. The two may have any ranks in common.
        target_placements: the same for the target.
        hosts: the ranks of each host, such as ``mesh.hosts()`` or ``[range(0, 8), range(8, 16)]``. Default:
            all ranks are on one host.

    Raises:
        AxisError: there is no such axis.
        RankError: a rank is on no host.
        ShapeError: there is no such dimension, a placement is ``Partial``, or the number of placements is wrong.

    >>> from pgmesh.resharding import ReshardPlan
    >>> trainer, generator = Layout(fsdp=2, tp=2), Layout(dp=2, tp=2, ranks=range(2, 6))
    >>> plan = ReshardPlan((8, 4), trainer, {"tp": 0}, generator, {"tp": 1}, hosts=[range(4), range(4, 6)])
    >>> [(mine.sent, mine.leaving, mine.received, mine.floor) for mine in map(plan.of, plan.ranks)]
    [(12, 8, 0, 0), (12, 8, 0, 0), (12, 8, 8, 8), (12, 8, 8, 8), (0, 0, 16, 16), (0, 0, 16, 16)]
    """

    def __init__(
        self,
        shape: Sequence[int],
        source: Any,
        source_placements: Placements,
        target: Any,
        target_placements: Placements,
        *,
        hosts: Sequence[Iterable[int]] | None = None,
    ) -> None:
        if any(size < 0 for size in shape):
            raise ShapeError(f"the sizes of a shape are 0 or more, not {tuple(shape)}.")
        self.shape = tuple(shape)
        self.source = Sharding(self.shape, layout_of(source), source_placements)
        self.target = Sharding(self.shape, layout_of(target), target_placements)
        self.ranks = tuple(dict.fromkeys((*self.source.layout.ranks(), *self.target.layout.ranks())))
        """The ranks of source and target."""
        self._hosts = [self.ranks] if hosts is None else [tuple(ranks) for ranks in hosts]
        self._host_of = {rank: number for number, ranks in enumerate(self._hosts) for rank in ranks}
        for rank in self.ranks:
            if rank not in self._host_of:
                raise RankError(f"hosts= has no host for rank {rank}. Give the ranks of each, as in [[0, 1], [2, 3]].")
        self._served: dict[Part, Served] = {}
        self._wanting: dict[Part, Mapping[Part, tuple[int, Region]]] = {}

    def of(self, rank: int) -> RankPlan:
        """The plan of one rank: the elements that it sends, receives and copies.

        >>> ReshardPlan((8,), Layout(2), [0], Layout(2, ranks=[1, 2]), [0]).of(1).receives
        (Transfer(peer=0, region=(((0, 4),),)),)
        """
        mine, held, sends = None, None, list[Transfer]()
        if rank in self.source.layout:
            mine = self.source.part_of(rank)
            held = self.source.region_of_part(mine)
            sends += self._sends(rank, mine)
        wanted, copied, receives, floor = None, None, list[Transfer](), 0
        if rank in self.target.layout:
            wanted = self.target.region_of(rank)
            for part, overlap in self.source.parts_in(wanted):
                if part == mine:
                    copied = overlap
                else:
                    floor += size_of(overlap)
                    receives += self._to(part, rank)
        leaving = sum(each.size for each in sends if self._host_of[each.peer] != self._host_of[rank])
        return RankPlan(rank, held, wanted, tuple(sends), tuple(receives), copied, leaving, floor)

    def _sends(self, rank: int, part: Part) -> Iterator[Transfer]:
        """The transfers from one replica of a part of the source."""
        near, own_host = self._served_of(part).near, self._host_of[rank]
        for wanted in self._wanting_of(part):
            for taker in self.target.ranks_of(wanted):
                host = self._host_of[taker]
                if (host == own_host or host not in near) and self._takes(taker, part):
                    yield from (each._replace(peer=taker) for each in self._to(part, taker) if each.peer == rank)

    def _slot(self, rank: int, part: Part) -> int | None:
        """The place of a rank among all that want some of a part of the source; None if it does not."""
        wanting = self._wanting_of(part)
        if rank not in self.target.layout or (wanted := self.target.part_of(rank)) not in wanting:
            return None
        return self.target.replica_of(rank) * len(wanting) + wanting[wanted][0]

    def _takes(self, rank: int, part: Part) -> bool:
        """True if a rank wants some of a part of the source, and does not hold it."""
        holds = rank in self.source.layout and self.source.part_of(rank) == part
        return not holds and self._slot(rank, part) is not None

    def _to(self, part: Part, rank: int) -> Iterator[Transfer]:
        """The transfers of a part of the source to one taker, by the replicas that serve it."""
        served, host = self._served_of(part), self._host_of[rank]
        _, overlap = self._wanting_of(part)[self.target.part_of(rank)]
        if host in served.near:
            here = [each for each in self._hosts[host] if self._takes(each, part)]
            senders, takers, turn = served.near[host], len(here), here.index(rank)
        else:
            (senders, takers), slot = served.by_all, self._slot(rank, part) or 0
            turn = slot - bisect.bisect(served.holding, slot)
        each_by = max(len(senders) // takers, 1)
        for i, share in enumerate(split(overlap, each_by)):
            yield Transfer(senders[(turn * each_by + i) % len(senders)], share)

    def _served_of(self, part: Part) -> Served:
        """The replicas that serve the takers of a part of the source, the same on all ranks."""
        if part not in self._served:
            replicas, near = self.source.ranks_of(part), defaultdict[int, list[int]](list)
            holding = sorted(slot for rank in replicas if (slot := self._slot(rank, part)) is not None)
            takers = len(self._wanting_of(part)) * self.target.replicas - len(holding)
            for rank in replicas if len(self._hosts) > 1 else ():
                near[self._host_of[rank]].append(rank)
            self._served[part] = Served(near, (replicas, takers), holding)
        return self._served[part]

    def _wanting_of(self, part: Part) -> Mapping[Part, tuple[int, Region]]:
        """The parts of the target that have some of a part of the source, each with its number and the overlap."""
        if part not in self._wanting:
            overlaps = self.target.parts_in(self.source.region_of_part(part))
            self._wanting[part] = {each: (i, overlap) for i, (each, overlap) in enumerate(overlaps)}
        return self._wanting[part]


def layout_of(mesh: Any) -> Layout:
    """The layout of a mesh, or the layout itself."""
    layout = getattr(mesh, "layout", mesh)
    if not isinstance(layout, Layout):
        raise ShapeError(f"source and target are a ProcessGroupMesh or a Layout, not {mesh!r}.")
    return layout
