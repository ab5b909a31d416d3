"""A new process in the place of a lost rank: it joins the world again, stands by, and the survivors take it in."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pgmesh import MembershipError, PgmeshError, ProcessGroupMesh, launch
from pgmesh.launch import StoreProcess
from pgmesh.launch.processes import process_context
from tests.support.faults import BEAT, LONG_TIMEOUT, WAIT_TIMEOUT, beat_fast, set_flag, wait_for_flag
from tests.support.worlds import check_sums, groups_of

RANKS, LOST = 4, 3
TIMEOUT = WAIT_TIMEOUT / 4  # seconds, of the groups: Gloo does not always wake a rank whose connections are shut down


def run(rank: int, port: int, folder: Path, process: int) -> None:
    """A rank of the mesh "train". Its processes are numbered from 0; each but the first stands by."""
    signal.alarm(int(4 * WAIT_TIMEOUT))  # it does not outlive the test
    beat_fast()
    launch.join("gloo", timeout=TIMEOUT, replica=rank, replicas=RANKS, host="127.0.0.1", port=port)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    if process:
        set_flag(folder, f"process {process}")
        mesh = mesh.stand_by(timeout=WAIT_TIMEOUT)
    while not (folder / "over").exists():
        try:
            mesh.connect("dp", "tp", ("dp", "tp"), timeout=LONG_TIMEOUT)  # nothing to do where they are connected
            check_sums(groups_of(mesh))
            round_ = mesh._group_cache.identity.generation
            assert [*mesh] == [*range(RANKS)]
            set_flag(folder, f"round {round_} rank {rank} process {process}")
        except (PgmeshError, RuntimeError):
            try:
                mesh = mesh.shrink(spares=[LOST], timeout=WAIT_TIMEOUT)
            except MembershipError as error:
                (folder / f"refused {rank}").write_text(str(error))
                break
            assert mesh.shrunk.replaced_by == {LOST: LOST}
    os._exit(0)


@pytest.mark.parametrize("order", ["it comes first", "the others call shrink first"])
def test_a_new_process_takes_the_place_of_a_lost_rank_twice(tmp_path: Path, order: str):
    context = process_context()
    running: dict[int, Any] = {}

    def start(rank: int, process: int) -> None:
        running[rank] = context.Process(target=run, args=(rank, store.port, tmp_path, process))
        running[rank].start()

    def wait_for_sums(round_: int) -> None:
        for rank in range(RANKS):
            wait_for_flag(tmp_path, f"round {round_} rank {rank} process {round_ if rank == LOST else 0}")

    with StoreProcess() as store:
        try:
            for rank in range(RANKS):
                start(rank, 0)
            wait_for_sums(0)
            for process in 1, 2:
                survivors = [running[rank].pid for rank in range(RANKS) if rank != LOST]
                if order == "it comes first":
                    for pid in survivors:
                        os.kill(pid, signal.SIGSTOP)
                running[LOST].kill()
                running[LOST].join(WAIT_TIMEOUT)
                start(LOST, process)
                if order == "it comes first":
                    wait_for_flag(tmp_path, f"process {process}")
                    for pid in survivors:
                        os.kill(pid, signal.SIGCONT)
                wait_for_sums(process)
            set_flag(tmp_path, "over")
            for process in running.values():
                process.join(WAIT_TIMEOUT)
        finally:
            for process in running.values():
                process.kill()


def test_an_old_process_that_goes_on_leaves_the_mesh_of_its_successor_alone(tmp_path: Path):
    context = process_context()
    running: list[Any] = []

    def start(rank: int, process: int) -> None:
        running.append(context.Process(target=run, args=(rank, store.port, tmp_path, process)))
        running[-1].start()

    with StoreProcess() as store:
        try:
            for rank in range(RANKS):
                start(rank, 0)
            for rank in range(RANKS):
                wait_for_flag(tmp_path, f"round 0 rank {rank} process 0")
            os.kill(running[LOST].pid, signal.SIGSTOP)
            start(LOST, 1)
            for rank in range(RANKS):
                wait_for_flag(tmp_path, f"round 1 rank {rank} process {int(rank == LOST)}")
            os.kill(running[LOST].pid, signal.SIGCONT)
            running[LOST].join(WAIT_TIMEOUT)
            refused = (tmp_path / f"refused {LOST}").read_text()
            time.sleep(3 * BEAT)  # in which an abort would reach the others
            set_flag(tmp_path, "over")
            for process in running:
                process.join(WAIT_TIMEOUT)
        finally:
            for process in running:
                process.kill()
    print(refused)
    assert f"process {running[LOST].pid} on" not in refused
    assert f"process {running[-1].pid} on" in refused
    assert f"has taken the place of this process as rank {LOST}" in refused
    assert not [*tmp_path.glob("round 2 *")], "the mesh was replaced again"
