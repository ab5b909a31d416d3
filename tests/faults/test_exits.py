"""How processes end: after a use of groups, after an abort or a shrink, in a fork, and with a collective under way."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from tests.support.exiting import Ended, run_to_exit
from tests.support.faults import read_result, wait_for_flag, wait_until, write_result
from tests.support.programs import wait_until_gone
from tests.support.torch_tables import address_is_published
from tests.support.worlds import STARVED

SHORT = 10.0 if STARVED else 0.6  # seconds; the timeout of a group that loses a member
STATUS = 7

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


def in_asynchronous_collective() -> None:
    """Rank 2 ends when its address is in the store. Rank 0 enters the collective at that time, and rank 1 later."""
    mesh = ProcessGroupMesh(3, name="actor")
    mesh.configure(0, timeout=4 * SHORT)
    dist.barrier()
    if mesh.rank < 2:
        wait_for_flag(Path(), "address")
    if mesh.rank == 1:
        assert wait_until_gone(read_result(Path(), "address"))
    work = dist.all_reduce(torch.ones(1), group=mesh.group(), async_op=True)
    if mesh.rank == 2:
        wait_until(lambda: address_is_published(mesh.group()), "the address of rank 2")
        write_result(Path(), "address", os.getpid())
        os._exit(0)
    work.wait()


def after(how: str, delay: float, leaves: bool) -> None:
    """Abort or shrink the mesh; "blocked" and "thread": while ranks 2 and 3 are in a collective, in a thread or not."""
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    mesh.connect(timeout=60)
    dist.barrier()
    end_mesh(mesh, how)
    time.sleep(delay)
    if leaves:
        dist.destroy_process_group()
    sys.exit(STATUS)


def end_mesh(mesh: ProcessGroupMesh, how: str) -> None:
    def block() -> None:
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1), group=mesh.group("dp"))

    if mesh.rank >= 2 and how == "blocked":
        block()
        return
    if mesh.rank >= 2 and how == "thread":
        threading.Thread(target=block, daemon=True).start()
    if how in ("blocked", "thread"):
        time.sleep(0.2)  # until they are in it; an earlier abort ends it as well
    if how == "shrink":
        mesh.shrink("dp", timeout=30)
    else:
        mesh.abort("the test")


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
    larger = {"asynchronous": (in_asynchronous_collective, 3), "shrink": (after, 4, "shrink", 0.09, True)}
    return run_to_exit(tmp_path_factory.mktemp("ends"), {**pairs, **larger})


@pytest.mark.fault("a process ends without `close`")
@pytest.mark.parametrize("fn", SILENT, ids=lambda fn: fn.__name__)
def test_process_without_close_exits_with_status_0(ends: dict[str, list[Ended]], fn: Callable[[], None]):
    for each in ends[fn.__name__]:
        assert (each.status, each.err.strip()) == (0, "")
    assert fn is not with_a_failed_collective or "rank 1 did not reach" in ends[fn.__name__][0].out


def test_process_that_raises_prints_only_its_error(ends: dict[str, list[Ended]]):
    for rank, (status, _, err) in enumerate(ends["in_an_error"]):
        assert status == 1, err
        _, error, rest = err.rstrip().partition("ZeroDivisionError: by design")
        assert error, err
        # If the other rank has ended by then, the log says that it did.
        ended = rf"rank {1 - rank} ended, or destroyed the group:\n  .* refuses connections$"
        assert not rest or re.search(ended, rest)


@pytest.mark.fault("a process forks")
def test_forked_child_refuses_groups_and_exits(ends: dict[str, list[Ended]]):
    for rank, (status, out, err) in enumerate(ends["in_a_fork"]):
        assert (status, err.strip()) == (0, ""), out
        lines = out.splitlines()
        assert lines[0].startswith("LifetimeError: mesh 'actor' was created before this process was forked.")
        assert "group tp of mesh 'actor' was created before this process was forked" in lines[1]
        assert [line.partition(":")[0] for line in lines[2:4]] == ["LifetimeError"] * 2  # of a copy, and of a new mesh
        assert f"rank {rank} of ProcessGroupMesh(dp=1, tp=2, name='actor') holds 0 groups" in out
        assert lines[-3:] == [f"(0, {rank})", f"the child's status: {STATUS}", "the parent goes on"]


def test_exit_logs_dead_rank_after_asynchronous_collective(ends: dict[str, list[Ended]]):
    """torch raises the error of an asynchronous collective itself, so it cannot name the rank."""
    assert [each.status for each in ends["asynchronous"]] == [1, 1, 0]
    for rank in range(2):
        errors = ends["asynchronous"][rank].err
        print(errors)
        ranks = "1, 2" if rank == 0 else "0, 2"  # the other one may have ended too, of the same error
        assert re.search(
            rf"^group 0 of mesh 'actor': (rank 2|ranks {ranks}) ended, or destroyed the group:$", errors, re.MULTILINE
        )
        assert re.search(r"^  rank 2: its listener at \S+:\d+ refuses connections$", errors, re.MULTILINE)
        assert errors.count("its listener at") == errors.count("refuses connections")


@pytest.mark.fault("the program ends 0 to 300 ms after an abort, a shrink or a failed collective")
def test_exit_status_is_kept_after_shrink(ends: dict[str, list[Ended]]):
    """90 ms later the groups are just being freed."""
    assert [each.status for each in ends["shrink"]] == [STATUS] * 4, ends["shrink"]


@pytest.mark.fault("the program ends 0 to 300 ms after an abort, a shrink or a failed collective")
@pytest.mark.long
@pytest.mark.parametrize("how", ["abort", "shrink", "blocked", "thread"])
def test_exit_status_is_kept_at_every_delay(how: str, tmp_path: Path):
    delays = [(0.0, False), (0.09, False), (0.3, True)]
    worlds = {f"{delay} s": (after, 4, how, delay, leaves) for delay, leaves in delays}
    for delay, ranks in run_to_exit(tmp_path, worlds).items():
        assert [each.status for each in ranks] == [STATUS] * 4, (delay, ranks)
