"""Processes that end shortly after an abort, a shrink or a failed collective: each has the program's own status."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from tests.support.exiting import run_to_exit
from tests.support.faults import CHAOS, LONG_TIMEOUT, SEED, WAIT_TIMEOUT, attempt, beat_fast

RANKS, STATUS = 4, 7
HALF_A_MESSAGE = 3  # the last kind


def end_soon(kind: int, time_: int) -> None:
    """The ranks are in collectives. Rank 3 aborts the mesh, or is killed. Then each ends at a random moment.

    In the last kind the messages are so large that rank 3 dies in the middle of one. Gloo might never free the group.
    """
    beat_fast()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    mesh.configure(timeout=2)  # the other members of half a message notice nothing before
    mesh.configure("tp", timeout=2)  # nor does a member that waits for rank 3 to connect
    mesh.connect("dp", timeout=LONG_TIMEOUT)
    group = mesh.group("tp")
    dist.barrier()
    chance = random.Random(f"{SEED} {kind} {time_} {mesh.rank}")

    def steps() -> None:
        while True:
            if kind == HALF_A_MESSAGE:
                mine = torch.ones(1 << 23)
                works = [
                    dist.all_to_all_single(torch.empty_like(mine), mine, group=mesh.group(), async_op=True)
                    for _ in range(3)
                ]
                for work in works:
                    work.wait()
                continue
            dist.all_reduce(torch.ones(1), group=mesh.group("dp"))
            dist.all_reduce(torch.ones(1), group=group)

    if mesh.rank == RANKS - 1:
        threading.Thread(target=lambda: attempt(steps), daemon=True).start()
        time.sleep(chance.uniform(0.0, 0.3))
        if kind:
            os.kill(os.getpid(), signal.SIGKILL)
        mesh.abort("the test")
    else:
        attempt(steps)
        if kind == 2:
            mesh = mesh.shrink("dp", timeout=WAIT_TIMEOUT)
            if mesh.rank in mesh:
                mesh.group("tp")
    time.sleep(chance.choice((0.0, chance.uniform(0.0, 0.3))))
    if chance.random() < (0.8 if kind == HALF_A_MESSAGE else 0.3):
        dist.destroy_process_group()
    sys.exit(STATUS)


@pytest.mark.fault("the program ends just after an abort, a shrink, or a failed collective")
@pytest.mark.parametrize("time_", range(20 if CHAOS else 1))
def test_process_ends_with_its_own_status(tmp_path: Path, time_: int):
    kinds = ["abort", "failed collective", "shrink", "half a message"]
    worlds = {name: (end_soon, RANKS, kind, time_) for kind, name in enumerate(kinds)}
    statuses = {name: [each.status for each in ended] for name, ended in run_to_exit(tmp_path, worlds).items()}
    killed = [*[STATUS] * (RANKS - 1), -signal.SIGKILL]
    assert statuses == {name: killed if kind else [STATUS] * RANKS for kind, name in enumerate(kinds)}
