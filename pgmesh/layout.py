"""Where each rank sits: rank <-> coord, blocks and partitions, as plain arithmetic.

A layout is an offset and, for each axis, how far each of its indices moves one along the ranks:

    rank = offset + sum of offsets[axis][index]

The offsets of an axis are a Python ``range``, which already is an affine axis: indexing, slicing, membership and
inverse cost O(1), so a million ranks take no more room than eight. Only ranks that follow no arithmetic go
through a table. Everything in this file is shown on one layout:

    >>> layout = Layout(pp=2, dp=2, tp=2)
    >>> print(layout)
    ┌ pp0 ───────┐  ┌ pp1 ───────┐
    │     tp0 tp1│  │     tp0 tp1│
    │ dp0   0   1│  │ dp0   4   5│
    │ dp1   2   3│  │ dp1   6   7│
    └────────────┘  └────────────┘
"""

from __future__ import annotations

import difflib
import itertools
import math
import numbers
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union, overload

from pgmesh import draw, hints
from pgmesh._util import offsets as strided
from pgmesh.errors import AxisError, MembershipError, PlaceError, ShapeError
from pgmesh.sizes import (
    Sizes,
    Text,
    arguments,
    brief,
    enough,
    fill,
    fill_with,
    is_truth,
    is_word,
    some,
    spell,
    take_ranks,
    take_sizes,
    whole_number,
    written,
)

Axis = Union[str, int]
"""An axis, by its name or its number."""

Keep = Union[int, slice, Iterable[int]]
"""What ``at`` takes for an axis: one index, which fixes it, or the slice or the indices to keep."""


class _RankTable(NamedTuple):
    """Ranks that follow no arithmetic: the rank at each position, and the position of each rank."""

    ranks: tuple[int, ...]
    positions: dict[int, int]


_FIELDS = ("axes", "offsets", "offset", "table", "all_axes", "is_slice")


