"""Two processes of one rank, by a mistake of a launcher."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from pgmesh import ProcessGroupMesh
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    SLACK,
    Attempt,
    attempt,
    read_result,
    set_flag,
    wait_for_flag,
    write_result,
)
from tests.support.rank_processes import RankProcesses, join_world

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
