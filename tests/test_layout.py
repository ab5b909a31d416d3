"""Properties of a layout that are not among its laws."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from random import Random

import numpy as np
import pytest
import torch

from pgmesh import Layout, PgmeshError, RankError, ShapeError
from pgmesh.layout import Partition
from tests.support.memory import memory

TRUTHS = (True, np.True_, torch.tensor(True))


@pytest.fixture
def box() -> Layout:
    return Layout(pp=2, dp=2, tp=2)


@pytest.mark.parametrize("kind", [list, tuple, iter, np.array])
def test_ranks_and_indices_are_any_iterable(kind):
    assert Layout(dp=np.int64(2), tp=2, ranks=kind([4, 5, 6, 7])) == Layout(dp=2, tp=2, ranks=range(4, 8))
    assert Layout(dp=2, tp=2, ranks={4, 5, 6, 7}) == Layout(dp=2, tp=2, ranks=range(4, 8))
    assert Layout(pp=4, tp=2).at(pp=kind([2, 1])).ranks() == (4, 5, 2, 3)


@pytest.mark.parametrize("outsider", [-1, 8, 10**30, 1.0, 1.5, Fraction(3), "1", None, (1,), [], {}])
@pytest.mark.parametrize("ranks", [range(8), (3, 1, 4, 5, 0, 2, 6, 7)], ids=["straight", "permuted"])
def test_foreign_value_is_not_in_a_layout(outsider, ranks):
    assert outsider not in Layout(2, 2, 2, ranks=ranks)


@pytest.mark.parametrize("truth", TRUTHS, ids=lambda truth: type(truth).__module__)
@pytest.mark.parametrize("ranks", [range(8), (3, 1, 4, 5, 0, 2, 6, 7)], ids=["straight", "permuted"])
def test_bool_is_no_number(truth, ranks):
    layout = Layout(pp=2, dp=2, tp=2, ranks=ranks)
    assert 1 in layout  # which True equals
    assert truth not in layout
    for ask in (
        lambda: layout.coord_of(truth),
        lambda: layout.rank_of((truth, 0, 0)),
        lambda: layout.at(pp=truth),
        lambda: layout.at(pp=[0, truth, 1]),
        lambda: layout.neighbor_of(0, "pp", truth),
    ):
        with pytest.raises((RankError, TypeError), match=r"is not in mesh|is no number"):
            ask()
    for sizes in ({"dp": truth}, {"dp": 2, "ranks": [0, truth]}):
        with pytest.raises(ShapeError, match="whole number"):
            Layout(**sizes)


@pytest.mark.parametrize(
    ("layout", "number", "same"),
    [
        (Layout(pp=2, dp=3, tp=5), 0, "pp"),
        (Layout(pp=2, dp=3, tp=5), -1, "tp"),
        (Layout(pp=2, dp=3, tp=5), np.uint8(2), "tp"),
        (Layout(2, 3, 5), np.int64(-3), 0),
        (Layout(2, 3, 5).at({1: 0}), -1, 2),
        (Layout(2, 3, 5).at({0: 1}).view(a=3, b=5), 0, "a"),
        (Layout(2, 3, 5).at({0: 1}).view(a=3, b=5), -1, "b"),
    ],
    ids=repr,
)
def test_number_of_an_axis_is_its_position(layout, number, same):
    assert layout.size(number) == layout.size(same)
    assert layout.partition(number) == layout.partition(same)
    assert layout.at({number: 1}) == layout.at({same: 1})


def test_view_may_reuse_name_of_fixed_axis(box):
    again = box.at(pp=1).view(pp=2, tp=2)
    assert again.block_of(4, "pp") == (4, 6)
    assert again.describe(4, "pp") == "pp=*, tp=0"


@pytest.mark.parametrize(
    ("layout", "label", "whole", "tp"),
    [
        (Layout(pp=2, dp=2, tp=2), "pp1-dp0-tp1", "pp=*, dp=*, tp=*", "pp=1, dp=0, tp=*"),
        (Layout(2, 2, 2), "1-0-1", "0=*, 1=*, 2=*", "0=1, 1=0, 2=*"),
        (Layout(pp=2, dp=2, tp=2).at(pp=1), "dp0-tp1", "pp=1, dp=*, tp=*", "pp=1, dp=0, tp=*"),
        (Layout(2, 2, 2).at({1: 0}), "1-1", "0=*, 1=0, 2=*", "0=1, 1=0, 2=*"),
        (Layout(pp=2, dp=4).at(pp=1).view(dp=2, tp=2), "dp0-tp1", "pp=1, dp=*, tp=*", "pp=1, dp=0, tp=*"),
    ],
    ids=repr,
)
def test_labels_and_descriptions_name_every_axis(layout, label, whole, tp):
    assert layout.label_of(5) == label
    assert layout.describe(5) == whole
    assert layout.describe(5, -1) == tp


@pytest.mark.parametrize(
    "other",
    [
        Layout(dp=2, tp=4),
        Layout(tp=2, dp=2),
        Layout(2, 2),
        Layout(dp=4, tp=1),
        Layout(dp=2, tp=2, ranks=range(1, 5)),
        Layout(dp=2, tp=2, ranks=[0, 2, 1, 3]),
        (0, 1, 2, 3),
        None,
    ],
)
def test_layouts_with_other_axes_or_ranks_differ(other):
    assert Layout(dp=2, tp=2) != other


def test_partition_is_a_sequence(box):
    blocks = box.partition("tp")
    assert isinstance(blocks, Partition)
    assert blocks == box.partition(2) == [*blocks] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [*reversed(blocks)] == [(6, 7), (4, 5), (2, 3), (0, 1)]
    assert blocks[1] == blocks[np.int64(1)] == blocks[torch.tensor(1)] == blocks[-3] == (2, 3)
    assert ((4, 5) in blocks, blocks.index((4, 5))) == (True, 2)
    assert [blocks == other for other in (box.partition("dp"), [(0, 1)], {*blocks})] == [False, False, False]


def test_repr_of_a_long_partition_is_short(box):
    assert repr(box.partition("pp")) == "((0, 4), (1, 5), (2, 6), (3, 7))"
    assert repr(box.partition()) == "((0, 1, 2, 3, 4, 5, 6, 7),)"
    many = "((0, 1), (2, 3), (4, 5), (6, 7), ..., (1998, 1999))"
    assert repr(Layout(dp=1000, tp=2).partition("tp")) == many


KIB = 1024
MILLION = {"pp": 64, "dp": 512, "tp": 32}
"""Sizes that hold 1,048,576 ranks."""


def test_layout_of_a_million_ranks_is_small():
    small, _ = memory(lambda: Layout(pp=2, dp=2, tp=2))
    held, peak = memory(lambda: Layout(**MILLION))
    assert held < small + KIB
    assert peak < 8 * KIB
    assert len(pickle.dumps(Layout(**MILLION))) < KIB


@pytest.mark.parametrize(
    "ask",
    [
        lambda layout: layout.coord_of(777_777),
        lambda layout: layout.rank_of((47, 241, 17)),
        lambda layout: 777_777 in layout,
        lambda layout: 10**9 in layout,
        lambda layout: layout.size("pp", "tp"),
        lambda layout: layout.index_of(777_777, "dp", "tp"),
        lambda layout: layout.block_of(777_777, "tp"),
        lambda layout: layout.partition("tp")[-1],
        lambda layout: layout.neighbor_of(777_777, "pp", -1, wrap=True),
        lambda layout: layout.label_of(777_777),
        lambda layout: layout.describe(777_777, "dp"),
        lambda layout: layout.at(pp=3, dp=slice(None, None, 2)),
        lambda layout: layout.at(pp=[0, -1]),
        lambda layout: layout.along(777_777, "dp", "tp"),
        lambda layout: layout.view(n=-1),
        lambda layout: layout.at(pp=3).view(edp=-1, ep=64).block_of(50_000, "edp")[0],
        lambda layout: layout.ranks_in_order(),
        lambda layout: layout == Layout(**MILLION),
        lambda layout: hash(layout),
        lambda layout: repr(layout),
        lambda layout: repr(layout.partition("tp")),
        lambda layout: str(layout),
        lambda layout: error_of(lambda: layout.coord_of(10**9)),
        lambda layout: error_of(lambda: layout.rank_of((64, 0, 0))),
        lambda layout: error_of(lambda: layout.size("xp")),
    ],
)
def test_calls_on_a_million_ranks_allocate_little(ask):
    ask(Layout(**MILLION))  # fills tables of the process, which earlier tests may have filled in part
    layout = Layout(**MILLION)
    _, peak = memory(lambda: ask(layout))
    assert peak < 128 * KIB


def error_of(call: Callable[[], object]) -> PgmeshError:
    with pytest.raises(PgmeshError) as caught:
        call()
    return caught.value


def test_slices_of_permuted_layout_share_its_table():
    layout = Layout(pp=64, dp=256, ranks=range(2**14)[::-1]).at(pp=[*range(1, 64), 0])
    permuted = Layout(pp=64, dp=256, ranks=layout.ranks())
    for ask in (lambda: permuted.at(pp=3), lambda: permuted.view(n=-1), lambda: permuted.along(9, "pp")):
        held, peak = memory(ask)
        assert held < 4 * KIB
        assert peak < 16 * KIB


@pytest.mark.parametrize("ranks", [None, "offset", "shuffled"])
def test_iterated_partition_equals_its_indexed_blocks(ranks: str | None):
    count = 6 * 40 * 5 * 20
    order = {
        None: range(count),
        "offset": range(7, 7 + 3 * count, 3),
        "shuffled": Random(1).sample(range(count), count),
    }
    layout = Layout(dp=6, pp=40, cp=5, tp=20, ranks=order[ranks])
    for part in (layout, layout.at(pp=[0, 3, 4, 39], tp=slice(None, None, -3)), layout.view(a=-1, b=32)):
        for n in range(len(part.axes) + 1):
            for axes in combinations(part.axes, n):
                partition = part.partition(*axes)
                assert list(partition) == [partition[i] for i in range(len(partition))], (part, axes)


def test_first_block_of_huge_partition_allocates_little():
    layout = Layout(dp=1 << 12, cp=1 << 4, tp=1 << 4)
    for axis, second in {"dp": 256, "cp": 16, "tp": 1}.items():
        assert next(iter(layout.partition(axis)))[1] == second
        assert memory(lambda axis=axis: next(iter(layout.partition(axis))))[1] < 2 << 20
