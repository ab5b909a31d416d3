"""Arithmetic on the offsets of axes, as numpy, torch and CuTe do it on strided arrays.

The offsets of an axis hold one integer for each index: the distance from index 0, which has offset 0. A position is
the sum of one offset from each axis.

- A *regular* axis has one stride. Its offsets are a ``range``, which takes the same memory for any size:
  ``range(0, 8, 2)`` is an axis of size 4 and stride 2.
- An *irregular* axis has no single stride. Its offsets are a tuple, such as ``(0, 2, 6)``. Functions that sort axes by
  stride take the greatest common divisor of its offsets as its stride: here 2.

``axes`` below is a sequence of such offsets, outermost first. Positions are enumerated in row-major order: the last
axis varies fastest. The nearest functions elsewhere:

    | here                | elsewhere                                                    |
    | ------------------- | ------------------------------------------------------------ |
    | row_major           | torch's contiguous strides; CuTe's LayoutRight               |
    | coalesce            | CuTe's coalesce                                              |
    | expand              | np.add.outer(...).ravel()                                    |
    | reshape             | torch.Tensor.view                                            |
    | nth                 | CuTe's layout(n)                                             |
    | find_coord          | np.unravel_index, but for strides in any order               |
    | is_non_overlapping  | torch's is_non_overlapping_and_dense, without "dense"        |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar, Union

from pgmesh._util.formatting import as_range

Offsets = Union[range, tuple[int, ...]]
"""The offset of each index of an axis: a range if the axis has one stride, else a tuple. The first is always 0."""

S = TypeVar("S", range, Sequence[int])

BATCH = 1 << 14
"""Number of positions that ``batches_of_blocks`` computes at a time."""


# -- one axis -------------------------------------------------------------------------------------------------------


def as_offsets(values: Sequence[int]) -> Offsets:
    """Values as a range if they are evenly spaced, else as a tuple.

    >>> as_offsets([0, 2, 4]), as_offsets([0, 1, 3])
    (range(0, 6, 2), (0, 1, 3))
    """
    values = values if isinstance(values, range) else tuple(values)
    return as_range(values) or values


def shift(values: S, by: int) -> S:
    """The values plus a constant; a range stays a range.

    >>> shift(range(0, 6, 2), 10), shift((0, 1, 3), 10)
    (range(10, 16, 2), [10, 11, 13])
    """
    if isinstance(values, range):
        return range(values.start + by, values.stop + by, values.step)
    return [value + by for value in values]


def rebase(values: Sequence[int]) -> Offsets:
    """The values relative to the first one, which makes them the offsets of an axis.

    >>> rebase(range(6, 12, 2)), rebase((4, 5, 7))
    (range(0, 6, 2), (0, 1, 3))
    """
    return as_offsets(shift(values, -values[0]))


def stride_of(offsets: Offsets) -> int | None:
    """The stride of a regular axis, 0 for an axis of size 1, None for an irregular axis.

    >>> stride_of(range(0, 6, 2)), stride_of(range(1)), stride_of((0, 1, 3))
    (2, 0, None)
    """
    if len(offsets) == 1:
        return 0
    return offsets.step if isinstance(offsets, range) else None


def stride_and_lowest(offsets: Offsets) -> tuple[int, int]:
    """The greatest common divisor of the offsets, and the lowest offset.

    >>> stride_and_lowest(range(0, -6, -2)), stride_and_lowest((0, 4, -8, 12))
    ((2, -4), (4, -8))
    """
    if isinstance(offsets, range):
        return abs(offsets.step), min(offsets[0], offsets[-1])
    return math.gcd(*offsets), min(offsets)


# -- several axes ---------------------------------------------------------------------------------------------------


def row_major(sizes: Sequence[int], stride: int = 1) -> tuple[Offsets, ...]:
    """Offsets of contiguous axes: the last one has this stride.

    >>> row_major((2, 3)), row_major((2, 3), stride=10)
    ((range(0, 6, 3), range(0, 3)), (range(0, 60, 30), range(0, 30, 10)))
    """
    axes: list[Offsets] = []
    for size in reversed(sizes):
        axes.append(range(0, size * stride, stride))
        stride *= size
    return tuple(reversed(axes))


def coalesce(axes: Iterable[Offsets]) -> list[Offsets]:
    """The fewest axes that enumerate the same positions in the same order.

    Two neighbouring regular axes become one if the outer stride is the inner size times the inner stride. Axes of
    size 1 are dropped.

    >>> coalesce([range(0, 8, 4), range(0, 4, 2), range(1), range(2)])
    [range(0, 8)]
    >>> coalesce([range(0, 16, 8), range(0, 4, 2), (0, 1, 5)])
    [range(0, 16, 8), range(0, 4, 2), (0, 1, 5)]
    """
    fewest: list[Offsets] = []
    for inner in axes:
        if len(inner) == 1:
            continue
        outer = fewest[-1] if fewest else None
        if isinstance(outer, range) and isinstance(inner, range) and outer.step == len(inner) * inner.step:
            fewest[-1] = range(0, len(outer) * outer.step, inner.step)
        else:
            fewest.append(inner)
    return fewest


def expand(starts: Sequence[int], axes: Iterable[Offsets]) -> Sequence[int]:
    """Every position of these axes from each start, in row-major order.

    >>> expand((0, 100), [range(0, 8, 4), range(2)]), expand((10,), [range(0, 4, 2)])
    ([0, 1, 4, 5, 100, 101, 104, 105], range(10, 14, 2))
    """
    for offsets in axes:
        if len(starts) == 1:
            starts = shift(offsets, starts[0])
        elif len(offsets) < len(starts):  # the longer loop is that inside ``shift``, which for a range is none
            spread = [0] * (len(starts) * len(offsets))
            for place, offset in enumerate(offsets):
                spread[place :: len(offsets)] = shift(starts, offset)
            starts = spread
        else:
            starts = [*chain.from_iterable(shift(offsets, start) for start in starts)]
    return starts


def nth(axes: Sequence[Offsets], n: int) -> int:
    """The n-th position in row-major order. Cost: one division for each axis.

    >>> nth([range(0, 8, 4), range(2)], 3)
    5
    """
    position = 0
    for offsets in reversed(axes):
        n, index = divmod(n, len(offsets))
        position += offsets[index]
    return position


def reshape(axes: Iterable[Offsets], sizes: Sequence[int]) -> tuple[Offsets, ...] | None:
    """Axes of these sizes that enumerate the same positions in the same order.

    Returns None if the offsets of a new axis would depend on the index of another axis.

    >>> reshape([range(8)], (2, 4))
    (range(0, 8, 4), range(0, 4))
    >>> reshape([range(0, 16, 8), range(2)], (4,))      # merged axes may be irregular
    ((0, 1, 8, 9),)
    >>> print(reshape([range(0, 12, 4), range(2)], (2, 3)))
    None
    """
    left = coalesce(axes)
    reshaped: list[Offsets] = []
    for size in reversed(sizes):
        parts: list[Offsets] = []  # what the new axis takes from the old ones, outermost first
        while size > 1:
            last = left[-1]
            count = math.gcd(size, len(last))
            inner, outer = last[:count], last[::count]
            splits = isinstance(last, range) or all(
                offset == outer[i // count] + inner[i % count] for i, offset in enumerate(last)
            )
            if count == 1 or not splits:
                return None
            left = coalesce([*left[:-1], as_offsets(outer)])
            parts.insert(0, inner)
            size //= count
        reshaped.insert(0, as_offsets(expand(range(1), parts)))
    return tuple(reshaped)


def is_non_overlapping(axes: Sequence[Offsets]) -> bool:
    """Check that each stride is larger than the span of all axes with smaller strides.

    ``find_coord`` needs this. Every position then has one coord.

    >>> is_non_overlapping([range(0, 8, 4), range(4)]), is_non_overlapping([range(0, 6, 3), range(4)])
    (True, False)
    """
    covered = 0
    for stride, lowest, i in reversed(by_descending_stride(axes)):
        if covered >= stride:
            return False
        offsets = axes[i]
        covered += max((offsets[0], offsets[-1]) if isinstance(offsets, range) else offsets) - lowest
    return True


# -- coords and blocks ----------------------------------------------------------------------------------------------


def by_descending_stride(axes: Sequence[Offsets]) -> list[tuple[int, int, int]]:
    """The stride, the lowest offset and the number of each axis, largest stride first. Axes of size 1 are left out.

    >>> by_descending_stride([range(0, -4, -1), range(1), range(0, 8, 4)])
    [(4, 0, 2), (1, -3, 0)]
    """
    return sorted(
        ((*stride_and_lowest(offsets), i) for i, offsets in enumerate(axes) if len(offsets) > 1), reverse=True
    )


def find_coord(
    above_lowest: int, axes: Sequence[Offsets], by_stride: Iterable[tuple[int, int, int]]
) -> tuple[int, ...] | None:
    """The coord of a position on non-overlapping axes; None if no coord has it. Cost: one division for each axis.

    Args:
        above_lowest: the position minus the lowest position, which is the sum of the lowest offsets.
        by_stride: ``by_descending_stride(axes)``.

    >>> axes = [range(2), range(0, 8, 4)]      # positions 0, 4, 1, 5
    >>> [find_coord(position, axes, by_descending_stride(axes)) for position in (4, 5, 6)]
    [(0, 1), (1, 1), None]
    """
    coord = [0] * len(axes)
    for stride, lowest, i in by_stride:
        rest = above_lowest % stride  # the axes with smaller strides add less than one stride
        try:
            coord[i] = axes[i].index(above_lowest - rest + lowest)
        except ValueError:
            return None
        above_lowest = rest
    return tuple(coord) if above_lowest == 0 else None


def batches_of_blocks(
    offset: int, block: Iterable[Offsets], others: Iterable[Offsets], ranks_at: Callable[[Sequence[int]], Iterable[int]]
) -> Iterator[Iterable[tuple[int, ...]]]:
    """All blocks in row-major order, in batches: each start along the other axes, expanded along the block's axes.

    Args:
        offset: the position of the first block.
        block: the axes inside a block.
        others: the axes from block to block.
        ranks_at: the ranks at positions.

    >>> [list(batch) for batch in batches_of_blocks(0, [range(2)], [range(0, 4, 2)], lambda positions: positions)]
    [[(0, 1), (2, 3)]]
    """
    members = coalesce(block)
    outer, *inner = coalesce(others) or [range(1)]
    size, starts_each = math.prod(map(len, members)), math.prod(map(len, inner))
    count = max(1, BATCH // (size * starts_each))
    for first in range(0, len(outer), count):
        starts = shift(outer[first : first + count], offset)
        if size <= len(starts) * starts_each:  # fewer members than blocks: compute each member of all blocks, transpose
            yield zip(*[ranks_at(expand(shift(starts, member), inner)) for member in expand(range(1), members)])
        else:
            yield (tuple(ranks_at(expand((start,), members))) for start in expand(starts, inner))
