"""The laws of a layout, against a plain list.

First over every shape of up to 24 ranks, then by property over whatever at, along and view make of larger ones. The
laws that speak of groups hold where there are processes, and are tested there:

    index(*axes) == dist.get_rank(group(*axes))
    group(*axes) is group(*reversed(axes))
    group along axes of size 1 is a real group of one; never None
    along(*axes).group() is group(*axes)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, product
from math import prod
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from pgmesh import Layout
from tests.support.layout_oracle import Axis, Keep, LayoutOracle

WORLDS = {
    "whole": range,
    "offset": lambda n: range(5, 5 + n),
    "strided": lambda n: range(3, 3 + 7 * n, 7),
    "reversed": lambda n: range(n + 1, 1, -1),
    "permuted": lambda n: Random(n).sample(range(2 * n), n),
}
"""The n ranks that a layout is made on."""

MOST = 24
"""Every shape of up to so many ranks stands in one of the worlds."""

FIRST = 6
"""Those of up to so many ranks stand in all of them."""

FEW = 8
"""Those of more ranks have at most one axis of size 1."""


def shapes(n: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every way to write n as a product of so many sizes."""
    if axes == 0:
        yield from [()] * (n == 1)
    for size in range(1, n + 1) if axes else ():
        if n % size == 0:
            yield from ((size, *rest) for rest in shapes(n // size, axes - 1))


SHAPES = [
    shape
    for n in range(1, MOST + 1)
    for axes in range(1, n.bit_length() + 4)
    for shape in shapes(n, axes)
    if (axes <= 4 or 1 not in shape) and (n <= FEW or shape.count(1) <= 1)
]


def pair(shape: Sequence[int], ranks: Iterable[int]) -> tuple[Layout, LayoutOracle]:
    """A layout and its oracle, with axes named a, b, c, ..."""
    sizes, ranks = dict(zip("abcdefgh", shape)), list(ranks)
    return Layout(**sizes, ranks=ranks), LayoutOracle(sizes, shape, ranks)


@cache
def pairs(world: str) -> list[tuple[Layout, LayoutOracle]]:
    """This world's share of all shapes."""
    turn = list(WORLDS).index(world)
    mine = [s for i, s in enumerate(SHAPES) if prod(s) <= FIRST or i % len(WORLDS) == turn]
    return [pair(shape, WORLDS[world](prod(shape))) for shape in mine]


def requests(axes: Sequence[Axis]) -> Iterator[tuple[Axis, ...]]:
    """Every combination of axes; () asks for all of them."""
    return (request for n in range(len(axes) + 1) for request in combinations(axes, n))


def everywhere(law):
    """Runs a law on every pair of every world."""

    @pytest.mark.parametrize("world", WORLDS)
    def test(world):
        for layout, plain in pairs(world):
            law(layout, plain)

    test.__doc__ = law.__doc__
    return test


@everywhere
def test_rank_of_inverts_coord_of(layout, plain):
    assert layout.ranks() == tuple(layout) == plain.ranks()
    for coord, rank in plain.table.items():
        assert layout.coord_of(rank) == coord
        assert layout.rank_of(coord) == rank
        assert rank in layout
    for outsider in {*range(-2, 2 * len(layout) + 8)} - {*plain.ranks()}:
        assert outsider not in layout


@everywhere
def test_partition_blocks_cover_each_rank_once(layout, plain):
    for axes in requests(layout.axes):
        blocks = plain.partition(*axes)
        assert layout.partition(*axes) == blocks
        assert sorted(rank for block in blocks for rank in block) == sorted(layout)
        for block in blocks:
            assert all(layout.block_of(rank, *axes) == block for rank in block)


@everywhere
def test_index_of_is_the_position_in_block(layout, plain):
    for axes in requests(layout.axes):
        for block in plain.partition(*axes):
            assert [layout.index_of(rank, *axes) for rank in block] == [*range(len(block))]


@everywhere
def test_size_is_the_product_of_axis_sizes(layout, plain):
    sizes = dict(zip(plain.axes, plain.shape))
    assert layout.shape == plain.shape
    for axes in requests(layout.axes):
        size = prod(sizes[axis] for axis in axes or layout.axes)
        assert layout.size(*axes) == size == len(layout.block_of(plain.ranks()[-1], *axes))


@everywhere
def test_at_keeps_blocks_of_other_axes_whole(layout, plain):
    whole = {axes: {*layout.partition(*axes)} for axes in requests(layout.axes)}
    for axis, size in zip(plain.axes, plain.shape):
        for i in {0, size - 1}:
            part, plain_part = layout.at({axis: i}), plain.at({axis: i})
            assert part.axes == plain_part.axes
            assert part.ranks() == plain_part.ranks()
            for axes in filter(None, requests(part.axes)):
                assert whole[axes].issuperset(part.partition(*axes))


@everywhere
def test_along_is_the_block_as_a_layout(layout, plain):
    for axes in requests(layout.axes):
        for block in plain.partition(*axes)[::3]:
            along = layout.along(block[-1], *axes)
            assert along.ranks() == block
            assert along.axes == (axes or layout.axes)


@everywhere
def test_view_keeps_the_ranks(layout, plain):
    n = len(layout)
    for shape in [s for axes in (1, 2, 3) for s in shapes(n, axes)] if n <= 24 else [plain.shape[::-1], (n,)]:
        view = layout.view(*shape)
        assert view.ranks() == layout.ranks()
        assert view.shape == shape
        assert view.partition(0) == LayoutOracle(range(len(shape)), shape, plain.ranks()).partition(0)


@everywhere
def test_view_merges_axes_that_are_not_adjacent(layout, plain):
    """The slice along two axes with others between them is one axis, and that is two again."""
    for outer, inner in [
        (a, b) for a, b in combinations(layout.axes, 2) if layout.axes.index(b) > layout.axes.index(a) + 1
    ]:
        block = plain.partition(outer, inner)[-1]
        part, view = layout.along(block[0], outer, inner), layout.along(block[0], outer, inner).view(m=-1)
        assert (view.axes, view.shape, view.ranks(), view.block_of(block[-1])) == (("m",), (len(block),), block, block)
        assert [view.index_of(rank, "m") for rank in block] == [*range(len(block))]
        assert {rank for rank in range(3 * max(layout.ranks()) + 9) if rank in view} == {*block}
        assert view.view(**{outer: layout.size(outer), inner: -1}) == part
        for shape in shapes(len(block), 2):
            assert view.view(*shape).partition(1) == LayoutOracle(range(2), shape, block).partition(1)


@everywhere
def test_neighbor_backward_inverts_neighbor_forward(layout, plain):
    for axis in layout.axes:
        for line in plain.partition(axis):
            for here, there in zip(line, [*line[1:], None]):
                assert layout.neighbor_of(here, axis, +1) == there
                assert there is None or layout.neighbor_of(there, axis, -1) == here
            for here, there in zip(line, [*line[1:], line[0]]):
                assert layout.neighbor_of(here, axis, +1, wrap=True) == there
                assert layout.neighbor_of(there, axis, -1, wrap=True) == here


@everywhere
def test_repr_of_a_root_recreates_it(layout, plain):
    again = eval(repr(layout))
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.ranks() == plain.ranks()


@everywhere
def test_order_of_axes_changes_no_answer(layout, plain):
    rank = plain.ranks()[len(layout) // 2]
    for axes in (request for request in requests(layout.axes) if len(request) > 1):
        answer = answer_all(layout, rank, axes)
        assert answer_all(layout, rank, axes[::-1]) == answer
        assert answer_all(layout, rank, (*axes[1:], *axes[:1])) == answer


def answer_all(layout: Layout, rank: int, axes: Iterable[Axis]) -> tuple[object, ...]:
    """All that one can ask along some axes."""
    return (
        layout.size(*axes),
        layout.index_of(rank, *axes),
        layout.block_of(rank, *axes),
        layout.partition(*axes)[-1],
        layout.along(rank, *axes),
        layout.describe(rank, *axes),
    )


@st.composite
def roots(draw) -> tuple[Layout, LayoutOracle]:
    """A layout of up to 5 axes and 512 ranks, on any ranks."""
    shape: list[int] = []
    for _ in range(draw(st.integers(1, 5))):
        shape.append(draw(st.integers(1, min(8, 512 // prod(shape)))))
    n = prod(shape)
    start, step = draw(st.integers(0, 99)), draw(st.integers(1, 9))
    ranks: Sequence[int] = range(start, start + n * step, step)
    if draw(st.booleans()):
        ranks = ranks[::-1]
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    return pair(shape, ranks)


def parts(size: int) -> st.SearchStrategy[Keep]:
    """A slice or indices that keep something of an axis of this size."""
    slices = st.slices(size).map(lambda part: part if range(size)[part] else slice(None))
    return slices | st.lists(indices(size), min_size=1, max_size=size)


def indices(size: int) -> st.SearchStrategy[int]:
    return st.integers(-size, size - 1)


@st.composite
def sizes_of(draw, n: int) -> list[int]:
    """Sizes of up to 4 axes that hold n ranks."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        rest = n // prod(sizes)
        sizes.append(draw(st.sampled_from([size for size in range(1, rest + 1) if rest % size == 0])))
    return [*sizes, n // prod(sizes)]


class Walk:
    """A layout and its oracle, led through the same steps."""

    def __init__(self, layout: Layout, plain: LayoutOracle) -> None:
        self.layout, self.plain = layout, plain

    def at(self, data: st.DataObject) -> None:
        choices = {axis: parts(size) | indices(size) for axis, size in zip(self.plain.axes, self.plain.shape)}
        kept = data.draw(st.fixed_dictionaries({}, optional=choices), label="at")
        self.layout, self.plain = self.layout.at(kept), self.plain.at(kept)

    def along(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.plain.ranks()), label="along")
        axes = data.draw(some_of(self.plain.axes))
        self.layout, self.plain = self.layout.along(rank, *axes), self.plain.along(rank, *axes)

    def view(self, data: st.DataObject) -> None:
        sizes = data.draw(sizes_of(self.plain.size()) | st.just(self.plain.shape or (1,)), label="view")
        shape = dict(zip("stuvwxyz", sizes))
        self.layout, self.plain = self.layout.view(**shape), self.plain.view(shape, sizes)

    def check(self, data: st.DataObject) -> None:
        layout, plain = self.layout, self.plain
        rank, axes = data.draw(st.sampled_from(plain.ranks())), data.draw(some_of(plain.axes))
        assert (layout.axes, layout.shape, layout.ranks()) == (plain.axes, plain.shape, plain.ranks())
        if plain.axes:
            direct = Layout(dict(zip(plain.axes, plain.shape)), ranks=plain.ranks())
            assert (layout, hash(layout)) == (direct, hash(direct))
        assert {layout.coord_of(rank): rank for rank in plain.ranks()} == plain.table
        assert all(layout.rank_of(coord) == rank for coord, rank in plain.table.items())
        from_the_end = {tuple(i - n for i, n in zip(coord, plain.shape)): rank for coord, rank in plain.table.items()}
        assert all(layout.rank_of(coord) == rank for coord, rank in from_the_end.items())
        assert {rank for rank in range(-9, 5000) if rank in layout} == {*plain.ranks()}
        assert layout.size(*axes) == plain.size(*axes)
        assert layout.partition(*axes) == plain.partition(*axes)
        assert layout.block_of(rank, *axes) == plain.block_of(rank, *axes)
        assert layout.index_of(rank, *axes) == plain.index_of(rank, *axes)
        for axis, step, wrap in product(axes, (-9, -2, -1, 0, 1, 2, 9), (False, True)):
            assert layout.neighbor_of(rank, axis, step, wrap=wrap) == plain.neighbor_of(rank, axis, step, wrap=wrap)


def some_of(axes: Sequence[Axis]) -> st.SearchStrategy[list[Axis]]:
    return st.lists(st.sampled_from(axes), unique=True) if axes else st.just([])


@settings(max_examples=50)
@given(roots(), st.lists(st.sampled_from([Walk.at, Walk.view, Walk.along]), min_size=1, max_size=5), st.data())
def test_laws_hold_after_at_along_and_view(root, steps, data):
    walk = Walk(*root)
    for step in steps:
        step(walk, data)
    walk.check(data)
