"""The facts in messages of errors: the numbers, the names, and the call that would be right."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pgmesh import AxisError, Layout, PgmeshError, RankError, ShapeError, errors
from pgmesh._util.validation import fill_sizes
from tests.support.message_assertions import assert_raises

BOX = Layout(pp=2, dp=2, tp=2)
NUMBERED = Layout(2, 2, 2)


# ---- ShapeError ----


@pytest.mark.parametrize(
    ("box", "text"),
    [
        (
            {"dp": 2},
            """
            ProcessGroupMesh(dp=2) holds 2 ranks, but the world has 1.

              torchrun --nproc-per-node 2 script.py   # start 2 ranks: a script by itself is a world of 1
              ProcessGroupMesh(dp=-1)                 # infer dp: 1
            """,
        ),
        (
            {"dp": -1, "tp": 2},
            """
            ProcessGroupMesh(dp=-1, tp=2) cannot be filled: the world has 1, and 1 is not divisible by 2.

              torchrun --nproc-per-node 2 script.py   # start 2 ranks: a script by itself is a world of 1
              ProcessGroupMesh(dp=-1, tp=1)           # tp may be 1
            """,
        ),
        (
            {"dp": 8, "tp": 8},
            """
            ProcessGroupMesh(dp=8, tp=8) holds 64 ranks, but the world has 1.

              torchrun --nnodes 8 --nproc-per-node 8 script.py   # start 64 ranks: a script by itself is a world of 1
              ProcessGroupMesh(dp=-1, tp=1)                      # dp is then 1
            """,
        ),
    ],
)
def test_world_of_one_rank_suggests_torchrun(box, text):
    assert_raises(ShapeError, lambda: fill_sizes("ProcessGroupMesh", box, 1, "the world has 1", is_world=True), text)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: Layout(dp=2, tp=2, ranks=range(8)),
            """
            Layout(dp=2, tp=2) holds 4 ranks, but ranks= has 8.

              Layout(dp=-1, tp=2, ranks=range(8))   # infer dp: 4
            """,
        ),
        (
            lambda: Layout(dp=2, ranks=[7]),
            """
            Layout(dp=2) holds 2 ranks, but ranks= has 1.

              Layout(dp=-1, ranks=range(7, 8))   # infer dp: 1
            """,
        ),
        (
            lambda: Layout(dp=3, tp=2, ranks=range(9)),
            """
            Layout(dp=3, tp=2) holds 6 ranks, but ranks= has 9.

              Layout(dp=-1, tp=1, ranks=range(9))   # dp is then 9
            """,
        ),
        (
            lambda: Layout(dp=3, tp=3, ranks=range(8)),
            """
            Layout(dp=3, tp=3) holds 9 ranks, but ranks= has 8.

              Layout(dp=-1, tp=2, ranks=range(8))   # sizes that divide 8; dp is then 4
            """,
        ),
        (
            lambda: Layout(dp=-1, tp=3, ranks=range(8)),
            """
            Layout(dp=-1, tp=3) cannot be filled: ranks= has 8, and 8 is not divisible by 3.

              Layout(dp=-1, tp=2, ranks=range(8))   # dp is then 4
            """,
        ),
        (
            lambda: BOX.view(a=3, b=4),
            """
            view(a=3, b=4) holds 12 ranks, but the mesh has 8.

              view(a=-1, b=4)   # infer a: 2
            """,
        ),
        (
            lambda: NUMBERED.view(3, -1),
            """
            view(3, -1) cannot be filled: the mesh has 8, and 8 is not divisible by 3.

              view(2, -1)   # axis 0 may be 1, 2, 4 or 8
            """,
        ),
    ],
)
def test_wrong_number_of_ranks_suggests_sizes(call, text):
    assert_raises(ShapeError, call, text)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: Layout(dp=-1, cp=2, tp=-1),
            "Layout(dp=-1, cp=2, tp=-1): at most one size may be -1 (inferred); here are dp, tp.",
        ),
        (
            lambda: Layout(dp=-1),
            "Layout(dp=-1) cannot infer the size of -1: give it ranks, such as Layout(dp=-1, ranks=range(8)).",
        ),
        (
            lambda: Layout(dp=0),
            "Layout: the size of axis dp is 0; a size is at least 1, or -1 to infer it.",
        ),
        (
            lambda: Layout(2, -2),
            "Layout: the size of axis 1 is -2; a size is at least 1, or -1 to infer it.",
        ),
        (
            lambda: BOX.view(dp=0),
            "view: the size of axis dp is 0; a size is at least 1, or -1 to infer it.",
        ),
        (lambda: Layout(dp=2.0), "Layout: the size of axis dp is a whole number, not 2.0."),
        (
            lambda: Layout(2, 1.5, ranks=range(4)),
            "Layout: the size of axis 1 is a whole number, not 1.5.",
        ),
        (
            lambda: Layout(dp=0.5, tp=1.5),
            "Layout: the size of axis dp is a whole number, not 0.5.",
        ),
        (
            lambda: BOX.view(dp=2.5, tp=2),
            "view: the size of axis dp is a whole number, not 2.5.",
        ),
        (lambda: Layout(dp=float("nan")), "Layout: the size of axis dp is a whole number, not nan."),
        (lambda: Layout(dp="2"), "Layout: the size of axis dp is a whole number, not '2'."),
        (lambda: Layout((2, 2)), "Layout: sizes are given one by one, not as (2, 2).\n\n  Layout(2, 2)"),
        (lambda: BOX.view([4, -1]), "view: sizes are given one by one, not as [4, -1].\n\n  view(4, -1)"),
        (lambda: Layout(("dp", 2)), "Layout: sizes are given one by one, not as ('dp', 2)."),
        (lambda: Layout(()), "Layout: sizes are given one by one, not as ()."),
        (lambda: Layout(dp=None), "Layout: the size of axis dp is a whole number, not None."),
        (
            lambda: Layout(2, tp=2),
            "Layout(2, tp=2): give all sizes by position, by keyword, or in one mapping.",
        ),
    ],
)
def test_invalid_sizes_are_refused(call, text):
    assert_raises(ShapeError, call, text)


def test_layout_without_axes_is_refused():
    with pytest.raises(ShapeError, match=r"^Layout needs at least one axis, such as Layout\(.*\)\.$") as caught:
        Layout()
    call = re.search(r"such as (.*)\.", str(caught.value))[1]
    assert eval(call).size() >= 1


@pytest.mark.fault(
    "sizes that do not fit, two -1, an empty mesh, an unknown axis, ranks that are repeated, negative or foreign"
)
@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "Layout: there is no rank to arrange; ranks is empty."),
        (range(0), "Layout: there is no rank to arrange; ranks is empty."),
        ([0, 1, 1, 0], "Layout: each rank may appear once, but ranks repeats 0, 1."),
        ([0, 1, -2, 3], "Layout: a rank is at least 0, but ranks holds -2."),
        (range(-4, 0), "Layout: a rank is at least 0, but ranks holds -4."),
        (4, "Layout: ranks are whole numbers, such as ranks=range(4), not 4."),
        ("0123", "Layout: ranks are whole numbers, such as ranks=range(4), not '0123'."),
        ([0.0, 1.0], "Layout: ranks are whole numbers, such as ranks=range(4), not [0.0, 1.0]."),
    ],
)
def test_invalid_ranks_are_refused(ranks, text):
    assert_raises(ShapeError, lambda: Layout(dp=-1, ranks=ranks), text)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: BOX.at(tp=[0]).at(pp=slice(1, None)).at(dp=[]),
            "at(dp=[]) keeps nothing of axis dp, which has 2 indices, 0 to 1.",
        ),
        (
            lambda: BOX.at(tp=slice(2, None)),
            "at(tp=slice(2, None, None)) keeps nothing of axis tp, which has 2 indices, 0 to 1.",
        ),
    ],
)
def test_empty_slice_names_the_axis(call, text):
    assert_raises(ShapeError, call, text)


def test_view_of_uneven_ranks_suggests_mesh():
    assert_raises(
        ShapeError,
        lambda: Layout(pp=3, tp=4).at(tp=[0, 1]).view(a=2, b=3),
        """
        view(a=2, b=3) would split mesh (pp=3, tp=2) where its ranks (0, 1, 4, 5, 8, 9) are not evenly spaced.

          ProcessGroupMesh(a=2, b=3, ranks=(0, 1, 4, 5, 8, 9))   # a new mesh takes any ranks
        """,
    )
    assert_raises(
        ShapeError,
        lambda: Layout(pp=99, tp=4).at(tp=[0, 1]).view(a=2, n=-1),
        """
        view(a=2, n=99) would split mesh (pp=99, tp=2) where its ranks (0, ..., 393) are not evenly spaced.

          ProcessGroupMesh(a=2, n=99, ranks=[a + b for a in range(0, 396, 4) for b in range(2)])   \
