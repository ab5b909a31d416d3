"""Locality of groups: how many hosts each group spans, and how many hops of its ring leave a host.

Two numbers are counted for every group along some axes: the units (hosts or domains) that its ranks are on, and the
hops of a ring over the group, in mesh order, that leave a unit. The result has the minimum and the maximum of both.

The arithmetic. Ranks of a regular layout are ``start + i * stride + j * stride' + ...``. A group fixes ``start``; the
indices run over its axes. The starts themselves have the same form, over the other axes. With that:

1. On hosts of one size, the count depends on ``start`` modulo that size alone. So the starts are grouped into classes
   by remainder, and one group of each class is counted (``_residue_classes``).
2. Where host sizes differ, the starts are halved until no group of a part has ranks on both sides of a change of the
   size for some starts only. Each part is then divided into classes separately (``_group_classes``).
3. One group is counted recursively, outermost axis first. Indices with the same remainder span the same number of
   units; two neighbours that share a unit share one count (``_count_units``).
4. The ranks of a regular group ascend, so its ring enters each unit once. On ``n > 1`` units, ``n`` hops leave.

The cost depends on the host sizes and the number of axes, not on the number of ranks: a million ranks take at most
``MAX_ENUMERATED`` steps and a table of remainders. Three cases are counted rank by rank instead: irregular layouts,
levels of more than ``MAX_RUNS`` runs, and arithmetic of more steps. Then at most about ``MAX_ENUMERATED`` ranks are
looked at; if these are not all groups, the result has ``exact=False``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from pgmesh.topology.hosts import HostLevel

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout

StridedRuns = tuple[tuple[int, int], ...]
"""Pairs of (number of indices, stride in ranks), one for each axis of size over 1, outermost first."""

MAX_ENUMERATED = 1 << 16
"""The most steps of the arithmetic, and the most ranks that are counted one by one. Beyond it, groups are sampled."""

MAX_RUNS = 64
"""The most runs for which the arithmetic is used. A level of at most this many units has one run for each unit."""


@dataclass(frozen=True)
class Locality:
    """The locality of all groups along some axes, on the units of one level, such as hosts.

    >>> from pgmesh.topology.hosts import HostLevel
    >>> locality_of(layout, ("dp",), HostLevel("host", ((2, 4),)))
    Locality(level='host', low=1, high=1, intra=4, inter=0, mixed=0, hops_low=0, hops_high=0, exact=True)
    """

    level: str
    low: int  # the fewest units that a group spans
    high: int  # the most units that a group spans
    intra: int  # the number of groups on one unit
    inter: int  # the number of groups with every rank on a different unit
    mixed: int  # the number of other groups
    hops_low: int  # the fewest hops of a group's ring that leave a unit
    hops_high: int  # the most
    exact: bool  # False if only a sample of the groups was counted

    @property
    def kind(self) -> str:
        """``intra``: every group is on one unit. ``inter``: no two ranks of a group share one. Else ``mixed``."""
        if not self.inter and not self.mixed:
            return "intra"
        return "mixed" if self.intra or self.mixed else "inter"


def locality_of(layout: Layout, axes: Sequence[Axis], level: HostLevel) -> Locality:
    """The locality of the groups along some axes, on the units of a level."""
    size = layout.size(*axes) if axes else 1
    counts, exact = _group_counts(layout, axes, level)
    low, high, hops_low, hops_high = size, 1, size, 0
    intra = inter = mixed = 0
    for units, hops, count in counts:
        low, high = min(low, units), max(high, units)
        hops_low, hops_high = min(hops_low, hops), max(hops_high, hops)
        if units == 1:
            intra += count
        elif units == size:
            inter += count
        else:
            mixed += count
    return Locality(level.name, low, high, intra, inter, mixed, hops_low, hops_high, exact)


def _group_counts(
    layout: Layout, axes: Sequence[Axis], level: HostLevel
) -> tuple[Iterable[tuple[int, int, int]], bool]:
    """Triples of (units, hops, number of groups with these), and True if they cover every group."""
    along, others = strided_runs(layout, axes)
    if along is None or others is None:
        return _enumerate_groups(layout, axes, level)
    if level.count <= MAX_RUNS:
        level = HostLevel(level.name, tuple((1, size) for n, size in level.runs for _ in range(n)))
    period = math.lcm(*(size for n, size in level.runs if n > 1))  # a run of one unit needs no remainders
    if len(level.runs) > MAX_RUNS or len(level.runs) * _max_steps(along, others, period) > MAX_ENUMERATED:
        return _enumerate_groups(layout, axes, level)
    origin = layout.rank_of([0] * len(layout.axes))
    classes = _group_classes(origin, others, along, level.edges[1:-1], period)
    counts = [(_count_units(start, along, level), count) for start, count in classes]
    return [(units, units if units > 1 else 0, count) for units, count in counts], True


def strided_runs(layout: Layout, axes: Sequence[Axis]) -> tuple[StridedRuns | None, StridedRuns | None]:
    """The strided runs of these axes and of the others; (None, None) if the strides are not even and nested."""
    strides = layout.strides
    span = 0
    for size, stride in zip(reversed(layout.shape), reversed(strides)):
        if size > 1:
            if stride is None or stride <= span:
                return None, None
            span += (size - 1) * stride
    chosen = {layout.axes.index(axis) for axis in axes}
    even = [(i, (size, strides[i] or 1)) for i, size in enumerate(layout.shape) if size > 1]
    return tuple(s for i, s in even if i in chosen), tuple(s for i, s in even if i not in chosen)


# -- classes of groups with equal counts --------------------------------------------------------------------------


def _group_classes(
    start: int, others: StridedRuns, along: StridedRuns, edges: Sequence[int], period: int
) -> Iterator[tuple[int, int]]:
    """One start for each class of groups with equal counts, and the number of groups in the class.

    Starts that are equal modulo ``period`` have equal counts, if every rank of their groups stays in its run of hosts.
    Otherwise the starts are divided in two halves.

    Args:
        edges: the ranks where the host size changes.
    """
    span = _extent(others)
    if not any(_has_rank_between(along, edge - start - span, edge - start) for edge in edges):
        yield from _residue_classes(start, others, period)
        return
    left, distance, right = _halves(others)
    yield from _group_classes(start, left, along, edges, period)
    yield from _group_classes(start + distance, right, along, edges, period)


def _halves(steps: StridedRuns) -> tuple[StridedRuns, int, StridedRuns]:
    """The steps of both halves of the outermost axis, with the distance between their starts in the middle."""
    (size, stride), inner = steps[0], steps[1:]
    half = size // 2
    left, right = (((part, stride), *inner) if part > 1 else inner for part in (half, size - half))
    return left, half * stride, right


def _has_rank_between(steps: StridedRuns, low: int, high: int) -> bool:
    """True if a rank of the group from 0 along ``steps`` is at least ``low`` and less than ``high``."""
    last = 0  # the last rank before ``high``
    for size, stride in steps:
        last += min(size - 1, max(0, high - 1 - last) // stride) * stride
    return low <= last < high


def _residue_classes(start: int, steps: StridedRuns, period: int) -> Iterator[tuple[int, int]]:
    """One start for each remainder modulo ``period`` that the steps reach, and the number of starts with it."""
    found = {start % period: (start, 1)}
    for size, stride in steps:
        cycle = period // math.gcd(period, stride)  # remainders repeat after this many indices
        reached: dict[int, tuple[int, int]] = {}
        for first, count in found.values():
            for i in range(min(size, cycle)):
                at = first + i * stride
                times = count * len(range(i, size, cycle))
                example, so_far = reached.get(at % period, (at, 0))
                reached[at % period] = (example, so_far + times)
        found = reached
    yield from found.values()


def _max_steps(along: StridedRuns, others: StridedRuns, period: int) -> int:
    """An upper bound on the number of steps of the arithmetic for one run of hosts."""
    starts, steps_in_all = 1, 0
    for size, stride in (*others, *along):
        cycle = min(size, period // math.gcd(period, stride))
        steps_in_all += starts * cycle
        starts = min(starts * cycle, period)
    return steps_in_all


# -- the units that one group spans -------------------------------------------------------------------------------


def _count_units(start: int, steps: StridedRuns, level: HostLevel) -> int:
    """The number of units that the group from ``start`` along ``steps`` spans."""
    run = level.run_of(start)
    if run == level.run_of(start + _extent(steps)):
        count, unit = level.runs[run]
        return 1 if count == 1 else _count_units_of_equal_size(unit, (start - level.edges[run]) % unit, steps)
    left, distance, right = _halves(steps)
    units = _count_units(start, left, level) + _count_units(start + distance, right, level)
    return units - (level.unit_of(start + _extent(left)) == level.unit_of(start + distance))


@lru_cache(maxsize=1 << 14)
def _count_units_of_equal_size(unit: int, phase: int, steps: StridedRuns) -> int:
    """The same on units of ``unit`` ranks, for a group that starts ``phase`` ranks after the beginning of a unit.

    Indices with the same phase span the same number of units, so each phase is counted once.
    """
    if not steps:
        return 1
    (size, stride), inner = steps[0], steps[1:]
    cycle = unit // math.gcd(unit, stride)
    span, units = _extent(inner), 0
    for i in range(min(size, cycle)):
        at = (phase + i * stride) % unit
        units += len(range(i, size, cycle)) * _count_units_of_equal_size(unit, at, inner)
        if (at + span) // unit == (at + stride) // unit:  # it ends on the unit on which the next begins
            units -= len(range(i, size - 1, cycle))
    return units


def _extent(steps: StridedRuns) -> int:
    """The difference between the last and the first rank."""
    return sum((size - 1) * stride for size, stride in steps)


# -- irregular layouts: rank by rank ------------------------------------------------------------------------------


def _enumerate_groups(
    layout: Layout, axes: Sequence[Axis], level: HostLevel
) -> tuple[Iterable[tuple[int, int, int]], bool]:
    """The same counts rank by rank, over evenly spaced groups. Each represents the groups up to the next one."""
    if not axes:
        return [(1, 0, layout.size())], True
    blocks = layout.partition(*axes)
    total = len(blocks)
    sampled = min(total, max(2, MAX_ENUMERATED // layout.size(*axes)))
    chosen = sorted({i * (total - 1) // max(1, sampled - 1) for i in range(sampled)})
    counts = []
    for i, number in enumerate(chosen):
        units = [level.unit_of(rank) for rank in blocks[number]]
        hops = sum(a != b for a, b in zip(units, units[1:] + units[:1])) if len(units) > 1 else 0
        counts.append((len(set(units)), hops, len(range(i, total, len(chosen)))))
    return counts, sampled == total
