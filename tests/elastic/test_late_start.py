"""Ranks are lost while others wait: in ``connect`` for a rank that never starts, or standing by as spares."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pgmesh import ProcessGroupMesh
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    NAMED,
    SLACK,
    Attempt,
    H,
    attempt,
    read_result,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    write_result,
)
from tests.support.rank_processes import RankProcesses, join_world
from tests.support.worlds import check_sums, groups_of

NEVER, DIES = 1, 2


def wait_in_connect(rank: int, port: int, folder: Path, watches: int) -> None:
    """One of the ranks 0, 2 and 3. Each shares a group with rank 1, and only rank 1 precedes rank 2."""
    join_world(rank, port, 4)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    if watches:
        mesh.abort_when_lost()
    set_flag(folder, f"connects {rank}")
    failed = attempt(lambda: mesh.connect(*(mesh.axes if watches else ()), mesh.axes, timeout=LONG_TIMEOUT))
    write_result(folder, f"failed {rank}", *failed)


@pytest.mark.fault("a member dies after it arrived, while another is late")
@pytest.mark.parametrize("watches", [0, 1], ids=["connect", "abort_when_lost"])
def test_dead_rank_is_named_while_another_never_starts(tmp_path: Path, watches: int):
    with RankProcesses(wait_in_connect, tmp_path) as ranks:
        for rank in (0, DIES, 3):
            ranks.start(rank, watches)
        wait_for_flags(tmp_path, "connects", (0, DIES, 3))
        time.sleep(3 * BEAT)  # so that each rank has arrived, and its heartbeats were read
        ranks.newest[DIES].kill()
        killed = time.monotonic()
        for rank in (0, 3):
            failed = Attempt(*read_result(tmp_path, f"failed {rank}"))
            print(f"{failed.end - killed:.2f} s: {failed}")
            ended = f"rank {DIES} has ended: its listener at 127.0.0.1:" in failed.text
            # On a busy machine, H may pass before the system has closed the listener.
            is_silent = failed.end - killed >= H and f"rank {DIES} has sent no heartbeat for at least" in failed.text
            assert ended or is_silent
            assert failed.end - killed < NAMED + (2 * BEAT if watches else 0.0) + SLACK


def train_with_spares(rank: int, port: int, folder: Path, _: int) -> None:
    """Ranks 0 and 1 train, and ranks 2 and 3 stand by."""
    join_world(rank, port, 4)
    mesh = ProcessGroupMesh(dp=2, ranks=range(2), name="train")
    if rank < 2:
        mesh.connect(timeout=LONG_TIMEOUT)
        set_flag(folder, f"ready {rank}")
        wait_for_flag(folder, "shrink")
        mesh = mesh.shrink(spares=[2, 3], timeout=LONG_TIMEOUT)
    else:
        set_flag(folder, f"ready {rank}")
        mesh = mesh.stand_by(timeout=LONG_TIMEOUT)
    mesh.connect(timeout=LONG_TIMEOUT)
    check_sums(groups_of(mesh))
    write_result(folder, f"connected {rank}", str(mesh.shrunk))


def test_spare_that_was_killed_is_passed_over(tmp_path: Path):
    with RankProcesses(train_with_spares, tmp_path) as ranks:
        for rank in range(4):
            ranks.start(rank, 0)
        wait_for_flags(tmp_path, "ready", range(4))
        time.sleep(3 * BEAT)  # so that the spares have arrived
        for rank in (2, 1):
            ranks.newest[rank].kill()
            ranks.newest[rank].join()
        set_flag(tmp_path, "shrink")
        for rank in (0, 3):
            (text,) = read_result(tmp_path, f"connected {rank}")
            print(text)
            assert "rank 3 came in the place of rank 1" in text
            how = "in" if rank == 0 else "after standing by for"
            assert text.startswith(f"mesh 'train': 2 ranks, and now 2, {how} ")
