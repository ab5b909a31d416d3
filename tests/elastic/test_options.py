"""The options of ``configure`` on the mesh that replaces another one."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, torch_private
from tests.support.faults import (
    LONG_TIMEOUT,
    attempt,
    beat_fast,
    kill_self,
    results,
    set_flag,
    wait_for_flags,
)
from tests.support.worlds import check_sums, fresh_world, groups_of


def shrink_configured(folder: Path) -> list[timedelta | None]:
    """Rank 1 is killed, and rank 4 takes its place. It has configured nothing."""
    beat_fast()
    mesh = ProcessGroupMesh(dp=2, tp=2, ranks=range(4), name="train")
    if mesh.rank in mesh:
        mesh.configure("dp", timeout=11)
        mesh.configure(timeout=timedelta(seconds=13))
        mesh.configure("tp", tag="second", timeout=17)
        mesh.along("tp").configure(tag="third", timeout=19)  # a slice of one group
        mesh.connect(timeout=LONG_TIMEOUT)
        set_flag(folder, f"connected {mesh.rank}")
        if mesh.rank == 1:
            wait_for_flags(folder, "connected", range(4))
            kill_self(signal.SIGKILL)
        attempt(lambda: [dist.all_reduce(torch.ones(1), group=mesh.group("tp")) for _ in range(10**6)])
        mesh = mesh.shrink(spares=[4], timeout=LONG_TIMEOUT)
    else:
        mesh = mesh.stand_by(timeout=LONG_TIMEOUT)
    check_sums(groups_of(mesh))
    again = ProcessGroupMesh(4, ranks=[*mesh], name="again")  # the sums show that all members have one timeout
    check_sums(groups_of(again))
    groups = [
        mesh.group("dp"),
        mesh.group(),
        mesh.group("tp", tag="second"),
        mesh.group("tp", tag="third"),
        mesh.group("tp"),
    ]
    return [torch_private.timeout_of(group) for group in groups]


def test_configured_options_survive_shrink(tmp_path: Path):
    with fresh_world(5) as own:
        seen = results(own.outcomes(shrink_configured, tmp_path), 1)
    for *configured, of_world in seen:
        assert configured == [timedelta(seconds=seconds) for seconds in (11, 13, 17, 19)]
        assert of_world == timedelta(seconds=60)