class Layout:
    """Ranks arranged in a box, with no processes and no torch: what a mesh is before it has any groups.

    Args:
        shape: the sizes of numbered axes, outermost first: the last axis varies fastest. Or one mapping of sizes by
            axis, with any names or numbers.
        ranks: the ranks to arrange, in this order; ``range`` of the size unless given.
        sizes: the sizes of named axes, outermost first. At most one size is -1: what is left of ``ranks``.

    Raises:
        ShapeError: the sizes do not hold the ranks, or the ranks are no ranks.
        OptionsError: an option of groups in place of a size.

    >>> Layout(pp=2, dp=-1, tp=2, ranks=range(8)).shape
    (2, 2, 2)
    >>> Layout({"data-parallel": 2, "tp": 2}).size("data-parallel")
    2
    >>> Layout(2, 2, ranks=[3, 1, 2, 0]).rank_of((0, 1))
    1
    """

    __slots__ = (
        *("_axes", "_offsets", "_offset", "_table", "_all_axes", "_is_slice"),
        *("_numbers", "_by_stride", "_lowest", "_last_lookup"),
    )

    _axes: tuple[Axis, ...]
    _offsets: tuple[strided.Offsets, ...]
    _offset: int
    _table: _RankTable | None
    _all_axes: tuple[tuple[Axis, int | None], ...]  # the axes as first named; a fixed one has its index beside it
    _is_slice: bool

    def __init__(self, /, *shape: int | Sizes, ranks: Iterable[int] | None = None, **sizes: int) -> None:
        order = None if ranks is None else take_ranks("Layout", ranks)
        more = arguments(order)
        box = take_sizes("Layout", shape, sizes, more, None if order is None else len(order))
        if order is not None:
            box = fill_with("Layout", box, order, more)
        elif -1 in box.values():
            call = spell("Layout", box, ranks=enough(box))
            raise ShapeError(f"{spell('Layout', box)} cannot know what is left: give it ranks, such as {call}.")
        self._set_row_major(box, range(math.prod(box.values())) if order is None else order)

    @classmethod
    def of(cls, box: Mapping[Axis, int], ranks: range | tuple[int, ...]) -> Layout:
        """A layout of sizes and ranks that are known to be good."""
        layout = object.__new__(cls)
        layout._set_row_major(box, ranks)
        return layout

    def _set_row_major(self, box: Mapping[Axis, int], ranks: range | tuple[int, ...]) -> None:
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
        self._axes, self._offsets, self._offset, self._table, self._all_axes = axes, offsets, offset, table, all_axes
        self._is_slice = is_slice
        self._numbers = {axis: i for i, axis in enumerate(axes)}
        self._last_lookup: tuple[int | None, tuple[int, ...] | None] = (None, None)
        self._by_stride = strided.by_descending_stride(offsets)
        self._lowest = offset + sum(lowest for _, lowest, _ in self._by_stride)

    def _replace(self, **changed: Any) -> Layout:
        fields = {name: getattr(self, f"_{name}") for name in _FIELDS}
        layout = object.__new__(Layout)
        layout._set_fields(**{**fields, **changed})
        return layout

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, outermost first: names, or numbers where none were given.

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
        """How many ranks apart neighbours along each axis are; None where that differs from place to place.

        >>> layout.strides
        (4, 2, 1)
        """
        strides = map(strided.stride_of, self._offsets)
        return tuple(stride if stride == 0 or self._table is None else None for stride in strides)

    def size(self, *axes: Axis) -> int:
        """How many ranks along these axes; along none, how many in all.

        Raises:
            AxisError: there is no such axis, or it is named twice.

        >>> layout.size("dp", "tp"), layout.size()
        (4, 8)
        """
        return math.prod(len(self._offsets[i]) for i in self._numbers_of(axes))

    @property
    def is_slice(self) -> bool:
        """Whether ``at`` or ``along`` took it from a larger layout.

        >>> layout.is_slice, layout.at(pp=0).is_slice
        (False, True)
        """
        return self._is_slice

    def ranks(self) -> tuple[int, ...]:
        """Every rank, in the order of the mesh: the last axis varies fastest.

        >>> layout.at(pp=1).ranks()
        (4, 5, 6, 7)
        """
        return self._expand(self._offset, range(len(self._offsets)))

    def ranks_in_order(self) -> range | tuple[int, ...]:
        """The same as ``ranks``, as a range where the ranks follow one: then at no cost.

        >>> layout.at(tp=1).ranks_in_order()
        range(1, 9, 2)
        """
        return self._as_range() or self.ranks()

    def _as_range(self) -> range | None:
        runs = strided.coalesce(self._offsets) or [range(1)]
        if self._table is None and len(runs) == 1 and isinstance(runs[0], range):
            return strided.shift(runs[0], self._offset)
        return None

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
            coord: one index for each axis, outermost first.

        Raises:
            PlaceError: there is no such place.

        >>> layout.rank_of((1, 0, 1))
        5
        """
        try:
            coord = tuple(coord)
        except TypeError:
            raise PlaceError(f"a coord is a tuple of indices, one for each axis, not {coord!r}.") from None
        if len(coord) != len(self._axes):
            raise PlaceError(f"a coord of {self._brief()} has {len(self._axes)} indices, but {coord} has {len(coord)}.")
        return self._rank_at(self._position(coord))

    def coord_of(self, rank: int) -> tuple[int, ...]:
        """The place of a rank on every axis; the inverse of ``rank_of``.

        Raises:
            PlaceError: the rank is not in this layout.

        >>> layout.coord_of(5)
        (1, 0, 1)
        """
        coord = self._lookup(rank)
        if coord is None:
            raise PlaceError(f"rank {rank!r} is not in {self._brief()}, whose ranks are {self._listed()}.")
        return coord

    def index_of(self, rank: int, *axes: Axis) -> int:
        """A rank's place along these axes, which is its rank inside the group along them.

        >>> layout.index_of(5, "dp", "tp")
        1
        """
        coord, index = self.coord_of(rank), 0
        for i in self._numbers_of(axes):
            index = index * len(self._offsets[i]) + coord[i]
        return index

    def label_of(self, rank: int) -> str:
        """A rank's place as a word for logs and file names.

        >>> layout.label_of(5)
        'pp1-dp0-tp1'
        """
        coord = self.coord_of(rank)
        return "-".join(f"{'' if isinstance(axis, int) else axis}{i}" for axis, i in zip(self._axes, coord))

    def neighbor_of(self, rank: int, axis: Axis, step: int = 1, *, wrap: bool = False) -> int | None:
        """The rank so many steps on along an axis; None past the edge.

        Args:
            step: how many indices on; negative for back.
            wrap: go round, as a ring does, in place of None.

        >>> layout.neighbor_of(5, "pp", -1), layout.neighbor_of(5, "pp", +1), layout.neighbor_of(5, "pp", wrap=True)
        (1, None, 1)
        """
        (i,) = self._numbers_of((axis,))
        coord = list(self.coord_of(rank))
        size = len(self._offsets[i])
        try:
            coord[i] += whole_number(step)
        except TypeError:
            raise PlaceError(f"a step along axis {axis} is a whole number, not {step!r}.") from None
        if wrap:
            coord[i] %= size
        return self._rank_at(self._position(coord)) if 0 <= coord[i] < size else None

    # -- blocks -------------------------------------------------------------------------------------------------

    def block_of(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """The ranks that share one group with a rank along these axes, in the order of the mesh.

        >>> layout.block_of(5, "dp", "tp"), layout.block_of(5, "pp")
        ((4, 5, 6, 7), (1, 5))
        """
        along, start = self._numbers_of(axes), self._offset
        for i, place in enumerate(self.coord_of(rank)):
            if i not in along:
                start += self._offsets[i][place]
        return self._expand(start, along)

    def partition(self, *axes: Axis) -> Partition:
        """Every block along these axes. They tile the layout; none is made before it is looked at.

        >>> layout.partition("tp")
        ((0, 1), (2, 3), (4, 5), (6, 7))
        """
        return Partition(self, self._numbers_of(axes))

    def seen_by(self, rank: int) -> RankView:
        """This layout as a rank sees it: the methods of a mesh that need no groups, with no process of that rank.

        Raises:
            PlaceError: the rank is not in this layout.

        >>> layout.seen_by(5).label(), layout.seen_by(5).index("dp", "tp"), layout.seen_by(5).ranks("pp")
        ('pp1-dp0-tp1', 1, (1, 5))
        """
        self.coord_of(rank)
        return RankView(self, operator.index(rank))

    # -- smaller, and read with other axes ----------------------------------------------------------------------

    def at(self, fixed: Mapping[Axis, Keep] | None = None, /, **indices: Keep) -> Layout:
        """The part of this layout at these indices.

        Args:
            fixed: the same as ``indices``, for numbered axes: ``at({0: 1})``.
            indices: for each axis one index, which fixes and drops it, or a slice or indices to keep of it.
                Negative ones count from the end; an index that is named twice counts once, so ``[0, -1]`` is
                one stage where there is one.

        Raises:
            AxisError: there is no such axis.
            PlaceError: there is no such index.
            ShapeError: nothing is left.

        >>> layout.at(pp=1, tp=0).ranks()
        (4, 6)
        >>> Layout(pp=4, tp=2).at(pp=[0, -1]).ranks()
        (0, 1, 6, 7)
        """
        if fixed is not None and not isinstance(fixed, Mapping):
            raise PlaceError(f"at takes indices by axis, such as at({{0: 1}}) or at(pp=1), not {fixed!r}.")
        offset, offsets, axes, all_axes = self._offset, list(self._offsets), list(self._axes), dict(self._all_axes)
        seen: set[int] = set()
        for axis, keep in [*(fixed or {}).items(), *indices.items()]:
            (i,) = self._numbers_of((axis,))
            if i in seen:
                raise AxisError(f"axis {self._axes[i]} is given twice.")
            seen.add(i)
            step = self._offsets[i]
            if isinstance(keep, slice):
                picked: strided.Offsets = _take_slice(step, keep, f"axis {axis}")
            elif isinstance(keep, Iterable) and getattr(keep, "ndim", 1) > 0:  # a tensor may be one number
                picked = tuple(
                    dict.fromkeys(step[self._checked_index(i, one)] for one in self._checked_indices(i, keep))
                )
            else:
                place = self._checked_index(i, keep)
                offset += step[place]
                all_axes[self._axes[i]] = place
                axes[i] = _GONE
                continue
            if not picked:
                raise ShapeError(
                    f"{at_call({axis: keep})} keeps nothing of axis {axis}, which has {_index_range(len(step))}."
                )
            offset += picked[0]
            offsets[i] = strided.rebase(strided.as_offsets(picked))
        left = [i for i, axis in enumerate(axes) if axis is not _GONE]
        return self._replace(
            axes=tuple(axes[i] for i in left),
            offsets=tuple(offsets[i] for i in left),
            offset=offset,
            all_axes=tuple(all_axes.items()),
            is_slice=self._is_slice or math.prod(len(offsets[i]) for i in left) < len(self),
        )

    def along(self, rank: int, *axes: Axis) -> Layout:
        """The slice through a rank along these axes: every other axis fixed where the rank is.

        >>> layout.along(5, "dp", "tp") == layout.at(pp=1)
        True
        """
        along, coord = self._numbers_of(axes), self.coord_of(rank)
        return self.at({self._axes[i]: index for i, index in enumerate(coord) if i not in along})

    def view(self, /, *shape: int | Sizes, **sizes: int) -> Layout:
        """The same ranks in the same order, read with other axes: split, merged or both.

        Args:
            shape: the new sizes, for numbered axes, or one mapping of sizes by axis.
            sizes: the new sizes by name. At most one size is -1: what is left.

        Raises:
            ShapeError: the sizes do not hold the ranks, or would cut an uneven slice.
            OptionsError: an option of groups in place of a size.

        >>> layout.view(pp=2, edp=1, ep=4).block_of(5, "ep")
        (4, 5, 6, 7)
        >>> layout.along(5, "pp", "tp").view(n=4).ranks()      # axes that do not touch, read as one
        (0, 1, 4, 5)
        """
        count = len(self)
        box = fill("view", take_sizes("view", shape, sizes, count=count), count, f"the mesh has {count}", pick=False)
        fixed = ((axis, index) for axis, index in self._all_axes if index is not None and axis not in box)
        all_axes = (*fixed, *((axis, None) for axis in box))
        offsets = strided.reshape(self._offsets, tuple(box.values()))
        if offsets is not None and strided.is_non_overlapping(offsets):
            return self._replace(axes=tuple(box), offsets=offsets, all_axes=all_axes)
        if offsets is None and (
            self._table is None
            or strided.reshape([strided.rebase(self._range_or_ranks())], tuple(box.values())) is None
        ):
            call = spell("ProcessGroupMesh", box, ranks=Text(brief(self._ranks_written(), "mesh.ranks()")))
            raise ShapeError(
                f"{spell('view', box)} would cut {self._brief()} where its ranks ({self._listed()}) do not "
                f"follow one another evenly.\n\n"
                f"  {call}   # a mesh of its own can read any ranks"
            )
        return Layout.of(box, self._range_or_ranks())._replace(all_axes=all_axes, is_slice=self._is_slice)

    def _range_or_ranks(self) -> range | tuple[int, ...]:
        """The ranks, as a range where they are one."""
        return strided.as_offsets(self.ranks())

    # -- text ---------------------------------------------------------------------------------------------------

    def describe(self, rank: int, *axes: Axis) -> str:
        """What a block along these axes is, in the words of this layout.

        >>> layout.describe(5, "dp", "tp")
        'pp=1, dp=*, tp=*'
        """
        places: dict[Axis, object] = dict(zip(self._axes, self.coord_of(rank)))
        for i in self._numbers_of(axes):
            places[self._axes[i]] = "*"
        return ", ".join([f"{axis}={places.get(axis, index)}" for axis, index in self._all_axes])

    def __repr__(self) -> str:
        return self.spell("Layout")

    def spell(self, who: str, *, world: int | None = None, **more: object) -> str:
        """The call of ``who`` that would make this layout, as text.

        Args:
            world: how many ranks there are where none are given; as many as here unless given.

        >>> layout.at(pp=0).spell("ProcessGroupMesh", world=8)
        'ProcessGroupMesh(dp=2, tp=2, ranks=range(4))'
        """
        if not self._axes:  # of one rank, every axis fixed
            return f"{self.view(1).spell(who, world=world, **more)}.at({{0: 0}})"
        box = dict(zip(self._axes, self.shape))
        ranks = self._as_range()
        if ranks == range(len(self) if world is None else world):
            return spell(who, box, **more)
        return spell(who, box, ranks=ranks or Text(self._ranks_written()), **more)

    def __str__(self) -> str:
        return draw.text(self)

    def _repr_html_(self) -> str:
        from pgmesh import svg  # a notebook's picture; whoever prints text has no use for it

        return svg.of(self)

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

    # -- the arithmetic -----------------------------------------------------------------------------------------

    def _numbers_of(self, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """Where these axes stand, in the order of the mesh: a combination has no order of its own."""
        if not axes:
            return tuple(range(len(self._axes)))
        found = sorted(map(self._number_of, axes))
        if len(set(found)) != len(found):
            twice = next(i for i in found if found.count(i) > 1)
            words = dict.fromkeys(str(axis) for axis in axes if self._number_of(axis) == twice)
            ways = f", as {' and as '.join(words)}" if len(words) > 1 else ""
            raise AxisError(f"axis {self._axes[twice]} is named twice{ways}.")
        return tuple(found)

    def _number_of(self, axis: Axis) -> int:
        kind = type(axis)
        if kind is str or kind is int or (isinstance(axis, (str, numbers.Integral)) and kind is not bool):
            number = self._numbers.get(axis)
            if number is not None:
                return number
        elif isinstance(axis, (tuple, slice)) or not isinstance(axis, Hashable):
            known = {*map(repr, self._axes)}
            given = axis if isinstance(axis, (list, tuple, set)) and {*map(repr, axis)} <= known else self._axes[-2:]
            raise AxisError(
                f"axes are separate arguments, not a {kind.__name__} {axis!r}.\n\n"
                f"  mesh.group({', '.join(map(repr, given))})"
            )
        else:
            raise AxisError(f"there is no axis {axis!r} in {self._brief()}.")
        fixed = dict(self._all_axes).get(axis)
        positions = 0 if isinstance(next(iter(self._axes), 0), int) else len(self._axes)  # numbered ones keep numbers
        if not isinstance(axis, str) and fixed is None and -len(self._axes) <= axis < positions:
            return int(axis) % len(self._axes)
        if fixed is not None:
            raise AxisError(f"axis {axis} is fixed at {fixed} in {self._brief()}; ask the mesh that it was cut from.")
        close = alike(axis, [name for name in self._axes if isinstance(name, str)])
        hint = f" Did you mean {close!r}?" if close else ""
        raise AxisError(f"there is no axis {axis!r} in {self._brief()}.{hint}")

    def _checked_index(self, i: int, index: Any) -> int:
        """An index of an axis, counted from the start."""
        size, axis = len(self._offsets[i]), self._axes[i]
        try:
            place: int = index if type(index) is int else whole_number(index)
        except TypeError:
            raise PlaceError(f"an index of axis {axis} is a whole number, not {index!r}.") from None
        if not -size <= place < size:
            raise PlaceError(f"axis {axis} has {_index_range(size)}; there is no {place}.")
        return place % size

    def _checked_indices(self, i: int, keep: Iterable[Any]) -> Iterable[Any]:
        """Indices to keep of an axis; PlaceError if they are a mask."""
        kept = tuple(keep)
        if len(kept) != len(self._offsets[i]) or not all(map(is_truth, kept)):
            return kept
        axis, places = self._axes[i], [place for place, keeps in enumerate(kept) if keeps]
        if not places:
            raise PlaceError(f"axis {axis} is given a mask that keeps nothing; it takes indices.")
        raise PlaceError(f"axis {axis} is given a mask; it takes indices.\n\n  {at_call({axis: places})}")

    def _position(self, coord: Sequence[int]) -> int:
        return self._offset + sum(
            step[self._checked_index(i, c)] for i, (step, c) in enumerate(zip(self._offsets, coord))
        )

    def _rank_at(self, position: int) -> int:
        return position if self._table is None else self._table.ranks[position]

    def _lookup(self, rank: object) -> tuple[int, ...] | None:
        """The coord of a rank, None if it is not here. The last one is remembered: most questions are of one rank."""
        last, coord = self._last_lookup
        if last is rank:
            return coord
        try:
            number = rank if type(rank) is int else whole_number(rank)
        except TypeError:
            return None
        position = number if self._table is None else self._table.positions.get(number)
        coord = (
            None if position is None else strided.find_coord(position - self._lowest, self._offsets, self._by_stride)
        )
        if number is rank:  # an array or a tensor may be written in place
            self._last_lookup = (number, coord)
        return coord

    def _expand(self, start: int, along: Sequence[int]) -> tuple[int, ...]:
        """The ranks that one reaches from a position along these axes, the last varying fastest."""
        return tuple(self._ranks_at(strided.expand((start,), strided.coalesce(self._offsets[i] for i in along))))

    def _ranks_at(self, positions: Sequence[int]) -> Iterable[int]:
        """The ranks at positions."""
        return positions if self._table is None else map(self._table.ranks.__getitem__, positions)

    def _listed(self) -> str:
        """The ranks for a message, at no cost for the many."""
        if len(self) <= 8:
            return some(self.ranks())
        first, last = ([end] * len(self._axes) for end in (0, -1))
        return f"{self.rank_of(first)}, ..., {self.rank_of(last)}"

    def _ranks_written(self) -> str:
        """The ranks as an expression, at no cost for the many that follow some arithmetic.

        >>> Layout(pp=99, tp=4).at(tp=[0, 1])._ranks_written()
        '[a + b for a in range(0, 396, 4) for b in range(2)]'
        """
        runs = strided.coalesce(self._offsets)
        if self._table is not None or len(runs) < 2 or len(self) <= 64:
            return written(self._as_range() or self.ranks())
        first = strided.shift(runs[0], self._offset)
        names = [chr(ord("a") + i) for i in range(len(runs))]
        loops = [f"for {a} in {written(offsets)}" for a, offsets in zip(names, [first, *runs[1:]])]
        return f"[{' + '.join(names)} {' '.join(loops)}]"

    def _brief(self) -> str:
        return spell("mesh ", dict(zip(self._axes, self.shape)))


class Partition(Sequence[tuple[int, ...]]):
    """All the blocks along some axes: a sequence that makes a block when it is looked at."""

    __slots__ = ("_block_axes", "_layout", "_other_axes")

    def __init__(self, layout: Layout, along: tuple[int, ...]) -> None:
        self._layout, self._block_axes = layout, along
        self._other_axes = [i for i in range(len(layout.axes)) if i not in along]

    def __len__(self) -> int:
        return math.prod(self._layout.shape[i] for i in self._other_axes)

    @overload
    def __getitem__(self, which: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, which: slice) -> tuple[tuple[int, ...], ...]: ...
    def __getitem__(self, which: int | slice) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        if isinstance(which, slice):
            return tuple(self[i] for i in _take_slice(range(len(self)), which, f"{len(self)} blocks"))
        try:
            which = whole_number(which)
        except TypeError:
            last = len(self) - 1
            raise PlaceError(f"a block is found by its number, 0 to {last}, not {which!r}.") from None
        if not -len(self) <= which < len(self):
            raise PlaceError(f"there are {len(self)} blocks; there is no number {which}.")
        start = strided.nth([self._layout._offsets[i] for i in self._other_axes], which % len(self))
        return self._layout._expand(self._layout._offset + start, self._block_axes)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        offsets, inner, outer = self._layout._offsets, self._block_axes, self._other_axes
        batches = strided.batches_of_blocks(
            self._layout._offset, [offsets[i] for i in inner], [offsets[i] for i in outer], self._layout._ranks_at
        )
        return itertools.chain.from_iterable(batches)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if len(self) <= 64:
            return repr(tuple(self))
        return f"({', '.join(map(repr, self[:4]))}, ..., {self[-1]!r})"


@dataclass(frozen=True, repr=False)
class RankView:
    """What ``Layout.seen_by`` returns: the methods of a mesh that need no groups, for any rank.

    Args:
        layout: where each rank sits.
        rank: the rank that sees it. The rank may lie outside a slice.

    >>> seen = layout.seen_by(5)
    >>> seen.coord, seen.index("dp", "tp"), seen.ranks("dp", "tp"), seen.neighbor("pp", -1)
    ((1, 0, 1), 1, (4, 5, 6, 7), 1)
    """

    layout: Layout
    rank: int

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, outermost first."""
        return self.layout.axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, outermost first."""
        return self.layout.shape

    @property
    def coord(self) -> tuple[int, ...] | None:
        """The rank's place on every axis; None where the rank is outside."""
        return self.layout.coord_of(self.rank) if self.rank in self.layout else None

    def size(self, *axes: Axis) -> int:
        """How many ranks along these axes; along none, how many in all."""
        return self.layout.size(*axes)

    def index(self, *axes: Axis) -> int:
        """The rank's place along these axes."""
        return self.layout.index_of(self._member(), *axes)

    def ranks(self, *axes: Axis) -> tuple[int, ...]:
        """The ranks of the rank's block along these axes; along none, all."""
        return self.layout.block_of(self._member(), *axes) if axes else self.layout.ranks()

    def label(self) -> str:
        """The rank's place as a word for logs and file names."""
        return self.layout.label_of(self._member())

    def neighbor(self, axis: Axis, step: int = 1, *, wrap: bool = False) -> int | None:
        """The rank so many steps on along an axis; None past the edge."""
        return self.layout.neighbor_of(self._member(), axis, step, wrap=wrap)

    def partition(self, *axes: Axis) -> Partition:
        """Every block along these axes."""
        return self.layout.partition(*axes)

    def at(self, fixed: Mapping[Axis, Keep] | None = None, /, **indices: Keep) -> RankView:
        """The part at these indices, seen by the same rank."""
        return RankView(self.layout.at(fixed, **indices), self.rank)

    def along(self, *axes: Axis) -> RankView:
        """The slice through the rank along these axes. ``seen[axes]`` is the same."""
        return RankView(self.layout.along(self._member(), *axes), self.rank)

    def __getitem__(self, axes: Axis | tuple[Axis, ...]) -> RankView:
        return self.along(*axes) if isinstance(axes, tuple) else self.along(axes)

    def view(self, /, *shape: int, **sizes: int) -> RankView:
        """The same ranks in the same order, read with other axes."""
        return RankView(self.layout.view(*shape, **sizes), self.rank)

    def _member(self) -> int:
        if self.rank not in self.layout:
            raise MembershipError(
                f"rank {self.rank} is not in {self.layout!r}, so it has no place there.\n\n"
                f"  if seen.rank in seen: ...   # ask first"
            )
        return self.rank

    def __iter__(self) -> Iterator[int]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def __contains__(self, rank: object) -> bool:
        return rank in self.layout

    def __repr__(self) -> str:
        if self.rank in self.layout:
            return f"{self.layout!r}.seen_by({self.rank})"
        return f"RankView({self.layout!r}, {self.rank})"  # seen_by refuses a rank outside

    def __str__(self) -> str:
        return draw.text(self.layout, mark=self.rank)


