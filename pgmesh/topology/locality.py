"""Locality of groups: how many hosts each group spans, and how many hops of its ring leave a host.

Two numbers are counted for every group along some axes: the units (hosts or domains) that its ranks are on, and the
hops of a ring over the group, in mesh order, that leave a unit. The result has the minimum and the maximum of both.

Ranks of a regular layout are ``start + i * stride + j * stride' + ...``. A group fixes ``start``; the indices run over
its axes. On hosts of one size, both numbers depend on ``start`` modulo that size alone. So one group is counted for
each remainder (``_remainders``). All groups of irregular layouts, and of hosts of several sizes, are counted.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgmesh.topology.hosts import HostLevel

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout

StridedRuns = list[tuple[int, int]]
"""Pairs of (number of indices, stride in ranks), one for each axis of size over 1, innermost first."""


@dataclass(frozen=True)
class Locality:
    """The locality of all groups along some axes, on the units of one level, such as hosts.

    Args:
        level: the name of the level, such as ``host``.
        kind: ``intra`` if every group is on one unit, ``inter`` if no two ranks of a group share one, else ``mixed``.
        low: the fewest units that a group spans.
        high: the most units that a group spans.
        intra: the number of groups on one unit.
        hops_low: the fewest hops of a group's ring that leave a unit.
        hops_high: the most hops of a group's ring that leave a unit.

    >>> from pgmesh import plan
    >>> plan(layout, nodes="2x4")["dp"].localities[0]
    Locality(level='host', kind='intra', low=1, high=1, intra=4, hops_low=0, hops_high=0)
    """

    level: str
    kind: str
    low: int
    high: int
    intra: int
    hops_low: int
    hops_high: int


def locality_of(layout: Layout, axes: Sequence[Axis], level: HostLevel) -> Locality:
    """The locality of the groups along some axes, on the units of a level."""
    size = layout.size(*axes) if axes else 1
    counts: Counter[tuple[int, int]] = Counter()  # the number of groups with so many units and hops
    for on, groups in _units_of_groups(layout, axes, level):
        counts[len({*on}), sum(map(operator.ne, on, on[1:] + on[:1]))] += groups
    units, hops = zip(*counts)
    low, high = min(units), max(units)
    kind = "intra" if high == 1 else "inter" if low == size else "mixed"
    intra = sum(groups for (spanned, _), groups in counts.items() if spanned == 1)
    return Locality(level.name, kind, low, high, intra, min(hops), max(hops))


def _units_of_groups(layout: Layout, axes: Sequence[Axis], level: HostLevel) -> Iterator[tuple[list[int], int]]:
    """The units of the ranks of a group, in mesh order, and the number of groups with the same locality."""
    if not axes:
        yield [0], layout.size()
        return
    blocks, steps = layout.partition(*axes), strided_runs(layout, axes)
    if steps is None or len(level.runs) > 1:
        yield from (([*map(level.unit_of, block)], 1) for block in blocks)
        return
    unit, group = level.largest, blocks[0]
    first = group[0]
    for start, groups in _remainders(first % unit, steps, unit).items():
        yield [(start + rank - first) // unit for rank in group], groups


def strided_runs(layout: Layout, axes: Sequence[Axis]) -> StridedRuns | None:
    """The strided runs of the axes other than these; None if the strides of the layout are not even and nested."""
    runs, span = [], 0
    for axis, size, stride in zip(reversed(layout.axes), reversed(layout.shape), reversed(layout.strides)):
        if size == 1:
            continue
        if stride is None or stride <= span:
            return None
        span += (size - 1) * stride
        if axis not in axes:
            runs.append((size, stride))
    return runs


def _remainders(start: int, steps: StridedRuns, unit: int) -> dict[int, int]:
    """The number of groups for each remainder of their starts modulo ``unit``, which the steps reach."""
    found = {start: 1}
    for size, stride in steps:
        reached: Counter[int] = Counter()
        cycle = unit // math.gcd(unit, stride)  # remainders repeat after this many indices
        for first, count in found.items():
            for i in range(min(size, cycle)):
                reached[(first + i * stride) % unit] += count * len(range(i, size, cycle))
        found = reached
    return found
