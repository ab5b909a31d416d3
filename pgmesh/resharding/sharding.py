"""The shard of a tensor that each rank holds, as index intervals. Pure arithmetic, with DTensor's semantics.

A *region* has, for each dimension of the tensor, the sorted intervals ``(start, stop)`` of the indices that it takes.
It is their Cartesian product. A shard is a region. ``Shard`` gives one interval for each dimension, ``_StridedShard``
of FSDP2 gives several.

A *part* is a shard as such, whatever ranks hold it: its index on each axis that shards the tensor. Parts do not
overlap and cover the tensor. Each is on as many ranks, its *replicas*, as the other axes have coords.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Union, runtime_checkable

from pgmesh.errors import AxisError, ShapeError
from pgmesh.layout import Axis, Layout

Intervals = tuple[tuple[int, int], ...]
Region = tuple[Intervals, ...]
Part = tuple[int, ...]
"""The index of a shard on each axis that shards the tensor, in the order of ``Sharding.sharded``."""

Placements = Union[Sequence[Any], Mapping[Axis, Any], None]
"""DTensor placements, one for each axis; or by axis, a placement or the tensor dimension that the axis shards. None,
or an axis that is not named: replicated."""


def size_of(region: Region) -> int:
    """Number of elements of a region."""
    return math.prod(length(intervals) for intervals in region)


def length(intervals: Intervals) -> int:
    """Number of indices in some intervals."""
    return sum(stop - start for start, stop in intervals)


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """The indices in both."""
    return tuple((start, stop) for _, start, stop in _overlaps(one, other))


def positions(whole: Intervals, part: Intervals) -> Intervals:
    """The positions of the indices of ``part`` among those of ``whole``."""
    shift = [position - start for (start, _), position in zip(whole, _starts(whole))]
    return _joined((start + shift[i], stop + shift[i]) for i, start, stop in _overlaps(whole, part))


def indices_at(whole: Intervals, kept: Sequence[tuple[int, int]]) -> Intervals:
    """The indices at these positions of ``whole``: the inverse of ``positions``."""
    starts = _starts(whole)
    spans = [(position, position + stop - start) for (start, stop), position in zip(whole, starts)]
    shift = [start - position for (start, _), position in zip(whole, starts)]
    return _joined((start + shift[i], stop + shift[i]) for i, start, stop in _overlaps(spans, kept))


def _starts(intervals: Intervals) -> list[int]:
    """The position of each interval's first index."""
    return list(itertools.accumulate((stop - start for start, stop in intervals), initial=0))


