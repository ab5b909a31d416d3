"""A mesh that loses ranks or is aborted: real processes, also blocked ones, and the sums on the mesh after theirs."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.groups import connecting
from pgmesh.launch import StoreProcess
from tests.support.collectives import COLLECTIVES
from tests.support.fake_world import fake_rank
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    SLACK,
    WAIT_TIMEOUT,
    Attempt,
    H,
    attempt,
    beat_fast,
    fast_world,
    meanwhile,
    read_result,
    results,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    wait_until,
    write_result,
)
from tests.support.resource_counts import CAN_COUNT, count_with_keys
from tests.support.worlds import World, check_sums, fresh_world, groups_of, on_ranks

KEPT = {"descriptors": 4, "threads": 2}  # of each group of an aborted mesh: see docs/see.md
RANKS = 4
ABSENT = (0, 2)
LATE = (3, 4)
TIMEOUT = 4.0  # seconds, of groups with a message that is larger than the buffers of a TCP connection
SIZE = 2**24  # elements of 4 bytes, of that message


def connected(folder: Path, ranks: Sequence[int] = range(4), **sizes: int) -> ProcessGroupMesh:
    """A connected mesh "train" of these ranks, and a flag of each rank."""
    beat_fast()
    mesh = ProcessGroupMesh(sizes or {"dp": 2, "tp": 2}, ranks=ranks, name="train")
    if mesh.rank in mesh:
        for axis in mesh.axes:
            mesh.configure(axis, timeout=WAIT_TIMEOUT / 4)  # Gloo does not wake each rank whose connection ends
        mesh.connect(*mesh.axes, timeout=LONG_TIMEOUT)
        check_sums(groups_of(mesh))
    set_flag(folder, f"ready {mesh.rank}")
    return mesh


def steps_until_one_fails(mesh: ProcessGroupMesh) -> Attempt:
    def steps() -> None:
        while True:
            for axis in mesh.axes:
                dist.all_reduce(torch.tensor(2.0**mesh.rank), group=mesh.group(axis))

    return attempt(steps)


def checked(mesh: ProcessGroupMesh) -> str:
    """The repr of a mesh with right sums."""
    if mesh.rank in mesh:
        check_sums(groups_of(mesh))
    return repr(mesh)


def run(folder: Path, size: int, fn: Callable[..., Any], act: Callable[[World], object], but: Sequence[int]) -> Any:
    """The results of ``fn(folder)`` on all ranks but these, while ``act`` runs once all of them are ready."""
    with StoreProcess() as store, fresh_world(size, store) as own:

        def actor() -> None:
            wait_for_flags(folder, "ready", range(size))
            act(own)

        with meanwhile(actor):
            return results(own.outcomes(fn, folder), *but)


def drop_along_dp(folder: Path) -> tuple[Attempt, str, str, float]:
    mesh = connected(folder)
    failed = steps_until_one_fails(mesh)
    after = mesh.shrink("dp", timeout=LONG_TIMEOUT)
    return failed, str(after.shrunk), checked(after), time.monotonic()


@pytest.mark.fault("a rank is killed, the others call `shrink`")
def test_shrink_after_kill_takes_one_second(tmp_path: Path):
    killed = [0.0]

    def kill(own: World) -> None:
        killed[0] = time.monotonic()
        own.kill(3, signal.SIGKILL)

    seen = run(tmp_path, 4, drop_along_dp, kill, [3])
    assert len(seen) == 3
    for failed, change, mesh, end in seen:
        # Gloo's own text, if its connection ended before the listener of the killed process did.
        assert failed.kind in ("MissingRanksError", "LifetimeError") or "Connection" in failed.text, failed
        assert mesh == "ProcessGroupMesh(dp=1, tp=2, ranks=range(2), name='train#1')"
        assert change.startswith("mesh 'train': 4 ranks, and now 2\n")
        assert "\n  lost: rank 3 has ended: its listener at 127.0.0.1:" in change
        assert end - killed[0] < 1.0 + SLACK


def one_is_stopped(folder: Path) -> tuple[Attempt, str, float]:
    """Rank 3 is stopped, and goes on after the others have replaced it."""
    mesh = connected(folder)
    mesh.abort_when_lost()
    set_flag(folder, f"watching {mesh.rank}")
    if mesh.rank == 4:
        mesh = mesh.stand_by(timeout=LONG_TIMEOUT)
        text = checked(mesh)
        return attempt(lambda: None), text, time.monotonic()
    steps_until_one_fails(mesh)
    wait_until(lambda: mesh.is_closed, "the abort")
    failed = attempt(lambda: mesh.group("dp"))
    if mesh.rank == 3:
        refused = attempt(lambda: mesh.shrink("dp", spares=[4], timeout=LONG_TIMEOUT))
        return failed, f"{refused.kind}: {refused.text}", time.monotonic()
    mesh = mesh.shrink("dp", spares=[4], timeout=LONG_TIMEOUT)
    text, end = checked(mesh), time.monotonic()
    set_flag(folder, f"done {mesh.rank}")
    return failed, text, end


@pytest.mark.fault("a rank is stopped or unreachable, with `abort_when_lost`")
def test_stopped_rank_is_replaced_and_refused_later(tmp_path: Path):
    stopped = [0.0]

    def stop(own: World) -> None:
        wait_for_flags(tmp_path, "watching", range(5))
        time.sleep(2 * BEAT)  # so that the heartbeats of each rank were read
        stopped[0] = time.monotonic()
        own.kill(3, signal.SIGSTOP)
        wait_for_flags(tmp_path, "done", range(3))
        os.kill(own.pids[3], signal.SIGCONT)

    seen = run(tmp_path, 5, one_is_stopped, stop, [])
    for rank in (0, 1, 2):
        failed, mesh, end = seen[rank]
        assert "rank 3 has sent no heartbeat for at least" in failed.text, failed
        assert mesh == "ProcessGroupMesh(dp=2, tp=2, ranks=(0, 1, 2, 4), name='train#1')"
        assert end - stopped[0] < H + 2 * BEAT + SLACK
    failed, refused, _ = seen[3]
    assert "was aborted by rank" in failed.text
    assert refused.startswith("MembershipError: mesh 'train': the other ranks went on without rank 3")
    assert "mesh = mesh.stand_by()" in refused


@pytest.mark.skipif(not CAN_COUNT, reason="reads /proc")
@on_ranks(3, fresh=True)
def test_abort_wakes_all_ranks_with_its_reason(tmp_path: Path):
    """Rank 0 waits in a thread and aborts the mesh; rank 1 waits for rank 2, which arrives later."""
    mesh = connected(tmp_path, range(3), dp=3)
    other = ProcessGroupMesh(3, name="other")
    other.connect(timeout=LONG_TIMEOUT)

    def abort() -> None:
        wait_for_flag(tmp_path, "enters 1")
        time.sleep(BEAT)
        write_result(tmp_path, "aborts", time.monotonic())
        mesh.abort("the loss is not a number")
        set_flag(tmp_path, "aborted")

    with meanwhile(abort if mesh.rank == 0 else lambda: None):
        set_flag(tmp_path, f"enters {mesh.rank}")
        if mesh.rank == 2:
            wait_for_flag(tmp_path, "aborted")
        failed = attempt(lambda: dist.all_reduce(torch.ones(1), group=mesh.group()))
    assert failed.kind
    assert mesh.rank == 2 or failed.end - read_result(tmp_path, "aborts")[0] < 0.5 + SLACK, failed
    wait_until(lambda: mesh.is_closed, "the abort")
    again = attempt(lambda: mesh.group("dp"))
    assert again.kind == "LifetimeError", again
    assert "mesh 'train' was aborted by rank 0 at test_shrink.py:" in again.text
    assert "the loss is not a number" in again.text
    mesh.abort()  # changes nothing
    mesh.close()
    check_sums(groups_of(other))
    check_sums(groups_of(ProcessGroupMesh(3, name="train")))


@pytest.mark.skipif(not CAN_COUNT, reason="reads /proc")
@on_ranks(4)
def test_six_shrinks_keep_only_the_aborted_groups():
    """The mesh is replaced although no rank is lost."""
    beat_fast()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    counts = []
    for _ in range(6):
        check_sums(groups_of(mesh))
        dist.barrier()  # shrink aborts the mesh, and another rank may still check its sums
        mesh = mesh.shrink("dp", timeout=LONG_TIMEOUT)
        check_sums(groups_of(mesh))
        gc.collect()
        time.sleep(2 * connecting.PAIRS_AFTER)
        dist.barrier()
        counts.append(count_with_keys())
        dist.barrier()
        assert mesh.shrunk is not None
    addresses, decision = 12, 3  # those of dp and tp, twice each, and of the whole mesh; the arrivals and the abort
    most = {"keys": addresses + decision, **{what: 3 * number for what, number in KEPT.items()}}
    for what, number in counts[2].items():
        assert counts[-1][what] - number <= most.get(what, 0) * 3, f"{what}: {[each[what] for each in counts]}"


@on_ranks(4)
def test_abort_ends_no_mesh_of_a_similar_name():
    """The second mesh of a name, one that is named as if it were, and one that is named as what replaces it."""
    beat_fast()
    ProcessGroupMesh(dp=4, name="train").close()
    again, numbered, replacing = (ProcessGroupMesh(dp=4, name=name) for name in ("train", "train.1", "train#1"))
    for mesh in (again, numbered, replacing):
        mesh.abort_when_lost()
        check_sums(groups_of(mesh))
    dist.barrier()
    numbered.abort("the test")
    shrunk = numbered.shrink("dp", timeout=LONG_TIMEOUT)
    for mesh in (again, replacing, shrunk):
        check_sums(groups_of(mesh))
    dist.barrier()


def test_wrong_arguments_raise_before_the_abort():
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(pp=2, dp=2, tp=2, name="train")
        for act, kind, text in [
            (mesh.shrink, "OptionsError", "mesh = mesh.shrink('pp')"),
            (lambda: mesh.view(ep=8).shrink("ep"), "LifetimeError", "is a view or a slice"),
            (lambda: mesh.at(pp=1).abort(), "LifetimeError", "is a view or a slice"),
            (lambda: mesh.shrink("dp", timeout=0), "OptionsError", "0"),
            (lambda: mesh.abort_when_lost(1), "OptionsError", "three heartbeats, which take 3 s here"),
            (lambda: mesh.shrink(spares=[1, 1]), "ShapeError", "repeats 1"),
        ]:
            failed = attempt(act)
            assert failed.kind == kind, failed
            assert text in failed.text
        assert not mesh.is_closed
        assert "pgmesh-liveness" not in [thread.name for thread in threading.enumerate()]
        mesh.close()
        failed = attempt(lambda: mesh.shrink("dp"))
        assert failed.kind == "LifetimeError"
        assert "cannot be replaced" in failed.text


def connected_in_pairs(name: str, timeout: float) -> ProcessGroupMesh:
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
        mesh = connected_in_pairs(name, 60.0)
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


@on_ranks(5, fresh=True)
def test_late_connection_ends_no_survivor(tmp_path: Path):
    """Ranks connect to the others after their waits for them have timed out, as ranks do that were stopped.

    Of each two ranks, the one with the greater port connects: six pairs, so that it is the late one in some.
    """
    beat_fast()
    connecting.PAIRS_AFTER = 1e6  # each pair is connected at its first use
    mesh, value = ProcessGroupMesh(5, name="train"), torch.ones(1)
    mesh.configure(timeout=0.5)
    group = mesh.group()
    time.sleep(BEAT)  # until each rank knows the others
    if mesh.rank in LATE:
        wait_for_flags(tmp_path, "replaced", range(3))
        found = [attempt(lambda rank=rank: dist.send(value, rank, group=group)) for rank in range(3)]
        set_flag(tmp_path, f"sent {mesh.rank}")
    else:
        mesh.abort_when_lost()  # so that the others know of each other
        found = [attempt(lambda rank=rank: dist.recv(value, rank, group=group)) for rank in LATE]
        check_sums(groups_of(mesh.shrink(0, timeout=LONG_TIMEOUT)))
        set_flag(tmp_path, f"replaced {mesh.rank}")
        wait_for_flags(tmp_path, "sent", LATE)
        time.sleep(BEAT)
    assert all(each.kind for each in found), found


def send_or_wait(folder: Path) -> tuple[Attempt, str]:
    beat_fast()
    mesh = ProcessGroupMesh(dp=3, name="train")
    mesh.configure("dp", timeout=TIMEOUT)
    mesh.connect("dp", timeout=LONG_TIMEOUT)
    group, values = mesh.group("dp"), torch.zeros(SIZE)
    dist.all_to_all_single(torch.zeros(3), torch.zeros(3), group=group)  # connects every pair of ranks
    if mesh.rank == 1:
        received = dist.irecv(values, 0, group=group)
    set_flag(folder, f"ready {mesh.rank}")
    if mesh.rank == 1:
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
        own.kill(1, signal.SIGSTOP)
        set_flag(tmp_path, "stopped")
        wait_for_flag(tmp_path, "begins 0")
        time.sleep(0.5)  # until the buffers are full; if they are not, the rank raises at once
        own.kill(1, signal.SIGKILL)

    seen = run(tmp_path, 3, send_or_wait, stop_and_kill, [1])
    assert len(seen) == 2
    for failed, mesh in seen:
        assert failed.kind
        assert failed.took < TIMEOUT + 1.0 + SLACK, failed
        assert mesh == "ProcessGroupMesh(dp=2, ranks=range(0, 4, 2), name='train#1')"
