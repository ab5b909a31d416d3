"""Names that users of DeviceMesh, Megatron and others try: an AttributeError that shows the call."""

from __future__ import annotations

import numpy as np
import pytest

from pgmesh import Layout, ProcessGroupMesh, ShapeError, plan
from pgmesh._util import missing_attributes
from tests.support.fake_world import fake_rank

BOX = Layout(pp=2, dp=2, tp=2)


@pytest.fixture
def mesh():
    with fake_rank(5, 8):
        yield ProcessGroupMesh(pp=2, dp=2, tp=2, name="m")


def hint_of(of: object, name: str) -> str:
    assert not hasattr(of, name)
    with pytest.raises(AttributeError) as caught:
        getattr(of, name)
    says, nothing, call = str(caught.value).splitlines()
    assert says == f"{type(of).__name__!r} object has no attribute {name!r}."
    assert nothing == ""
    call, _, comment = call.strip().partition("   # ")
    assert comment in ("", "for example: name the axes that you mean")
    return call


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("get_group", "mesh.group('tp')"),
        ("get_local_rank", "mesh.index('tp')"),
        ("get_rank", "mesh.rank"),
        ("get_coordinate", "mesh.coord"),
        ("get_all_groups", "[mesh.group(axis) for axis in mesh.axes]"),
        ("mesh_dim_names", "mesh.axes"),
        ("ndim", "len(mesh.axes)"),
        ("device_type", "mesh.device_mesh().device_type"),
        ("mesh", "mesh.device_mesh().mesh"),
        ("_flatten", "mesh.group('dp', 'tp')"),
        ("neighbour", "mesh.neighbor('tp')"),
        ("get_group_along_axis", "mesh.group('tp')"),
    ],
)
def test_missing_attribute_of_mesh_shows_call(mesh, name, call):
    assert hint_of(mesh, name) == call
    assert hint_of(mesh.at(pp=1), name) == call


def test_hint_of_a_slice_names_its_axes(mesh):
    assert hint_of(mesh.at(pp=1), "_unflatten") == "mesh.view({'dp': 2, 'tp': 2})"
    assert hint_of(mesh.at(pp=1, dp=0, tp=1), "get_group") == "mesh.group()"


def test_hint_with_axes_calls_them_an_example(mesh):
    """Which axes were meant, an attribute cannot know."""
    for name, comment in (("get_group", "   # for example: name the axes that you mean"), ("get_rank", "")):
        with pytest.raises(AttributeError) as caught:
            getattr(mesh, name)
        assert str(caught.value).endswith(f"{hint_of(mesh, name)}{comment}")


@pytest.mark.parametrize("name", missing_attributes.CALLS)
def test_each_hint_of_a_mesh_runs(mesh, name):
    eval(hint_of(mesh, name), {"mesh": mesh, "torch": __import__("torch")})


@pytest.mark.parametrize("name", ["nothing", "local_rank"])
def test_unknown_attribute_raises_the_usual_error(mesh, name):
    for of in (mesh, BOX, BOX.seen_by(0)):
        with pytest.raises(AttributeError) as caught:
            getattr(of, name)
        assert str(caught.value) == f"{type(of).__name__!r} object has no attribute {name!r}"
        assert (caught.value.name, caught.value.obj) == (name, of)
    assert not {*missing_attributes.CALLS} & {*dir(mesh)}


@pytest.mark.parametrize(
    ("planned", "same"),
    [
        (lambda: plan(dp=8, tp=8, nodes="8x8"), lambda: plan(Layout(dp=8, tp=8), nodes="8x8")),
        (lambda: plan({"dp": -1, "tp": 8}, nodes="8x8"), lambda: plan(Layout(dp=8, tp=8), nodes="8x8")),
        (lambda: plan(2, -1, nodes="2x4"), lambda: plan(Layout(2, 4), nodes="2x4")),
        (
            lambda: plan(dp=2, tp=-1, ranks=[3, 1, 2, 0, 7, 6, 5, 4]),
            lambda: plan(Layout(dp=2, tp=4, ranks=(3, 1, 2, 0, 7, 6, 5, 4))),
        ),
        (
            lambda: plan(dp=2, tp=4, combinations=(("dp", "tp") for _ in "1")),
            lambda: plan(Layout(dp=2, tp=4), combinations=[("dp", "tp")]),
        ),
    ],
)
def test_plan_takes_sizes_as_a_layout_does(planned, same):
    assert planned() == same()


def test_plan_accepts_hosts_in_an_array():
    assert plan(Layout(8), nodes=np.array([4, 4])) == plan(Layout(8), nodes="2x4")
    with pytest.raises(ShapeError, match=r"\n  plan\(\{0: -1, 1: 2\}, nodes=\[4, 4\]\) "):
        plan(-1, 3, nodes=np.array([4, 4]))


def test_plan_refuses_unknown_arguments_with_type_error():
    for call, argument in (
        (lambda: plan(BOX, node="2x4"), "node='2x4'"),
        (lambda: plan(BOX, ranks=range(8)), r"ranks=range\(0, 8\)"),
        (lambda: plan(BOX, 8), "8"),
    ):
        with pytest.raises(TypeError, match=f"not a layout and {argument}"):
            call()
