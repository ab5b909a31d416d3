"""The exit status of a program that ends at any moment of the liveness thread is its own."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.groups.world import current_world
from pgmesh.liveness import timing
from pgmesh.liveness.liveness import liveness_of
from tests.support.exiting import run_to_exit


def end_after(milliseconds: int) -> None:
    dist.barrier()  # torch's own group is connected
    timing.HEARTBEAT = 0.01
    liveness_of(current_world())
    time.sleep(milliseconds / 1000)


def end_after_report(milliseconds: int) -> None:
    dist.barrier()
    ProcessGroupMesh(-1).report()
    time.sleep(milliseconds / 1000)


def raise_after(milliseconds: int) -> None:
    end_after(milliseconds)
    raise ValueError("by design")


def destroy_after(milliseconds: int) -> None:
    end_after(milliseconds)
    dist.destroy_process_group()


def test_exit_status_is_the_programs_own(tmp_path: Path):
    worlds = {
        f"{fn.__name__}-{milliseconds}": (fn, 2, milliseconds)
        for fn in (end_after, end_after_report, raise_after, destroy_after)
        for milliseconds in (0, 3, 20)
    }
    for name, ended in run_to_exit(tmp_path, worlds).items():
        expected = 1 if name.startswith("raise") else 0
        assert [each.status for each in ended] == [expected] * 2, (name, ended)
