"""How processes end: after a use of groups, in a fork, and with a collective pending. elastic/test_exit.py has aborts.

PGMESH_EXITS=200 runs each way to end with a pending collective 200 times, for PGMESH_EXITS_SECONDS in all.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.groups.world import current_world
from pgmesh.liveness import timing
from pgmesh.liveness.liveness import liveness_of
from tests.support.exiting import Ended, run_to_exit
from tests.support.faults import LONG_TIMEOUT, SLACK, Attempt, attempt, wait_until_waiting
from tests.support.pending_exits import Case, all_cases, chosen_cases, problems
from tests.support.worlds import STARVED

STATUS = 7
SOON = 2.0 + SLACK  # seconds until a process has ended that misses members
PENDING_SECONDS = 600.0  # for all worlds with a pending collective
EXITS = int(os.environ.get("PGMESH_EXITS", "1"))
EXITS_SECONDS = float(os.environ.get("PGMESH_EXITS_SECONDS", "45"))
OTHERS = all_cases(EXITS) if EXITS > 1 else [case for case in all_cases(1) if case not in chosen_cases()]


def used() -> ProcessGroupMesh:
    mesh = pair()
    use(mesh)
    return mesh


def pair() -> ProcessGroupMesh:
    return ProcessGroupMesh(dp=1, tp=2, name="actor")


def use(mesh: ProcessGroupMesh) -> None:
    dist.all_reduce(torch.ones(1), group=mesh.group("tp"))
    dist.all_reduce(torch.ones(1), group=mesh.group("dp", timeout=5))
    dist.all_reduce(torch.ones(1), group=mesh.group("dp", "tp"))


def nothing_closed() -> None:
    used()


def in_an_error() -> None:
    used()
    raise ZeroDivisionError("by design")


def with_a_failed_collective() -> None:
    mesh = pair()
    if mesh.rank == 0:
        mesh.configure("tp", timeout=0.5)
        try:
            dist.all_reduce(torch.ones(1), group=mesh.group("tp"))
        except TimeoutError as error:
            print(error)
    dist.barrier()


def with_a_pending_collective() -> None:
    global work
    mesh = pair()
    if mesh.rank == 0:
        work = dist.all_reduce(torch.ones(1), group=mesh.group("tp"), async_op=True)
    dist.barrier()


def with_torch_destroyed() -> None:
    used()
    dist.barrier()
    dist.destroy_process_group()


def while_another_connects() -> None:
    """Rank 1 ends without closing its mesh while rank 0 waits for it."""
    mesh = pair()
    mesh.connect("tp")
    if mesh.rank == 1:
        wait_until_waiting(0)
        print(time.monotonic())
    else:
        mesh.release("tp")  # a connected group is skipped
        print(json.dumps(attempt(lambda: mesh.connect("tp", timeout=LONG_TIMEOUT))))


def after_heartbeats(milliseconds: int) -> None:
    dist.barrier()  # torch's own group is connected
    timing.HEARTBEAT = 0.01
    liveness_of(current_world())
    time.sleep(milliseconds / 1000)


def after_report(milliseconds: int) -> None:
    dist.barrier()
    ProcessGroupMesh(-1).report()
    time.sleep(milliseconds / 1000)


def in_an_error_after_heartbeats(milliseconds: int) -> None:
    after_heartbeats(milliseconds)
    raise ZeroDivisionError("by design")


def with_torch_destroyed_after_heartbeats(milliseconds: int) -> None:
    after_heartbeats(milliseconds)
    dist.destroy_process_group()


def in_a_fork() -> None:
    mesh = used()
    group = mesh.group("tp")
    asks: list[Callable[[], object]] = [
        lambda: mesh.group("tp"),
        lambda: dist.all_reduce(torch.ones(1), group=group),
        mesh.close,
        lambda: copy.deepcopy(mesh).group("tp"),
        lambda: ProcessGroupMesh(dp=2, name="child"),
        lambda: print(mesh.report()),
        lambda: print(mesh.coord),
    ]
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # of a fork beside threads, from 3.12 on
    child = os.fork()
    if child == 0:
        for ask in asks:
            if (failed := attempt(ask)).kind:
                print(f"{failed.kind}: {failed.text}")
        print("in seconds:", min(attempt(asks[0]).took for _ in range(20)))
        sys.exit(STATUS)
    end = time.monotonic() + 30
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.01)  # a child that hangs is what this looks for, so no wait without a deadline
    if not ended[0]:
        os.kill(child, 9)
    print("the child's status:", os.waitstatus_to_exitcode(ended[1]) if ended[0] else "it hung")
    use(mesh)
    print("the parent goes on")


SILENT = [nothing_closed, with_a_failed_collective, with_a_pending_collective, with_torch_destroyed]
WITH_LIVENESS = {
    after_heartbeats: 0,
    after_report: 0,
    in_an_error_after_heartbeats: 1,
    with_torch_destroyed_after_heartbeats: 0,
}
"""Ends at any moment of the liveness thread, and their exit statuses."""
MILLISECONDS = (0, 20)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ended]]:
    """How the ranks of several worlds ended, by the function that they called."""
    pairs: dict[str, Any] = {fn.__name__: (fn, 2) for fn in [*SILENT, in_an_error, in_a_fork, while_another_connects]}
    pairs |= {f"{fn.__name__} {after}": (fn, 2, after) for fn in WITH_LIVENESS for after in MILLISECONDS}
    return run_to_exit(tmp_path_factory.mktemp("ends"), pairs, at_once=7)


@pytest.mark.fault("interpreter exit without close")
@pytest.mark.parametrize("fn", SILENT, ids=lambda fn: fn.__name__)
def test_process_without_close_exits_with_status_0(ends: dict[str, list[Ended]], fn: Callable[[], None]):
    waits = "rank 0 waits. group tp of mesh 'actor': rank 1 did not make this group"
    for rank, each in enumerate(ends[fn.__name__]):
        has_waited = fn is with_a_failed_collective and rank == 0
        assert each.status == 0
        assert (each.err.startswith(waits) and each.err.count("\n") == 1) if has_waited else not each.err.strip()
    assert fn is not with_a_failed_collective or "rank 1 did not make this group" in ends[fn.__name__][0].out


def test_process_that_raises_prints_only_its_error(ends: dict[str, list[Ended]]):
    for status, _, err in ends["in_an_error"]:
        assert status == 1, err
        assert err.rstrip().endswith("ZeroDivisionError: by design")
        assert err.count("Traceback") == 1


@pytest.mark.parametrize("fn", WITH_LIVENESS, ids=lambda fn: fn.__name__)
def test_exit_status_beside_liveness_thread_is_the_programs(ends: dict[str, list[Ended]], fn: Callable[[int], None]):
    for after in MILLISECONDS:
        ended = ends[f"{fn.__name__} {after}"]
        assert [each.status for each in ended] == [WITH_LIVENESS[fn]] * 2, ended


@pytest.mark.fault("interpreter exit without close")
def test_process_exit_after_connect_is_named_at_once(ends: dict[str, list[Ended]]):
    waiting, left = ends["while_another_connects"]
    assert [each.status for each in (waiting, left)] == [0, 0]
    failed = Attempt(*json.loads(waiting.out))
    assert failed.kind == "MissingRanksError"
    assert "rank 1 has left the world: its process has exited" in failed.text
    assert failed.end - float(left.out) < 1.0 + SLACK


@pytest.mark.fault("fork")
def test_forked_child_refuses_groups_and_exits(ends: dict[str, list[Ended]]):
    for rank, (status, out, err) in enumerate(ends["in_a_fork"]):
        assert (status, err.strip()) == (0, ""), out
        lines = out.splitlines()
        assert lines[0].startswith("LifetimeError: mesh 'actor' was created before this process was forked.")
        assert "group tp of mesh 'actor' was created before this process was forked" in lines[1]
        assert [line.partition(":")[0] for line in lines[2:4]] == ["LifetimeError"] * 2  # of a copy, and of a new mesh
        assert out.count("mesh 'actor' was created before this process was forked") >= 3  # of the report too
        assert float(lines[-3].partition(":")[2]) < (SLACK if STARVED else 0.001)
        assert [lines[-4], *lines[-2:]] == [f"(0, {rank})", f"the child's status: {STATUS}", "the parent goes on"]


@pytest.mark.fault("the program ends while an asynchronous first collective is pending")
@pytest.mark.parametrize(
    ("cases", "seconds"),
    [
        pytest.param(chosen_cases(), PENDING_SECONDS, id="half of them"),
        pytest.param(OTHERS, EXITS_SECONDS, id="the others", marks=pytest.mark.long),
    ],
)
def test_exit_status_is_kept_with_pending_collective(tmp_path: Path, cases: Sequence[Case], seconds: float):
    """Each process has its own exit status, and in time."""
    wrong, took = problems(cases, tmp_path, seconds)
    assert not wrong, "\n".join(wrong)
    assert statistics.median(took) < SOON
