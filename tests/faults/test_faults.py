"""Faults in real processes, one test or more for each row of docs/faults.md: the error on each rank, and its time.

Heartbeats are five times as frequent here as elsewhere, so a silent rank is suspected after a second. Times are taken
in the ranks, on the clock that all processes of a machine share. No test sleeps and hopes: a rank that must act after
another one polls the store, or a file, until that one is ready.

With PGMESH_STARVED=4, while four processes keep the cores busy, heartbeats are as frequent as elsewhere, and reports
may be late. Their text may not differ.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, mesh as mesh_file
from pgmesh.groups import backends
from pgmesh.groups.world import current_world
from pgmesh.launch import StoreProcess
from pgmesh.rendezvous import timing
from tests.support import worlds
from tests.support.board import Fault, at_all_reduce, faults, key_of, losing_all_reduces, raises
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    NAMED,
    SLACK,
    WAIT_TIMEOUT,
    Attempt,
    H,
    attempt,
    beat_fast_with_bystander,
    connect_and_check,
    fast_world,
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
from tests.support.logs import LogLine, logged_lines
from tests.support.programs import send_signal
from tests.support.rank_processes import RankProcesses, join_world
from tests.support.resource_counts import CAN_COUNT, count_resources, growth
from tests.support.torch_tables import record_operations, table_sizes
from tests.support.worlds import STARVED, check_sums, fresh_world, groups_of, on_ranks

# ---- meshes and options that differ ----

ALIKE: dict[str, Any] = {"dp": 2, "tp": 2, "ranks": range(4)}
DIFFER: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"dp": 4, "tp": 1}, "shape: [2, 2] on ranks 0, 1, 2, [4, 1] on rank 3"),
    "axes": ({"dp": 2, "cp": 2}, "axes: ['dp', 'tp'] on ranks 0, 1, 2, ['dp', 'cp'] on rank 3"),
    "ranks": (
        {"dp": 2, "tp": 2, "ranks": [3, 1, 2, 0]},
        "ranks: (0, 1, 2, 3) on ranks 0, 1, 2, (3, 1, 2, 0) on rank 3",
    ),
    "options": (ALIKE, f"timeout: {worlds.DEADLINE} on ranks 0, 1, 2, 7.0 on rank 3"),
    "backend": (ALIKE, "backend: gloo on ranks 0, 1, 2, cpu:gloo on rank 3"),
    "world": (ALIKE, "size of the world: 4 on ranks 0, 1, 2, 5 on rank 3"),
}


@contextlib.contextmanager
def larger_world() -> Iterator[None]:
    """This rank takes the world for larger than it is."""
    mistaken = dist.get_rank(), 1 + dist.get_world_size()
    with (
        mock.patch.object(mesh_file, "world_rank_and_size", return_value=mistaken),
        mock.patch.object(current_world(), "size", mistaken[1]),
    ):
        yield


def differ() -> dict[str, Attempt]:
    bystander, seen = beat_fast_with_bystander(), {}
    odd = dist.get_rank() == 3
    for what, (theirs, _) in DIFFER.items():
        with larger_world() if odd and what == "world" else contextlib.nullcontext():
            mesh = ProcessGroupMesh(**(theirs if odd else ALIKE), name=f"actor, {what}")
            if odd and what == "options":
                mesh.configure(*mesh.axes, timeout=timedelta(seconds=7))
            if odd and what == "backend":
                mesh.configure(*mesh.axes, backend="cpu:gloo")
            if odd:
                wait_until_waiting(0, 1, 2)
            seen[what] = attempt(lambda mesh=mesh: mesh.connect(*mesh.axes, mesh.axes, timeout=LONG_TIMEOUT))
        check_sums(groups_of(bystander))
        mesh.close()
        right = ProcessGroupMesh(**ALIKE, name=mesh.name)
        connect_and_check(right, "dp", "tp", ("dp", "tp"))
        right.close()
        dist.barrier()
    return seen


@pytest.mark.fault("shape, axes, order of ranks or options differ")
@pytest.mark.fault("the sizes of the world differ")
def test_mismatch_is_raised_on_all_arrived_ranks():
    """Once, though several groups differ; a retry works at once. test_detection_latency.py has the exact time."""
    ranks = results(fast_world(4).outcomes(differ))
    for what, (_, words) in DIFFER.items():
        came = ranks[3][what].start
        for failed in (seen[what] for seen in ranks):
            print(failed, failed.end - came)
            assert failed.kind == "MismatchError"
            assert failed.text.count(words) == failed.text.count("is not the same on all ranks") == 1
            assert failed.end - came < 0.1 + SLACK


@pytest.mark.fault(
    "sizes that do not fit, two -1, an empty mesh, an unknown axis, ranks that are repeated, negative or foreign"
)
@on_ranks(2, "fast")
def test_local_errors_are_raised_without_store_operations():
    """The text of each error is in test_messages.py."""
    beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=1, tp=2, name="actor")
    mesh.group()
    world_size = dist.get_world_size()
    wrong: list[Callable[[], Any]] = [
        lambda: ProcessGroupMesh(dp=3, tp=2),
        lambda: ProcessGroupMesh(dp=-1, tp=-1),
        lambda: ProcessGroupMesh(dp=2, ranks=[0, 0]),
        lambda: ProcessGroupMesh(dp=2, ranks=[-1, 0]),
        lambda: ProcessGroupMesh(dp=2, ranks=[0, world_size]),
        lambda: ProcessGroupMesh(dp=0),
        lambda: mesh.group("pp"),
        lambda: mesh.connect("dp", "pp"),
        lambda: mesh.group_of([0, 0]),
    ]
    took, before = [], table_sizes()
    with record_operations() as done:
        for ask in wrong:
            best = 1.0
            for _ in range(3):  # the best of three: a machine that is busy takes its time once in a while
                seen = attempt(ask)
                assert seen.kind in ("ShapeError", "RankError", "AxisError"), seen
                best = min(best, seen.took)
            took.append(best)
    assert table_sizes() == before
    connect_and_check(mesh, "tp")
    assert done == []
    assert max(took) < (SLACK if STARVED else 0.01)


# ---- the order of asking ----


@pytest.mark.fault("ranks wait for each other in a circle")
@on_ranks(4, "fast")
def test_circle_error_shows_every_rank_in_it():
    bystander = beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    first = {0: "tp", 1: "dp", 3: "tp", 2: "dp"}[mesh.rank]  # 0 waits for 1, 1 for 3, 3 for 2, 2 for 0
    failed = attempt(lambda: mesh.connect(first, timeout=timedelta(seconds=D)))
    check_sums(groups_of(bystander))
    connect_and_check(mesh, "tp", "dp")
    assert failed.kind == "MissingRanksError"
    assert "wait for each other" in failed.text
    for rank, axis, following in [(0, "tp", 1), (1, "dp", 3), (3, "tp", 2), (2, "dp", 0)]:
        words = rf"rank {rank} connects group {axis} of mesh 'actor' .* at test_faults.py:\d+, and waits for rank "
        assert re.search(f"{words}{following}", failed.text), failed.text
    assert "Connect the groups in one call on every rank" in failed.text
    assert failed.took < D + SLACK


@pytest.mark.fault("ranks ask for a group with different options in the call, which gives different groups")
@on_ranks(2, "fast")
def test_missing_rank_error_shows_differing_call_options():
    beat_fast_with_bystander()
    with mock.patch.object(timing, "TIMING", timing.TIMING._replace(status_after=0.0)):
        group = ProcessGroupMesh(dp=2, name="actor").group(timeout=timedelta(seconds=D + 0.1 * dist.get_rank()))
        failed = attempt(lambda: dist.all_reduce(torch.ones(1), group=group))
    assert failed.kind == "MissingRanksError"
    if dist.get_rank() == 0:
        assert "rank 1 did not reach the first collective" in failed.text
        assert failed.text.startswith("group dp of mesh 'actor' (asked for with timeout=1.5): ")
        waiting = "in the first collective of group dp of mesh 'actor' (asked for with timeout=1.6), waiting for its"
        assert f"last status of rank 1: {waiting} members" in failed.text
        assert "an option asked for in a call makes a different group. Use mesh.configure" in failed.text


@pytest.mark.fault("ranks have created, closed or tried meshes of one name a different number of times")
@on_ranks(4, fresh=True)
def test_error_explains_meshes_of_other_names_or_numbers():
    bystander = beat_fast_with_bystander()

    def connect(name: str) -> Attempt:
        mesh = ProcessGroupMesh(dp=2, tp=2, name=name)
        dist.barrier()  # all of them wait for D at the same time
        failed = attempt(lambda: mesh.connect(mesh.axes, timeout=timedelta(seconds=D)))
        mesh.close()
        return failed

    if bystander.rank == 0:
        ProcessGroupMesh(dp=2, tp=2, name="actor").close()
    numbers, names = connect("actor"), connect("trian" if bystander.rank == 3 else "train")
    check_sums(groups_of(bystander))
    connect_and_check(ProcessGroupMesh(dp=2, tp=2, name="right"), "dp", "tp")
    assert numbers.kind == names.kind == "MissingRanksError"
    assert "created, closed or released them a different number of times" in numbers.text
    assert "These are different meshes: mesh 'train' on rank " in names.text
    assert "mesh 'trian' on rank 3. Create the mesh with the same name on every rank." in names.text
    assert names.took < D + SLACK


@pytest.mark.fault("the first sum of a group is wrong")
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


@pytest.mark.fault("ranks ask for groups in different orders, or threads connect groups at once")
@on_ranks(4, "fast")
def test_threads_connect_groups_in_any_order():
    """Three threads on every rank connect three groups, each rank in another order."""
    beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    wanted = [(mesh.view(dp=2, tp=2), "dp"), (mesh.view(a=4), "a"), (mesh.view(dp=2, tp=2), "tp")]
    random.Random(mesh.rank).shuffle(wanted)
    failed: list[str] = []

    def connect(part: ProcessGroupMesh, axis: str) -> None:
        seen = attempt(lambda: part.connect(axis, timeout=LONG_TIMEOUT))
        failed.extend([seen.text] if seen.kind else [])

    threads = [threading.Thread(target=connect, args=what) for what in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_TIMEOUT)
    assert not failed
    check_sums(groups_of(mesh))


# ---- a member does not arrive ----


D = 1.5


def one_never_comes(folder: Path) -> tuple[Attempt, list[LogLine], Attempt]:
    """Ranks 0 and 1 wait for 2 and 3: 2 waits for 3 elsewhere, and 3 for no other. Both arrive too late."""
    bystander = beat_fast_with_bystander()
    everyone = ProcessGroupMesh(4, name="everyone")
    pair = ProcessGroupMesh(2, ranks=[2, 3], name="pair") if everyone.rank >= 2 else None
    with logged_lines() as lines:
        if everyone.rank == 2:
            threading.Thread(target=lambda: attempt(lambda: pair.connect(timeout=LONG_TIMEOUT)), daemon=True).start()
        if everyone.rank < 2:
            wait_until_waiting(2)
        else:
            wait_for_flag(folder, "given up by 0")
            wait_for_flag(folder, "given up by 1")
        failed = attempt(lambda: everyone.connect(timeout=timedelta(seconds=D)))
        set_flag(folder, f"given up by {everyone.rank}")
    check_sums(groups_of(bystander))
    if pair is not None and everyone.rank == 3:
        pair.connect(timeout=LONG_TIMEOUT)
    return failed, lines, attempt(lambda: connect_and_check(everyone, 0))


@pytest.mark.fault("a living member does not come")
def test_missing_rank_is_named_with_its_status(tmp_path: Path):
    seen = results(fast_world(4).outcomes(one_never_comes, tmp_path))
    early, late = seen[:2], seen[2:]
    for failed, lines, again in early:
        print(failed, lines)
        assert failed.kind == "MissingRanksError"
        for text in (failed.text, lines[0].text):
            assert "group 0 of mesh 'everyone' (ranks 0, 1, 2, 3): ranks 2, 3 did not arrive" in text
            assert re.search(r"rank 2: connecting group 0 of mesh 'pair' .* at test_faults.py:\d+, waiting for", text)
            assert "rank 3: not in connect" in text
        assert "did not arrive in 1.5 s" in failed.text
        assert re.search(r"Rank [01] waited at test_faults.py:\d+", failed.text)
        assert len(lines) == 1
        assert D / 3 <= lines[0].at - failed.start < D / 3 + SLACK / 2
        assert not again.kind, again.text
    assert min(failed.took for failed, *_ in early) >= D - 0.01
    assert max(failed.took for failed, *_ in early) < D + SLACK
    for rank, (failed, lines, again) in zip((2, 3), late):  # each logs the last decision at once, and waits for a retry
        print("late", failed, lines)
        (line,) = [each for each in lines if f"failed before rank {rank} arrived" in each.text]
        assert early[0][0].text in line.text
        assert line.at - failed.start < 0.1 + SLACK / 2
        assert failed.kind == "MissingRanksError"
        assert D - 0.01 <= failed.took < D + SLACK
        assert not again.kind, again.text


def one_dies_before(folder: Path) -> tuple[Attempt, Attempt, float]:
    """Rank 3 dies while the others wait for it."""
    bystander = beat_fast_with_bystander(3)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    if mesh.rank == 3:
        wait_until_waiting(0, 1, 2)
        (folder / "died").write_text(str(time.monotonic()))
        kill_self()
    failed = attempt(lambda: mesh.connect(mesh.axes, timeout=LONG_TIMEOUT))
    check_sums(groups_of(bystander))
    survivors = ProcessGroupMesh(3, ranks=range(3), name="survivors")
    again = attempt(lambda: connect_and_check(survivors, 0))
    return failed, again, float((folder / "died").read_text())


@pytest.mark.fault("a member dies before it arrives")
def test_rank_killed_before_arrival_is_named(tmp_path: Path):
    with fresh_world(4) as own:
        seen = results(own.outcomes(one_dies_before, tmp_path), 3)
    for failed, again, died in seen:
        print(failed, failed.end - died)
        assert failed.kind == "MissingRanksError"
        assert "rank 3 did not arrive" in failed.text
        assert re.search(r"rank 3 has ended: its listener at 127.0.0.1:\d+ refuses connections", failed.text)
        assert failed.end - died < NAMED + SLACK
        assert not again.kind, again.text


def one_dies_after(moment: str) -> Attempt:
    """All have arrived, and rank 3 dies before it begins the first collective, or right after."""
    bystander = beat_fast_with_bystander(3)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    die = at_all_reduce(**{"after" if moment == "in" else "before": kill_self})
    with die if mesh.rank == 3 else contextlib.nullcontext():
        failed = attempt(lambda: mesh.connect(mesh.axes, timeout=LONG_TIMEOUT))
    check_sums(groups_of(bystander))
    connect_and_check(ProcessGroupMesh(3, ranks=range(3), name="survivors"), 0)
    return failed


@pytest.mark.fault("a member dies in the first collective")
@pytest.mark.parametrize("moment", ["before", "in"])
def test_rank_killed_in_first_collective_is_named(moment: str):
    """If it dies right after it began, the collective may have been done on some or on all."""
    with fresh_world(4) as own:
        seen = results(own.outcomes(one_dies_after, moment), 3)
    for failed in seen:
        print(failed)
        if moment == "before" or failed.kind:
            assert failed.kind == "MissingRanksError"
            assert "rank 3" in failed.text
            assert "first collective" in failed.text
        if moment == "before":
            assert "refuses connections" in failed.text, failed.text  # known before it is silent
        assert failed.took < H + BEAT + SLACK


@pytest.mark.fault("a first collective completes on one member and fails on another")
@pytest.mark.parametrize("release", [True, False], ids=["released", "still held"])
@on_ranks(4, "fast")
def test_group_that_failed_on_one_rank_reconnects(tmp_path: Path, release: bool):
    """The first collective is done on all, but rank 3 takes it for lost; then all connect again."""
    beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")

    def wait() -> None:
        wait_for_flags(tmp_path, "connected", range(3))

    with losing_all_reduces(before=wait) if mesh.rank == 3 else contextlib.nullcontext():
        failed = attempt(lambda: mesh.connect(mesh.axes, timeout=LONG_TIMEOUT))
    set_flag(tmp_path, f"connected {mesh.rank}")
    dist.barrier()
    if release:
        mesh.release()
    connect_and_check(mesh, mesh.axes)
    assert failed.kind == ("MissingRanksError" if mesh.rank == 3 else "")


# ---- the store ----

GOES = {"dies": signal.SIGKILL, "hangs": signal.SIGSTOP}


def lose_store(fn: Callable[[Path], Any], folder: Path, how: str) -> tuple[list[Any], str, float]:
    """Kill the store once each rank is ready, or stop it until each rank is done.

    Returns:
        The results of ``fn(folder)`` on four ranks, the store as errors name it, and the time at which it went.
    """
    gone = []

    def go() -> None:
        wait_for_flags(folder, "ready", range(4))
        send_signal(pid, GOES[how])
        gone.append(time.monotonic())
        set_flag(folder, "gone")
        wait_for_flags(folder, "done", range(4))
        if how == "hangs":
            os.kill(pid, signal.SIGCONT)
        set_flag(folder, "over")

    with StoreProcess() as store, fresh_world(4, store) as own:
        own.run(dist.get_rank)
        pid = store.process.pid
        assert pid is not None
        with meanwhile(go):
            seen = results(own.outcomes(fn, folder))
    return seen, f"the store at 127.0.0.1:{store.port}", gone[0]


def connect_without_a_store(folder: Path) -> tuple[Attempt, Attempt, Attempt]:
    """The store goes while ranks 0 and 2 wait for 1 and 3, which arrive after that; then it may come back."""
    bystander = beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    mesh.configure("dp", timeout=timedelta(seconds=50))  # what is configured is agreed on when the group is made
    dist.barrier()
    if mesh.rank == 1:
        wait_until_waiting(0, 2)
    set_flag(folder, f"ready {mesh.rank}")
    if mesh.index("tp"):
        wait_for_flag(folder, "gone")
    failed = attempt(lambda: mesh.connect("tp", *["dp"] * mesh.index("tp"), timeout=timedelta(seconds=D)))
    check_sums(groups_of(bystander))
    closing = attempt(mesh.close)
    set_flag(folder, f"done {mesh.rank}")
    wait_for_flag(folder, "over")
    again = attempt(lambda: connect_and_check(ProcessGroupMesh(dp=2, tp=2, name="again"), "tp"))
    check_sums(groups_of(bystander))
    return failed, closing, again


@pytest.mark.fault("the store dies")
@pytest.mark.fault("the store hangs")
@pytest.mark.parametrize("how", GOES)
def test_lost_store_is_named_while_groups_work(tmp_path: Path, how: str):
    seen, where, gone = lose_store(connect_without_a_store, tmp_path, how)
    for failed, closing, again in seen:
        took = failed.end - max(gone, failed.start)
        print(failed, took, "close", closing.took, "again", again)
        assert failed.kind == "WorldError"
        assert "Connected groups continue to work" in failed.text
        if how == "dies":
            assert f"{where} failed: " in failed.text
            assert took < 1.0 + SLACK
            assert again.kind == "WorldError"
            assert again.took < 1.0 + SLACK
        else:
            assert re.search(rf"{where} did not answer for \d\.\d s", failed.text)
            assert failed.took < D + SLACK
            assert not again.kind, again.text
        assert closing.took < 1.0 + SLACK


def ask_without_a_store(folder: Path) -> tuple[dict[str, Attempt], bool, Attempt]:
    """No rank has connected anything when the store goes: each call that may ask it, one after another."""
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    mesh.configure("dp", timeout=timedelta(seconds=D / 3))
    used, unused, destroyed = mesh.group("tp"), mesh.group("dp"), mesh.group(tag="destroyed")
    check_sums({"tp": (used, mesh.ranks("tp")), "destroyed": (destroyed, mesh.ranks())})
    dist.barrier()
    set_flag(folder, f"ready {mesh.rank}")
    wait_for_flag(folder, "gone")
    calls: dict[str, Callable[[], Any]] = {
        "first collective": lambda: dist.all_reduce(torch.ones(1), group=unused),
        "group": lambda: mesh.group("tp", timeout=timedelta(seconds=50)),
        "connect": lambda: mesh.connect("tp", timeout=timedelta(seconds=D / 3)),
        "report": lambda: set_flag(folder, f"report {mesh.rank}") if "the store" in mesh.report().trouble else None,
        "barrier": dist.barrier,  # so that a rank's sums do not wait for the earlier calls of others
        "sums": lambda: check_sums({"tp": (used, mesh.ranks("tp"))}),
        "destroy": lambda: dist.destroy_process_group(destroyed),
        "release": lambda: mesh.release("tp"),
        "close": mesh.close,
    }
    seen = {name: attempt(call) for name, call in calls.items()}
    reported = (folder / f"report {mesh.rank}").exists()
    set_flag(folder, f"done {mesh.rank}")
    wait_for_flag(folder, "over")
    return seen, reported, attempt(lambda: connect_and_check(ProcessGroupMesh(dp=2, tp=2, name="again")))


@pytest.mark.fault("the store fails, and no rank has connected anything")
@pytest.mark.parametrize("how", GOES)
def test_calls_of_unconnected_ranks_end_without_a_store(tmp_path: Path, how: str):
    seen, where, _ = lose_store(ask_without_a_store, tmp_path, how)
    words = f"{where} failed: " if how == "dies" else f"{where} did not answer for "
    for calls, reported, again in seen:
        print({name: (each.kind, round(each.took, 2)) for name, each in calls.items()})
        for name in ("first collective", "connect"):
            assert (calls[name].kind, calls[name].text[: len(words)]) == ("WorldError", words)
            assert calls[name].took < (1.0 if how == "dies" else D / 3 + timing.TIMING.report_missing) + SLACK
        assert reported
        for name in ("group", "report", "sums", "destroy", "release", "close"):
            assert not calls[name].kind, calls[name]
            assert calls[name].took < 1.0 + SLACK
        assert again.kind == ("WorldError" if how == "dies" else ""), again


# ---- a member is stopped, and continues ----


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


@pytest.mark.fault("a member is stopped (SIGSTOP) and continues")
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
        print(failed, failed.end - stopped)
        assert failed.kind == "MissingRanksError"
        assert failed.text == seen[0][0].text
        assert re.search(r"rank 3 has sent no heartbeat for at least \d+ s", failed.text)
    assert max(failed.end for failed, *_ in seen[:3]) - stopped < H + BEAT + SLACK


# ---- signals ----


SIGNALS = {
    "Ctrl-C": (signal.SIGINT, signal.default_int_handler, "KeyboardInterrupt"),
    "SIGTERM": (signal.SIGTERM, signal.SIG_DFL, "rank 2 has ended: its listener at 127.0.0.1:"),
}


def one_is_signalled(folder: Path, how: str) -> tuple[Attempt, Attempt]:
    """Rank 2 is sent a signal while 0, 1 and 2 wait for 3."""
    bystander = beat_fast_with_bystander(2)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    number, handler, _ = SIGNALS[how]
    if mesh.rank == 3:
        wait_until_waiting(0, 1, 2)
        set_flag(folder, "signal")
        wait_for_flag(folder, "done 0")
        wait_for_flag(folder, "done 1")
    if mesh.rank == 2:
        signal.signal(number, handler)
    failed = attempt(lambda: mesh.connect(mesh.axes, timeout=LONG_TIMEOUT))
    set_flag(folder, f"done {mesh.rank}")
    kept = signal.getsignal(number) == handler or mesh.rank != 2
    assert kept, f"the handler is now {signal.getsignal(number)}"
    if how == "SIGTERM":
        mesh = ProcessGroupMesh(-1, ranks=[0, 1, 3], name="survivors")
    again = attempt(lambda: connect_and_check(mesh, mesh.axes))
    if mesh.rank != 2:
        check_sums(groups_of(bystander))
    return failed, again


@pytest.mark.fault("Ctrl-C or SIGTERM while connecting, or any exception")
@pytest.mark.parametrize("how", SIGNALS)
def test_signal_during_connect_is_named_on_peers(tmp_path: Path, how: str):
    sent = []

    def send(pid: int) -> None:
        wait_for_flag(tmp_path, "signal")
        sent.append(time.monotonic())
        os.kill(pid, SIGNALS[how][0])

    with fresh_world(4) as own:
        own.run(dist.get_rank)
        with meanwhile(lambda: send(own.pids[2])):
            outcomes = own.outcomes(one_is_signalled, tmp_path, how)
    seen = results(outcomes, *([2] if how == "SIGTERM" else []))
    if how == "SIGTERM":
        assert outcomes[2].exitcode == -signal.SIGTERM
    for failed, again in seen:
        print(failed, failed.end - sent[0])
        assert not again.kind, again.text
    peers = [outcomes[rank].result[0] for rank in (0, 1)]
    for failed in peers:
        assert failed.kind == "MissingRanksError"
        assert SIGNALS[how][2] in failed.text
        if how != "SIGTERM":
            assert re.search(r"was cancelled because rank 2 stopped connecting at test_faults.py:\d+: ", failed.text)
    assert max(failed.end for failed in peers) - sent[0] < (NAMED if how == "SIGTERM" else 0.2) + SLACK
    late = outcomes[3].result[0]  # it connects with the retry of the others, or fails because rank 2 has ended
    assert late.kind == ("MissingRanksError" if how == "SIGTERM" else ""), late
    assert "rank 2" in late.text or how != "SIGTERM"
    assert late.took < NAMED + SLACK
    if how != "SIGTERM":
        failed = outcomes[2].result[0]
        assert failed.kind == "KeyboardInterrupt"
        assert failed.end - sent[0] < 0.2 + SLACK


def interrupt_at(where: str) -> Any:
    """Ctrl-C in this process, at one place of ``connect``."""
    stop = raises(KeyboardInterrupt())
    if where == "making":
        return mock.patch.dict(backends.CONSTRUCTORS, gloo=lambda *arguments: stop())
    if where == "first collective":
        return at_all_reduce(before=stop)
    return faults(Fault(lambda each: key_of(each).endswith(where), before=stop, times=1, in_caller=True))


def one_is_interrupted(where: str) -> Attempt:
    """Rank 3 is interrupted. It has a connected group, so it reads the key under which others tell that one broke."""
    bystander = beat_fast_with_bystander()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    mesh.connect("dp")
    if mesh.rank == 3 and where != "first collective":
        wait_until_waiting(0, 1, 2)
    with interrupt_at(where) if mesh.rank == 3 else contextlib.nullcontext():
        failed = attempt(lambda: mesh.connect("dp", mesh.axes, timeout=LONG_TIMEOUT))
    check_sums(groups_of(bystander))
    connect_and_check(mesh, mesh.axes)
    return failed


@pytest.mark.fault("Ctrl-C or SIGTERM while connecting, or any exception")
@pytest.mark.parametrize("where", ["making", "/broken", "/arrivals", "first collective"])
def test_interrupt_before_or_after_arrival_reaches_peers(where: str):
    seen = results(fast_world(4).outcomes(one_is_interrupted, where))
    for failed in seen:
        print(failed)
        assert failed.kind == ("KeyboardInterrupt" if failed is seen[3] else "MissingRanksError")
        assert failed.end - seen[3].end < 0.2 + SLACK
    assert all("rank 3" in failed.text and "KeyboardInterrupt" in failed.text for failed in seen[:3])


# ---- what stays behind ----


def try_without_a_store(pid: int, times: int) -> dict[str, int]:
    beat_fast_with_bystander()
    dist.barrier()
    if dist.get_rank() == 0:
        send_signal(pid, signal.SIGKILL)
    seen = []
    for i in range(times):
        mesh = ProcessGroupMesh(2, name=f"try {i}")
        assert attempt(lambda mesh=mesh: mesh.connect(timeout=LONG_TIMEOUT)).kind == "WorldError"
        mesh.close()
        gc.collect()
        seen.append(count_resources())
    return growth(seen[1:-1])


@pytest.mark.fault("connect, use, release, 500 times; any fault that a process survives, repeatedly")
@pytest.mark.skipif(not CAN_COUNT, reason="counts in /proc")
def test_retries_without_a_store_leave_nothing_behind():
    with StoreProcess() as store, fresh_world(2, store) as own:
        own.run(dist.get_rank)
        assert results(own.outcomes(try_without_a_store, store.process.pid, 6)) == [{}] * 2


# ---- a process ends ----


def end_or_connect(rank: int, port: int, folder: Path, _: int) -> None:
    """Rank 1 ends without closing its mesh while rank 0 waits for it."""
    join_world(rank, port, 2)
    mesh = ProcessGroupMesh(dp=1, tp=2, name="actor")
    mesh.connect("tp")
    if rank == 1:
        wait_until_waiting(0)
        write_result(folder, "ended", time.monotonic())
        atexit._run_exitfuncs()  # which interpreters do, and processes of multiprocessing do not
        return
    mesh.release("tp")  # a connected group is skipped
    write_result(folder, "failed", *attempt(lambda: mesh.connect("tp", timeout=LONG_TIMEOUT)))


@pytest.mark.fault("a process ends without `close`")
def test_process_exit_after_connect_is_named_at_once(tmp_path: Path):
    """Its status and its standard error are in test_exits.py."""
    with RankProcesses(end_or_connect, tmp_path) as ranks:
        for rank in range(2):
            ranks.start(rank, 0)
        ranks.join(2 * WAIT_TIMEOUT)
    assert [process.exitcode for process in ranks.all] == [0, 0]
    failed = Attempt(*read_result(tmp_path, "failed"))
    print(failed)
    assert failed.kind == "MissingRanksError"
    assert "rank 1: its process has exited" in failed.text
    assert failed.end - read_result(tmp_path, "ended")[0] < 1.0 + SLACK


# ---- groups and meshes that have ended ----


def quickest(act: Callable[[], Any]) -> float:
    """The least time until an error of an ended group or mesh, in seconds."""
    seen = [attempt(act) for _ in range(20)]
    assert {each.kind for each in seen} == {"LifetimeError"}, seen[0]
    return min(each.took for each in seen)


@pytest.mark.fault("a group is used after `release` or `close`")
@pytest.mark.fault("a process forks")
@on_ranks(2)
def test_ended_mesh_raises_within_a_millisecond():
    mesh = ProcessGroupMesh(dp=1, tp=2, name="actor")
    group = mesh.group("tp")
    check_sums(groups_of(mesh))
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(int(WAIT_TIMEOUT))
        try:
            os.write(sender, repr(quickest(lambda: mesh.group("tp"))).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as answer:
        took = {"a fork": float(answer.read())}
    os.waitpid(child, 0)
    dist.barrier()
    mesh.release("tp")
    took["release"] = quickest(lambda: dist.all_reduce(torch.ones(1), group=group))
    mesh.close()
    took["close"] = quickest(lambda: mesh.group("tp"))
    assert max(took.values()) < (SLACK if STARVED else 0.001), took