hints.answer(RankView, "seen", {**{name: f"seen.layout.{name}" for name in hints.public(Layout)}, **hints.RANK_VIEW})
hints.answer(Layout, "layout", hints.LAYOUT)


def at_call(asked: Mapping[Axis, object]) -> str:
    """The call of ``at`` for these axes, as text.

    >>> at_call({"pp": 1}), at_call({0: [1, 2]})
    ('at(pp=1)', 'at({0: [1, 2]})')
    """
    if all(map(is_word, asked)):
        return f"at({', '.join(f'{axis}={keep!r}' for axis, keep in asked.items())})"
    return f"at({dict(asked)!r})"


def _take_slice(values: strided.Offsets, part: slice, whole: str) -> strided.Offsets:
    """A slice of values; PlaceError where one of its ends is no number."""
    try:
        ends = (None if end is None else whole_number(end) for end in (part.start, part.stop, part.step))
        return values[slice(*ends)]
    except (TypeError, ValueError) as error:
        raise PlaceError(f"{part} is no slice of {whole}: {error}.") from None


def _index_range(size: int) -> str:
    return f"{size} indices, 0 to {size - 1}" if size > 1 else "one index, 0"


def taken(before: Layout, after: Layout) -> dict[Axis, int | range | tuple[int, ...]]:
    """What ``at`` was asked for: the index of each axis that it fixed, and the indices of those that it cut.

    >>> taken(layout, layout.at(pp=1, tp=[1]))
    {'pp': 1, 'tp': range(1, 2)}
    """
    first = before.coord_of(after.rank_of([0] * len(after._axes)))
    asked: dict[Axis, int | range | tuple[int, ...]] = {}
    for axis, old, start in zip(before._axes, before._offsets, first):
        if axis not in after._numbers:
            asked[axis] = start
            continue
        kept = strided.indices_of_part(old, after._offsets[after._numbers[axis]], start)
        if kept != range(len(old)):
            asked[axis] = kept
    return asked


def alike(wrong: object, names: list[str]) -> str | None:
    """The name that was meant: the same letters in another order or case, or nearly the same."""
    folded = {name.casefold(): name for name in names}
    word = str(wrong).casefold()
    for name in folded:
        if sorted(name) == sorted(word):
            return folded[name]
    close = difflib.get_close_matches(word, folded, n=1)
    return folded[close[0]] if close else None


_GONE: Any = object()
