"""Faults while real processes connect: the error on each rank, and its time. Those of stores: faults/test_faults.py."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, mesh as mesh_file
from pgmesh.groups import backends
from pgmesh.groups.world import current_world
from tests.support import worlds
from tests.support.board import Fault, at_all_reduce, faults, key_of, losing_all_reduces, raises
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    NAMED,
    SLACK,
    Attempt,
    H,
    attempt,
    beat_fast_with_bystander,
    connect_and_check,
    connected_bystander,
    kill_self,
    meanwhile,
    read_result,
    results,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    wait_until_waiting,
    write_result,
)
from tests.support.logs import logged_lines
from tests.support.programs import send_signal
from tests.support.rank_processes import RankProcesses, join_world
from tests.support.worlds import check_sums, fresh_world, groups_of, on_ranks

D = 1.5  # seconds: a deadline that passes
ALIKE: dict[str, Any] = {"dp": 2, "tp": 2, "ranks": range(4)}
DIFFER: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"dp": 4, "tp": 1}, "shape: [2, 2] on ranks 0, 1, 2, [4, 1] on rank 3"),
    "axes": ({"dp": 2, "cp": 2}, "axes: ['dp', 'tp'] on ranks 0, 1, 2, ['dp', 'cp'] on rank 3"),
    "ranks": ({**ALIKE, "ranks": [3, 1, 2, 0]}, "ranks: (0, 1, 2, 3) on ranks 0, 1, 2, (3, 1, 2, 0) on rank 3"),
    "timeout": (ALIKE, f"timeout: {worlds.DEADLINE} on ranks 0, 1, 2, 7.0 on rank 3"),
    "backend": (ALIKE, "backend: gloo on ranks 0, 1, 2, cpu:gloo on rank 3"),
    "world": (ALIKE, "size of the world: 4 on ranks 0, 1, 2, 5 on rank 3"),
}
CONFIGURED: dict[str, Any] = {"timeout": {"timeout": 7.0}, "backend": {"backend": "cpu:gloo"}}
SIGNALS = {
    "KeyboardInterrupt": (signal.SIGINT, signal.default_int_handler),
    "SystemExit": (signal.SIGTERM, lambda number, frame: sys.exit(7)),
}
INTERRUPTS = {
    "making": lambda stop: mock.patch.dict(backends.CONSTRUCTORS, gloo=lambda *arguments: stop()),
    "first collective": lambda stop: at_all_reduce(before=stop),
    "/broken": lambda stop: faults(Fault(lambda each: key_of(each).endswith("/broken"), before=stop, times=1)),
}
"""Ctrl-C in this process, at one place of ``connect``. connect/test_model.py has those at the other operations."""


@contextlib.contextmanager
def larger_world() -> Iterator[None]:
    """This rank takes the world for larger than it is."""
    mistaken = dist.get_rank(), 1 + dist.get_world_size()
    with (
        mock.patch.object(mesh_file, "world_rank_and_size", return_value=mistaken),
        mock.patch.object(current_world(), "size", mistaken[1]),
    ):
        yield


@pytest.mark.fault("shape, axes, rank order, options differ between ranks")
@on_ranks(4, "fast")
def test_mismatch_is_raised_on_all_arrived_ranks(tmp_path: Path):
    """Once, though several groups differ; a retry works at once. test_rounds.py has the exact time."""
    bystander, odd = beat_fast_with_bystander(), dist.get_rank() == 3
    for what, (theirs, words) in DIFFER.items():
        with larger_world() if odd and what == "world" else contextlib.nullcontext():
            mesh = ProcessGroupMesh(**(theirs if odd else ALIKE), name=f"actor, {what}")
            if odd and what in CONFIGURED:
                mesh.configure(*mesh.axes, **CONFIGURED[what])
            if odd:
                wait_until_waiting(0, 1, 2)
                write_result(tmp_path, what, time.monotonic())
            failed = attempt(lambda mesh=mesh: mesh.connect(*mesh.axes, mesh.axes, timeout=LONG_TIMEOUT))
        assert failed.kind == "MismatchError", failed
        assert failed.text.count(words) == failed.text.count("is not the same on all ranks") == 1, failed
        assert failed.end - read_result(tmp_path, what)[0] < 0.1 + SLACK
        check_sums(groups_of(bystander))
        mesh.close()
        right = ProcessGroupMesh(**ALIKE, name=mesh.name)
        connect_and_check(right, "dp", "tp", ("dp", "tp"))
        right.close()
        dist.barrier()


@pytest.mark.fault("ranks `connect` in a circle")
@on_ranks(4, "fast")
def test_circle_error_shows_what_each_rank_awaits():
    bystander = beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    first = {0: "tp", 1: "dp", 3: "tp", 2: "dp"}[mesh.rank]  # 0 waits for 1, 1 for 3, 3 for 2, 2 for 0
    following = {0: 1, 1: 3, 3: 2, 2: 0}
    with logged_lines() as lines:
        failed = attempt(lambda: mesh.connect(first, timeout=timedelta(seconds=D)))
    check_sums(groups_of(bystander))
    connect_and_check(mesh, "tp", "dp")
    assert failed.kind == "MissingRanksError"
    after = following[mesh.rank]
    waits = rf"rank {after}: .*connecting group .* of mesh 'actor' .* at test_faults.py:\d+, waiting for rank "
    for text in (failed.text, lines[0].text):
        assert re.search(f"{waits}{following[after]}", text), text
    assert lines[0].text.startswith(f"rank {mesh.rank} waits in connect.")
    assert D / 3 <= lines[0].at - failed.start < D / 3 + SLACK / 2
    assert failed.took < D + SLACK


@on_ranks(4, "fast")
def test_wrong_first_sum_fails_on_all_ranks():
    beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    twice = mock.patch.object(torch, "ones", lambda *size, **how: torch.full(size, 2.0, **how))
    with twice if mesh.rank == 3 else contextlib.nullcontext():
        failed = attempt(lambda: mesh.connect(("dp", "tp"), timeout=LONG_TIMEOUT))
    again = attempt(lambda: connect_and_check(mesh, ("dp", "tp")))
    assert failed.kind == "MismatchError", failed.text
    assert "group dp, tp of mesh 'actor' has 4 members, but the sum of one from each is 5." in failed.text
    assert not again.kind, again.text


@pytest.mark.fault("a living member never comes to `connect`")
@on_ranks(4, "fast")
def test_missing_rank_is_named_with_its_status(tmp_path: Path):
    """Ranks 0 and 1 wait for 2 and 3: 2 waits for 3 elsewhere, and 3 for no other. Both arrive too late."""
    bystander = beat_fast_with_bystander()
    everyone = ProcessGroupMesh(4, name="everyone")
    rank = everyone.rank
    pair = ProcessGroupMesh(2, ranks=[2, 3], name="pair") if rank >= 2 else None
    with logged_lines() as lines:
        if rank == 2:
            threading.Thread(target=lambda: attempt(lambda: pair.connect(timeout=LONG_TIMEOUT)), daemon=True).start()
        if rank < 2:
            wait_until_waiting(2)
        else:
            wait_for_flags(tmp_path, "given up by", range(2))
        failed = attempt(lambda: everyone.connect(timeout=timedelta(seconds=D)))
        write_result(tmp_path, f"given up by {rank}", failed.text)
    check_sums(groups_of(bystander))
    if pair is not None and rank == 3:
        pair.connect(timeout=LONG_TIMEOUT)
    connect_and_check(everyone, 0)
    assert failed.kind == "MissingRanksError", failed
    if rank < 2:
        for text in (failed.text, lines[0].text):
            assert "group 0 of mesh 'everyone' (ranks 0, 1, 2, 3): ranks 2, 3 did not arrive" in text
            assert re.search(r"rank 2: connecting group 0 of mesh 'pair' .* at test_faults.py:\d+, waiting for", text)
            assert re.search(r"rank 3: at faults.py:\d+ in wait_until, for \d+ s", text)
        assert "did not arrive in 1.5 s" in failed.text
        assert re.search(r"Rank [01] waited at test_faults.py:\d+", failed.text)
        assert len(lines) == 1
        assert D / 3 <= lines[0].at - failed.start < D / 3 + SLACK / 2
        assert D - 0.01 <= failed.took < D + SLACK
    else:  # each logs the last decision at once, and waits for a retry
        (line,) = [each for each in lines if f"failed before rank {rank} arrived" in each.text]
        assert read_result(tmp_path, "given up by 0")[0] in line.text
        assert line.at - failed.start < 0.1 + SLACK / 2
        assert D - 0.2 <= failed.took < D + SLACK  # the deadline of one of them ends the attempt of both


def one_dies(folder: Path, moment: str) -> tuple[Attempt, float]:
    """Rank 3 dies before it arrives, before it begins the first collective, or right after."""
    # While rank 3 is awaited on a busy core, it could be silent first if heartbeats were fast.
    bystander = connected_bystander(3) if moment == "before arriving" else beat_fast_with_bystander(3)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")

    def die() -> None:
        write_result(folder, "died", time.monotonic())
        kill_self()

    if mesh.rank == 3 and moment == "before arriving":
        wait_until_waiting(0, 1, 2)
        die()
    dies = at_all_reduce(**{"after" if moment == "in" else "before": die})
    with dies if mesh.rank == 3 else contextlib.nullcontext():
        failed = attempt(lambda: mesh.connect(mesh.axes, timeout=LONG_TIMEOUT))
    check_sums(groups_of(bystander))
    connect_and_check(ProcessGroupMesh(3, ranks=range(3), name="survivors"), 0)
    return failed, failed.end - read_result(folder, "died")[0]


@pytest.mark.fault("a member dies before arriving in `connect` (L)")
@pytest.mark.fault("a member dies before or in the first collective")
@pytest.mark.parametrize("moment", ["before arriving", "before", "in"])
def test_rank_killed_during_connect_is_named(tmp_path: Path, moment: str):
    """If it dies right after it began, the collective may have been done on some or on all."""
    with fresh_world(4) as own:
        seen = results(own.outcomes(one_dies, tmp_path, moment), 3)
    for failed, since_death in seen:
        if moment != "in" or failed.kind:
            assert failed.kind == "MissingRanksError", failed
            assert "rank 3" in failed.text
            assert ("rank 3 did not arrive" if moment == "before arriving" else "first collective") in failed.text
        if moment != "in":  # known before it is silent
            assert re.search(r"rank 3 has ended: its listener at 127.0.0.1:\d+ refuses connections", failed.text)
        if moment == "before arriving":
            assert since_death < NAMED + SLACK
        else:
            assert failed.took < H + BEAT + SLACK


@on_ranks(4, "fast")
def test_group_that_failed_on_one_rank_reconnects(tmp_path: Path):
    """The first collective is done on all, but rank 3 takes it for lost; then all connect again."""
    beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    for tag in ("released", "still held"):
        wait = partial(wait_for_flags, tmp_path, f"{tag} group connected", range(3))
        with losing_all_reduces(before=wait) if mesh.rank == 3 else contextlib.nullcontext():
            failed = attempt(lambda tag=tag: mesh.connect(mesh.axes, tag=tag, timeout=LONG_TIMEOUT))
        set_flag(tmp_path, f"{tag} group connected {mesh.rank}")
        dist.barrier()
        if tag == "released":
            mesh.release()
        mesh.connect(mesh.axes, tag=tag, timeout=LONG_TIMEOUT)
        check_sums({tag: (mesh.group(tag=tag), mesh.ranks())})
        assert failed.kind == ("MissingRanksError" if mesh.rank == 3 else "")


def one_is_stopped(folder: Path) -> tuple[Attempt, Attempt, float]:
    bystander = beat_fast_with_bystander(3)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    if mesh.rank == 3:
        wait_until_waiting(0, 1, 2)
        stopped = time.monotonic()
        set_flag(folder, "stop me")
        wait_for_flag(folder, "stopped")
    failed = attempt(lambda: mesh.connect(mesh.axes, timeout=LONG_TIMEOUT))
    set_flag(folder, f"done {mesh.rank}")
    check_sums(groups_of(bystander)) if mesh.rank < 3 else None
    return failed, attempt(lambda: connect_and_check(mesh, mesh.axes, "dp", "tp")), stopped if mesh.rank == 3 else 0.0


@pytest.mark.fault("a member is stopped (SIGSTOP) and continues (L)")
def test_stopped_rank_is_named_and_may_return(tmp_path: Path):
    def stop(pid: int) -> None:
        wait_for_flag(tmp_path, "stop me")
        send_signal(pid, signal.SIGSTOP)
        set_flag(tmp_path, "stopped")
        wait_for_flags(tmp_path, "done", range(3))
        os.kill(pid, signal.SIGCONT)

    with fresh_world(4) as own:
        own.run(dist.get_rank)
        with meanwhile(lambda: stop(own.pids[3])):
            seen = results(own.outcomes(one_is_stopped, tmp_path))
    stopped = seen[3][2]
    assert not any(again.kind for _, again, _ in seen)
    assert not seen[3][0].kind  # it connects with the retry of the others
    for failed, _, _ in seen[:3]:
        assert failed.kind == "MissingRanksError", failed
        assert failed.text == seen[0][0].text
        assert re.search(r"rank 3 has sent no heartbeat for at least \d+ s", failed.text)
    assert max(failed.end for failed, *_ in seen[:3]) - stopped < H + BEAT + SLACK


@pytest.mark.fault("Ctrl-C or SIGTERM while connecting")
@pytest.mark.parametrize("how", SIGNALS)
@on_ranks(4, fresh=True)
def test_signal_during_connect_is_named_on_peers(how: str, tmp_path: Path):
    """Rank 2 is sent a signal while 0, 1 and 2 wait for 3, which then connects with the retry of the others."""
    bystander = beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    number, handler = SIGNALS[how]
    if mesh.rank == 2:
        signal.signal(number, handler)
        write_result(tmp_path, "pid", os.getpid())
    if mesh.rank == 3:
        wait_until_waiting(0, 1, 2)
        write_result(tmp_path, "sent", time.monotonic())
        os.kill(read_result(tmp_path, "pid")[0], number)
        wait_for_flags(tmp_path, "done", range(2))
    failed = attempt(lambda: mesh.connect(mesh.axes, timeout=LONG_TIMEOUT))
    set_flag(tmp_path, f"done {mesh.rank}")
    assert signal.getsignal(number) == handler or mesh.rank != 2
    connect_and_check(mesh, mesh.axes)
    check_sums(groups_of(bystander))
    assert failed.kind == ("MissingRanksError", "MissingRanksError", how, "")[mesh.rank], failed
    if mesh.rank < 2:
        assert re.search(r"was cancelled because rank 2 stopped connecting at test_faults.py:\d+: ", failed.text), (
            failed
        )
    if mesh.rank < 3:
        assert failed.end - read_result(tmp_path, "sent")[0] < 0.2 + SLACK, failed


@pytest.mark.fault("Ctrl-C or SIGTERM while connecting")
@pytest.mark.parametrize("where", INTERRUPTS)
@on_ranks(4, "fast")
def test_interrupt_before_or_after_arrival_reaches_peers(where: str, tmp_path: Path):
    """Rank 3 is interrupted. It has a connected group, so it reads the key under which others tell that one broke."""
    bystander = beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    mesh.connect("dp")
    if mesh.rank == 3 and where != "first collective":
        wait_until_waiting(0, 1, 2)
    with INTERRUPTS[where](raises(KeyboardInterrupt())) if mesh.rank == 3 else contextlib.nullcontext():
        failed = attempt(lambda: mesh.connect("dp", mesh.axes, timeout=LONG_TIMEOUT))
    if mesh.rank == 3:
        write_result(tmp_path, "interrupted", failed.end)
    check_sums(groups_of(bystander))
    connect_and_check(mesh, mesh.axes)
    assert failed.kind == ("KeyboardInterrupt" if mesh.rank == 3 else "MissingRanksError"), failed
    assert failed.end - read_result(tmp_path, "interrupted")[0] < 0.2 + SLACK
    assert mesh.rank == 3 or ("rank 3" in failed.text and "KeyboardInterrupt" in failed.text), failed


def connect_twice(rank: int, port: int, folder: Path, number: int) -> None:
    """Rank 3 never starts: its process has rank 2."""
    join_world(rank, port, 4)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    set_flag(folder, f"connects {rank} {number}")
    write_result(folder, f"failed {rank} {number}", *attempt(lambda: mesh.connect(("dp", "tp"), timeout=LONG_TIMEOUT)))


@pytest.mark.fault("two processes have the same rank")
def test_second_process_of_rank_is_named_everywhere(tmp_path: Path):
    processes = [(0, 0), (1, 0), (2, 0), (2, 1)]
    with RankProcesses(connect_twice, tmp_path) as ranks:
        for rank, number in processes[:3]:
            ranks.start(rank, number)
        for rank, number in processes[:3]:
            wait_for_flag(tmp_path, f"connects {rank} {number}")
        time.sleep(3 * BEAT)  # they send heartbeats, and wait
        ranks.start(*processes[3])
        wait_for_flag(tmp_path, "connects 2 1")
        started = time.monotonic()
        seen = [Attempt(*read_result(tmp_path, f"failed {rank} {number}")) for rank, number in processes]
        pids = [process.pid for process in ranks.all[2:]]
    for failed in seen:
        assert failed.kind == "MismatchError", failed
        both = re.search(r"both process (\d+) on \S+ and process (\d+) on \S+ connect as rank 2", failed.text)
        assert both is not None, failed.text
        assert sorted(map(int, both.groups())) == sorted(pids)
        assert failed.end - started < 1.0 + SLACK
