"""Oracle of layouts: a table from coord to rank, in which every query is a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod

Axis = str | int
Keep = int | slice | Sequence[int]


class LayoutOracle:
    """A layout as a table. ``Layout`` must return the same from every method that both have."""

    def __init__(self, axes: Iterable[Axis], shape: Iterable[int], ranks: Iterable[int]) -> None:
        self.axes, self.shape = tuple(axes), tuple(shape)
        self.table = dict(zip(product(*map(range, self.shape)), ranks, strict=True))

    def ranks(self) -> tuple[int, ...]:
        return tuple(self.table.values())

    def size(self, *axes: Axis) -> int:
        return prod(size for axis, size in zip(self.axes, self.shape) if axis in (axes or self.axes))

    def rank_of(self, coord: Sequence[int]) -> int:
        return self.table[tuple(coord)]

    def coord_of(self, rank: int) -> tuple[int, ...]:
        return next(coord for coord, other in self.table.items() if other == rank)

    def partition(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Blocks: the ranks grouped by their coords on the other axes."""
        heaps: dict[tuple[int, ...], list[int]] = {}
        for coord, rank in self.table.items():
            where = tuple(i for axis, i in zip(self.axes, coord) if axis not in (axes or self.axes))
            heaps.setdefault(where, []).append(rank)
        return tuple(map(tuple, heaps.values()))

    def block_of(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        return next(block for block in self.partition(*axes) if rank in block)

    def index_of(self, rank: int, *axes: Axis) -> int:
        return self.block_of(rank, *axes).index(rank)

    def neighbor_of(self, rank: int, axis: Axis, step: int = 1, *, wrap: bool = False) -> int | None:
        line = self.block_of(rank, axis)
        place = line.index(rank) + step
        if wrap:
            return line[place % len(line)]
        return line[place] if 0 <= place < len(line) else None

    def at(self, indices: Mapping[Axis, Keep]) -> LayoutOracle:
        fixed = {axis for axis, keep in indices.items() if isinstance(keep, int)}
        kept = [_kept(range(size), indices.get(axis, slice(None))) for axis, size in zip(self.axes, self.shape)]
        left = {axis: len(places) for axis, places in zip(self.axes, kept) if axis not in fixed}
        return LayoutOracle(left, left.values(), [self.table[coord] for coord in product(*kept)])

    def along(self, rank: int, *axes: Axis) -> LayoutOracle:
        here = zip(self.axes, self.coord_of(rank))
        return self.at({axis: i for axis, i in here if axis not in (axes or self.axes)})

    def view(self, axes: Iterable[Axis], shape: Iterable[int]) -> LayoutOracle:
        return LayoutOracle(axes, shape, self.ranks())


def _kept(places: range, keep: Keep) -> list[int]:
    """The indices that an index, a slice or a list selects, each once."""
    if isinstance(keep, slice):
        return list(places[keep])
    return list(dict.fromkeys(places[i] for i in ([keep] if isinstance(keep, int) else keep)))
