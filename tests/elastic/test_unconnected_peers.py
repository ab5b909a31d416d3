"""Ranks that wait in a collective for a member that never connects: Gloo has no socket to shut down then."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest

from pgmesh import ProcessGroupMesh
from tests.support.collectives import COLLECTIVES
from tests.support.faults import (
    LONG_TIMEOUT,
    SLACK,
    Attempt,
    attempt,
    beat_fast,
    last_status,
    results,
    set_flag,
    wait_for_flag,
    wait_until,
)
from tests.support.worlds import check_sums, fresh_world, groups_of

RANKS = 6


def connected(name: str, timeout: float) -> ProcessGroupMesh:
    """A connected mesh. Its first collective has connected some pairs of ranks, and not all."""
    mesh = ProcessGroupMesh(RANKS, name=name)
    mesh.configure(timeout=timedelta(seconds=timeout))
    mesh.connect(timeout=LONG_TIMEOUT)
    check_sums(groups_of(mesh))
    return mesh


def wait_until_others_are_in(folder: Path, name: str, absent: int) -> None:
    """Wait until the others are in the collective, or have finished it since they did not need the absent rank."""
    for rank in [rank for rank in range(RANKS) if rank != absent]:
        wait_for_flag(folder, f"{name} {rank}")
        out = folder / f"{name} {rank} out"
        wait_until(
            lambda rank=rank, out=out: out.exists() or ((last := last_status(rank)) and last.running),
            f"rank {rank} is in {name}",
        )


def abort_each(folder: Path, collective: str) -> list[tuple[int, float, Attempt]]:
    """One rank stays out of the collective and aborts the mesh, each rank in turn; also the time of that call."""
    beat_fast()
    seen = []
    for absent in range(RANKS):
        name = f"{collective} without {absent}"
        mesh = connected(name, 60.0)
        group = mesh.group()
        if mesh.rank == absent:
            wait_until_others_are_in(folder, name, absent)
            (folder / "now").write_text(f"{time.monotonic()}")
            (folder / "now").rename(folder / f"{name} aborted")
            mesh.abort("the test")
            continue
        set_flag(folder, f"{name} {mesh.rank}")
        failed = attempt(lambda group=group: COLLECTIVES[collective](group))
        set_flag(folder, f"{name} {mesh.rank} out")
        wait_for_flag(folder, f"{name} aborted")
        seen.append((absent, failed.end - float((folder / f"{name} aborted").read_text()), failed))
    return seen


@pytest.mark.fault("a rank of an aborted mesh is blocked in a collective, also in the first one between two ranks")
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather", "all_to_all", "barrier"])
def test_abort_wakes_ranks_without_connection(tmp_path: Path, collective: str):
    with fresh_world(RANKS) as own:
        seen = results(own.outcomes(abort_each, tmp_path, collective))
    found = [each for per_rank in seen for each in per_rank]
    assert {absent for absent, _, failed in found if failed.kind} == {*range(RANKS)}
    for absent, seconds, failed in found:
        print(absent, seconds, failed)
        if not failed.kind:
            continue  # it did not need the absent rank
        assert seconds < 1.0 + SLACK, f"without {absent}: {seconds:.1f} s after the abort, {failed}"
        assert failed.kind == "LifetimeError" or "onnection" in failed.text, failed
