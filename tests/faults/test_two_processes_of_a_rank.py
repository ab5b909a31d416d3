"""A launcher's mistake: two processes have the same rank."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, launch
from tests.support.faults import (
    LONG_TIMEOUT,
    WAIT_TIMEOUT,
    Attempt,
    attempt,
    read_result,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    wait_until,
    write_result,
)
from tests.support.rank_processes import RankProcesses
from tests.support.worlds import check_sums, groups_of

RANKS, TWICE = 4, 2


def join(rank: int, port: int) -> ProcessGroupMesh:
    signal.alarm(int(4 * WAIT_TIMEOUT))  # it does not outlive the test
    launch.join("gloo", timeout=WAIT_TIMEOUT, replica=rank, replicas=RANKS, host="127.0.0.1", port=port)
    return ProcessGroupMesh(dp=2, tp=2, name="train")


def connect(rank: int, port: int, folder: Path, number: int) -> None:
    """Rank 3 never starts: its process has rank 2."""
    mesh = join(rank, port)
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
        time.sleep(1.5)  # they send heartbeats, and wait
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
        assert failed.end - started < 2.0 + 1.0


def train(rank: int, port: int, folder: Path, number: int) -> None:
    """The second process of a rank starts late. While it lives, the others make another group, and rank 3 aborts."""
    mesh = join(rank, port)
    mesh.abort_when_lost()
    if number:
        write_result(folder, "second", *attempt(lambda: mesh.connect(timeout=LONG_TIMEOUT)))
        wait_for_flag(folder, "over")
        return
    mesh.connect(mesh.axes, *mesh.axes, timeout=LONG_TIMEOUT)
    set_flag(folder, f"connected {rank}")
    wait_for_flag(folder, "go on")
    write_result(folder, f"sums {rank}", *attempt(lambda: check_sums(groups_of(mesh))))
    if rank == 3:
        wait_for_flags(folder, "sums", range(3))
        mesh.abort("the test")
    write_result(
        folder, f"aborted {rank}", *attempt(lambda: wait_until(lambda: mesh.group() is None, "an error of the mesh"))
    )


@pytest.mark.fault("two processes have the same rank")
@pytest.mark.long
def test_late_second_process_ends_no_healthy_job(tmp_path: Path):
    with RankProcesses(train, tmp_path) as ranks:
        for rank in range(RANKS):
            ranks.start(rank, 0)
        wait_for_flags(tmp_path, "connected", range(RANKS))
        ranks.start(TWICE, 1)
        wait_for_flag(tmp_path, "second")
        time.sleep(2.5)  # two heartbeats: the others look at the status of rank 2
        set_flag(tmp_path, "go on")
        for rank in range(RANKS):
            assert Attempt(*read_result(tmp_path, f"sums {rank}")).kind == ""
            assert "was aborted by rank 3 at " in Attempt(*read_result(tmp_path, f"aborted {rank}")).text
        set_flag(tmp_path, "over")
    assert "connect as rank 2" in Attempt(*read_result(tmp_path, "second")).text


def connect_again(rank: int, port: int, folder: Path, number: int) -> None:
    """After the second process has ended, the others connect more groups."""
    mesh = join(rank, port)
    if number:
        write_result(folder, "second", *attempt(lambda: mesh.connect(timeout=LONG_TIMEOUT)))
        dist.destroy_process_group()
        return
    mesh.connect(mesh.axes, timeout=LONG_TIMEOUT)
    set_flag(folder, f"connected {rank}")
    wait_for_flag(folder, "go on")
    write_result(folder, f"again {rank}", *attempt(lambda: mesh.connect(*mesh.axes, timeout=LONG_TIMEOUT)))


def test_connect_succeeds_after_second_process_ended(tmp_path: Path):
    with RankProcesses(connect_again, tmp_path) as ranks:
        for rank in range(RANKS):
            ranks.start(rank, 0)
        wait_for_flags(tmp_path, "connected", range(RANKS))
        ranks.start(TWICE, 1)
        wait_for_flag(tmp_path, "second")
        ranks.all[-1].join(WAIT_TIMEOUT)
        set_flag(tmp_path, "go on")
        for rank in range(RANKS):
            assert Attempt(*read_result(tmp_path, f"again {rank}")).kind == ""
    assert "connect as rank 2" in Attempt(*read_result(tmp_path, "second")).text
