"""Ranks that stand by until the training ends."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from pgmesh import ProcessGroupMesh
from tests.support.faults import (
    LONG_TIMEOUT,
    SLACK,
    WAIT_TIMEOUT,
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

KILLED = r"rank 0 has (ended: its listener at 127\.0\.0\.1:\d+ refuses connections|sent no heartbeat for at least)"


def stand_by_with_another(rank: int, port: int, folder: Path, _: int) -> None:
    """Ranks 1 and 2 of three stand by, as ranks that were taken for lost do. Rank 0 ends."""
    join_world(rank, port, 3)
    mesh = ProcessGroupMesh(dp=3, name="train")
    mesh.connect(timeout=LONG_TIMEOUT)
    set_flag(folder, f"connected {rank}")
    if rank == 0:
        wait_for_flag(folder, "never")
    failed = attempt(lambda: mesh.stand_by(timeout=4 * WAIT_TIMEOUT))
    write_result(folder, f"failed {rank}", *failed)


@pytest.mark.fault("ranks stand by and no rank is left that can call `shrink`")
def test_spares_do_not_await_each_other(tmp_path: Path):
    with RankProcesses(stand_by_with_another, tmp_path) as ranks:
        for rank in range(3):
            ranks.start(rank, 0)
        wait_for_flags(tmp_path, "connected", range(3))
        ended = time.monotonic()
        ranks.newest[0].kill()
        for rank in (1, 2):
            failed = Attempt(*read_result(tmp_path, f"failed {rank}"))
            print(f"{failed.end - ended:.2f} s: {failed}")
            assert failed.kind == "MissingRanksError"
            assert re.search(KILLED, failed.text), failed
            assert "no other rank of it is left, so none can call shrink." in failed.text, failed
            assert re.search(r"rank [12] stands by too", failed.text), failed
            assert failed.end - ended < 2 * H + SLACK