# a new mesh takes any ranks
        """,
    )


# ---- AxisError ----


@pytest.mark.fault(
    "sizes that do not fit, two -1, an empty mesh, an unknown axis, ranks that are repeated, negative or foreign"
)
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: Layout(pp=2, dp=2, tp=2).size("dpp"),
            "there is no axis 'dpp' in mesh (pp=2, dp=2, tp=2). Did you mean 'dp'?",
        ),
        (
            lambda: Layout(data=2, tensor=2).size("tensr"),
            "there is no axis 'tensr' in mesh (data=2, tensor=2). Did you mean 'tensor'?",
        ),
        (
            lambda: Layout(dp_shard=2, tp=2).at(dp_shards=0),
            "there is no axis 'dp_shards' in mesh (dp_shard=2, tp=2). Did you mean 'dp_shard'?",
        ),
        (lambda: BOX.size("ep"), "there is no axis 'ep' in mesh (pp=2, dp=2, tp=2)."),
        (lambda: BOX.block_of(0, "data"), "there is no axis 'data' in mesh (pp=2, dp=2, tp=2)."),
        (lambda: BOX.partition(3), "there is no axis 3 in mesh (pp=2, dp=2, tp=2)."),
        (lambda: NUMBERED.size("tp"), "there is no axis 'tp' in mesh (2, 2, 2)."),
        (lambda: NUMBERED.size(12), "there is no axis 12 in mesh (2, 2, 2)."),
        (lambda: NUMBERED.size(-4), "there is no axis -4 in mesh (2, 2, 2)."),
        (lambda: NUMBERED.size(True), "there is no axis True in mesh (2, 2, 2)."),
        (lambda: NUMBERED.size(1.0), "there is no axis 1.0 in mesh (2, 2, 2)."),
        (lambda: NUMBERED.size(np.float32(1)), f"there is no axis {np.float32(1)!r} in mesh (2, 2, 2)."),
        (lambda: BOX.size(False), "there is no axis False in mesh (pp=2, dp=2, tp=2)."),
        (lambda: BOX.size(None), "there is no axis None in mesh (pp=2, dp=2, tp=2)."),
        (
            lambda: BOX.size(["a", "b"]),  # none of its axes
            "axes are separate arguments, not a list ['a', 'b'].\n\n  mesh.group('dp', 'tp')   # and so on",
        ),
    ],
)
def test_unknown_axis_is_named_with_suggestion(call, text):
    assert_raises(AxisError, call, text)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: BOX.size("tp", "tp"), "axis tp is named twice."),
        (lambda: BOX.index_of(0, "tp", "dp", -1), "axis tp is named twice, as tp and as -1."),
        (lambda: BOX.at({"tp": 0}, tp=1), "axis tp is given twice."),
        (lambda: NUMBERED.at({0: 0, -3: 1}), "axis 0 is given twice."),
    ],
)
def test_axis_named_twice_is_refused(call, text):
    assert_raises(AxisError, call, text)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: BOX.at(pp=1).size("pp"),
            "axis pp is fixed at 1 in mesh (dp=2, tp=2); use the mesh before at() fixed it.",
        ),
        (
            lambda: BOX.at(pp=-1).at(pp=0),
            "axis pp is fixed at 1 in mesh (dp=2, tp=2); use the mesh before at() fixed it.",
        ),
    ],
)
def test_fixed_axis_is_named_with_index(call, text):
    assert_raises(AxisError, call, text)


# ---- RankError ----


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: BOX.at(pp=0).coord_of(5), "rank 5 is not in mesh (dp=2, tp=2), whose ranks are 0, 1, 2, 3."),
        (
            lambda: Layout(dp=10, tp=10).block_of(100, "tp"),
            "rank 100 is not in mesh (dp=10, tp=10), whose ranks are 0, ..., 99.",
        ),
        (lambda: BOX.at(pp=0, dp=0).neighbor_of(-1, "tp"), "rank -1 is not in mesh (tp=2), whose ranks are 0, 1."),
        (lambda: Layout(dp=2).label_of(None), "rank None is not in mesh (dp=2), whose ranks are 0, 1."),
        (lambda: Layout(dp=2).along("1"), "rank '1' is not in mesh (dp=2), whose ranks are 0, 1."),
    ],
)
def test_unknown_rank_is_named_with_mesh(call, text):
    assert_raises(RankError, call, text)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: BOX.rank_of((0, 2, 0)), "axis dp has 2 indices, 0 to 1; there is no 2."),
        (lambda: BOX.rank_of((0, 0, -3)), "axis tp has 2 indices, 0 to 1; there is no -3."),
        (lambda: BOX.rank_of((0, "1", 0)), "an index of axis dp is a whole number, not '1'."),
        (lambda: BOX.rank_of((0, 1)), "a coord of mesh (pp=2, dp=2, tp=2) has 3 indices, but (0, 1) has 2."),
        (lambda: BOX.at(pp=2), "axis pp has 2 indices, 0 to 1; there is no 2."),
        (lambda: BOX.at(pp=[0, -3]), "axis pp has 2 indices, 0 to 1; there is no -3."),
        (lambda: NUMBERED.at({1: 1.0}), "an index of axis 1 is a whole number, not 1.0."),
        (lambda: BOX.neighbor_of(0, "pp", 0.5), "a step along axis pp is a whole number, not 0.5."),
        (lambda: BOX.partition("tp")[4], "there are 4 blocks; there is no number 4."),
    ],
)
def test_unknown_index_is_named_with_range(call, text):
    assert_raises(RankError, call, text)


# ---- the tree ----

ERRORS = PgmeshError.__subclasses__()


def test_docstring_shows_the_tree_of_errors():
    drawn = re.findall(r"[├└]── (\w+) +\(([\w, ]+)\) +(.*)", errors.__doc__)
    bases = {error.__name__: ", ".join(base.__name__ for base in error.__bases__[1:]) for error in ERRORS}
    assert {name: builtin for name, builtin, _ in drawn} == bases
    for name, _, meaning in drawn:
        assert getattr(errors, name).__doc__.lower() == f"{meaning}.".lower()


def test_errors_suppress_their_context():
    with pytest.raises(ShapeError) as caught:
        Layout(dp=2.5)
    assert caught.value.__suppress_context__
