"""Ranks that die early, and ranks that are stuck in a collective: the errors of the others."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    SLACK,
    Attempt,
    attempt,
    beat_fast,
    connect_and_check,
    kill_self,
    results,
    set_flag,
    wait_for_flag,
    wait_until,
)
from tests.support.programs import wait_until_gone
from tests.support.torch_tables import address_is_published
from tests.support.worlds import STARVED, fresh_world, on_ranks

SHORT = 10.0 if STARVED else 0.6  # seconds; the timeout of a group that loses a member


# ---- a rank is stuck in a collective ----


@on_ranks(4, "fast")
def test_all_of_many_stuck_collectives_end_soon():
    beat_fast()
    groups, timeout = list[dist.ProcessGroup](), max(2.0, SHORT)
    for i in range(8):
        mesh = ProcessGroupMesh(4, name=f"mesh {i}")
        mesh.configure(timeout=timeout)
        mesh.connect(timeout=LONG_TIMEOUT)
        groups.append(mesh.group())
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == 0:
        works: list[Any] = [dist.broadcast(torch.ones(1), src=2, group=group, async_op=True) for group in groups]
        wait_until(lambda: all(work.is_completed() for work in works), "the end of all collectives")
    took = time.monotonic() - start
    dist.barrier()
    assert took < timeout + 2 * BEAT + SLACK


# ---- a member dies in a first collective that no connect preceded ----


def one_dies_in_a_first_collective(folder: Path) -> Attempt:
    """Rank 2 dies when its address is in the store. Rank 0 enters the collective at that time, and rank 1 later."""
    beat_fast()
    mesh = ProcessGroupMesh(3, name="actor")
    mesh.configure(0, timeout=timedelta(seconds=SHORT))
    group = mesh.group()
    (folder / f"pid {mesh.rank}").write_text(str(os.getpid()))
    dist.barrier()
    if mesh.rank == 2:
        dist.all_reduce(torch.ones(1), group=group, async_op=True)
        wait_until(lambda: address_is_published(group), "the address of rank 2")
        set_flag(folder, "address")
        kill_self()
    wait_for_flag(folder, "address")
    if mesh.rank == 1:
        assert wait_until_gone([int((folder / "pid 2").read_text())])
    failed = attempt(lambda: dist.all_reduce(torch.ones(1), group=group))
    connect_and_check(ProcessGroupMesh(2, ranks=range(2), name="survivors"))
    return failed


@pytest.mark.fault("a member dies in the first collective")
def test_plain_first_collective_raises_if_a_member_died(tmp_path: Path):
    with fresh_world(3) as own:
        seen = results(own.outcomes(one_dies_in_a_first_collective, tmp_path), 2)
    for failed in seen:
        print(failed, failed.took)
        assert failed.kind in ("RuntimeError", "MissingRanksError")
        assert failed.took < 5 * SHORT + SLACK  # Gloo waits five timeouts for a neighbour to connect
