"""A mesh that is aborted before its first use on a rank, or while another thread of the process holds its lock."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.launch import StoreProcess
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    SLACK,
    Attempt,
    attempt,
    beat_fast,
    results,
    set_flag,
    wait_for_flag,
)
from tests.support.worlds import fresh_world


def use_after_abort(folder: Path) -> Attempt | None:
    """Rank 0 aborts the mesh. Only then do the others use it, in groups without rank 0."""
    beat_fast()
    mesh = ProcessGroupMesh(dp=3, name="train")
    other = ProcessGroupMesh(3, name="other")
    other.connect(timeout=LONG_TIMEOUT)
    if mesh.rank == 0:
        mesh.abort("rank 0 has enough")
        time.sleep(3 * BEAT)  # the others' heartbeats have counted it
        set_flag(folder, "aborted")
        wait_for_flag(folder, "done")
        return None
    wait_for_flag(folder, "aborted")
    group = mesh.group_of([1, 2])

    def steps() -> None:
        while True:
            dist.all_reduce(torch.ones(1), group=group)

    failed = attempt(steps)
    set_flag(folder, "done")
    return failed


def test_first_use_after_abort_fails_within_heartbeats(tmp_path: Path):
    with StoreProcess() as store, fresh_world(3, store) as own:
        for failed in results(own.outcomes(use_after_abort, tmp_path))[1:]:
            print(failed)
            assert failed.kind in ("LifetimeError", "MissingRanksError", "RuntimeError")
            assert failed.took < 3 * BEAT + 1.0 + SLACK
