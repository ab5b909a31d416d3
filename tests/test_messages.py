"""Whole messages of errors: each call below and what it raises is in ``tests/golden/messages.txt``."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pgmesh
from pgmesh import Layout, MismatchError, PgmeshError, ProcessGroupMesh, ShapeError, errors
from pgmesh._util.validation import fill_sizes
from pgmesh.parallel import DataParallel, compose
from pgmesh.rendezvous.records import Fingerprint
from pgmesh.rendezvous.statuses import PendingConnect, RankStatus, status_key
from tests.support import golden_files
from tests.support.fake_world import fake_rank
from tests.support.memory_client import MemoryClient, attempt_of, participant_of

GOLDEN = "messages.txt"

IN_A_WORLD_OF_ONE: list[dict[str, Any]] = [{"dp": 2}, {"dp": -1, "tp": 2}, {"dp": 8, "tp": 8}]

OF_LAYOUTS = """
Layout(dp=2, tp=2, ranks=range(8))
Layout(dp=2, ranks=[7])
Layout(dp=3, tp=2, ranks=range(9))
Layout(dp=3, tp=3, ranks=range(8))
Layout(dp=-1, tp=3, ranks=range(8))
box.view(a=3, b=4)
numbered.view(3, -1)
Layout(dp=-1, cp=2, tp=-1)
Layout(dp=-1)
Layout(dp=0)
Layout(2, -2)
box.view(dp=0)
Layout(dp=2.0)
Layout(2, 1.5, ranks=range(4))
Layout(dp=0.5, tp=1.5)
box.view(dp=2.5, tp=2)
Layout(dp=float("nan"))
Layout(dp="2")
Layout((2, 2))
box.view([4, -1])
Layout(("dp", 2))
Layout(())
Layout(dp=None)
Layout(2, tp=2)
Layout(dp=-1, ranks=[])
Layout(dp=-1, ranks=range(0))
Layout(dp=-1, ranks=[0, 1, 1, 0])
Layout(dp=-1, ranks=[0, 1, -2, 3])
Layout(dp=-1, ranks=range(-4, 0))
Layout(dp=-1, ranks=4)
Layout(dp=-1, ranks="0123")
Layout(dp=-1, ranks=[0.0, 1.0])
box.at(tp=[0]).at(pp=slice(1, None)).at(dp=[])
box.at(tp=slice(2, None))
box.at(tp=())
box.at(tp=range(0))
Layout(pp=3, tp=4).at(tp=[0, 1]).view(a=2, b=3)
Layout(pp=99, tp=4).at(tp=[0, 1]).view(a=2, n=-1)
box.size("dpp")
Layout(data=2, tensor=2).size("tensr")
Layout(dp_shard=2, tp=2).at(dp_shards=0)
box.size("ep")
box.block_of(0, "data")
box.partition(3)
numbered.size("tp")
numbered.size(12)
numbered.size(-4)
numbered.size(True)
numbered.size(1.0)
box.size(False)
box.size(None)
box.size(1.5)
box.size(["a", "b"])
box.size("tp", "tp")
box.index_of(0, "tp", "dp", -1)
box.at({"tp": 0}, tp=1)
numbered.at({0: 0, -3: 1})
box.at({"pp": [1]}, pp=slice(1, 2))
box.at(pp=1).size("pp")
box.at(pp=-1).at(pp=0)
box.at(pp=0).coord_of(5)
Layout(dp=10, tp=10).block_of(100, "tp")
box.at(pp=0, dp=0).neighbor_of(-1, "tp")
Layout(dp=2).label_of(None)
Layout(dp=2).along("1")
box.coord_of(1.5)
box.coord_of(1.0)
box.index_of((1,))
box.block_of([])
box.label_of({})
Layout(2, 2, ranks=[3, 1, 0, 2]).coord_of("1")
Layout(2, 2, ranks=[3, 1, 0, 2]).along(None)
box.rank_of((0, 2, 0))
box.rank_of((0, 0, -3))
box.rank_of((0, "1", 0))
box.rank_of((0, 1))
box.rank_of(())
box.rank_of((0, 0, 0, 0))
box.rank_of((0, 0, 1.0))
box.rank_of(5)
box.rank_of(None)
box.at(pp=2)
box.at(pp=[0, -3])
box.at(pp=[[0]])
box.at(pp="0")
box.at(pp=None)
box.at(pp=[None])
box.at(pp=1.0)
numbered.at({1: 1.0})
box.neighbor_of(0, "pp", 0.5)
box.partition("tp")[4]
box.partition("tp")[-5]
Layout("cpu", (2, 4))
"""

OF_MESHES = """
ProcessGroupMesh(dp=2, tp=2)
ProcessGroupMesh(dp=2, tp=3)
ProcessGroupMesh(dp=-1, tp=3)
ProcessGroupMesh(dp=2, tp=4, timeout=30)
ProcessGroupMesh(dp=2, ranks=[7, 8])
ProcessGroupMesh(dp=8, name="a/b")
ProcessGroupMesh(dp=8, name="x" * 1025)
ProcessGroupMesh(dp=8, name="é" * 4500)
ProcessGroupMesh("cpu", 4, 4)
ProcessGroupMesh("cpu", [[0, 1], [2, 3]])
ProcessGroupMesh("cpu", "x")
mesh.group("tpp")
mesh.at(pp=1).group("pp")
mesh.at(pp=0).index("tp")
ProcessGroupMesh(dp=2, tp=2, ranks=range(4), name="half").group("dp")
mesh.group_of([0, 1])
mesh.group_of([5, 5])
mesh.group_of(5)
mesh.group_of([5.0])
mesh.group_of([])
mesh.release(ranks=5)
mesh.at(1)
mesh.at([0])
mesh.adopt(mesh.group("dp", tag="other"), "dp")
mesh.adopt("dp", [1, 3])
mesh.adopt("dp", 3)
mesh.adopt("dp", mesh.group("tp"))
mesh.connect("pp", ["dp", "tp"])
mesh.group("dp", high_priority="no")
mesh.group("dp", backend="gloo", high_priority=True)
mesh.group("dp", description=3)
mesh.group("dp", nccl=["max_ctas"])
mesh.group("dp", nccl={"max_cta": 3})
mesh.group("dp", nccl={1: 2, "a": 3})
mesh.group("dp", timeot=3)
mesh.group("dp", timeout="3")
mesh.group("dp", timeout=timedelta(0))
mesh.group("dp", backend=3)
mesh.set_timeout("tp")
mesh.group("dp") and mesh.configure("dp", timeout=60)
mesh.view(8).close()
mesh.at(pp=1).close()
ProcessGroupMesh(8, name="actor")
mesh.device_mesh(fsdp=())
mesh.device_mesh("dp", dp="tp")
mesh.device_mesh("dp", both=("dp", "tp"))
mesh.device_mesh(both=("dp", "dp"))
mesh.device_mesh(both=("dp", "zz"))
mesh.device_mesh(both=None)
"""
"""The mesh is pp=2, dp=2, tp=2, named "actor", as rank 5."""


def connect_without_rank_1(status: RankStatus) -> None:
    """Connect a group of ranks 0 and 1 as rank 0, until the deadline."""
    attempt = attempt_of()
    participant_of(MemoryClient(values={status_key(1): status.pack().encode()}), attempt).connect()
    assert attempt.decision is not None
    error = attempt.decision.error()
    assert error is not None
    raise error


def use_a_released_group(mesh: ProcessGroupMesh) -> None:
    group = mesh.group("tp")
    mesh.release("tp")
    dist.all_reduce(torch.ones(1), group=group)


def compare_options(rank: int, other: int) -> None:
    hint = "On every rank, configure its axes with the same options or pass the same options in the call."
    label = "group tp of mesh 'actor'"
    mine = Fingerprint(rank, {"backend": "gloo", "timeout": 30.0}, label, hint)
    other_one = Fingerprint(other, {"backend": "gloo", "timeout": 60.0}, label, hint)
    raise MismatchError(mine.mismatch([other_one.encoded]))


WAITING = PendingConnect("other/0", "group dp", "mesh 'actor'", "0, 1", "train.py:12", (0,))

WHILE_RUNNING: dict[str, Callable[[ProcessGroupMesh], object]] = {
    "a group that was released": use_a_released_group,
    "options that differ": lambda mesh: compare_options(0, 3),
    "a rank that never comes": lambda mesh: connect_without_rank_1(RankStatus(1, 3)),
    "ranks that wait for each other": lambda mesh: connect_without_rank_1(
        RankStatus(1, 3, pending=(WAITING._replace(name="group tp/1"),))
    ),
    "two methods on one axis": lambda mesh: compose(mesh, DataParallel(mesh, "dp"), DataParallel(mesh, "dp")),
}


def message(call: Callable[[], object]) -> str:
    with pytest.raises(PgmeshError) as caught:
        call()
    text = re.sub(rf"{Path(__file__).name}:\d+", "train.py:12", str(caught.value))
    return f"{type(caught.value).__name__}: {text}"


def messages() -> dict[str, str]:
    """The message of each call."""
    names = {"Layout": Layout, "box": Layout(pp=2, dp=2, tp=2), "numbered": Layout(2, 2, 2)}
    found = {call: message(lambda call=call: eval(call, names)) for call in OF_LAYOUTS.split("\n")[1:-1]}
    for sizes in IN_A_WORLD_OF_ONE:
        call = f"ProcessGroupMesh({', '.join(f'{axis}={size}' for axis, size in sizes.items())})"
        found[f"{call} in a world of one rank"] = message(
            lambda sizes=sizes: fill_sizes("ProcessGroupMesh", sizes, 1, "the world has 1", is_world=True)
        )
    for what in [*OF_MESHES.split("\n")[1:-1], *WHILE_RUNNING]:
        with fake_rank(5, 8):
            mesh = ProcessGroupMesh(pp=2, dp=2, tp=2, name="actor")
            names = {"ProcessGroupMesh": ProcessGroupMesh, "mesh": mesh, "timedelta": timedelta}
            call = WHILE_RUNNING.get(what, lambda mesh, what=what, names=names: eval(what, names))
            found[what] = message(lambda call=call, mesh=mesh: call(mesh))
            for each in pgmesh.meshes().values():
                each.close()
    return found


@pytest.mark.fault(
    "sizes that do not fit, two -1, an empty mesh, an unknown axis, ranks that are repeated, negative or foreign"
)
def test_messages_equal_the_reviewed_ones():
    golden_files.check(GOLDEN, "\n\n".join(f"== {what}\n{text}" for what, text in messages().items()) + "\n")


SUGGESTED = re.findall(
    r"^  (Layout\(.*?\))(?:   #.*)?$", (golden_files.FOLDER / GOLDEN).read_text("utf-8"), re.MULTILINE
)


@pytest.mark.parametrize("call", SUGGESTED)
def test_suggested_layout_can_be_made(call: str):
    assert isinstance(eval(call), Layout)


def test_layout_without_axes_is_refused():
    with pytest.raises(ShapeError, match=r"^Layout needs at least one axis, such as Layout\(.*\)\.$") as caught:
        Layout()
    call = re.search(r"such as (.*)\.", str(caught.value))[1]
    assert eval(call).size() >= 1


# ---- the tree ----


def test_docstring_shows_the_tree_of_errors():
    drawn = re.findall(r"[├└]── (\w+) +\(([\w, ]+)\) +(.*)", errors.__doc__)
    bases = {each.__name__: ", ".join(b.__name__ for b in each.__bases__[1:]) for each in PgmeshError.__subclasses__()}
    assert {name: builtin for name, builtin, _ in drawn} == bases
    for name, _, meaning in drawn:
        assert getattr(errors, name).__doc__.lower() == f"{meaning}.".lower()
        assert getattr(errors, name).__module__ == "pgmesh"


def test_errors_suppress_their_context():
    with pytest.raises(ShapeError) as caught:
        Layout(dp=2.5)
    assert caught.value.__suppress_context__
