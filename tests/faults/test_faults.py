"""Faults in real processes: the error on each rank, and its time. Those of ``connect`` are in connect/test_faults.py.

Heartbeats are five times as frequent as elsewhere, but not with PGMESH_STARVED=4, while four processes keep the cores
busy: then reports may be late. Times are on the clock that all processes share. No test sleeps and hopes: a rank that
must act after another one polls the store, or a file.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.launch import StoreProcess
from tests.support.faults import (
    LONG_TIMEOUT,
    SLACK,
    Attempt,
    H,
    attempt,
    beat_fast,
    beat_fast_with_bystander,
    connect_and_check,
    kill_self,
    meanwhile,
    read_result,
    results,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    wait_until,
    wait_until_waiting,
    write_result,
)
from tests.support.footprint import threads_of_pgmesh
from tests.support.programs import send_signal, wait_until_gone
from tests.support.torch_tables import address_is_published, record_operations, table_sizes
from tests.support.worlds import STARVED, check_sums, fresh_world, groups_of, on_ranks

STOP = 3.0  # seconds, of the store
SHORT = 10.0 if STARVED else 0.6  # seconds; the timeout of a group that loses a member


@pytest.mark.fault("sizes that do not fit, wrong ranks, unknown axis, empty mesh")
@on_ranks(2, "fast")
def test_local_errors_are_raised_without_store_operations():
    """The text of each error is in test_messages.py."""
    beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=1, tp=2, name="actor")
    mesh.group()
    wrong: list[Callable[[], Any]] = [
        lambda: ProcessGroupMesh(dp=3, tp=2),
        lambda: ProcessGroupMesh(dp=-1, tp=-1),
        lambda: ProcessGroupMesh(dp=2, ranks=[0, 0]),
        lambda: ProcessGroupMesh(dp=2, ranks=[-1, 0]),
        lambda: ProcessGroupMesh(dp=2, ranks=[0, dist.get_world_size()]),
        lambda: ProcessGroupMesh(dp=0),
        lambda: mesh.group("pp"),
        lambda: mesh.connect("dp", "pp"),
        lambda: mesh.group_of([0, 0]),
    ]
    before = table_sizes()
    with record_operations() as done:
        seen = [[attempt(ask) for _ in range(3)] for ask in wrong]
    assert table_sizes() == before
    connect_and_check(mesh, "tp")
    assert done == []
    for each in seen:
        assert each[0].kind in ("ShapeError", "RankError", "AxisError"), each
        assert min(tried.took for tried in each) < (SLACK if STARVED else 0.01)


def lose_store(fn: Callable[[Path], Any], folder: Path, number: int) -> tuple[list[Any], str]:
    """Send a signal to the store once each rank is ready. A store that is stopped continues after three seconds.

    Returns:
        The results of ``fn(folder)`` on four ranks, and the store as errors name it.
    """

    def go() -> None:
        wait_for_flags(folder, "ready", range(4))
        send_signal(pid, number)
        write_result(folder, "gone at", time.monotonic())
        set_flag(folder, "gone")
        if number == signal.SIGSTOP:
            time.sleep(STOP)
            write_result(folder, "continued", time.monotonic())
            os.kill(pid, signal.SIGCONT)

    with StoreProcess() as store, fresh_world(4, store) as own:
        own.run(dist.get_rank)
        pid = store.process.pid
        assert pid is not None
        with meanwhile(go):
            seen = results(own.outcomes(fn, folder))
    return seen, f"the store at 127.0.0.1:{store.port}"


def summed(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(1), group=group)


def connect_in_thread(mesh: ProcessGroupMesh) -> Callable[[], Attempt]:
    """Connect along tp. The ranks 0 and 2 wait for the others, which connect when the result is asked for."""
    if mesh.index("tp"):
        return lambda: attempt(lambda: mesh.connect("tp", timeout=LONG_TIMEOUT))
    connects = ThreadPoolExecutor(1).submit(attempt, lambda: mesh.connect("tp", timeout=LONG_TIMEOUT))
    wait_until_waiting(mesh.rank)
    return connects.result


def use_without_a_store(folder: Path) -> dict[str, Attempt]:
    """No rank has connected anything when the store dies: each call that may ask it, one after another."""
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    used, destroyed = mesh.group("tp"), mesh.group(tag="destroyed")
    check_sums({"tp": (used, mesh.ranks("tp")), "destroyed": (destroyed, mesh.ranks())})
    first = ProcessGroupMesh(dp=2, tp=2, name="first")
    if mesh.index("dp") == 0:
        waiting: Any = dist.all_reduce(torch.ones(1), group=mesh.group("dp"), async_op=True)
    dist.barrier()
    connecting = connect_in_thread(first)
    set_flag(folder, f"ready {mesh.rank}")
    wait_for_flag(folder, "gone")
    calls: dict[str, Callable[[], Any]] = {
        "wait": lambda: waiting.wait() if mesh.index("dp") == 0 else summed(mesh.group("dp")),
        "first use": lambda: summed(mesh.group("tp", timeout=50)),
        "connect": lambda: mesh.connect("tp", timeout=LONG_TIMEOUT),
        "report": mesh.report,
        "barrier": dist.barrier,  # so that a rank's sums do not wait for the earlier calls of others
        "sums": lambda: check_sums({"tp": (used, mesh.ranks("tp"))}),
        "destroy": lambda: dist.destroy_process_group(destroyed),
        "release": lambda: mesh.release("tp"),
        "close": mesh.close,
    }
    return {"wait in connect": connecting()} | {name: attempt(call) for name, call in calls.items()}


@pytest.mark.fault("the store dies")
def test_calls_end_without_a_store(tmp_path: Path):
    seen, where = lose_store(use_without_a_store, tmp_path, signal.SIGKILL)
    gone = read_result(tmp_path, "gone at")[0]
    for calls in seen:
        for name, each in calls.items():
            fails = name in ("wait", "wait in connect", "first use", "connect", "report")
            assert each.kind == ("WorldError" if fails else ""), f"{name}: {each}"
            assert not each.kind or each.text.startswith(f"{where} failed: "), each.text
            assert each.end - max(each.start, gone) < 1.0 + SLACK, f"{name}: {each}"


def use_while_the_store_stops(folder: Path) -> tuple[Attempt, Attempt, Attempt, Attempt, float]:
    beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    check_sums(groups_of(mesh))
    connector = "pgmesh.groups.connecting._run"
    wait_until(lambda: connector not in threads_of_pgmesh(), "the pairs are started")  # which asks the store
    dist.barrier()
    connecting = connect_in_thread(ProcessGroupMesh(dp=2, tp=2, name="first"))
    set_flag(folder, f"ready {mesh.rank}")
    wait_for_flag(folder, "gone")
    sums = attempt(lambda: check_sums(groups_of(mesh)))
    made = attempt(lambda: mesh.group("tp", timeout=50))
    used = attempt(lambda: check_sums({"tp": (mesh.group("tp", timeout=50), mesh.ranks("tp"))}))
    return sums, made, used, connecting(), read_result(folder, "continued")[0]


@pytest.mark.fault("the store is stopped, or its host does not answer")
def test_calls_wait_for_a_stopped_store(tmp_path: Path):
    """It stops for longer than H. No rank is taken for lost."""
    assert STARVED or STOP > H
    seen, _ = lose_store(use_while_the_store_stops, tmp_path, signal.SIGSTOP)
    for rank, (sums, made, used, connected, continued) in enumerate(seen):
        assert not sums.kind + made.kind + used.kind + connected.kind, (sums, made, used, connected)
        assert sums.took < STOP / 3 + SLACK
        if rank in (1, 3):  # on the others, connect waits with the client of the store
            assert made.took < STOP / 3 + SLACK
        assert continued <= used.end < continued + 1.0 + SLACK
        assert continued <= connected.end < continued + 2.0 + SLACK


def die_in_a_first_collective(folder: Path) -> Attempt:
    """Rank 2 dies when its address is in the store. Rank 0 enters the collective at that time, and rank 1 later."""
    beat_fast()
    mesh = ProcessGroupMesh(3, name="actor")
    mesh.configure(0, timeout=SHORT)
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


@pytest.mark.fault("a member dies before or in the first collective")
def test_plain_first_collective_raises_if_a_member_died(tmp_path: Path):
    with fresh_world(3) as own:
        seen = results(own.outcomes(die_in_a_first_collective, tmp_path), 2)
    for failed in seen:
        assert failed.kind in ("RuntimeError", "MissingRanksError"), failed
        assert failed.took < 5 * SHORT + SLACK  # Gloo waits five timeouts for a neighbour to connect


def quickest(act: Callable[[], Any]) -> float:
    """The least time until an error of an ended group or mesh, in seconds."""
    seen = [attempt(act) for _ in range(20)]
    assert {each.kind for each in seen} == {"LifetimeError"}, seen[0]
    return min(each.took for each in seen)


@pytest.mark.fault("a mesh used after close, or the end of its world")
@on_ranks(2)
def test_ended_mesh_raises_within_a_millisecond():
    mesh = ProcessGroupMesh(dp=1, tp=2, name="actor")
    group = mesh.group("tp")
    check_sums(groups_of(mesh))
    dist.barrier()
    mesh.release("tp")
    released = quickest(lambda: dist.all_reduce(torch.ones(1), group=group))
    mesh.close()
    assert max(released, quickest(lambda: mesh.group("tp"))) < (SLACK if STARVED else 0.001)
