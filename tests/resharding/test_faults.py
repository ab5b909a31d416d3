"""A mesh is aborted, or a rank is lost, while tensors are moved: no rank waits on, and all move them again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from pgmesh import Layout, PgmeshError, ProcessGroupMesh
from pgmesh.errors import LifetimeError
from pgmesh.launch import StoreProcess
from pgmesh.resharding import Resharder
from pgmesh.resharding.link import Link
from tests.support import faults
from tests.support.faults import LONG_TIMEOUT, SLACK, attempt, beat_fast, results, set_flag, wait_for_flags
from tests.support.rank_processes import RankProcesses, join_world
from tests.support.worlds import fresh_world, on_ranks


def move_while_aborted(folder: Path, moment: str) -> tuple[faults.Attempt | None, list[float]]:
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
        assert "mesh 'train' was aborted by rank 1 at test_faults.py:" in failed.text
        assert ": rank 1 has enough" in failed.text
        assert failed.took < 3.0 + SLACK


@on_ranks(2)
def test_transfer_of_an_aborted_mesh_raises():
    mesh = ProcessGroupMesh(dp=2, name="aborted before it moves")
    link = Link(mesh, mesh, LONG_TIMEOUT)
    link.begin("a call")
    mesh.abort("enough")
    with pytest.raises(LifetimeError, match="enough"):
        link.run(link.barrier)


RANKS, LOST = 3, 1


def move_until_over(rank: int, port: int, folder: Path, process: int) -> None:
    """Ranks 0 and 1 send to rank 2, again and again. A rank creates the Resharder again after each error."""
    join_world(rank, port, RANKS)
    newest = (folder / "newest process").read_text
    while not (folder / "over").exists():
        sides = {"source": {"x": torch.arange(100_000.0)}} if rank < 2 else {"target": {"x": torch.zeros(100_000)}}
        set_flag(folder, f"process {process} creates")
        try:
            sync = Resharder(Layout(2), Layout(1, ranks=[2]), timeout=LONG_TIMEOUT, **sides)
            while not (folder / "over").exists():
                sync()
                assert all(torch.equal(each["x"], torch.arange(100_000.0)) for each in sides.values())
                set_flag(folder, f"moved with process {newest()} {rank}")
        except PgmeshError:
            continue
    os._exit(0)


def test_resharder_is_created_again_with_new_processes(tmp_path: Path):
    """Process 0 is lost in a transfer; process 1 too, and then process 2 as it connects."""

    def start(rank: int, number: int) -> None:
        (tmp_path / "newest process").write_text(f"{number}")
        processes.start(rank, number)

    def wait_for_transfers(number: int) -> None:
        wait_for_flags(tmp_path, f"moved with process {number}", range(RANKS))

    def kill() -> None:
        processes.newest[LOST].kill()
        processes.newest[LOST].join(faults.WAIT_TIMEOUT)

    with RankProcesses(move_until_over, tmp_path) as processes:
        for rank in range(RANKS):
            start(rank, 0)
        wait_for_transfers(0)
        kill()
        start(LOST, 1)
        wait_for_transfers(1)
        kill()
        processes.signal(signal.SIGSTOP, LOST)
        start(LOST, 2)
        faults.wait_for_flag(tmp_path, "process 2 creates")
        time.sleep(1)  # it waits for the others
        processes.signal(signal.SIGCONT, LOST)
        kill()
        start(LOST, 3)
        wait_for_transfers(3)
        set_flag(tmp_path, "over")
