"""A new process in the place of a lost rank creates the Resharder again, and the others do so too."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from pgmesh import Layout, PgmeshError
from pgmesh.resharding import Resharder
from tests.support.faults import LONG_TIMEOUT, WAIT_TIMEOUT, set_flag, wait_for_flag, wait_for_flags
from tests.support.rank_processes import RankProcesses, join_world

RANKS, LOST = 3, 1


def run(rank: int, port: int, folder: Path, process: int) -> None:
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
        processes.newest[LOST].join(WAIT_TIMEOUT)

    with RankProcesses(run, tmp_path) as processes:
        for rank in range(RANKS):
            start(rank, 0)
        wait_for_transfers(0)
        kill()
        start(LOST, 1)
        wait_for_transfers(1)
        kill()
        processes.signal(signal.SIGSTOP, LOST)
        start(LOST, 2)
        wait_for_flag(tmp_path, "process 2 creates")
        time.sleep(1)  # it waits for the others
        processes.signal(signal.SIGCONT, LOST)
        kill()
        start(LOST, 3)
        wait_for_transfers(3)
        set_flag(tmp_path, "over")