def _overlaps(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Each overlap of two lists of intervals: the place of the interval in ``one``, start and stop."""
    i = j = 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < stop:
            yield i, start, stop
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1


def _joined(intervals: Iterator[tuple[int, int]]) -> Intervals:
    """The same indices, with adjacent intervals joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


class _Split:
    """The split of a dimension along one axis: ``torch.chunk`` into ``strides`` chunks, each of them into ``n``.

    Shard ``i`` has the i-th piece of every chunk. ``Shard`` has one chunk, ``_StridedShard`` ``split_factor`` chunks.
    """

    def __init__(self, n: int, strides: int) -> None:
        self.n, self.strides = n, strides

    def shard(self, whole: Intervals, i: int) -> Intervals:
        """The indices of shard ``i``."""
        kept = []
        for start, stop in self._chunks(length(whole)):
            step = -(-(stop - start) // self.n)
            first = min(start + i * step, stop)
            if first < stop:
                kept.append((first, min(first + step, stop)))
        return indices_at(whole, kept)

    def shards_with(self, whole: Intervals, wanted: Intervals) -> list[int]:
        """The shards that have some of the wanted indices."""
        found: set[int] = set()
        for first, last in positions(whole, wanted):
            for start, stop in self._chunks(length(whole), first, last):
                step = -(-(stop - start) // self.n)
                low, high = max(first, start) - start, min(last, stop) - start
                found.update(range(low // step, (high - 1) // step + 1))
        return sorted(found)

    def _chunks(self, size: int, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
        """The chunks that are not empty, of those that have positions in ``first`` to ``last``."""
        step = max(-(-size // self.strides), 1)
        for start in range(first // step * step, size if last is None else last, step):
            yield start, min(start + step, size)


class Sharding:
    """A tensor's placements on a layout: which ranks hold which region.

    Args:
        shape: global shape of the tensor.
        layout: the ranks.
        placements: as in ``Placements``.

    Raises:
        AxisError: there is no such axis.
        ShapeError: there is no such dimension, or a placement is ``Partial``.

    >>> sharding = Sharding((10, 4), Layout(dp=2, tp=4), {"tp": 0})
    >>> sharding.region_of(6), sharding.region_of(7)
    ((((6, 9),), ((0, 4),)), (((9, 10),), ((0, 4),)))
    """

    def __init__(self, shape: Sequence[int], layout: Layout, placements: Placements) -> None:
        self.shape, self.layout = tuple(shape), layout
        self._splits: dict[int, list[tuple[int, _Split]]] = {}  # by dimension: each axis number with its split
        given = zip(layout.axes, _by_axis(layout, placements))
        self.placements = [None if each is None else self._parse(axis, each) for axis, each in given]
        """For each axis, the dimension that it shards and the split factor; None if the tensor is replicated."""
        for axis, placement in enumerate(self.placements):
            if placement is not None:
                dimension, strides = placement
                self._splits.setdefault(dimension, []).append((axis, _Split(layout.shape[axis], strides)))
        self.sharded = tuple(axis for dimension in sorted(self._splits) for axis, _ in self._splits[dimension])
        self._others = [axis for axis in range(len(layout.axes)) if axis not in self.sharded]
        self.replicas = math.prod(layout.shape[axis] for axis in self._others)

    def _parse(self, axis: Axis, placement: Any) -> tuple[int, int]:
        """The dimension that a placement shards, and its split factor."""
        if isinstance(placement, _Placement) and placement.is_partial():
            raise ShapeError(
                f"the tensor is {placement} along axis {axis}: its ranks hold summands, not values. Sum them first:\n\n"
                f"  tensor.redistribute(placements=[... Replicate() in place of {placement} ...])"
            )
        dimension, strides = placement if isinstance(placement, tuple) else (placement, 1)
        if isinstance(placement, _Placement):
            dimension, strides = getattr(placement, "dim", 0), getattr(placement, "split_factor", 1)
        if not -len(self.shape) <= dimension < len(self.shape):
            raise ShapeError(f"axis {axis} shards dimension {dimension}, but the shape {self.shape} has no such one.")
        return dimension % len(self.shape), strides

    def region_of(self, rank: int) -> Region:
        """The region that a rank of the layout holds."""
        return self.region_of_part(self.part_of(rank))

    def part_of(self, rank: int) -> Part:
        """The part that a rank of the layout holds."""
        coord = self.layout.coord_of(rank)
        return tuple(coord[axis] for axis in self.sharded)

    def region_of_part(self, part: Part) -> Region:
        """The region of a part."""
        index, region = dict(zip(self.sharded, part)), []
        for dimension, size in enumerate(self.shape):
            intervals: Intervals = ((0, size),) if size else ()
            for axis, split in self._splits.get(dimension, ()):
                intervals = split.shard(intervals, index[axis])
            region.append(intervals)
        return tuple(region)

    def parts_in(self, region: Region) -> list[tuple[Part, Region]]:
        """The parts that overlap a region, each with the overlap, in ascending order."""
        choices = [self._parts_in_dimension(dimension, wanted) for dimension, wanted in enumerate(region)]
        return [
            (tuple(itertools.chain.from_iterable(part for part, _ in each)), tuple(overlap for _, overlap in each))
            for each in itertools.product(*choices)
        ]

    def _parts_in_dimension(self, dimension: int, wanted: Intervals) -> list[tuple[Part, Intervals]]:
        size = self.shape[dimension]
        found: list[tuple[Part, Intervals]] = [((), ((0, size),))] if wanted else []
        for _, split in self._splits.get(dimension, ()):
            found = [
                ((*part, i), split.shard(whole, i)) for part, whole in found for i in split.shards_with(whole, wanted)
            ]
        return [(part, intersect(whole, wanted)) for part, whole in found]

    # -- the ranks of a part -------------------------------------------------------------------------------------

    def ranks_of(self, part: Part) -> tuple[int, ...]:
        """The ranks that hold a part, in mesh order."""
        return self.layout.at({self.layout.axes[axis]: i for axis, i in zip(self.sharded, part)}).ranks()

    def rank_of(self, part: Part, replica: int) -> int:
        """The rank of a part's replica: ``ranks_of(part)[replica]``."""
        index = dict(zip(self.sharded, part))
        for axis in reversed(self._others):
            replica, index[axis] = divmod(replica, self.layout.shape[axis])
        return self.layout.rank_of([index[axis] for axis in range(len(self.layout.axes))])

    def replica_of(self, rank: int) -> int:
        """Number of the replica that a rank is of its part: its index in ``ranks_of(part_of(rank))``."""
        coord, replica = self.layout.coord_of(rank), 0
        for axis in self._others:
            replica = replica * self.layout.shape[axis] + coord[axis]
        return replica


@runtime_checkable
class _Placement(Protocol):
    """A placement of DTensor, known without torch."""

    def is_replicate(self) -> bool: ...

    def is_partial(self) -> bool: ...


def _by_axis(layout: Layout, placements: Placements) -> list[Any]:
    """For each axis a placement or a dimension; None if the tensor is replicated along it."""
    if placements is None:
        return [None] * len(layout.axes)
    if isinstance(placements, Mapping):
        if unknown := [axis for axis in placements if axis not in layout.axes]:
            raise AxisError(
                f"there is no axis {unknown[0]!r} to place a tensor on: the axes are {', '.join(map(str, layout.axes))}"
            )
        found = [placements.get(axis) for axis in layout.axes]
    else:
        found = list(placements)
        if len(found) != len(layout.axes):
            raise ShapeError(
                f"{len(found)} placements for the {len(layout.axes)} axes {', '.join(map(str, layout.axes))}: give one "
                f"for each axis, or name the axes, such as {{{layout.axes[-1] if layout.axes else 'tp'!r}: 0}}."
            )
    wrong = [
        each for each in found if isinstance(each, bool) or not isinstance(each, (int, tuple, type(None), _Placement))
    ]
    if wrong:
        raise ShapeError(f"a placement is Shard(0), Replicate() or a dimension to shard, such as 0, not {wrong[0]!r}.")
    return [None if isinstance(each, _Placement) and each.is_replicate() else each for each in found]
