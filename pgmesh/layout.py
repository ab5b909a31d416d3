"""Layout: the rank at each coord and the coord of each rank, as arithmetic on strided axes.

A layout is what numpy, torch and CuTe call the layout of a strided tensor. The elements are ranks. It has an offset
and, for each axis, the offsets of its indices:

    rank = offset + sum(offsets[axis][index])

The examples in this file use the layout below, or a mesh with this layout on rank 5. Its offset is 0, and its axes
(name, size, stride) are (pp, 2, 4), (dp, 2, 2) and (tp, 2, 1).

    >>> layout = Layout(pp=2, dp=2, tp=2)
    >>> print(layout)
    ┌ pp0 ───────┐  ┌ pp1 ───────┐
    │     tp0 tp1│  │     tp0 tp1│
    │ dp0   0   1│  │ dp0   4   5│
    │ dp1   2   3│  │ dp1   6   7│
    └────────────┘  └────────────┘

- A *regular* axis has one stride. Its offsets are ``range(0, size * stride, stride)``. A range takes the same memory
  for any size, so a million ranks take as much as eight.
- An *irregular* axis has no single stride. Its offsets are a tuple. If pp has stride 4, ``at(pp=[0, 1, 3])`` leaves
  the offsets ``(0, 4, 12)``.
- The *rank table* is for ranks that are not evenly spaced, such as ``ranks=[3, 1, 2, 0]``. The formula then gives a
  position in these ranks. The table maps each position to its rank, and each rank to its position. Slices and views
  share the table.
- A *block* is the ranks of one group. A *partition* is all blocks along the axes.

Each operation makes a new layout. It costs O(number of axes), plus a step for each rank in the last column:

    | operation               | offset                  | axes (name, size, stride)                       | ranks     |
    | ----------------------- | ----------------------- | ----------------------------------------------- | --------- |
    | Layout(pp=2, tp=4)      | 0                       | (pp, 2, 4), (tp, 4, 1): row-major, contiguous   | 0         |
    | ranks=range(4, 20, 2)   | 4, the first rank       | (pp, 2, 8), (tp, 4, 2): strides times the step  | 0         |
    | ranks=[7, 1, ...]       | 0, in a rank table      | (pp, 2, 4), (tp, 4, 1)                          | all       |
    | at(tp=1)                | plus offsets[tp][1]     | without tp                                      | 0         |
    | at(tp=slice(1, 4, 2))   | plus offsets[tp][1]     | (tp, 2, stride times 2)                         | 0         |
    | at(tp=[1, 2])           | plus offsets[tp][1]     | tp is regular if the kept offsets are evenly    | kept of   |
    |                         |                         | spaced, else irregular                          | tp        |
    | along(rank, "tp")       | plus the rank's offsets | tp alone                                        | 0         |
    |                         | on the other axes       |                                                 |           |
    | view(a=4, b=2)          | unchanged               | coalesced, then split and merged. A merged axis | irregular |
    |                         |                         | may be irregular                                | axes      |
    | view(a=4, b=2) (*)      | first rank, or 0 in a   | row-major, contiguous                           | all       |
    |                         | new rank table          |                                                 |           |

(*) If the strided axes would overlap, or if the ranks are evenly spaced but their positions in the rank table are not.
The view then stores all its ranks again.

Each question about a layout also costs O(number of axes), plus a step for each of these ranks:

    | question                                              | ranks                                                   |
    | ----------------------------------------------------- | ------------------------------------------------------- |
    | rank_of(coord)                                        | 0                                                       |
    | coord_of(rank), index_of, label_of, neighbor_of       | 0                                                       |
    | block_of(rank, "tp")                                  | those of the block                                      |
    | partition("tp")                                       | 0. Reading a block costs its ranks                      |
    | ranks(), iteration                                    | all                                                     |
    | ranks_in_order()                                      | 0 if the axes coalesce to one regular axis, else all    |
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, Union

from pgmesh._util import offsets as strided
from pgmesh._util.formatting import (
    format_call,
    format_ranks,
    other_arguments,
)
from pgmesh._util.suggestions import closest_name, did_you_mean, example_ranks
from pgmesh._util.validation import (
    Sizes,
    fill_sizes,
    parse_ranks,
    parse_sizes,
    whole_number,
)
from pgmesh.drawing.drawable import Axis as Axis
from pgmesh.errors import AxisError, MembershipError, RankError, ShapeError

Keep = Union[int, slice, Iterable[int]]
"""An argument of ``at`` for one axis: an index, which fixes the axis, or the slice or the indices to keep."""


class _RankTable(NamedTuple):
    """Ranks that are not evenly spaced: the rank at each position, and the position of each rank."""

    ranks: tuple[int, ...]
    positions: dict[int, int]


_FIELDS = ("_axes", "_offsets", "_offset", "_table", "_all_axes", "_is_slice")
"""The state of a layout. ``Layout._set_fields`` describes each."""


class Layout:
    """Ranks arranged in an N-D box: the arithmetic of a mesh, without processes, groups or torch.

    Args:
        shape: the sizes of numbered axes, outermost first: the last axis varies fastest. Or one mapping of sizes by
            axis, with any names or numbers.
        ranks: the ranks to arrange, in this order. Default: a ``range`` of the right size.
        sizes: the sizes of named axes, outermost first. At most one size is -1: it is inferred from ``ranks``.

    Raises:
        ShapeError: the sizes do not hold the ranks, or a rank is negative, repeated or not an integer.
        OptionsError: a keyword is an option of groups, not an axis.

    >>> Layout(pp=2, dp=-1, tp=2, ranks=range(8)).shape
    (2, 2, 2)
    >>> Layout({"data-parallel": 2, "tp": 2}).size("data-parallel")
    2
    >>> Layout(2, 2, ranks=[3, 1, 2, 0]).rank_of((0, 1))
    1
    """

    __slots__ = (*_FIELDS, "_by_stride", "_lowest", "_numbers")

    def __init__(self, /, *shape: int | Sizes, ranks: Iterable[int] | None = None, **sizes: int) -> None:
        order = None if ranks is None else parse_ranks("Layout", ranks)
        more = other_arguments(order)
        box = parse_sizes("Layout", shape, sizes, more, None if order is None else len(order))
        if order is not None:
            box = fill_sizes("Layout", box, len(order), f"ranks= has {len(order)}", more=more)
        elif -1 in box.values():
            call = format_call("Layout", box, ranks=example_ranks(box))
            raise ShapeError(
                f"{format_call('Layout', box)} cannot infer the size of -1: give it ranks, such as {call}."
            )
        self._set_row_major(box, range(math.prod(box.values())) if order is None else order)

    @classmethod
    def of(cls, box: Mapping[Axis, int], ranks: range | tuple[int, ...]) -> Layout:
        """A layout of sizes and ranks that were checked before."""
        layout = object.__new__(cls)
        layout._set_row_major(box, ranks)
        return layout

    def _set_row_major(self, box: Mapping[Axis, int], ranks: range | tuple[int, ...]) -> None:
        """Set the fields for ranks in row-major order."""
        all_axes = tuple((axis, None) for axis in box)
        if isinstance(ranks, range):
            stride, offset, table = ranks.step, ranks[0], None
        else:
            stride, offset, table = 1, 0, _RankTable(ranks, {rank: i for i, rank in enumerate(ranks)})
        self._set_fields(tuple(box), strided.row_major(tuple(box.values()), stride), offset, table, all_axes, False)

    def _set_fields(
        self,
        axes: tuple[Axis, ...],
        offsets: tuple[strided.Offsets, ...],
        offset: int,
        table: _RankTable | None,
        all_axes: tuple[tuple[Axis, int | None], ...],
        is_slice: bool,
    ) -> None:
        """Set the fields, and what is computed from them.

        Args:
            axes: the names or numbers of the axes, outermost first.
            offsets: the offset of each index, for each axis.
            offset: the rank at index 0 of every axis; its position if there is a rank table.
            table: the rank table; None if positions are ranks.
            all_axes: the axes before any was fixed: the index of a fixed axis, None for the others.
            is_slice: True for a part of a larger layout.
        """
        self._axes, self._offsets, self._offset, self._table = axes, offsets, offset, table
        self._all_axes, self._is_slice = all_axes, is_slice
        self._numbers = {axis: i for i, axis in enumerate(axes)}
        self._by_stride = strided.by_descending_stride(offsets)
        self._lowest = offset + sum(lowest for _, lowest, _ in self._by_stride)  # the lowest position

    def _replace(self, **changed: Any) -> Layout:
        """A copy with some fields changed, given without their underscores."""
        layout = object.__new__(Layout)
        layout._set_fields(*(changed.get(name[1:], getattr(self, name)) for name in _FIELDS))
        return layout

    # -- properties ---------------------------------------------------------------------------------------------

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, outermost first: names, or numbers for a layout without names.

        >>> layout.axes
        ('pp', 'dp', 'tp')
        """
        return self._axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, outermost first: the last axis varies fastest.

        >>> layout.shape
        (2, 2, 2)
        """
        return tuple(map(len, self._offsets))

    @property
    def strides(self) -> tuple[int | None, ...]:
        """The stride of each axis in ranks: 0 for an axis of size 1, None for an irregular axis.

        With a rank table, every axis of more than one index has None.

        >>> layout.strides
        (4, 2, 1)
        """
        strides = map(strided.stride_of, self._offsets)
        return tuple(stride if stride == 0 or self._table is None else None for stride in strides)

    def size(self, *axes: Axis) -> int:
        """The number of ranks along these axes; without axes, of all ranks.

        Raises:
            AxisError: there is no such axis, or it is named twice.

        >>> layout.size("dp", "tp"), layout.size()
        (4, 8)
        """
        return math.prod(len(self._offsets[i]) for i in self._numbers_of(axes))

    @property
    def is_slice(self) -> bool:
        """True if ``at`` or ``along`` took this layout from a larger one.

        >>> layout.is_slice, layout.at(pp=0).is_slice
        (False, True)
        """
        return self._is_slice

    def ranks(self) -> tuple[int, ...]:
        """All ranks in mesh order: the last axis varies fastest.

        >>> layout.at(pp=1).ranks()
        (4, 5, 6, 7)
        """
        return self._expand(self._offset, range(len(self._offsets)))

    def ranks_in_order(self) -> range | tuple[int, ...]:
        """The same as ``ranks``, but a range if the axes coalesce to one regular axis.

        >>> layout.at(tp=1).ranks_in_order()
        range(1, 9, 2)
        """
        coalesced = strided.coalesce(self._offsets) or [range(1)]
        if self._table is None and len(coalesced) == 1 and isinstance(coalesced[0], range):
            return strided.shift(coalesced[0], self._offset)
        return self.ranks()

    def __contains__(self, rank: object) -> bool:
        return self._lookup(rank) is not None

    def __len__(self) -> int:
        return self.size()

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks())

    # -- rank <-> coord -----------------------------------------------------------------------------------------

    def rank_of(self, coord: Sequence[int]) -> int:
        """The rank at a coord; the inverse of ``coord_of``.

        Args:
            coord: one index for each axis, outermost first. Negative indices count from the end.

        Raises:
            RankError: there is no such coord.

        >>> layout.rank_of((1, 0, 1))
        5
        """
        if len(coord) != len(self._axes):
            raise RankError(f"a coord of {self._brief()} has {len(self._axes)} indices, but {coord} has {len(coord)}.")
        return self._rank_at(self._position_of(coord))

    def coord_of(self, rank: int) -> tuple[int, ...]:
        """The coord of a rank, its index on each axis; the inverse of ``rank_of``.

        Raises:
            RankError: the rank is not in this layout.

        >>> layout.coord_of(5)
        (1, 0, 1)
        """
        coord = self._lookup(rank)
        if coord is None:
            ranks = format_ranks(self.ranks_in_order())
            raise RankError(f"rank {rank!r} is not in {self._brief()}, whose ranks are {ranks}.")
        return coord

    def index_of(self, rank: int, *axes: Axis) -> int:
        """The index of a rank in its block along these axes: its rank in that process group.

        >>> layout.index_of(5, "dp", "tp")
        1
        """
        coord, index = self.coord_of(rank), 0
        for i in self._numbers_of(axes):
            index = index * len(self._offsets[i]) + coord[i]
        return index

    def label_of(self, rank: int) -> str:
        """The coord of a rank as a string for logs and file names.

        >>> layout.label_of(5)
        'pp1-dp0-tp1'
        """
        coord = self.coord_of(rank)
        return "-".join(f"{'' if isinstance(axis, int) else axis}{i}" for axis, i in zip(self._axes, coord))

    def neighbor_of(self, rank: int, axis: Axis, step: int = 1, *, wrap: bool = False) -> int | None:
        """The rank ``step`` indices further along an axis; None past the edge.

        Args:
            step: the number of indices; negative for backwards.
            wrap: continue at the other edge, as in a ring.

        >>> layout.neighbor_of(5, "pp", -1), layout.neighbor_of(5, "pp", +1), layout.neighbor_of(5, "pp", wrap=True)
        (1, None, 1)
        """
        i = self._number_of(axis)
        coord = list(self.coord_of(rank))
        size = len(self._offsets[i])
        coord[i] += whole_number(step)
        if wrap:
            coord[i] %= size
        return self._rank_at(self._position_of(coord)) if 0 <= coord[i] < size else None

    # -- blocks -------------------------------------------------------------------------------------------------

    def block_of(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """The block of a rank along these axes: all ranks of its group, in mesh order.

        >>> layout.block_of(5, "dp", "tp"), layout.block_of(5, "pp")
        ((4, 5, 6, 7), (1, 5))
        """
        along, start = self._numbers_of(axes), self._offset
        for i, index in enumerate(self.coord_of(rank)):
            if i not in along:
                start += self._offsets[i][index]
        return self._expand(start, along)

    def partition(self, *axes: Axis) -> Partition:
        """All blocks along these axes, as a sequence. Each rank is in one block. A block is computed when it is read.

        >>> layout.partition("tp")
        ((0, 1), (2, 3), (4, 5), (6, 7))
        """
        return Partition(self, self._numbers_of(axes))

    def seen_by(self, rank: int) -> RankView:
        """This layout with the methods of a mesh on that rank, except those that need groups.

        Raises:
            RankError: the rank is not in this layout.

        >>> layout.seen_by(5).label(), layout.seen_by(5).index("dp", "tp"), layout.seen_by(5).ranks("pp")
        ('pp1-dp0-tp1', 1, (1, 5))
        """
        self.coord_of(rank)
        return RankView(self, operator.index(rank))

    # -- slices and views ---------------------------------------------------------------------------------------

    def at(self, fixed: Mapping[Axis, Keep] | None = None, /, **indices: Keep) -> Layout:
        """The part of this layout at these indices.

        Args:
            fixed: the same as ``indices``, for numbered axes: ``at({0: 1})``.
            indices: for each axis one index, which fixes and drops the axis, or a slice or indices to keep of it.
                Negative indices count from the end. A repeated index counts once: ``[0, -1]`` is one stage if there
                is only one.

        Raises:
            AxisError: there is no such axis.
            RankError: there is no such index.
            ShapeError: no index of an axis is kept.

        >>> layout.at(pp=1, tp=0).ranks()
        (4, 6)
        >>> Layout(pp=4, tp=2).at(pp=[0, -1]).ranks()
        (0, 1, 6, 7)
        """
        offset, offsets, all_axes = self._offset, dict(enumerate(self._offsets)), dict(self._all_axes)
        given: set[int] = set()
        for axis, keep in [*(fixed or {}).items(), *indices.items()]:
            i = self._number_of(axis)
            if i in given:
                raise AxisError(f"axis {self._axes[i]} is given twice.")
            given.add(i)
            old = self._offsets[i]
            if isinstance(keep, slice):
                kept = old[keep]
            elif isinstance(keep, Iterable) and getattr(keep, "ndim", 1) > 0:  # a 0-d tensor is one index
                kept = tuple(dict.fromkeys(old[self._checked_index(i, one)] for one in keep))
            else:
                index = self._checked_index(i, keep)
                offset += old[index]
                all_axes[self._axes[i]] = index
                del offsets[i]
                continue
            if not kept:
                has = _index_range(len(old))
                raise ShapeError(
                    f"{format_call('mesh.at', {axis: keep})} keeps nothing of axis {axis}, which has {has}."
                )
            offset += kept[0]
            offsets[i] = strided.rebase(strided.as_offsets(kept))
        return self._replace(
            axes=tuple(self._axes[i] for i in offsets),
            offsets=tuple(offsets.values()),
            offset=offset,
            all_axes=tuple(all_axes.items()),
            is_slice=self._is_slice or math.prod(map(len, offsets.values())) < len(self),
        )

    def along(self, rank: int, *axes: Axis) -> Layout:
        """The slice through a rank along these axes: every other axis is fixed at the rank's index.

        >>> layout.along(5, "dp", "tp") == layout.at(pp=1)
        True
        """
        along, coord = self._numbers_of(axes), self.coord_of(rank)
        return self.at({self._axes[i]: index for i, index in enumerate(coord) if i not in along})

    def view(self, /, *shape: int | Sizes, **sizes: int) -> Layout:
        """The same ranks in the same order with other axes: split, merged or both.

        Args:
            shape: the new sizes, for numbered axes, or one mapping of sizes by axis.
            sizes: the new sizes by name. At most one size is -1: it is inferred.

        Raises:
            ShapeError: the sizes do not hold the ranks.
            OptionsError: a keyword is an option of groups, not an axis.

        >>> layout.view(pp=2, edp=1, ep=4).block_of(5, "ep")
        (4, 5, 6, 7)
        >>> layout.along(5, "pp", "tp").view(n=4).ranks()      # merges axes that are not adjacent
        (0, 1, 4, 5)
        """
        who, count = "mesh.view", len(self)
        box = fill_sizes(who, parse_sizes(who, shape, sizes, count=count), count, f"the mesh has {count}")
        fixed = ((axis, index) for axis, index in self._all_axes if index is not None and axis not in box)
        all_axes, new_sizes = (*fixed, *((axis, None) for axis in box)), tuple(box.values())
        offsets = strided.reshape(self._offsets, new_sizes)
        if offsets is not None and strided.is_non_overlapping(offsets):
            return self._replace(axes=tuple(box), offsets=offsets, all_axes=all_axes)
        return Layout.of(box, strided.as_offsets(self.ranks()))._replace(all_axes=all_axes, is_slice=self._is_slice)

    # -- text ---------------------------------------------------------------------------------------------------

    def describe(self, rank: int, *axes: Axis) -> str:
        """The block of a rank along these axes as text: its index on every axis, * for the axes of the block.

        >>> layout.describe(5, "dp", "tp")
        'pp=1, dp=*, tp=*'
        """
        indices: dict[Axis, object] = dict(zip(self._axes, self.coord_of(rank)))
        for i in self._numbers_of(axes):
            indices[self._axes[i]] = "*"
        return ", ".join([f"{axis}={indices.get(axis, index)}" for axis, index in self._all_axes])

    def __repr__(self) -> str:
        return self.spell("Layout")

    def spell(self, who: str, *, world_size: int | None = None, **more: object) -> str:
        """The call of ``who`` that makes this layout, as text.

        Args:
            world_size: the number of ranks if the call names none. Default: the number of ranks of this layout.

        >>> layout.at(pp=0).spell("ProcessGroupMesh", world_size=8)
        'ProcessGroupMesh(dp=2, tp=2, ranks=range(4))'
        """
        if not self._axes:  # one rank: every axis is fixed
            return f"{self.view(1).spell(who, world_size=world_size, **more)}.at({{0: 0}})"
        ranks, default = self.ranks_in_order(), range(len(self) if world_size is None else world_size)
        return format_call(who, dict(zip(self._axes, self.shape)), ranks=None if ranks == default else ranks, **more)

    def __str__(self) -> str:
        from pgmesh.drawing import text  # only to print

        return text.draw(self)

    def _repr_html_(self) -> str:
        from pgmesh.drawing import svg  # only notebooks need it

        return svg.draw(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        if self._axes != other._axes or self.shape != other.shape:
            return False
        if self._table is None and other._table is None:
            return (self._offset, self._offsets) == (other._offset, other._offsets)
        return self.ranks() == other.ranks()

    def __hash__(self) -> int:
        last = tuple(size - 1 for size in self.shape)
        return hash((self._axes, self.shape, self._rank_at(self._offset), self.rank_of(last)))

    # -- axes and indices as given ------------------------------------------------------------------------------

    def _numbers_of(self, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """The numbers of these axes in mesh order, since a combination of axes has no order; without axes, all."""
        if not axes:
            return tuple(range(len(self._axes)))
        found = sorted(map(self._number_of, axes))
        if len(set(found)) != len(found):
            twice = next(i for i in found if found.count(i) > 1)
            raise AxisError(f"axis {self._axes[twice]} is named twice.")
        return tuple(found)

    def _number_of(self, axis: Axis) -> int:
        """The number of an axis, counted from the outermost."""
        kind = type(axis)
        if kind is str or kind is int or (isinstance(axis, (str, numbers.Integral)) and kind is not bool):
            number = self._numbers.get(axis)
            if number is not None:
                return number
        else:
            raise AxisError(f"there is no axis {axis!r} in {self._brief()}; each axis is an argument of its own.")
        # On named axes an integer is a position. On numbered axes it is the number of the axis, which does not shift
        # when other axes are fixed; negative integers count from the end.
        end = 0 if isinstance(next(iter(self._axes), 0), int) else len(self._axes)
        if not isinstance(axis, str) and -len(self._axes) <= axis < end:
            return int(axis) % len(self._axes)
        fixed = dict(self._all_axes).get(axis)
        if fixed is not None:
            raise AxisError(
                f"axis {axis} is fixed at {fixed} in {self._brief()}; use the mesh that this one is a slice of."
            )
        close = closest_name(axis, [name for name in self._axes if isinstance(name, str)])
        raise AxisError(f"there is no axis {axis!r} in {self._brief()}.{did_you_mean(close)}")

    def _checked_index(self, i: int, index: Any) -> int:
        """An index of an axis, counted from the start; RankError if the axis does not have it."""
        size, axis = len(self._offsets[i]), self._axes[i]
        number: int = index if type(index) is int else whole_number(index)
        if not -size <= number < size:
            raise RankError(f"axis {axis} has {_index_range(size)}; there is no {number}.")
        return number % size

    # -- positions and ranks ------------------------------------------------------------------------------------

    def _position_of(self, coord: Sequence[int]) -> int:
        """The position at a coord, by the formula."""
        checked = self._checked_index
        return self._offset + sum(
            [each[checked(i, index)] for i, (each, index) in enumerate(zip(self._offsets, coord))]
        )

    def _rank_at(self, position: int) -> int:
        return position if self._table is None else self._table.ranks[position]

    def _ranks_at(self, positions: Sequence[int]) -> Iterable[int]:
        return positions if self._table is None else map(self._table.ranks.__getitem__, positions)

    def _expand(self, start: int, along: Sequence[int]) -> tuple[int, ...]:
        """The ranks from a start position along these axes, in row-major order."""
        return tuple(self._ranks_at(strided.expand((start,), strided.coalesce(self._offsets[i] for i in along))))

    def _lookup(self, rank: object) -> tuple[int, ...] | None:
        """The coord of a rank, None if the rank is not in this layout."""
        try:
            position = rank if type(rank) is int else whole_number(rank)
        except TypeError:
            return None
        if self._table is not None:
            position = self._table.positions.get(position, -1)  # -1 is no position
        return strided.find_coord(position - self._lowest, self._offsets, self._by_stride)

    # -- text for messages --------------------------------------------------------------------------------------

    def _brief(self) -> str:
        return format_call("mesh ", dict(zip(self._axes, self.shape)))


class Partition(Sequence[tuple[int, ...]]):
    """All blocks along some axes. Each block is computed when it is read."""

    __slots__ = ("_block_axes", "_layout", "_other_axes")

    def __init__(self, layout: Layout, along: tuple[int, ...]) -> None:
        self._layout, self._block_axes = layout, along
        self._other_axes = [i for i in range(len(layout.axes)) if i not in along]

    def __len__(self) -> int:
        return math.prod(self._layout.shape[i] for i in self._other_axes)

    def __getitem__(self, which: int) -> tuple[int, ...]:  # type: ignore[override]  # a slice would compute its blocks
        which = whole_number(which)
        if not -len(self) <= which < len(self):
            raise RankError(f"there are {len(self)} blocks; there is no number {which}.")
        start = strided.nth([self._layout._offsets[i] for i in self._other_axes], which % len(self))
        return self._layout._expand(self._layout._offset + start, self._block_axes)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        layout = self._layout
        block, others = ([layout._offsets[i] for i in axes] for axes in (self._block_axes, self._other_axes))
        batches = strided.batches_of_blocks(layout._offset, block, others, layout._ranks_at)
        return itertools.chain.from_iterable(batches)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if len(self) <= 64:
            return repr(tuple(self))
        return f"({', '.join(map(repr, itertools.islice(self, 4)))}, ..., {self[-1]!r})"


_Ranks = TypeVar("_Ranks", bound="RankMethods")


class RankMethods:
    """The methods that a mesh and a ``RankView`` have in common: a layout from the point of view of one rank.

    Args:
        layout: the arithmetic, without processes.
        rank: the rank, which may lie outside the layout.
    """

    __slots__ = ()

    layout: Layout
    rank: int

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, outermost first: their names, or numbers if they have none.

        >>> mesh.axes
        ('pp', 'dp', 'tp')
        """
        return self.layout.axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, outermost first: the last axis varies fastest.

        >>> mesh.shape
        (2, 2, 2)
        """
        return self.layout.shape

    @property
    def coord(self) -> tuple[int, ...] | None:
        """This rank's index on every axis; None if the mesh does not contain it.

        >>> mesh.coord, mesh.at(pp=0).coord
        ((1, 0, 1), None)
        """
        return self.layout._lookup(self.rank)

    def size(self, *axes: Axis) -> int:
        """Number of ranks along these axes; without axes, of all ranks.

        Raises:
            AxisError: there is no such axis, or it is named twice.

        >>> mesh.size("dp", "tp"), mesh.size()
        (4, 8)
        """
        return self.layout.size(*axes)

    def index(self, *axes: Axis) -> int:
        """This rank's index along these axes: its rank in the group along them.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            MembershipError: the mesh does not contain this rank.

        >>> mesh.index("dp", "tp"), mesh.index("pp")
        (1, 1)
        """
        self._check_member()
        return self.layout.index_of(self.rank, *axes)

    def ranks(self, *axes: Axis) -> tuple[int, ...]:
        """The ranks of this rank's group along these axes, in mesh order; without axes, all ranks.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            MembershipError: the mesh does not contain this rank.

        >>> mesh.ranks("dp", "tp"), mesh.ranks("pp")
        ((4, 5, 6, 7), (1, 5))
        """
        if not axes:
            return self.layout.ranks()
        self._check_member()
        return self.layout.block_of(self.rank, *axes)

    def label(self) -> str:
        """This rank's coord as a label for logs and file names.

        >>> mesh.label()
        'pp1-dp0-tp1'
        """
        self._check_member()
        return self.layout.label_of(self.rank)

    def neighbor(self, axis: Axis, step: int = 1, *, wrap: bool = False) -> int | None:
        """The rank at a distance along an axis; None past either end.

        Args:
            step: number of indices forward; negative for backward.
            wrap: continue at the other end, as in a ring.

        Raises:
            AxisError: there is no such axis.
            MembershipError: the mesh does not contain this rank.

        >>> mesh.neighbor("pp", -1), mesh.neighbor("pp", +1), mesh.neighbor("pp", +1, wrap=True)
        (1, None, 1)
        """
        self._check_member()
        return self.layout.neighbor_of(self.rank, axis, step, wrap=wrap)

    def partition(self, *axes: Axis) -> Partition:
        """All blocks along these axes, which tile the mesh: a sequence that computes each block when it is read.

        >>> mesh.partition("tp")
        ((0, 1), (2, 3), (4, 5), (6, 7))
        """
        return self.layout.partition(*axes)

    def __str__(self) -> str:
        from pgmesh.drawing import text  # only to print

        return text.draw(self.layout, mark=self.rank)

    def _repr_html_(self) -> str:
        from pgmesh.drawing import svg  # only notebooks need it

        return svg.draw(self.layout, mark=self.rank)

    def along(self: _Ranks, *axes: Axis) -> _Ranks:
        raise NotImplementedError

    def _check_member(self) -> None:
        if self.rank not in self.layout:
            raise MembershipError(
                f"rank {self.rank} is not in {self!r}, so it has no coord and no group there.\n\n"
                f"  if mesh.rank in mesh: ...   # check first"
            )

    def __getitem__(self: _Ranks, axes: Axis | tuple[Axis, ...]) -> _Ranks:
        return self.along(*axes) if isinstance(axes, tuple) else self.along(axes)

    def __iter__(self) -> Iterator[int]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def __contains__(self, rank: object) -> bool:
        return rank in self.layout


@dataclass(frozen=True)
class RankView(RankMethods):
    """A layout from one rank's point of view, as ``Layout.seen_by`` returns it. It has no groups and no processes.

    >>> seen = layout.seen_by(5)
    >>> seen.coord, seen.index("dp", "tp"), seen.ranks("dp", "tp"), seen.neighbor("pp", -1)
    ((1, 0, 1), 1, (4, 5, 6, 7), 1)
    """

    layout: Layout
    """The layout."""
    rank: int
    """The rank, which may lie outside a slice."""

    def at(self, fixed: Mapping[Axis, Keep] | None = None, /, **indices: Keep) -> RankView:
        """The part at these indices, for the same rank."""
        return RankView(self.layout.at(fixed, **indices), self.rank)

    def along(self, *axes: Axis) -> RankView:
        """The slice through the rank along these axes. ``seen[axes]`` is the same."""
        self._check_member()
        return RankView(self.layout.along(self.rank, *axes), self.rank)

    def view(self, /, *shape: int, **sizes: int) -> RankView:
        """The same ranks in the same order with other axes."""
        return RankView(self.layout.view(*shape, **sizes), self.rank)


def _index_range(size: int) -> str:
    return f"{size} indices, 0 to {size - 1}" if size > 1 else "one index, 0"
