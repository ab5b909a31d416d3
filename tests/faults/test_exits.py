"""How processes end: after a use of groups, in a fork, and with a collective pending. elastic/test_exit.py has aborts.

PGMESH_EXITS=200 runs each way to end with a pending collective 200 times, for PGMESH_EXITS_SECONDS in all.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from tests.support.exiting import Ended, run_to_exit
from tests.support.faults import SLACK
from tests.support.pending_exits import Case, all_cases, chosen_cases, problems

STATUS = 7
SOON = 2.0 + SLACK  # seconds until a process has ended that misses members
PENDING_SECONDS = 600.0  # for all worlds with a pending collective
EXITS = int(os.environ.get("PGMESH_EXITS", "1"))
EXITS_SECONDS = float(os.environ.get("PGMESH_EXITS_SECONDS", "60"))

# ---- inside a rank ----


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


def with_torch_destroyed_while_one_waits() -> None:
    mesh = pair()
    if mesh.rank == 0:
        _work = dist.all_reduce(torch.ones(1), group=mesh.group("tp"), async_op=True)
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
            try:
                ask()
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
        sys.exit(STATUS)
    end = time.monotonic() + 30
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.01)  # a child that hangs is what this looks for, so no wait without a deadline
    if not ended[0]:
        os.kill(child, 9)
    print("the child's status:", os.waitstatus_to_exitcode(ended[1]) if ended[0] else "it hung")
    use(mesh)
    print("the parent goes on")


# ---- their ends ----

SILENT = [
    nothing_closed,
    with_a_failed_collective,
    with_a_pending_collective,
    with_torch_destroyed,
    with_torch_destroyed_while_one_waits,
]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ended]]:
    """How the ranks of several worlds ended, by the function that they called."""
    pairs = {fn.__name__: (fn, 2) for fn in [*SILENT, in_an_error, in_a_fork]}
    return run_to_exit(tmp_path_factory.mktemp("ends"), pairs)


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


@pytest.mark.fault("fork")
def test_forked_child_refuses_groups_and_exits(ends: dict[str, list[Ended]]):
    for rank, (status, out, err) in enumerate(ends["in_a_fork"]):
        assert (status, err.strip()) == (0, ""), out
        lines = out.splitlines()
        assert lines[0].startswith("LifetimeError: mesh 'actor' was created before this process was forked.")
        assert "group tp of mesh 'actor' was created before this process was forked" in lines[1]
        assert [line.partition(":")[0] for line in lines[2:4]] == ["LifetimeError"] * 2  # of a copy, and of a new mesh
        assert out.count("mesh 'actor' was created before this process was forked") >= 3  # of the report too
        assert lines[-3:] == [f"(0, {rank})", f"the child's status: {STATUS}", "the parent goes on"]


@pytest.mark.fault("the program ends while an asynchronous first collective is pending")
@pytest.mark.parametrize(
    ("cases", "seconds"),
    [
        pytest.param(chosen_cases(), PENDING_SECONDS, id="half of them"),
        pytest.param(all_cases(EXITS), EXITS_SECONDS, id="all", marks=pytest.mark.long),
    ],
)
def test_exit_status_is_kept_with_pending_collective(tmp_path: Path, cases: Sequence[Case], seconds: float):
    """Each process has its own exit status, and in time."""
    wrong, took = problems(cases, tmp_path, seconds)
    assert not wrong, "\n".join(wrong)
    assert statistics.median(took) < SOON
