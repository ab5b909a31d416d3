"""Ranks that end soon after an abort or a shrink: python -m tests.support.exiting HOW DELAY END PORT STATUS

    python -m tests.support.exiting abort 0.09 leaves PORT STATUS

Each is forked before anything was started and ends as an interpreter does: processes of multiprocessing end without the
destructors of C++. The program prints their exit statuses.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, launch

RANKS = 4


def end_mesh(mesh: ProcessGroupMesh, how: str) -> None:
    """Abort or shrink the mesh; "blocked" and "thread": while ranks 2 and 3 are in a collective, in a thread or not."""

    def block() -> None:
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1), group=mesh.group("dp"))

    blocked = threading.Thread(target=block, daemon=True)
    if mesh.rank >= 2 and how == "blocked":
        return block()
    if mesh.rank >= 2 and how == "thread":
        blocked.start()
    if how in ("blocked", "thread"):
        time.sleep(0.2)  # until they are in it; an earlier abort ends it as well
    if how == "shrink":
        mesh.shrink("dp", timeout=30)
    else:
        mesh.abort("the test")
    return None


def be(rank: int, how: str, delay: float, leaves: bool, port: int, status: int) -> None:
    launch.join("gloo", timeout=60, replica=rank, replicas=RANKS, host="127.0.0.1", port=port)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    mesh.connect(timeout=60)
    dist.barrier()
    end_mesh(mesh, how)
    time.sleep(delay)
    if leaves:
        dist.destroy_process_group()
    sys.exit(status)


def main(how: str, delay: str, end: str, port: str, status: str) -> None:
    pids = []
    for rank in range(RANKS):
        pids.append(os.fork())
        if pids[-1] == 0:
            be(rank, how, float(delay), end == "leaves", int(port), int(status))
    ended = dict(os.waitpid(-1, 0) for _ in pids)
    print(*(os.waitstatus_to_exitcode(ended[pid]) for pid in pids))


if __name__ == "__main__":
    main(*sys.argv[1:])
