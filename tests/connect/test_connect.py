"""connect, report and stats with real ranks. What goes wrong on purpose is in test_faults.py."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pgmesh import LifetimeError, ProcessGroupMesh
from pgmesh.groups import backends, kept_groups
from pgmesh.groups.group import State, find_group
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Raw, Read
from tests.support.board import Fault, at_all_reduce, faults, key_of, writes
from tests.support.fake_world import fake_rank
from tests.support.faults import (
    LONG_TIMEOUT,
    attempt,
    beat_fast,
    last_status,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    wait_until,
)
from tests.support.logs import logged_lines
from tests.support.worlds import check_sums, groups_of, on_ranks, world

# ---- it connects ----


@pytest.mark.fault("ranks ask for groups in different orders, or threads connect groups at once")
@on_ranks(8)
def test_connect_succeeds_with_axes_in_any_order():
    mesh = ProcessGroupMesh(pp=2, dp=2, tp=2, name="any")
    families = ["pp", "dp", "tp", ("dp", "tp")]
    turn = mesh.rank % len(families)
    connected = mesh.connect(*families[turn:], *families[:turn])
    check_sums(groups_of(mesh))
    text = str(connected)
    *lines, operations = text.splitlines()
    assert len(lines) == 4
    assert all(re.fullmatch(r"group [dpt, ]+ +met +[\d.]+ s, warm +[\d.]+ s", line) for line in lines)
    assert re.fullmatch(r"\d+ store operations", operations)


@on_ranks(2)
def test_close_by_another_thread_ends_the_wait():
    """Rank 1 does not call. It creates the meshes too: later tests use their name."""
    for wait in (ProcessGroupMesh.connect, ProcessGroupMesh.stand_by):
        mesh = ProcessGroupMesh(2, name="actor")
        if mesh.rank == 0:
            with ThreadPoolExecutor(1) as threads:
                waits = threads.submit(wait, mesh, timeout=LONG_TIMEOUT)
                wait_until(lambda: (status := last_status(0)) and (status.pending or status.activity), "it waits")
                mesh.close()
                with pytest.raises(LifetimeError, match="actor' was closed at"):
                    waits.result(timeout=5.0)
        mesh.close()
    dist.barrier()


@on_ranks(2)
def test_group_adopted_during_another_connect_is_left_out():
    mesh, asked, lock = ProcessGroupMesh(2, name="actor"), threading.Event(), threading.RLock()
    group = find_group(mesh.group().group_name)
    acquire = lambda timeout: asked.set() or lock.acquire(timeout=timeout)  # noqa: E731
    group.connecting = SimpleNamespace(acquire=acquire, release=lock.release)
    with ThreadPoolExecutor(1) as threads:
        with lock:
            connects = threads.submit(mesh.connect, timeout=LONG_TIMEOUT)
            assert asked.wait(LONG_TIMEOUT.total_seconds())
            mesh._mesh_groups.discard([group], "broke.")
            mesh.adopt(0, dist.group.WORLD)
        assert connects.result(timeout=LONG_TIMEOUT.total_seconds()).met == {}


@on_ranks(4)
def test_failed_call_leaves_rounds_of_other_threads():
    """Another thread of rank 0 connects dp, while a call of the main thread cannot create the group along tp."""
    mesh = ProcessGroupMesh(dp=2, tp=2, name="two threads")
    broken = mock.patch.dict(backends.CONSTRUCTORS, gloo=mock.Mock(side_effect=OSError("Too many open files")))
    if mesh.rank == 0:
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(mesh.connect, "dp")
            wait_until(lambda: State.CONNECTING in [each.state for each in mesh._mesh_groups.made()], "it connects")
            with broken, pytest.raises(OSError, match="Too many open files"):
                mesh.connect("tp", "dp")
            dist.barrier()
            other.result()
    else:
        dist.barrier()
        mesh.connect("dp")
    check_sums({"dp": (mesh.group("dp"), mesh.ranks("dp"))})


def count_operations(tmp_path):
    """Store operations of this rank by kind, until all groups are decided. The last rank arrives after all others."""
    ProcessGroupMesh(-1, name="before").connect()  # the first mesh in a world costs one more
    mesh, last = ProcessGroupMesh(dp=-1, tp=2), dist.get_world_size() - 1
    families = ["dp", "tp", ("dp", "tp")]

    def wait_with_all():
        set_flag(tmp_path, f"came {mesh.rank}")  # this rank has arrived at all its attempts
        wait_for_flag(tmp_path, f"came {last}")

    if mesh.rank == last:
        wait_for_flags(tmp_path, "came", range(last))
        wait = Fault(writes("/decision"), after=wait_with_all, skip=len(families) - 1, in_caller=True)
    else:
        wait = Fault(reads_mesh_mismatch, before=wait_with_all, times=1, in_caller=True)
    with faults(wait) as board:
        connected = mesh.connect(*families)
    assert set(connected.met) == set(families)
    check_sums(groups_of(mesh))
    ends = "/broken", *(f"pgmesh/status/{rank}" for rank in range(last + 1))  # of the first collectives
    until_decided = [each for each in board.requested if not isinstance(each, Raw) and not key_of(each).endswith(ends)]
    counts = Counter(type(each).__name__ for each in until_decided)
    assert connected.operations >= counts["Append"]
    return counts


def reads_mesh_mismatch(operation):
    """True for the last operation of each read of the decisions."""
    return isinstance(operation, Read) and operation.key.endswith("/mismatch")


@pytest.mark.parametrize("ranks", [4, 8])
def test_each_group_costs_four_or_five_store_operations(ranks, tmp_path):
    """The mesh costs two."""
    groups, groups_of_all_ranks, decided = 3, 2 + ranks // 2 + 1, 0
    for counts in world(ranks).run(count_operations, tmp_path):
        mine = counts["CompareSet"] - 1  # the groups at which this rank arrived last
        undecided = groups - mine  # their decisions are read once, with a mismatch of the mesh
        reads = groups + mine + undecided + bool(undecided)
        assert counts == {"Append": 1 + groups, "Add": groups, "CompareSet": 1 + mine, "Read": reads}
        decided += mine
    assert decided == groups_of_all_ranks


def talk_to_all(most=None, paired=False):
    """How often the backend of each group asked the store, from its making until each member has talked to each."""
    mesh = ProcessGroupMesh(dp=2, tp=4)
    if paired and mesh.index("tp") < 2:  # two members connect before the others do
        if mesh.index("tp"):
            dist.send(torch.ones(1), group=mesh.group("tp"), group_dst=0)
        else:
            dist.recv(torch.ones(1), group=mesh.group("tp"), group_src=1)
    limits = timing.LIMITS._replace(shared_addresses=most or timing.LIMITS.shared_addresses)
    with mock.patch.object(timing, "LIMITS", limits):
        mesh.connect("dp", "tp", ("dp", "tp"))
    asked = {}
    for axes in ("dp",), ("tp",), ("dp", "tp"):
        group = mesh.group(*axes)
        mine, theirs = torch.full((group.size(),), float(mesh.rank)), torch.zeros(group.size())
        dist.all_to_all_single(theirs, mine, group=group)
        assert theirs.tolist() == list(map(float, mesh.ranks(*axes)))
        store = find_group(group.group_name).gloo
        assert store.used
        asked[axes] = store.operations
    check_sums(groups_of(mesh))
    return asked


@on_ranks(8)
def test_collective_after_connect_needs_no_store_operation():
    assert talk_to_all() == {("dp",): 0, ("tp",): 0, ("dp", "tp"): 0}


@on_ranks(8)
def test_backend_of_large_group_reads_addresses_from_store():
    asked = talk_to_all(4)
    assert asked.pop(("dp", "tp")) >= 1 + 7
    assert asked == {("dp",): 0, ("tp",): 0}


@on_ranks(8)
def test_connect_succeeds_after_send_between_two_members():
    asked = talk_to_all(paired=True)
    tp = asked.pop(("tp",))
    assert tp >= 2 if dist.get_rank() % 4 < 2 else tp == 0
    assert asked == {("dp",): 0, ("dp", "tp"): 0}


@on_ranks(2, "fast")
def test_unstarted_first_collective_fails_at_the_deadline(tmp_path):
    """Rank 1 arrives, but it does not begin the first collective before rank 0 has given up."""
    beat_fast()
    mesh = ProcessGroupMesh(dp=2, name="actor")
    dist.barrier()
    late = at_all_reduce(before=lambda: wait_for_flag(tmp_path, "given up by 0"))
    with late if mesh.rank == 1 else contextlib.nullcontext():
        failed = attempt(lambda: mesh.connect(timeout=2))
    set_flag(tmp_path, f"given up by {mesh.rank}")
    dist.barrier()
    mesh.connect()
    check_sums({"dp": (mesh.group(), range(2))})
    assert failed.kind == "MissingRanksError"
    assert failed.text == (
        "group dp of mesh 'actor': its first collective did not finish in time: the deadline was 2 s. "
        "Its members are ranks 0, 1."
    )


@pytest.mark.fault("Ctrl-C or SIGTERM while connecting, or any exception")
@on_ranks(4, "fast")
def test_retry_succeeds_after_interrupted_clean_up(tmp_path):
    """Both first collectives of rank 0 fail, and it is interrupted before it has ended the first of their groups."""
    beat_fast()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    dist.barrier()
    if mesh.rank == 0:
        with mock.patch.object(kept_groups, "free_finished", side_effect=KeyboardInterrupt):
            failed = attempt(lambda: mesh.connect("dp", "tp", timeout=1))
        assert failed.kind == "KeyboardInterrupt"
        set_flag(tmp_path, "interrupted")
    else:
        with at_all_reduce(before=lambda: wait_for_flag(tmp_path, "interrupted")):
            attempt(lambda: mesh.connect("dp", "tp", timeout=1))
    dist.barrier()
    mesh.connect("dp", "tp")
    check_sums(groups_of(mesh))


@on_ranks(4)
def test_connect_keeps_connected_groups_and_recreates_released_ones():
    mesh = ProcessGroupMesh(dp=2, tp=2)
    mesh.connect()
    first = mesh.group("dp")
    if mesh.rank == 0:  # it waits for no other rank
        assert mesh.connect("dp").warm == {}
    assert mesh.group("dp") is first
    check_sums(groups_of(mesh))
    mesh.release("dp")
    mesh.connect("dp")
    assert mesh.group("dp") is not first
    check_sums(groups_of(mesh))


@on_ranks(4)
def test_retry_skips_groups_that_are_connected():
    """Rank 3 arrived late. It logs at once that the others have failed, and connects with their retry."""
    mesh = ProcessGroupMesh(dp=2, tp=2)
    if mesh.rank != 3:
        failed = attempt(lambda: mesh.connect("dp", "tp", timeout=0.5))
        assert failed.kind == ("MissingRanksError" if mesh.rank else "")
    dist.barrier()
    with logged_lines() as lines:
        if mesh.rank != 0:  # its groups are connected: it does not call again
            mesh.connect("dp", "tp", timeout=20)
        check_sums(groups_of(mesh))
    assert len(lines) == (2 if mesh.rank == 3 else 0)
    assert all("failed before rank 3 arrived" in line.text for line in lines)
    assert all("rank 3 did not arrive in 0.5 s" in line.text for line in lines)


def test_connect_in_fake_world_costs_no_operation():
    with fake_rank(3, 64):
        assert ProcessGroupMesh(dp=8, tp=8).connect().operations == 0


# ---- first collectives without connect ----


@on_ranks(4)
def test_long_first_collective_logs_the_missing_rank(tmp_path):
    mesh = ProcessGroupMesh(dp=2, tp=2, name="watched")
    usual = timing.TIMING
    timing.TIMING = usual._replace(warn_in_collective=0.3, status_after=0.05)
    total = torch.tensor([2.0**mesh.rank])

    def release_rank_1() -> None:
        wait_until(lambda: lines, "a line of the log")
        set_flag(tmp_path, "done")

    with logged_lines() as lines:
        if mesh.rank == 1:  # it is stuck elsewhere
            mesh.configure("dp", timeout=60)
            wait_for_flag(tmp_path, "done")
        elif mesh.rank == 0:
            threading.Thread(target=release_rank_1, daemon=True).start()
        dist.all_reduce(total, group=mesh.group("tp"))
        timing.TIMING = usual
        check_sums(groups_of(mesh))
    if mesh.rank == 0:
        text = lines[0].text
        assert re.match(r"this rank is in all_reduce \(collective 1\) of group tp of mesh 'watched' for \d+ s: ", text)
        assert "rank 1 did not reach the first collective" in text
        assert "pgmesh-store" not in {line.thread for line in lines}  # which may not wait for a handler


# ---- report and stats ----


@on_ranks(4, fresh=True)  # communicators counts the whole process, and earlier tests may have left some
def test_report_shows_groups_and_statuses_of_others():
    mesh = ProcessGroupMesh(dp=2, tp=2, name="reported")
    mesh.connect("tp")
    mesh.group("dp")
    mesh.release("dp")
    mesh.group("dp")
    dist.barrier()
    report, stats = mesh.report(), mesh.stats()
    check_sums(groups_of(mesh))
    tp, dp = report.held
    assert (tp.label, tp.used, tp.generation) == ("group tp of mesh 'reported'", True, 0)
    assert (dp.label, dp.used, dp.generation) == ("group dp of mesh 'reported'", False, 1)
    assert tp.ranks == mesh.ranks("tp")
    assert re.fullmatch(r"test_connect\.py:\d+", dp.call_site)
    assert sorted(report.others) == [other for other in range(4) if other != mesh.rank]
    for said in report.others.values():
        assert re.match("not in connect|connecting|in ", said), said
    text = str(report)
    assert f"rank {mesh.rank} of ProcessGroupMesh(dp=2, tp=2, name='reported') holds 2 groups" in text
    assert "not used, at test_connect.py" in text
    assert "after 1 release;" in text
    assert stats.groups == 2 == stats.communicators
    assert stats.operations > 3
    assert 0 < stats.making < 5


def test_report_counts_releases_before_the_first_group():
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(pp=2, dp=2, tp=2)
        mesh.release("dp")
        mesh.group("dp")
        assert re.search(r"created, at test_connect\.py:\d+, after 1 release;", str(mesh.held()[0]))


@on_ranks(2, fresh=True)
def test_report_on_forwards_signals_to_earlier_wakeup_descriptor():
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.fileno())
    mesh = ProcessGroupMesh(dp=2)
    with contextlib.redirect_stderr(io.StringIO()):
        mesh.report_on(signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        receiver.settimeout(30)
        assert list(receiver.recv(8)) == [signal.SIGUSR1]
    child = os.fork()
    if child == 0:
        os._exit(0 if signal.set_wakeup_fd(-1) == -1 else 1)  # the descriptor of the parent is not set in the child
    assert os.waitpid(child, 0)[1] == 0


def test_report_on_raises_outside_the_main_thread():
    with fake_rank(0, 4), ThreadPoolExecutor(1) as thread:
        called = thread.submit(ProcessGroupMesh(4).report_on, signal.SIGUSR1)
        with pytest.raises(LifetimeError, match=r"^signal handlers can only be set in the main thread: call report_on"):
            called.result()


def test_report_works_after_close():
    with fake_rank(0, 4):
        mesh = ProcessGroupMesh(4)
        mesh.close()
        assert "not available: the mesh was closed at test_connect.py" in str(mesh.report())
