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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, Union

from pgmesh.errors import AxisError, ShapeError
from pgmesh.layout import Axis, Layout

Intervals = tuple[tuple[int, int], ...]
Region = tuple[Intervals, ...]
Part = tuple[int, ...]
"""The index of a shard on each axis that shards the tensor, in the order of ``Sharding.sharded``."""


class Box(NamedTuple):
    """In place of placements: all ranks of the layout hold this region, of one interval in each dimension."""

    region: Region

    @classmethod
    def at(cls, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> Box:
        """The box of these sizes at these offsets in a tensor of a shape.

        Raises:
            ShapeError: it is not inside.
        """
        ends = [(int(start), int(start + size)) for start, size in zip(offsets, sizes)]
        is_inside = all(start >= 0 and stop <= size for (start, stop), size in zip(ends, shape))
        if not is_inside or not len(offsets) == len(sizes) == len(shape):
            text = f"a part of shape {tuple(sizes)} at offsets {tuple(offsets)}"
            raise ShapeError(f"{text} is not inside a tensor of shape {tuple(shape)}.")
        return cls(tuple((each,) if each[0] < each[1] else () for each in ends))


Placements = Union[Sequence[Any], Mapping[Axis, Any], Box, None]
"""DTensor placements, one for each axis; or by axis, a placement or the tensor dimension that the axis shards. None,
or an axis that is not named: replicated."""


def size_of(region: Region) -> int:
    """Number of elements of a region."""
    return math.prod(shape_of(region))


def shape_of(region: Region) -> list[int]:
    """The shape of a tensor that has the elements of a region."""
    return [length(intervals) for intervals in region]


def length(intervals: Intervals) -> int:
    """Number of indices in some intervals."""
    return sum(stop - start for start, stop in intervals)


def overlaps(one: Sequence[Any], other: Sequence[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Each overlap of two sorted lists of intervals: the place of the interval in each list, start and stop."""
    i = j = 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < stop:
            yield i, j, start, stop
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1


def split(region: Region, n: int) -> Iterator[Region]:
    """A region in n parts, about equal, along its first dimension that has n indices; else along its longest.

    >>> [*split((((0, 1),), ((4, 8),)), 2)]
    [(((0, 1),), ((4, 6),)), (((0, 1),), ((6, 8),))]
    """
    if n == 1 or not region:
        yield region
        return
    sizes = shape_of(region)
    axis = next((axis for axis, size in enumerate(sizes) if size >= n), sizes.index(max(sizes)))
    count = min(n, sizes[axis])
    for i in range(count):
        indices = indices_at(region[axis], [(sizes[axis] * i // count, sizes[axis] * (i + 1) // count)])
        yield (*region[:axis], indices, *region[axis + 1 :])


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """The indices in both."""
    return tuple((start, stop) for _, _, start, stop in overlaps(one, other))


def positions(whole: Intervals, part: Iterable[tuple[int, int]]) -> Intervals:
    """The positions of the indices of ``part`` among those of ``whole``."""
    return _moved(whole, spans(stop - start for start, stop in whole), part)


def indices_at(whole: Intervals, kept: Iterable[tuple[int, int]]) -> Intervals:
    """The indices at these positions of ``whole``: the inverse of ``positions``."""
    return _moved(spans(stop - start for start, stop in whole), whole, kept)


def spans(sizes: Iterable[int]) -> Intervals:
    """Intervals of these sizes, one after the other.

    >>> spans([3, 0, 2])
    ((0, 3), (3, 3), (3, 5))
    """
    return tuple(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def _moved(old: Intervals, new: Intervals, some: Iterable[tuple[int, int]]) -> Intervals:
    """Some indices of the old intervals in the new ones, with adjacent intervals joined."""
    joined: list[tuple[int, int]] = []
    for i, _, start, stop in overlaps(old, [*some]):
        shift = new[i][0] - old[i][0]
        if joined and joined[-1][1] == start + shift:
            start = joined.pop()[0] - shift
        joined.append((start + shift, stop + shift))
    return tuple(joined)


class Sharded(NamedTuple):
    """A placement: the dimension that an axis shards, and the split factor, which is that of ``_StridedShard``."""

    dimension: int
    factor: int = 1


class Split(NamedTuple):
    """The split of a dimension along one axis: ``torch.chunk`` into ``factor`` chunks, each of them into ``n``.

    Shard ``i`` has the i-th piece of every chunk. ``Shard`` has one chunk, ``_StridedShard`` ``split_factor`` chunks.
    """

    n: int
    factor: int

    def shard(self, whole: Intervals, i: int) -> Intervals:
        """The indices of shard ``i``."""
        chunks = self._chunks(whole)
        return indices_at(
            whole, [(min(start + i * step, stop), min(start + (i + 1) * step, stop)) for start, stop, step in chunks]
        )

    def shards_with(self, whole: Intervals, wanted: Intervals) -> list[int]:
        """The shards that have some of the wanted indices."""
        chunks, found = self._chunks(whole), set[int]()
        for i, _, start, stop in overlaps(chunks, positions(whole, wanted)):
            first, _, step = chunks[i]
            found.update(range((start - first) // step, (stop - 1 - first) // step + 1))
        return sorted(found)

    def _chunks(self, whole: Intervals) -> list[tuple[int, int, int]]:
        """Start and stop of each chunk, and the size of its pieces."""
        size = length(whole)
        chunk = max(-(-size // self.factor), 1)
        ends = [(start, min(start + chunk, size)) for start in range(0, size, chunk)]
        return [(start, stop, -(-(stop - start) // self.n)) for start, stop in ends]


class Sharding:
    """A tensor's placements on a layout: which ranks hold which region.

    Args:
        shape: global shape of the tensor.
        layout: the ranks.
        placements: as in ``Placements``, or those of the attribute.

    Raises:
        AxisError: there is no such axis.
        ShapeError: there is no such dimension, or a placement is ``Partial``.

    >>> sharding = Sharding((10, 4), Layout(dp=2, tp=4), {"tp": 0})
    >>> sharding.region_of(6), sharding.region_of(7)
    ((((6, 9),), ((0, 4),)), (((9, 10),), ((0, 4),)))
    """

    @classmethod
    def of(cls, tensor: Any) -> Sharding:
        """The sharding of a DTensor."""
        ranks = tensor.device_mesh.mesh
        return cls(
            tensor.shape, Layout(dict(enumerate(ranks.shape)), ranks=ranks.flatten().tolist()), tensor.placements
        )

    def __init__(self, shape: Sequence[int], layout: Layout, placements: Placements) -> None:
        self.shape, self.layout = tuple(shape), layout
        self.placements = parse_placements(layout, placements)
        """The placement on each axis; None if the tensor is replicated along it."""
        self.box = placements if isinstance(placements, Box) else None
        """The box that each rank holds, if it is given in place of placements."""
        whole = tuple(((0, size),) if size else () for size in self.shape)
        self._divided: Region = self.box.region if self.box else whole  # by the axes
        self._splits: list[list[tuple[int, Split]]] = [[] for _ in self.shape]  # by dimension: axis numbers and splits
        for number, (axis, placement) in enumerate(zip(layout.axes, self.placements)):
            if placement is None:
                continue
            dimension, factor = placement
            if not -len(shape) <= dimension < len(shape):
                raise ShapeError(f"axis {axis} shards dimension {dimension}, but the shape {self.shape} has none.")
            self._splits[dimension].append((number, Split(layout.shape[number], factor)))
        self.sharded = tuple(axis for splits in self._splits for axis, _ in splits)
        self._others = [layout.axes[axis] for axis in range(len(layout.axes)) if axis not in self.sharded]
        self.replicas = math.prod(layout.size(axis) for axis in self._others)
        self._ranks: dict[Part, tuple[int, ...]] = {}

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
        for intervals, splits in zip(self._divided, self._splits):
            for axis, split in splits:
                intervals = split.shard(intervals, index[axis])
            region.append(intervals)
        return tuple(region)

    def parts_in(self, region: Region) -> list[tuple[Part, Region]]:
        """The parts that overlap a region, each with the overlap, in ascending order."""
        choices = []
        for all_of_it, splits, wanted in zip(self._divided, self._splits, region):
            found: list[tuple[Part, Intervals]] = [((), all_of_it)] if intersect(all_of_it, wanted) else []
            for _, split in splits:
                found = [
                    ((*part, i), split.shard(whole, i))
                    for part, whole in found
                    for i in split.shards_with(whole, wanted)
                ]
            choices.append([(part, intersect(whole, wanted)) for part, whole in found])
        return [
            (tuple(itertools.chain.from_iterable(part for part, _ in each)), tuple(overlap for _, overlap in each))
            for each in itertools.product(*choices)
        ]

    def ranks_of(self, part: Part) -> tuple[int, ...]:
        """The ranks that hold a part, in mesh order."""
        if part not in self._ranks:
            fixed = {self.layout.axes[axis]: i for axis, i in zip(self.sharded, part)}
            self._ranks[part] = self.layout.at(fixed).ranks()
        return self._ranks[part]

    def replica_of(self, rank: int) -> int:
        """Number of the replica that a rank is of its part: its index in ``ranks_of(part_of(rank))``."""
        return self.layout.index_of(rank, *self._others) if self._others else 0


def by_axis(layout: Layout, placements: Placements) -> list[Any]:
    """For each axis the placement that is given; None if the tensor is replicated along it.

    Raises:
        AxisError: there is no such axis.
        ShapeError: their number is wrong.
    """
    if not isinstance(placements, Mapping):
        found = [None] * len(layout.axes) if placements is None or isinstance(placements, Box) else [*placements]
        if len(found) != len(layout.axes):
            names = f"{len(layout.axes)} axes {', '.join(map(str, layout.axes))}"
            raise ShapeError(f"{len(found)} placements for the {names}: give one for each axis.")
        return found
    for axis in placements:
        if axis not in layout.axes:
            raise AxisError(f"there is no axis {axis!r} in {layout!r} to place a tensor on.")
    return [placements.get(axis) for axis in layout.axes]


def parse_placements(layout: Layout, placements: Placements) -> list[Sharded | None]:
    """The placement on each axis; None if the tensor is replicated along it.

    Raises:
        AxisError: there is no such axis.
        ShapeError: a placement is ``Partial`` or no placement, or their number is wrong.
    """
    found: list[Sharded | None] = []
    for axis, each in zip(layout.axes, by_axis(layout, placements)):
        if hasattr(each, "is_partial"):  # a placement of DTensor, known without torch
            if each.is_partial():
                raise ShapeError(
                    f"the tensor is {each} along axis {axis}: its ranks hold summands, not values. Sum them first.\n\n"
                    "  tensor = tensor.redistribute(placements=[Replicate() if each.is_partial() else each "
                    "for each in tensor.placements])"
                )
            found.append(None if each.is_replicate() else Sharded(each.dim, getattr(each, "split_factor", 1)))
        elif each is None or isinstance(each, Sharded):
            found.append(each)
        elif isinstance(each, Integral) and not isinstance(each, bool):
            found.append(Sharded(int(each)))
        else:
            raise ShapeError(f"a placement is Shard(0), Replicate() or a dimension to shard, such as 0, not {each!r}.")
    return found
