"""The shares of the replicas of one source part in what other ranks want of it. Pure arithmetic.

Each replica of a part could send all of it. A *slot* is a rank that wants some of the part. The elements of all slots,
one slot after the other, are a line. The line is cut into one share for each replica. The shares are equal, to one
element, unless ``plan.balance`` has set others.

Some elements are not on the line: those of a slot that is a replica itself, since it has them, and with ``hosts`` those
that a replica sends to slots on its own host first, until its share is used up. They are the first of their slot.

A part can have a million slots. So no list has an entry for each: their positions on the line are computed.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from pgmesh.errors import RankError
from pgmesh.resharding.sharding import Part, Region, Sharding, size_of


class Transfer(NamedTuple):
    """Elements that one rank sends to another: ``start`` to ``stop`` of a region in row-major order."""

    peer: int
    region: Region
    start: int
    stop: int


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
            RankError: no host has the rank.
        """
        if rank not in self._host_of:
            raise RankError(f"hosts= has no host for rank {rank}. Give the ranks of each host, as in [[0, 1], [2, 3]].")
        return self._host_of[rank]


def split_evenly(total: int, loads: Sequence[int]) -> list[int]:
    """The parts of a total that, added to these loads, make the greatest sum least.

    >>> split_evenly(10, [0, 7, 4])
    [7, 0, 3]
    """
    order = sorted(range(len(loads)), key=lambda i: loads[i])
    for n in range(len(order), 0, -1):  # the n least loaded get a part, and come to the same level
        level, extra = divmod(total + sum(loads[i] for i in order[:n]), n)
        if level >= loads[order[n - 1]]:
            break
    parts = [0] * len(loads)
    for place, i in enumerate(order[:n]):
        parts[i] = level + (place < extra) - loads[i]
    return parts


class Shares:
    """The shares of the replicas of one source part.

    Args:
        source: the sharding of the source.
        target: that of the target.
        part: the part of the source.
        hosts: the hosts of the ranks; None if all are on one host.
        shares: the number of elements that each replica sends. Default: equal shares.
    """

    def __init__(
        self,
        source: Sharding,
        target: Sharding,
        part: Part,
        hosts: HostMap | None = None,
        shares: Sequence[int] | None = None,
    ) -> None:
        self._source, self._target = source, target
        self._holders = source.ranks_of(part)
        wanted = target.parts_in(source.region_of_part(part))
        # Slot n * target.replicas + i is replica i of the n-th of these target parts.
        self._parts = [each for each, _ in wanted]
        self._numbers = {each: number for number, each in enumerate(self._parts)}
        self._regions = [overlap for _, overlap in wanted]
        self._sizes = [size_of(overlap) for overlap in self._regions]
        own = self._slots(set(self._holders)).values()
        self._off_line = {slot: self._size(slot) for slot in own}  # by slot: the number of elements
        self.total = sum(self._sizes) * target.replicas - sum(self._off_line.values())
        """Number of elements that the replicas send."""
        left = [*shares] if shares is not None else split_evenly(self.total, [0] * len(self._holders))
        self._near: list[tuple[int, int, int, int]] = []  # number of the replica, slot, start, stop
        if hosts is not None and len(self._holders) > 1:
            self._serve_hosts(hosts, left)
        self._ends = [*itertools.accumulate(left, initial=0)]  # replica i has ends[i] to ends[i + 1] of the line
        self._off_line_slots = sorted(self._off_line)
        sizes = (self._off_line[slot] for slot in self._off_line_slots)
        self._off_line_before = [*itertools.accumulate(sizes, initial=0)]
        self._starts = [*itertools.accumulate((size * target.replicas for size in self._sizes), initial=0)]

    def received_by(self, rank: int) -> list[tuple[int, int, int]]:
        """The ranks that send to a rank, each with the start and the stop of what it sends."""
        slot = self._slot(rank)
        found = [(self._holders[replica], start, stop) for replica, to, start, stop in self._near if to == slot]
        first, begin, end = self._on_line(slot)
        for replica in range(bisect.bisect_right(self._ends, begin) - 1, len(self._holders)):
            if self._ends[replica] >= end:
                break
            start, stop = max(begin, self._ends[replica]), min(end, self._ends[replica + 1])
            if start < stop:
                found.append((self._holders[replica], first + start - begin, first + stop - begin))
        return found

    def sent_by(self, rank: int) -> list[Transfer]:
        """The transfers that a replica sends."""
        replica = self._source.replica_of(rank)
        found = [self._transfer(slot, start, stop) for by, slot, start, stop in self._near if by == replica]
        start, stop = self._ends[replica : replica + 2]
        if start == stop:
            return found
        slots = range(len(self._parts) * self._target.replicas)
        for slot in slots[bisect.bisect_right(slots, start, key=self._position) - 1 :]:
            first, begin, end = self._on_line(slot)
            if begin >= stop:
                break
            if begin < end:
                found.append(self._transfer(slot, first + max(start, begin) - begin, first + min(stop, end) - begin))
        return found

    def _transfer(self, slot: int, start: int, stop: int) -> Transfer:
        number, replica = divmod(slot, self._target.replicas)
        return Transfer(self._target.rank_of(self._parts[number], replica), self._regions[number], start, stop)

    # -- slots ----------------------------------------------------------------------------------------------------

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

    def _size(self, slot: int) -> int:
        """Number of elements that a slot wants."""
        return self._sizes[slot // self._target.replicas]

    def _position(self, slot: int) -> int:
        """Position of a slot's first element on the line."""
        number, replica = divmod(slot, self._target.replicas)
        before = self._off_line_before[bisect.bisect_left(self._off_line_slots, slot)]
        return self._starts[number] + replica * self._size(slot) - before

    def _on_line(self, slot: int) -> tuple[int, int, int]:
        """The first element of a slot that is on the line, and the start and stop of the slot there."""
        first, start = self._off_line.get(slot, 0), self._position(slot)
        return first, start, start + self._size(slot) - first

    def _serve_hosts(self, hosts: HostMap, left: list[int]) -> None:
        """Let each replica serve the slots of its own host first.

        Args:
            hosts: the hosts of the ranks.
            left: the shares of the replicas. What they send here is subtracted.
        """
        by_host: dict[int, list[int]] = {}
        for replica, rank in enumerate(self._holders):
            by_host.setdefault(hosts.number(rank), []).append(replica)
        slot_of = self._slots({rank for number in by_host for rank in hosts.hosts[number]})
        for number, replicas in by_host.items():
            slots = sorted(slot_of[rank] for rank in hosts.hosts[number] if rank in slot_of)
            for slot in (slot for slot in slots if slot not in self._off_line):
                start = 0
                for replica in replicas:
                    stop = min(start + left[replica], self._size(slot))
                    if start < stop:
                        self._near.append((replica, slot, start, stop))
                        left[replica] -= stop - start
                        start = self._off_line[slot] = stop
