"""Any name for an axis, and none for a keyword that means something else: sizes by keyword and in a mapping."""

from __future__ import annotations

import inspect
from datetime import timedelta
from enum import Enum
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import pgmesh
from pgmesh import GroupOptions, Layout, OptionsError, PgmeshError, ProcessGroupMesh, plan
from pgmesh._util.keywords import RESERVED
from pgmesh.interop import from_device_mesh
from pgmesh.planning.rank_report import rank_report_of
from tests.support.fake_world import fake_rank

ODD = {"data-parallel": 2, "timeout": 2, "class": 2}
"""Sizes of axes that cannot be keywords."""


class Role(str, Enum):
    PIPELINE = "pp"
    DATA = "dp"


@pytest.fixture
def world():
    with fake_rank(5, 8):
        yield


@pytest.mark.parametrize("kind", [dict, MappingProxyType])
def test_mapping_of_sizes_equals_keywords(world, kind):
    sizes = kind({"pp": 2, "dp": -1, "tp": 2})
    assert Layout(sizes, ranks=range(8)) == Layout(pp=2, dp=2, tp=2)
    assert Layout(n=8).view(sizes) == Layout(pp=2, dp=2, tp=2)
    mesh = ProcessGroupMesh(sizes, name="train")
    assert repr(mesh) == "ProcessGroupMesh(pp=2, dp=2, tp=2, name='train')"
    assert mesh.view(kind({"pp": 2, "ep": -1})).group("ep") is mesh.group("dp", "tp")
    assert plan(sizes, nodes="2x4") == plan(Layout(pp=2, dp=2, tp=2), nodes="2x4")
    assert plan(kind({"pp": 2, "tp": 4}), nodes="2x4", views={"moe": kind({"class": 8})})["moe: class"].size == 8


def test_numbers_in_a_mapping_are_numbered_axes():
    layout = Layout({1: 2, 2: 3}, ranks=range(6))
    assert layout.axes == (1, 2)
    assert (layout.size(2), layout.size(-1), layout.at({1: 1}).axes) == (3, 3, (2,))
    with pytest.raises(pgmesh.AxisError, match="there is no axis 0 in mesh"):
        layout.size(0)
    assert Layout({0: 2, 1: 2}) == Layout(2, 2) == Layout({np.int64(0): 2, np.int64(1): 2})


def test_enum_member_is_an_axis_name():
    layout = Layout({Role.PIPELINE: 2, Role.DATA: 4})
    assert repr(layout) == "Layout(pp=2, dp=4)"
    assert layout.size(Role.DATA) == layout.size("dp") == 4


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6).filter(str.isprintable) | st.sampled_from(
    [*RESERVED, "class", "match", "None", "__debug__", "self", "shape", "sizes", "fi", "ﬁ", "dp", "0", "=", "'"]
)


@settings(max_examples=50)
@given(
    axes=st.lists(names, min_size=1, max_size=3, unique=True)
    | st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
    data=st.data(),
)
@example(axes=["ﬁ"], data=None)
def test_repr_of_any_layout_recreates_it(axes, data):
    draw = (lambda strategy: data.draw(strategy)) if data else lambda strategy: 2
    layout = Layout({axis: draw(st.integers(1, 4)) for axis in axes})
    if data:
        layout = Layout(dict(zip(axes, layout.shape)), ranks=draw(st.permutations(range(len(layout)))))
        for axis in axes:
            kept = st.lists(st.integers(0, layout.size(axis) - 1), min_size=1)
            layout = layout.at({axis: draw(st.just(slice(None)) | st.integers(0, layout.size(axis) - 1) | kept)})
    assert eval(repr(layout)) == layout


def test_axes_of_any_name_work_on_a_mesh(world):
    mesh = ProcessGroupMesh(ODD, name="odd")
    assert repr(mesh) == "ProcessGroupMesh({'data-parallel': 2, 'timeout': 2, 'class': 2}, name='odd')"
    assert mesh.label() == "data-parallel1-timeout0-class1"
    assert mesh.at(timeout=1).ranks() == mesh.at({"timeout": 1}).ranks() == (2, 3, 6, 7)
    assert mesh.at({"data-parallel": [0], "class": 1}).axes == ("data-parallel", "timeout")
    assert mesh.along("timeout", "class") is mesh["timeout", "class"]
    assert mesh.along("timeout").ranks() == mesh.ranks("timeout") == (5, 7)
    assert mesh.neighbor("timeout") == 7
    mesh.configure("timeout", timeout=timedelta(minutes=3), tag="own")
    assert mesh.group("timeout", tag="own") is not mesh.group("timeout")
    assert mesh.group("timeout").group_desc == "group timeout of mesh 'odd'"
    mesh.connect("timeout", ("data-parallel", "class"))
    assert "timeout1" in str(mesh)
    assert "data-parallel" in mesh._repr_html_()
    assert mesh.view({"tag": 4, "name": 2}).group("tag") is mesh.group("data-parallel", "timeout")
    names = mesh.device_mesh().mesh_dim_names
    assert names == tuple(ODD)
    assert from_device_mesh(mesh.device_mesh(), name="again").axes == tuple(ODD)
    mesh.release("timeout")
    mesh.close()


def test_axes_of_any_name_work_in_plans():
    found = plan(ODD, nodes="2x4", views={"tag": {"name": 8}}, combinations=[("timeout", "class")])
    assert found["timeout x class"].sample == (0, 1, 2, 3)
    assert "tag: name" in str(found)
    assert "data-parallel" in found.svg()
    assert found.svg("class")
    report = rank_report_of(Layout(ODD), 5)
    assert [each.axis for each in report.along] == [*ODD]


TORCHS = {"backend", "init_method", "timeout", "world_size", "rank", "store", "pg_options", "device_id", "device_type"}
TORCHS |= {"mesh_shape", "mesh_dim_names", "backend_override", "mesh", "group"}
"""Keywords of torch's init_process_group, init_device_mesh, DeviceMesh and DeviceMesh.from_group."""


def test_keywords_of_torch_and_pgmesh_are_reserved():
    ours = {name for call in (ProcessGroupMesh, plan, Layout) for name in inspect.signature(call).parameters}
    hosts = {"nodes", "domains", "views", "combinations"}  # which a machine has, and an axis may well be called
    assert {*TORCHS, *GroupOptions.__dataclass_fields__, "options", "axes", *ours - hosts} <= {*RESERVED}


@pytest.mark.parametrize("word", RESERVED)
def test_reserved_keywords_are_refused_as_axes(world, word):
    asks = [Layout(8).view, ProcessGroupMesh(dp=8).view]
    asks += [Layout] if word != "ranks" else []
    asks += [ProcessGroupMesh] if word not in ("ranks", "name", "world") else []
    kind = OptionsError if word in GroupOptions.__dataclass_fields__ else PgmeshError
    for make in asks:
        with pytest.raises(kind, match=f"{word} is no axis; it ") as caught:
            make(dp=8, **{word: 1})
        assert "=-1" not in str(caught.value)
        assert isinstance(caught.value, ValueError)
        assert Layout({word: 8}).axes == (word,)
