"""Ranks that are blocked in a collective, as a mesh is aborted or a member is killed."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.groups import connecting
from pgmesh.launch import StoreProcess
from tests.support.collectives import COLLECTIVES
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    SLACK,
    Attempt,
    attempt,
    beat_fast,
    fast_world,
    meanwhile,
    results,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    wait_until,
)
from tests.support.worlds import World, check_sums, fresh_world, groups_of

RANKS = 4
ABSENT = (0, 2)


def connected(name: str, timeout: float) -> ProcessGroupMesh:
    """A mesh in whose group all pairs of ranks are connected."""
    mesh = ProcessGroupMesh(RANKS, name=name)
    mesh.configure(timeout=timedelta(seconds=timeout))
    mesh.connect(timeout=LONG_TIMEOUT)
    check_sums(groups_of(mesh))
    time.sleep(2 * connecting.PAIRS_AFTER)
    dist.barrier(mesh.group())
    return mesh


def abort_each(folder: Path, collective: str) -> list[tuple[int, float, Attempt]]:
    """One rank stays out of the collective and aborts the mesh, some ranks in turn; also the time of that call."""
    beat_fast()
    seen = []
    for absent in ABSENT:
        name = f"{collective} without {absent}"
        mesh = connected(name, 60.0)
        group = mesh.group()
        if mesh.rank == absent:
            wait_for_flags(folder, name, [rank for rank in range(RANKS) if rank != absent])
            time.sleep(BEAT)  # until they are in it, or have finished it since they did not need this rank
            (folder / "now").write_text(f"{time.monotonic()}")
            (folder / "now").rename(folder / f"{name} aborted")
            assert attempt(lambda mesh=mesh: mesh.abort("the test")).took < 0.5 + SLACK
            continue
        set_flag(folder, f"{name} {mesh.rank}")
        failed = attempt(lambda group=group: COLLECTIVES[collective](group))
        wait_for_flag(folder, f"{name} aborted")
        wait_until(lambda mesh=mesh: mesh.is_closed, "the end of the mesh")
        seen.append((absent, failed.end - float((folder / f"{name} aborted").read_text()), failed))
    return seen


@pytest.mark.fault("a rank is killed, the others call `shrink`")
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_to_all"])
def test_abort_wakes_ranks_in_a_collective(tmp_path: Path, collective: str):
    seen = results(fast_world(RANKS).outcomes(abort_each, tmp_path, collective))
    found = [each for per_rank in seen for each in per_rank]
    assert {absent for absent, _, failed in found if failed.kind} == {*ABSENT}
    for absent, seconds, failed in found:
        if not failed.kind:
            continue  # it did not need the absent rank
        assert seconds < 1.0 + SLACK, f"without {absent}: {seconds:.1f} s after the abort, {failed}"
        assert failed.kind == "LifetimeError" or "onnection" in failed.text, failed


LATE = (3, 4)


def connect_late(folder: Path) -> list[Attempt]:
    """Ranks connect to the others after their waits for them have timed out, as ranks do that were stopped."""
    beat_fast()
    connecting.PAIRS_AFTER = 1e6  # each pair is connected at its first use
    mesh, value = ProcessGroupMesh(5, name="train"), torch.ones(1)
    mesh.configure(timeout=0.5)
    group = mesh.group()
    time.sleep(BEAT)  # until each rank knows the others
    if mesh.rank in LATE:
        wait_for_flags(folder, "replaced", range(3))
        found = [attempt(lambda rank=rank: dist.send(value, rank, group=group)) for rank in range(3)]
        set_flag(folder, f"sent {mesh.rank}")
        return found
    mesh.abort_when_lost()  # so that the others know of each other
    failed = [attempt(lambda rank=rank: dist.recv(value, rank, group=group)) for rank in LATE]
    check_sums(groups_of(mesh.shrink(0, timeout=LONG_TIMEOUT)))
    set_flag(folder, f"replaced {mesh.rank}")
    wait_for_flags(folder, "sent", LATE)
    time.sleep(BEAT)
    return failed


def test_late_connection_ends_no_survivor(tmp_path: Path):
    """Of each two ranks, the one with the greater port connects: six pairs, so that it is the late one in some."""
    with fresh_world(5) as own:
        for failed in results(own.outcomes(connect_late, tmp_path)):
            assert all(each.kind for each in failed), failed


TIMEOUT = 4.0  # seconds, of the groups
SIZE = 2**24  # elements of 4 bytes: more than the buffers of a TCP connection


def send_or_wait(folder: Path) -> tuple[Attempt, str]:
    beat_fast()
    mesh = ProcessGroupMesh(dp=3, name="train")
    mesh.configure("dp", timeout=TIMEOUT)
    mesh.connect("dp", timeout=LONG_TIMEOUT)
    group, values = mesh.group("dp"), torch.zeros(SIZE)
    dist.all_to_all_single(torch.zeros(3), torch.zeros(3), group=group)  # connects every pair of ranks
    if mesh.rank == 1:
        received = dist.irecv(values, 0, group=group)
        set_flag(folder, "ready")
        received.wait()
    wait_for_flag(folder, "stopped")
    set_flag(folder, f"begins {mesh.rank}")
    if mesh.rank == 0:
        failed = attempt(lambda: dist.send(values, 1, group=group))
    else:
        failed = attempt(lambda: dist.all_reduce(torch.ones(1), group=group))
    after = mesh.shrink("dp", timeout=LONG_TIMEOUT)
    check_sums(groups_of(after))
    return failed, repr(after)


def test_send_to_killed_rank_fails_within_timeout(tmp_path: Path):
    """It sends more than the buffers hold. Gloo wakes only the operations that have not begun to send, not this one."""

    def stop_and_kill(own: World) -> None:
        wait_for_flag(tmp_path, "ready")
        own.kill(1, signal.SIGSTOP)
        set_flag(tmp_path, "stopped")
        wait_for_flag(tmp_path, "begins 0")
        time.sleep(0.5)  # until the buffers are full; if they are not, the rank raises at once
        own.kill(1, signal.SIGKILL)

    with StoreProcess() as store, fresh_world(3, store) as own, meanwhile(lambda: stop_and_kill(own)):
        seen = results(own.outcomes(send_or_wait, tmp_path), 1)
    assert len(seen) == 2
    for failed, mesh in seen:
        assert failed.kind
        assert failed.took < TIMEOUT + 1.0 + SLACK, failed
        assert mesh == "ProcessGroupMesh(dp=2, ranks=range(0, 4, 2), name='train#1')"
