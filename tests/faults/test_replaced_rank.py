"""A new process in the place of a lost rank: it connects with the survivors in the next mesh of the same name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, launch
from pgmesh.launch import StoreProcess
from pgmesh.launch.processes import process_context
from tests.support.faults import (
    LONG_TIMEOUT,
    WAIT_TIMEOUT,
    attempt,
    beat_fast,
    last_status,
    meanwhile,
    results,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    wait_until,
)
from tests.support.programs import wait_until_gone
from tests.support.worlds import DEADLINE, check_sums, fresh_world, groups_of

TIMES = 2  # how often the ranks make the mesh "train" before one of them is lost


def key_of(mesh: ProcessGroupMesh) -> str:
    """The prefix of a mesh's store keys, once its sums are right. Every rank calls this at the same time."""
    check_sums(groups_of(mesh))
    return mesh._mesh_groups.identity.key


def survive(folder: Path, order: str) -> str:
    """Rank 2 is killed in its last mesh "train". The others close theirs and make it again, as often as needed."""
    beat_fast()
    for number in range(TIMES):
        mesh = ProcessGroupMesh(3, name="train")
        mesh.connect(timeout=LONG_TIMEOUT)
        last = key_of(mesh)
        if number < TIMES - 1:
            mesh.close()
    set_flag(folder, f"connected {mesh.rank}")
    wait_for_flag(folder, "killed")
    if order == "new process first":
        wait_until(is_waiting_anew, "the new process waits")
    mesh.close()
    again = ProcessGroupMesh(3, name="train")
    if order == "new process while others wait":
        failed = attempt(lambda: again.connect(timeout=LONG_TIMEOUT))
        assert failed.kind == "MissingRanksError", failed
        assert "rank 2 has ended: its listener at 127.0.0.1:" in failed.text
    set_flag(folder, f"closed {again.rank}")
    wait_until(lambda: not attempt(lambda: again.connect(timeout=LONG_TIMEOUT)).kind, "the new mesh")
    key = key_of(again)
    assert key != last
    return key


def is_waiting_anew() -> bool:
    """True if rank 2 waits in a mesh "train" that is none of the first ones."""
    status = last_status(2)
    names = [wait.name for wait in status.pending] if status is not None else []
    return any(not name.startswith(f"pgmesh/train.{number}/") for name in names for number in range(TIMES))


def replace(port: int, folder: Path, order: str) -> None:
    """A new process joins the same world as rank 2, and makes the mesh once."""
    signal.alarm(int(2 * WAIT_TIMEOUT))  # it does not outlive the test
    beat_fast()
    wait_for_flags(folder, "closed", range(2) if order != "new process first" else ())
    os.environ.update(RANK="2", LOCAL_RANK="2", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(
        TORCHELASTIC_USE_AGENT_STORE="True", TORCH_GLOO_LAZY_INIT="1"
    )  # torch's own group stays unconnected
    launch.join("gloo", timeout=DEADLINE)  # the timeout of the groups, which all ranks must have in common
    mesh = ProcessGroupMesh(3, name="train")
    wait_until(lambda: not attempt(lambda: mesh.connect(timeout=LONG_TIMEOUT)).kind, "the mesh of the survivors")
    (folder / "key").write_text(key_of(mesh))
    set_flag(folder, "summed 2")
    wait_for_flag(folder, "over")
    os._exit(0)


@pytest.mark.parametrize("order", ["new process first", "new process after close", "new process while others wait"])
def test_new_process_of_lost_rank_connects_with_survivors(tmp_path: Path, order: str):
    with StoreProcess() as store, fresh_world(3, store) as own:
        own.run(dist.get_rank)
        new = process_context().Process(target=replace, args=(store.port, tmp_path, order))

        def kill() -> None:
            wait_for_flags(tmp_path, "connected", range(3))
            own.kill(2, signal.SIGKILL)
            assert wait_until_gone([own.pids[2]])
            new.start()
            set_flag(tmp_path, "killed")

        try:
            with meanwhile(kill):
                keys = results(own.outcomes(survive, tmp_path, order), 2)
            assert keys == [f"pgmesh/train.{TIMES}"] * 2
            wait_for_flag(tmp_path, "summed 2")
            assert (tmp_path / "key").read_text() == keys[0]
            set_flag(tmp_path, "over")
            new.join(WAIT_TIMEOUT)
            assert new.exitcode == 0
        finally:
            new.kill()
