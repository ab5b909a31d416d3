"""A mesh that loses ranks: real processes, killed and stopped, and the sums on the mesh that replaces theirs."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.launch import StoreProcess
from tests.support.faults import (
    H,
    LONG_TIMEOUT,
    SLACK,
    WAIT_TIMEOUT,
    Attempt,
    attempt,
    beat_fast,
    results,
    set_flag,
    wait_for_flag,
    wait_until,
)
from tests.support.worlds import check_sums, fresh_world, groups_of


def step_until_it_fails(mesh: ProcessGroupMesh, *axes: Any) -> Attempt:
    """Collectives along these axes, one after another, until one fails."""

    def steps() -> None:
        while True:
            total = torch.tensor(2.0**mesh.rank)
            dist.all_reduce(total, group=mesh.group(*axes))

    return attempt(steps)


def lose_one(folder: Path) -> tuple[Any, ...]:
    """Rank 3 of a mesh dp=2, tp=2 is killed in the middle of its steps, and the others go on."""
    beat_fast()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    mesh.connect("dp", "tp", timeout=LONG_TIMEOUT)
    check_sums(groups_of(mesh))
    set_flag(folder, f"ready {mesh.rank}")
    failed = step_until_it_fails(mesh, "dp" if mesh.rank in (1, 3) else "tp")
    start = time.monotonic()
    try:
        raise RuntimeError(failed.text)
    except RuntimeError:
        after = mesh.shrink("dp", timeout=LONG_TIMEOUT)
    agreed = time.monotonic()
    if after.rank in after:
        check_sums(groups_of(after))
    return failed, str(after.shrunk), repr(after), agreed - start, time.monotonic() - start, failed.end


def test_the_survivors_of_a_killed_rank_go_on_with_right_sums(tmp_path: Path):
    with StoreProcess() as store, fresh_world(4, store) as own:
        killed = [0.0]

        def kill() -> None:
            for rank in range(4):
                wait_for_flag(tmp_path, f"ready {rank}")
            time.sleep(0.3)
            killed[0] = time.monotonic()
            own.kill(3, signal.SIGKILL)

        actor = threading.Thread(target=kill, daemon=True)
        actor.start()
        seen = results(own.outcomes(lose_one, tmp_path), 3)
        actor.join(WAIT_TIMEOUT)
    for failed, change, text, agreed, done, end in seen:
        print(failed.kind, failed.text, "\n", change, text, f"agreed {agreed:.3f} done {done:.3f}", end - killed[0])
    assert False
