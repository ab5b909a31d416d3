"""Locality of groups: how many hosts each group spans, and how many hops of its ring leave a host.

Two numbers are counted for every group along some axes: the units (hosts or domains) that its ranks are on, and the
hops of a ring over the group, in mesh order, that leave a unit. The result has the minimum and the maximum of both.

The arithmetic. Ranks of a regular layout are ``start + i * stride + j * stride' + ...``. A group fixes ``start``; the
indices run over its axes. The starts themselves have the same form, over the other axes. On hosts of one size:

1. The count depends on ``start`` modulo that size alone. So the starts are grouped into classes by remainder, and one
   group of each class is counted (``_residue_classes``).
2. One group is counted recursively, outermost axis first. Indices with the same remainder span the same number of
   units; two neighbours that share a unit share one count (``_count_units``).
3. The ranks of a regular group ascend, so its ring enters each unit once. On ``n > 1`` units, ``n`` hops leave.

The cost depends on the host size and the number of axes, not on the number of ranks. Irregular layouts, and hosts of
several sizes, are counted rank by rank.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from pgmesh.topology.hosts import HostLevel

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout

StridedRuns = tuple[tuple[int, int], ...]
"""Pairs of (number of indices, stride in ranks), one for each axis of size over 1, outermost first."""


@dataclass(frozen=True)
class Locality:
    """The locality of all groups along some axes, on the units of one level, such as hosts.

    >>> from pgmesh.topology.hosts import HostLevel
    >>> locality_of(layout, ("dp",), HostLevel("host", ((2, 4),)))
    Locality(level='host', kind='intra', low=1, high=1, intra=4, hops_low=0, hops_high=0)
    """

    level: str
    kind: str  # intra: every group is on one unit. inter: no two ranks of a group share one. Else mixed
    low: int  # the fewest units that a group spans
    high: int  # the most units that a group spans
    intra: int  # the number of groups on one unit
    hops_low: int  # the fewest hops of a group's ring that leave a unit
    hops_high: int  # the most


def locality_of(layout: Layout, axes: Sequence[Axis], level: HostLevel) -> Locality:
    """The locality of the groups along some axes, on the units of a level."""
    size = layout.size(*axes) if axes else 1
    units, hops, _ = zip(*(counts := _group_counts(layout, axes, level)))
    low, high = min(units), max(units)
    kind = "intra" if high == 1 else "inter" if low == size else "mixed"
    intra = sum(groups for spanned, _, groups in counts if spanned == 1)
    return Locality(level.name, kind, low, high, intra, min(hops), max(hops))


def _group_counts(layout: Layout, axes: Sequence[Axis], level: HostLevel) -> list[tuple[int, int, int]]:
    """Triples of (units, hops, number of groups with these)."""
    along, others = strided_runs(layout, axes)
    if along is None or others is None or len(level.runs) > 1:
        return _enumerate_groups(layout, axes, level)
    unit = level.largest
    classes = _residue_classes(layout.rank_of([0] * len(layout.axes)) % unit, others, unit)
    counts = [(_count_units(unit, start, along), count) for start, count in classes.items()]
    return [(units, units if units > 1 else 0, count) for units, count in counts]


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


# -- regular layouts on hosts of one size -----------------------------------------------------------------------------


def _residue_classes(start: int, steps: StridedRuns, unit: int) -> dict[int, int]:
    """The number of starts for each remainder modulo ``unit`` that the steps reach."""
    found = {start: 1}
    for size, stride in steps:
        reached: dict[int, int] = {}
        cycle = unit // math.gcd(unit, stride)  # remainders repeat after this many indices
        for first, count in found.items():
            for i in range(min(size, cycle)):
                at = (first + i * stride) % unit
                reached[at] = reached.get(at, 0) + count * len(range(i, size, cycle))
        found = reached
    return found


@lru_cache(maxsize=1 << 14)
def _count_units(unit: int, phase: int, steps: StridedRuns) -> int:
    """The number of units of ``unit`` ranks that a group spans, which starts ``phase`` ranks after a unit begins.

    Indices with the same phase span the same number of units, so each phase is counted once.
    """
    if not steps:
        return 1
    (size, stride), inner = steps[0], steps[1:]
    cycle = unit // math.gcd(unit, stride)
    span = sum((size - 1) * stride for size, stride in inner)
    units = 0
    for i in range(min(size, cycle)):
        at = (phase + i * stride) % unit
        units += len(range(i, size, cycle)) * _count_units(unit, at, inner)
        if (at + span) // unit == (at + stride) // unit:  # it ends on the unit on which the next begins
            units -= len(range(i, size - 1, cycle))
    return units


# -- other layouts and hosts: rank by rank --------------------------------------------------------------------------


def _enumerate_groups(layout: Layout, axes: Sequence[Axis], level: HostLevel) -> list[tuple[int, int, int]]:
    """The same counts, rank by rank."""
    if not axes:
        return [(1, 0, layout.size())]
    found: Counter[tuple[int, int]] = Counter()
    for block in layout.partition(*axes):
        units = [*map(level.unit_of, block)]
        found[len({*units}), sum(map(operator.ne, units, units[1:] + units[:1]))] += 1
    return [(units, hops, count) for (units, hops), count in found.items()]
