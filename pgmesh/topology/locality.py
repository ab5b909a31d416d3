"""How the groups along some axes lie on the hosts: exact arithmetic, at no cost for a million ranks.

A group starts somewhere and goes on in even steps. On hosts of one size, two groups whose starts differ by a multiple
of that size lie alike, so one look at each remainder tells of all. Where hosts differ, a run of equal ones ends at
a rank that has a place on every axis; the starts before, at and after it are looked at apart. So each *kind* of group
is counted, and one of it is followed, by the same remainders, step by step over the hosts.
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
"""How many indices each axis has and how far apart they are in ranks, outermost first."""

MAX_ENUMERATED = 1 << 16
"""How many ranks are looked at one by one where no arithmetic leads on; then a sample of groups stands for all."""

MAX_RUNS = 64
"""So many units are each looked at for themselves, and so many runs of equal ones are worth the arithmetic."""


@dataclass(frozen=True)
class Locality:
    """How the groups of one family lie on the units of one level.

    >>> from pgmesh.topology.hosts import HostLevel
    >>> locality_of(layout, ("dp",), HostLevel("host", ((2, 4),)))
    Locality(level='host', low=1, high=1, intra=4, inter=0, mixed=0, hops_low=0, hops_high=0, exact=True)
    """

    level: str
    low: int  # the fewest units that a group touches, and the most
    high: int
    intra: int  # how many groups lie on one unit
    inter: int  # how many have each rank on a unit of its own
    mixed: int  # how many are neither
    hops_low: int  # in a ring over the group, how many hops leave a unit: the fewest, and the most
    hops_high: int
    exact: bool  # False where a sample of groups stands for all

    @property
    def kind(self) -> str:
        """``intra``, ``inter`` or ``mixed``: where the groups lie, all of them."""
        if not self.inter and not self.mixed:
            return "intra"
        return "mixed" if self.intra or self.mixed else "inter"


def locality_of(layout: Layout, axes: Sequence[Axis], level: HostLevel) -> Locality:
    """How the groups along some axes lie on the units of a level."""
    size = layout.size(*axes) if axes else 1
    seen, exact = _group_counts(layout, axes, level)
    low, high, hops_low, hops_high = size, 1, size, 0
    intra = inter = mixed = 0
    for units, hops, count in seen:
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
    """Units, hops and how many groups have them; and whether these are all the groups there are."""
    along, others = strided_runs(layout, axes)
    if along is None or others is None:
        return _enumerate_groups(layout, axes, level)
    if level.count <= MAX_RUNS:
        level = HostLevel(level.name, tuple((1, size) for n, size in level.runs for _ in range(n)))
    period = math.lcm(*(size for n, size in level.runs if n > 1))  # a unit by itself has no phase
    if len(level.runs) > MAX_RUNS or len(level.runs) * _max_steps(along, others, period) > MAX_ENUMERATED:
        return _enumerate_groups(layout, axes, level)
    origin = layout.rank_of([0] * len(layout.axes))
    cuts = [_indices_at(edge - origin, along, others) for edge in level.edges[1:-1] if edge > origin]
    met = ((_count_units(start, along, level), count) for start, count in _group_classes(origin, others, cuts, period))
    return [(units, units if units > 1 else 0, count) for units, count in met], True


def strided_runs(layout: Layout, axes: Sequence[Axis]) -> tuple[StridedRuns | None, StridedRuns | None]:
    """The steps along these axes and along the others; None where ranks do not follow even, nested steps."""
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


# -- which groups lie alike ---------------------------------------------------------------------------------------


def _indices_at(position: int, along: StridedRuns, others: StridedRuns) -> tuple[int, ...]:
    """The indices, on the axes that are not gone along, of the last place at or before a position."""
    places = []
    for size, stride, mine in sorted(
        [(*s, False) for s in along] + [(*s, True) for s in others], key=lambda s: s[1], reverse=True
    ):
        index = min(size - 1, position // stride)
        position -= index * stride
        if mine:
            places.append(index)
    return tuple(places)


def _group_classes(
    start: int, others: StridedRuns, cuts: list[tuple[int, ...]], period: int
) -> Iterator[tuple[int, int]]:
    """One start of each kind of group, and how many groups are of that kind."""
    if not cuts or not others:
        yield from _residue_classes(start, others, period)
        return
    (size, stride), *inner = others
    before = 0
    for index in sorted({cut[0] for cut in cuts}):
        yield from _residue_classes(start + before * stride, ((index - before, stride), *inner), period)
        yield from _group_classes(
            start + index * stride, tuple(inner), [cut[1:] for cut in cuts if cut[0] == index], period
        )
        before = index + 1
    yield from _residue_classes(start + before * stride, ((size - before, stride), *inner), period)


def _residue_classes(start: int, steps: StridedRuns, period: int) -> Iterator[tuple[int, int]]:
    """One start for each remainder that steps from a start lead to, and how many of them lead there."""
    found = {start % period: (start, 1)}
    for size, stride in steps:
        again = period // math.gcd(period, stride)
        reached: dict[int, tuple[int, int]] = {}
        for first, count in found.values():
            for i in range(min(size, again)):
                at = first + i * stride
                times = count * len(range(i, size, again))
                example, so_far = reached.get(at % period, (at, 0))
                reached[at % period] = (example, so_far + times)
        found = reached
    yield from found.values()


def _max_steps(along: StridedRuns, others: StridedRuns, period: int) -> int:
    """How many steps the arithmetic takes at most."""
    starts, most = 1, 0
    for size, stride in others:
        again = min(size, period // math.gcd(period, stride))
        most += starts * again
        starts = min(starts * again, period)
    for size, stride in along:
        again = min(size, period // math.gcd(period, stride))
        most += starts * again
        starts = min(starts * again, period)
    return most


# -- how many units one group touches -----------------------------------------------------------------------------


def _count_units(start: int, steps: StridedRuns, level: HostLevel) -> int:
    """How many units the ranks touch that steps from a start lead to."""
    last = start + _extent(steps)
    run = level.run_of(start)
    if run == level.run_of(last):
        return _count_units_in_run(start, steps, level, run)
    (size, stride), *rest = steps
    inner = tuple(rest)
    span, units, index, left = _extent(inner), 0, 0, -1
    while index < size:
        at = start + index * stride
        run = level.run_of(at)
        together = min(size - index, (level.edges[run + 1] - 1 - at - span) // stride + 1)  # those that this run holds
        if together > 0:
            units += _count_units_in_run(at, ((together, stride), *inner), level, run)
        else:
            together = 1
            units += _count_units(at, inner, level)
        units -= level.unit_of(at) == left
        index += together
        left = level.unit_of(start + (index - 1) * stride + span)
    return units


def _count_units_in_run(start: int, steps: StridedRuns, level: HostLevel, run: int) -> int:
    """The same where all these ranks are in one run of equal units."""
    count, unit = level.runs[run]
    return 1 if count == 1 else _count_units_of_equal_size(unit, (start - level.edges[run]) % unit, steps)


@lru_cache(maxsize=1 << 14)
def _count_units_of_equal_size(unit: int, phase: int, steps: StridedRuns) -> int:
    """The same on units of one size, from so many ranks into one. Indices whose phases are equal lie alike."""
    if not steps:
        return 1
    (size, stride), inner = steps[0], steps[1:]
    again = unit // math.gcd(unit, stride)
    span, units = _extent(inner), 0
    for i in range(min(size, again)):
        at = (phase + i * stride) % unit
        units += len(range(i, size, again)) * _count_units_of_equal_size(unit, at, inner)
        if (at + span) // unit == (at + stride) // unit:  # where this one ends, the next begins
            units -= len(range(i, size - 1, again))
    return units


def _extent(steps: StridedRuns) -> int:
    return sum((size - 1) * stride for size, stride in steps)


# -- where no arithmetic leads on ---------------------------------------------------------------------------------


def _enumerate_groups(
    layout: Layout, axes: Sequence[Axis], level: HostLevel
) -> tuple[Iterable[tuple[int, int, int]], bool]:
    if not axes:
        return [(1, 0, layout.size())], True
    blocks = layout.partition(*axes)
    total = len(blocks)
    look = min(total, max(2, MAX_ENUMERATED // layout.size(*axes)))
    picked = sorted({i * (total - 1) // max(1, look - 1) for i in range(look)})
    seen = []
    for i, number in enumerate(picked):
        units = [level.unit_of(rank) for rank in blocks[number]]
        hops = sum(a != b for a, b in zip(units, units[1:] + units[:1])) if len(units) > 1 else 0
        seen.append((len(set(units)), hops, len(range(i, total, len(picked)))))
    return seen, look == total
