"""Ranks that die early, and ranks that are stuck in a collective: the errors and reports of all ranks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.rendezvous import timing
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    SLACK,
    Attempt,
    H,
    attempt,
    beat_fast,
    connect_and_beat,
    connect_and_check,
    kill_self,
    meanwhile,
    results,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    wait_until,
)
from tests.support.logs import logged_lines
from tests.support.programs import wait_until_gone
from tests.support.torch_tables import address_is_published
from tests.support.worlds import STARVED, check_sums, fresh_world, groups_of, on_ranks

D = 1.5  # seconds
SHORT = 10.0 if STARVED else 0.6  # seconds; the timeout of a group that loses a member


def sum_powers(group: dist.ProcessGroup) -> int:
    total = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(total, group=group)
    return int(total.item())


# ---- a rank is stuck in a collective ----


def report_and_signal(mesh: ProcessGroupMesh, folder: Path) -> None:
    """Report from a thread once the others know of the collective, then on a signal. A report starts the heartbeats."""
    wait_for_flags(folder, "failed", (0, 3))
    entered = "entered by ranks 1, 2"
    text = wait_until(lambda: text if entered in (text := str(mesh.report())) else "", f"the report: {entered}")
    (folder / f"report {mesh.rank}").write_text(text)
    os.kill(os.getpid(), signal.SIGUSR1)
    errors = folder / f"errors {mesh.rank}"
    wait_until(lambda: "last status of the other ranks" in errors.read_text(), "the report on a signal")
    set_flag(folder, f"reported {mesh.rank}")


@on_ranks(4, fresh=True)
def test_report_and_errors_show_the_stuck_collective(tmp_path: Path):
    """Ranks 1 and 2 enter an all-reduce of all four. Ranks 0 and 3 do not: they wait for them in connect.

    No rank has called connect before: the heartbeats of the stuck ranks start by themselves.
    """
    beat_fast()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    sum_powers(mesh.group())
    running = r"in all_reduce \(collective 2\) of group dp, tp of mesh 'actor' for \d+ s"
    if mesh.rank in (1, 2):
        errors = tmp_path / f"errors {mesh.rank}"
        watcher = threading.Thread(target=report_and_signal, args=(mesh, tmp_path), daemon=True)
        with errors.open("w") as stderr, contextlib.redirect_stderr(stderr):
            mesh.report_on(signal.SIGUSR1)
            watcher.start()
            assert sum_powers(mesh.group()) == 15
            watcher.join(5.0)
        for text in ((tmp_path / f"report {mesh.rank}").read_text(), errors.read_text()):
            assert re.search(rf"this rank is {running}; entered by ranks 1, 2; ranks 0, 3 did not report it", text)
    else:
        failed = attempt(lambda: mesh.connect("tp", timeout=timedelta(seconds=D)))
        set_flag(tmp_path, f"failed {mesh.rank}")
        wait_for_flags(tmp_path, "reported", (1, 2))
        assert sum_powers(mesh.group()) == 15
        assert failed.kind == "MissingRanksError"
        assert re.search(rf"rank {2 if mesh.rank else 1}: {running}", failed.text), failed
        assert failed.took < D + SLACK
    mesh.connect("tp", timeout=LONG_TIMEOUT)
    check_sums(groups_of(mesh))


@pytest.mark.fault("a living member skips a later collective")
@on_ranks(4, fresh=True)
def test_timeout_names_living_rank_that_skipped_a_collective(tmp_path: Path):
    """Rank 3 skips the third collective of a connected group, until the others have failed."""
    beat_fast()
    timing.TIMING = timing.TIMING._replace(warn_in_collective=0.1)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    mesh.configure("dp", "tp", timeout=max(4.0, SHORT))
    connect_and_beat(mesh)
    group = mesh.group("dp", "tp")
    assert sum_powers(group) == 15
    if mesh.rank == 3:
        wait_for_flags(tmp_path, "failed", (0, 1, 2))
        return
    with logged_lines() as lines:
        failed = attempt(lambda: sum_powers(group))
    set_flag(tmp_path, f"failed {mesh.rank}")
    skipped = r"rank 3 did not report all_reduce \(collective \d+\)\n  rank 3: not in connect"
    assert failed.kind == "MissingRanksError"
    assert re.search(rf"group dp, tp of mesh 'actor': {skipped}", failed.text), failed
    (line,) = lines  # after half of the timeout
    running = r"this rank is in all_reduce \(collective \d+\) of group dp, tp of mesh 'actor' for (\d+) s"
    (seconds,) = re.findall(rf"{running}: {skipped}", line.text)
    assert int(seconds) >= max(4.0, SHORT) / 2


@on_ranks(4, "fast")
def test_all_of_many_stuck_collectives_end_soon():
    """Rank 0 waits for rank 2 to connect to it, or for a message: that depends on their ports in each group."""
    beat_fast()
    groups, timeout = list[dist.ProcessGroup](), max(2.0, SHORT)
    for i in range(8):
        mesh = ProcessGroupMesh(4, name=f"mesh {i}")
        mesh.configure(timeout=timeout)
        mesh.connect(timeout=LONG_TIMEOUT)
        groups.append(mesh.group())
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == 0:
        works: list[Any] = [dist.broadcast(torch.ones(1), src=2, group=group, async_op=True) for group in groups]
        wait_until(lambda: all(work.is_completed() for work in works), "the end of all collectives")
    took = time.monotonic() - start
    dist.barrier()
    assert took < timeout + 2 * BEAT + SLACK


# ---- a member dies in a first collective that no connect preceded ----


def one_dies_in_a_first_collective(folder: Path) -> Attempt:
    """Rank 2 dies when its address is in the store. Rank 0 enters the collective at that time, and rank 1 later."""
    beat_fast()
    mesh = ProcessGroupMesh(3, name="actor")
    mesh.configure(0, timeout=timedelta(seconds=SHORT))
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


def test_first_collective_names_dead_member_by_its_listener(tmp_path: Path):
    with fresh_world(3) as own:
        seen = results(own.outcomes(one_dies_in_a_first_collective, tmp_path), 2)
    for failed in seen:
        print(failed, failed.took)
        assert failed.kind == "MissingRanksError"
        assert "group 0 of mesh 'actor': rank 2 ended, or destroyed the group:" in failed.text
        assert re.search(r"rank 2: its listener at \S+:\d+ refuses connections", failed.text)
        assert failed.took < 5 * SHORT + SLACK  # Gloo waits five timeouts for a neighbour to connect


# ---- report ----


def report_on_the_lost(folder: Path) -> tuple[str, str, float]:
    """Rank 2 is killed and rank 3 is stopped; the statuses once the report names both, and the seconds until then."""
    beat_fast()
    mesh = ProcessGroupMesh(4, name="train")
    connect_and_beat(mesh)
    set_flag(folder, f"ready {mesh.rank}")
    wait_for_flags(folder, "ready", range(4))
    if mesh.rank >= 2:
        kill_self(signal.SIGKILL if mesh.rank == 2 else signal.SIGSTOP)
    start = time.monotonic()

    def look() -> dict[int, str] | None:
        others = mesh.report().others
        return others if "it has ended" in others[2] and "its last heartbeat was at" in others[3] else None

    others = wait_until(look, "the report names both")
    took = time.monotonic() - start
    set_flag(folder, f"reported {mesh.rank}")
    return others[2], others[3], took


@pytest.mark.fault("`report()` after a rank has ended or fallen silent")
def test_report_names_ended_and_silent_ranks(tmp_path: Path):
    with fresh_world(4) as own:

        def end_stopped_rank() -> None:
            wait_for_flags(tmp_path, "reported", range(2))
            own.kill(3, signal.SIGKILL)

        with meanwhile(end_stopped_rank):
            outcomes = own.outcomes(report_on_the_lost, tmp_path)
    at = r"its last heartbeat was at \d\d:\d\d:\d\d UTC by its clock, \d+ s ago by this one; "
    at += "its last status: not in connect"
    for ended, silent, took in results(outcomes, 2, 3):
        print(ended, silent, took)
        assert took < H + 1.0 + SLACK
        assert re.fullmatch(rf"it has ended: its listener at 127\.0\.0\.1:\d+ refuses connections; {at}", ended), ended
        assert re.fullmatch(at, silent), silent


# ---- a mismatch that a rank cannot read, since it waits for a connection ----


def sum_of_another_order(folder: Path) -> Attempt:
    """Rank 3 orders the ranks differently. The others learn it, and rank 1 waits for them to connect."""
    order = [3, 2, 1, 0] if dist.get_rank() == 3 else [0, 1, 2, 3]
    mesh = ProcessGroupMesh(dp=4, ranks=order, name="ordered")
    mesh.configure(timeout=60.0)
    failed = attempt(lambda: dist.all_reduce(torch.ones(1), group=mesh.group()))
    set_flag(folder, f"failed {mesh.rank}")
    for rank in range(4):
        wait_for_flag(folder, f"failed {rank}")
    mesh.close()
    return failed


@pytest.mark.fault("shape, axes, order of ranks or options differ")
def test_mismatch_ends_a_wait_for_a_connection(tmp_path: Path):
    with fresh_world(4) as world:
        for failed in results(world.outcomes(sum_of_another_order, tmp_path)):
            assert failed.kind == "MismatchError", failed
            assert failed.took < 3.0 + SLACK, failed
