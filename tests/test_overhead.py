"""Overhead in counts that do not depend on the machine: calls, allocations, modules, bytes, store operations.

Nothing here is timed: `make bench` does that. Operations of making and of connecting real groups are counted in
test_groups.py and test_connect.py.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pgmesh import ProcessGroupMesh
from tests.support.fake_world import fake_rank
from tests.support.memory import memory
from tests.support.torch_tables import record_operations

HITS: dict[str, Callable[[ProcessGroupMesh], Any]] = {
    'group("tp")': lambda mesh: mesh.group("tp"),
    'group("dp", "tp")': lambda mesh: mesh.group("dp", "tp"),
    'index("tp")': lambda mesh: mesh.index("tp"),
    'size("tp")': lambda mesh: mesh.size("tp"),
    'neighbor("pp", +1)': lambda mesh: mesh.neighbor("pp", 1),
    'along("dp", "tp")': lambda mesh: mesh.along("dp", "tp"),
}


def calls(do: Callable[[], Any]) -> list[str]:
    """The functions that a call of do calls in turn, Python's own and those of C."""
    called = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)
        elif event == "c_call":
            called.append(arg.__name__)

    sys.setprofile(note)
    try:
        do()
    finally:
        sys.setprofile(None)
    return called[1:-1]  # but for do, and setprofile


@pytest.mark.parametrize("hit", HITS)
def test_cached_call_makes_no_further_call(hit):
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(pp=2, dp=2, tp=2)
        HITS[hit](mesh)
        assert len(calls(lambda: HITS[hit](mesh))) == 2  # the line of HITS, and the method


@pytest.mark.parametrize("hit", [*HITS, "at(pp=1)"])
def test_cached_call_keeps_no_memory(hit):
    ask = HITS.get(hit, lambda mesh: mesh.at(pp=1))
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(pp=2, dp=2, tp=2)
        times = range(1000)
        for _ in times:
            ask(mesh)
        gc.collect()
        gc.disable()
        try:
            before = sys.getallocatedblocks()
            for _ in times:
                ask(mesh)
            kept = sys.getallocatedblocks() - before
        finally:
            gc.enable()
        assert kept < 20, f"{kept} blocks of memory stay from 1000 hits"


def making(ranks: int) -> list[str]:
    """What making a mesh and six groups calls, where groups are of the same sizes in every world."""
    with fake_rank(ranks // 2 + 1, ranks), record_operations() as done:

        def make() -> None:
            mesh = ProcessGroupMesh(more=ranks // 1024, dp=16, pp=4, cp=2, tp=8, name="counted")
            for axes in (("tp",), ("cp",), ("pp",), ("dp",), ("dp", "cp"), ("cp", "tp")):
                mesh.group(*axes)

        gc.disable()  # nothing is collected, and counted, in between
        try:
            called = calls(make)
        finally:
            gc.enable()
    assert done == []
    return called


def test_group_creation_costs_same_in_larger_worlds():
    making(2_048)  # what is done once is done
    assert len(making(1_048_576)) == len(making(2_048))


def test_mesh_of_a_million_ranks_is_small():
    sizes = {}
    for ranks in (1_024, 1_048_576):
        with fake_rank(1, ranks):
            sizes[ranks], _ = memory(lambda ranks=ranks: ProcessGroupMesh(dp=ranks // 64, pp=4, cp=2, tp=8))
    assert sizes[1_048_576] < sizes[1_024] + 512
    assert sizes[1_048_576] < 16 << 10


NEVER_FIRST = ("torch", "numpy", "rich", "cachetools", "json", "asyncio", "logging", "subprocess")
ON_DEMAND = (
    *("launch", "interop", "recipes", "parallel", "cli", "planning", "preflight"),
    *("drawing.svg", "drawing.figures", "drawing.text"),
)


def loaded(script: str) -> set[str]:
    """The modules that a fresh process has loaded after a script and not before."""
    code = f"import sys; before = {{*sys.modules}}; {script}; new = {{*sys.modules}} - before; import json; "
    command = [sys.executable, "-c", f"{code}print(json.dumps([*new]))"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {*json.loads(ran.stdout)}


def test_import_of_pgmesh_loads_no_other_module():
    modules = loaded("import pgmesh")
    assert [name for name in modules if name.startswith("pgmesh")] == ["pgmesh"]
    assert not modules.intersection(NEVER_FIRST)
    assert not loaded("import pgmesh; pgmesh.Layout(dp=2), pgmesh.GroupOptions()") & {"torch", "numpy"}


def test_import_of_mesh_loads_no_upper_layer():
    modules = loaded("import torch; from pgmesh import ProcessGroupMesh")
    assert not modules.intersection({f"pgmesh.{name}" for name in ON_DEMAND})
    assert "rich" not in modules
