"""A mesh that is aborted while its tensors are moved: no rank waits on, and the next mesh of these ranks moves them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from pgmesh import ProcessGroupMesh
from pgmesh.errors import LifetimeError
from pgmesh.launch import StoreProcess
from pgmesh.resharding import Resharder
from pgmesh.resharding.link import Link
from tests.support.faults import LONG_TIMEOUT, SLACK, Attempt, attempt, beat_fast, results, set_flag, wait_for_flags
from tests.support.worlds import fresh_world, on_ranks


def move_while_aborted(folder: Path, moment: str) -> tuple[Attempt | None, list[float]]:
    """Rank 1 aborts the mesh, in place of the creation of the Resharder or of its call. Then all replace it.

    Returns:
        The error of the waiting rank, and the values that were moved on the mesh that replaced it.
    """
    beat_fast()
    mesh = ProcessGroupMesh(dp=3, name="train")
    mesh.connect("dp", timeout=LONG_TIMEOUT)
    values = torch.full((4,), 1.0 if mesh.rank == 2 else 7.0)
    side = {"target" if mesh.rank == 2 else "source": {"weight": values}}

    def create() -> Resharder:
        return Resharder(mesh.at(dp=[0, 1]), mesh.at(dp=[2]), **side, timeout=LONG_TIMEOUT)

    resharder, failed = None if moment == "creation" else create(), None
    if mesh.rank == 1:
        wait_for_flags(folder, "begins", (0, 2))
        time.sleep(0.2)  # until they wait; they raise in any case
        mesh.abort("rank 1 has enough")
    else:
        set_flag(folder, f"begins {mesh.rank}")
        failed = attempt(create if resharder is None else resharder)
    mesh = mesh.shrink("dp", timeout=LONG_TIMEOUT)  # none was lost
    if mesh.rank != 1:
        time.sleep(0.3)  # rank 1, which has not seen what they tried, is the first
    create()()
    return failed, values.tolist()


@pytest.mark.parametrize("moment", ["creation", "call"])
def test_ranks_in_a_transfer_raise_after_an_abort(tmp_path: Path, moment: str):
    with StoreProcess() as store, fresh_world(3, store) as own:
        seen = results(own.outcomes(move_while_aborted, tmp_path, moment))
    assert [values for _, values in seen] == [[7.0] * 4] * 3
    for failed, _ in (seen[0], seen[2]):
        print(failed)
        assert failed.kind in ("LifetimeError", "MissingRanksError")  # the latter if another rank learnt it first
        assert "mesh 'train' was aborted by rank 1 at test_abort.py:" in failed.text
        assert ": rank 1 has enough" in failed.text
        assert failed.took < 3.0 + SLACK


@on_ranks(2)
def test_transfer_of_an_aborted_mesh_raises():
    mesh = ProcessGroupMesh(dp=2, name="aborted before it moves")
    link = Link(mesh, mesh, LONG_TIMEOUT)
    link.begin()
    mesh.abort("enough")
    with pytest.raises(LifetimeError, match="enough"):
        link.run(link.barrier)
