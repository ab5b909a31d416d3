"""Two processes of one rank: by a launcher's mistake, and one in the place of the other, which was lost."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, launch
from pgmesh.launch import StoreProcess
from pgmesh.launch.processes import process_context
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    SLACK,
    WAIT_TIMEOUT,
    Attempt,
    attempt,
    beat_fast,
    last_status,
    meanwhile,
    read_result,
    results,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    wait_until,
    write_result,
)
from tests.support.programs import wait_until_gone
from tests.support.rank_processes import RankProcesses, join_world
from tests.support.worlds import DEADLINE, check_sums, fresh_world, groups_of

RANKS, TWICE = 4, 2


def connect(rank: int, port: int, folder: Path, number: int) -> None:
    """Rank 3 never starts: its process has rank 2."""
    join_world(rank, port, RANKS)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    set_flag(folder, f"connects {rank} {number}")
    write_result(folder, f"failed {rank} {number}", *attempt(lambda: mesh.connect(("dp", "tp"), timeout=LONG_TIMEOUT)))


@pytest.mark.fault("two processes have the same rank")
def test_second_process_of_rank_is_named_everywhere(tmp_path: Path):
    processes = [(0, 0), (1, 0), (TWICE, 0), (TWICE, 1)]
    with RankProcesses(connect, tmp_path) as ranks:
        for rank, number in processes[:3]:
            ranks.start(rank, number)
        for rank, number in processes[:3]:
            wait_for_flag(tmp_path, f"connects {rank} {number}")
        time.sleep(3 * BEAT)  # they send heartbeats, and wait
        ranks.start(*processes[3])
        wait_for_flag(tmp_path, f"connects {TWICE} 1")
        started = time.monotonic()
        seen = [Attempt(*read_result(tmp_path, f"failed {rank} {number}")) for rank, number in processes]
        pids = [process.pid for process in ranks.all[2:]]
    for failed in seen:
        print(failed.end - started, failed)
        assert failed.kind == "MismatchError"
        both = re.search(r"both process (\d+) on \S+ and process (\d+) on \S+ connect as rank 2", failed.text)
        assert both is not None, failed.text
        assert sorted(map(int, both.groups())) == sorted(pids)
        assert failed.end - started < 1.0 + SLACK


def train(rank: int, port: int, folder: Path, number: int) -> None:
    """The second process of a rank starts late, and ends. The others connect more groups, and rank 3 aborts."""
    join_world(rank, port, RANKS)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    if number:
        write_result(folder, "second", *attempt(lambda: mesh.connect(timeout=LONG_TIMEOUT)))
        wait_for_flag(folder, "end")
        dist.destroy_process_group()
        return
    mesh.abort_when_lost()
    mesh.connect(mesh.axes, timeout=LONG_TIMEOUT)
    set_flag(folder, f"connected {rank}")
    wait_for_flag(folder, "go on")
    write_result(folder, f"sums {rank}", *attempt(lambda: check_sums({"all": (mesh.group(), range(RANKS))})))
    wait_for_flag(folder, "ended")
    write_result(folder, f"again {rank}", *attempt(lambda: mesh.connect(*mesh.axes, timeout=LONG_TIMEOUT)))
    if rank == 3:
        wait_for_flags(folder, "again", range(3))
        mesh.abort("the test")
    write_result(
        folder, f"aborted {rank}", *attempt(lambda: wait_until(lambda: mesh.group() is None, "an error of the mesh"))
    )


@pytest.mark.fault("two processes have the same rank")
def test_late_second_process_ends_no_healthy_job(tmp_path: Path):
    with RankProcesses(train, tmp_path) as ranks:
        for rank in range(RANKS):
            ranks.start(rank, 0)
        wait_for_flags(tmp_path, "connected", range(RANKS))
        ranks.start(TWICE, 1)
        assert "connect as rank 2" in Attempt(*read_result(tmp_path, "second")).text
        time.sleep(2.5 * BEAT)  # two heartbeats: the others look at the status of rank 2
        set_flag(tmp_path, "go on")
        for rank in range(RANKS):
            assert Attempt(*read_result(tmp_path, f"sums {rank}")).kind == ""
        set_flag(tmp_path, "end")
        ranks.all[-1].join(WAIT_TIMEOUT)
        set_flag(tmp_path, "ended")
        for rank in range(RANKS):
            assert Attempt(*read_result(tmp_path, f"again {rank}")).kind == ""
            assert "was aborted by rank 3 at " in Attempt(*read_result(tmp_path, f"aborted {rank}")).text


# ---- a new process in the place of a lost rank connects with the survivors in the next mesh of the same name ----


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


@pytest.mark.parametrize("order", ["new process first", "new process while others wait"])
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
