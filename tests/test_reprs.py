"""The repr of a layout, and of a slice or a view: which mesh it is of, as a call that gives it."""

from __future__ import annotations

import copy
import pickle
import re
from contextlib import suppress

import pytest
from hypothesis import given, settings, strategies as st

import pgmesh
from pgmesh import Layout, ProcessGroupMesh
from tests.support import golden_files
from tests.support.fake_world import fake_rank

ROOT = "ProcessGroupMesh(pp=2, dp=2, tp=2, name='example')"


@pytest.fixture
def mesh():
    with fake_rank(5, 8):
        yield ProcessGroupMesh(pp=2, dp=2, tp=2, name="example")


def again(mesh: ProcessGroupMesh, root: ProcessGroupMesh) -> ProcessGroupMesh:
    """What the repr gives, where the root lives."""
    text = repr(mesh)
    assert text.startswith(repr(root))
    return eval(f"root{text.removeprefix(repr(root))}", {"root": root})


CALLS = re.findall(r"^== (.*)$", golden_files.read("reprs.txt"), re.MULTILINE)
"""To add a call, add it to the file and run this with ``GOLDEN=write``."""


def test_reprs_equal_the_reviewed_ones(mesh):
    found = {call: eval(call, {"Layout": Layout, "mesh": mesh}) for call in CALLS}
    golden_files.check("reprs.txt", "\n".join(f"== {call}\n{made!r}\n" for call, made in found.items()))


@pytest.mark.parametrize("call", CALLS)
def test_repr_is_a_call_that_copies_have(mesh, call):
    made = eval(call, {"Layout": Layout, "mesh": mesh})
    again = eval(repr(made), {"Layout": Layout, "ProcessGroupMesh": lambda **_: mesh})
    assert getattr(again, "layout", again) == getattr(made, "layout", made)
    for there in (copy.copy(made), copy.deepcopy(made), *(pickle.loads(pickle.dumps(made, n)) for n in range(2, 6))):
        assert (repr(there), str(there)) == (repr(made), str(made))
        layout, copied = (getattr(each, "layout", each) for each in (made, there))
        assert (copied, hash(copied)) == (layout, hash(layout))
        assert [copied.describe(rank) for rank in copied] == [layout.describe(rank) for rank in layout]
    assert repr(mesh) == ROOT


def test_unpickled_along_prints_as_a_slice():
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(pp=2, dp=2, tp=2, name="example")
        sent = pickle.dumps(mesh.along("dp", "tp").along("tp").view(t=2))
    with fake_rank(0, 8):
        mesh = ProcessGroupMesh(pp=2, dp=2, tp=2, name="example")
        part = pickle.loads(sent)
        assert repr(part) == f"{ROOT}.at(pp=1).at(dp=0).view(t=2)"
        assert again(part, mesh).ranks() == part.ranks() == (4, 5)


@settings(max_examples=40)
@given(st.data())
def test_repr_of_any_part_recreates_it(data):
    with fake_rank(5, 8):
        root = mesh = ProcessGroupMesh(2, 2, 2, name="walk")
        for _ in range(data.draw(st.integers(1, 3))):
            kind = data.draw(st.sampled_from(["at", "along", "view"]))
            if kind == "view":
                with suppress(pgmesh.ShapeError):
                    mesh = mesh.view(**{"abcd"[len(mesh.axes)]: -1})
            elif kind == "at":
                kept = {
                    axis: data.draw(st.integers(0, size - 1) | st.permutations(range(size)))
                    for axis, size in zip(mesh.axes, mesh.shape)
                    if data.draw(st.booleans())
                }
                mesh = mesh.at(kept)
            elif mesh.rank in mesh and mesh.axes:
                mesh = mesh.along(*data.draw(st.lists(st.sampled_from(mesh.axes), unique=True, min_size=1)))
        if mesh is not root:
            assert again(mesh, root).layout == mesh.layout
