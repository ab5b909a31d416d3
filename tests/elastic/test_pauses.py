"""Stores and ranks that pause, and ranks that stand by: new processes in the place of lost ones, and spares."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pgmesh import MembershipError, PgmeshError, ProcessGroupMesh
from pgmesh.launch import StoreProcess
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    SLACK,
    WAIT_TIMEOUT,
    Attempt,
    H,
    attempt,
    beat_fast,
    meanwhile,
    read_result,
    results,
    set_flag,
    stopped,
    wait_for_flag,
    wait_for_flags,
    wait_until,
    write_result,
)
from tests.support.rank_processes import RankProcesses, join_world
from tests.support.worlds import check_sums, fresh_world, groups_of

LONGER_THAN_H = H + 3 * BEAT
RANKS, LOST = 4, 3
TIMEOUT = WAIT_TIMEOUT / 4  # seconds, of the groups: Gloo does not always wake a rank whose connections are shut down
KILLED = r"rank 0 has (ended: its listener at 127\.0\.0\.1:\d+ refuses connections|sent no heartbeat for at least)"


def steps_of(folder: Path, rank: int) -> int:
    return len((folder / f"steps {rank}").read_text()) if (folder / f"steps {rank}").exists() else 0


def wait_for_steps(folder: Path) -> None:
    """Wait until each rank has taken two more steps."""
    for rank in range(4):
        before = steps_of(folder, rank)
        wait_until(lambda rank=rank, before=before: steps_of(folder, rank) >= before + 2, f"steps of rank {rank}")


def train(folder: Path) -> tuple[Attempt, Attempt]:
    """Take steps until the flag "over" is set. Then three ranks wait in connect for one that arrives after a pause."""
    beat_fast()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    mesh.connect(*mesh.axes, (), timeout=LONG_TIMEOUT)
    mesh.abort_when_lost()

    def steps() -> None:
        with (folder / f"steps {mesh.rank}").open("a") as log:
            over = torch.zeros(1)
            while not over:
                for axis in mesh.axes:
                    dist.all_reduce(torch.ones(1), group=mesh.group(axis))
                over.fill_((folder / "over").exists())
                dist.all_reduce(over, group=mesh.group())
                log.write(".")
                log.flush()
                time.sleep(0.01)

    trained = attempt(steps)
    check_sums(groups_of(mesh))
    late = ProcessGroupMesh(dp=2, tp=2, name="late")
    set_flag(folder, f"connects {mesh.rank}")
    if mesh.rank == 3:
        wait_for_flag(folder, "suspended")
        time.sleep(BEAT)
    connected = attempt(lambda: late.connect(timeout=LONG_TIMEOUT))
    check_sums(groups_of(late))
    return trained, connected


@pytest.mark.fault("the store pauses for 20 s, or all ranks are suspended (L)")
def test_pause_aborts_no_healthy_mesh(tmp_path: Path):
    """Longer than the silence after which a rank is lost: of the store, of all ranks, and of both."""

    def pause(store: int, ranks: Sequence[int]) -> None:
        for pids in ([store], ranks, [store, *ranks]) * 2:  # one pause alone does not always show it
            wait_for_steps(tmp_path)
            with stopped(pids):
                time.sleep(LONGER_THAN_H)
        time.sleep(H)  # a rank taken for lost would be noticed meanwhile
        wait_for_steps(tmp_path)
        set_flag(tmp_path, "over")
        wait_for_flags(tmp_path, "connects", range(4))
        time.sleep(2 * BEAT)
        with stopped(ranks):
            time.sleep(LONGER_THAN_H)
        set_flag(tmp_path, "suspended")

    with StoreProcess() as store, fresh_world(4, store) as own:
        pid = store.process.pid
        assert pid is not None
        with meanwhile(lambda: pause(pid, own.pids)):
            seen = results(own.outcomes(train, tmp_path))
    assert [(trained.text, connected.text) for trained, connected in seen] == [("", "")] * 4


def abort_and_exit(rank: int, port: int, folder: Path, number: int) -> None:
    join_world(rank, port, 3)
    mesh = ProcessGroupMesh(dp=3, name="train")
    ProcessGroupMesh(3, name="other").connect(timeout=LONG_TIMEOUT)
    group = mesh.group_of([1, 2]) if rank else None
    if rank:
        dist.all_reduce(torch.ones(1), group=group)
    set_flag(folder, f"ready {rank}")
    wait_for_flag(folder, "paused")
    time.sleep(2 * BEAT)  # a heartbeat waits for the store
    if rank == 0:
        set_flag(folder, "aborts")
        mesh.abort("the test")  # which waits for the store
        dist.destroy_process_group()
        return
    failed = attempt(lambda: wait_until(lambda: mesh.group_of([1, 2]) is None, "an error of the mesh"))
    write_result(folder, f"failed {rank}", *failed)


@pytest.mark.fault("`abort()`, also just before the process exits")
def test_abort_before_exit_reaches_others(tmp_path: Path):
    """The store pauses, and the process leaves the world at once."""
    with RankProcesses(abort_and_exit, tmp_path) as ranks:
        for rank in range(3):
            ranks.start(rank, 0)
        wait_for_flags(tmp_path, "ready", range(3))
        with stopped([ranks.store_pid]):
            set_flag(tmp_path, "paused")
            wait_for_flag(tmp_path, "aborts")
            time.sleep(0.7)
        for rank in (1, 2):
            assert "was aborted by rank 0 at " in Attempt(*read_result(tmp_path, f"failed {rank}")).text


def step(rank: int, port: int, folder: Path, process: int) -> None:
    """A rank of the mesh "train". Its processes are numbered from 0; each but the first stands by."""
    join_world(rank, port, RANKS, TIMEOUT)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="train")
    if process:
        set_flag(folder, f"process {process}")
        mesh = mesh.stand_by(timeout=WAIT_TIMEOUT)
    while not (folder / "over").exists():
        try:
            mesh.connect("dp", "tp", ("dp", "tp"), timeout=LONG_TIMEOUT)  # nothing to do where they are connected
            check_sums(groups_of(mesh))
            round_ = int(repr(mesh).partition("#")[2].partition("'")[0] or 0)
            assert [*mesh] == [*range(RANKS)]
            set_flag(folder, f"round {round_} rank {rank} process {process}")
        except (PgmeshError, RuntimeError, KeyError):  # torch's tables lose a group while they are read
            try:
                mesh = mesh.shrink(spares=[LOST], timeout=WAIT_TIMEOUT)
            except MembershipError as error:
                (folder / f"refused {rank}").write_text(str(error))
                break
            assert mesh.shrunk.replaced_by == {LOST: LOST}
    os._exit(0)


def test_new_processes_replace_stopped_and_killed_ranks(tmp_path: Path):
    def wait_for_sums(number: int) -> None:
        for rank in range(RANKS):
            wait_for_flag(tmp_path, f"round {number} rank {rank} process {number if rank == LOST else 0}")

    with RankProcesses(step, tmp_path) as processes:
        for rank in range(RANKS):
            processes.start(rank, 0)
        wait_for_sums(0)

        stopped = processes.newest[LOST]
        os.kill(stopped.pid, signal.SIGSTOP)
        processes.start(LOST, 1)
        wait_for_sums(1)
        os.kill(stopped.pid, signal.SIGCONT)  # it leaves the mesh alone
        stopped.join(WAIT_TIMEOUT)
        refused = (tmp_path / f"refused {LOST}").read_text()
        assert f"a new process has taken the place of this one as rank {LOST}" in refused, refused
        time.sleep(3 * BEAT)  # in which an abort would reach the others
        assert not [*tmp_path.glob("round 2 *")], "the mesh was replaced again"

        processes.newest[LOST].kill()
        processes.newest[LOST].join(WAIT_TIMEOUT)
        processes.start(LOST, 2)  # meanwhile the others call shrink
        wait_for_sums(2)

        processes.signal(signal.SIGSTOP, LOST)
        processes.newest[LOST].kill()
        processes.newest[LOST].join(WAIT_TIMEOUT)
        processes.start(LOST, 3)
        wait_for_flag(tmp_path, "process 3")
        processes.signal(signal.SIGCONT, LOST)  # the new process has called stand_by before the others call shrink
        wait_for_sums(3)
        set_flag(tmp_path, "over")
        processes.join(WAIT_TIMEOUT)


def stand_by_with_another(rank: int, port: int, folder: Path, _: int) -> None:
    """Ranks 1 and 2 of three stand by, as ranks that were taken for lost do. Rank 0 ends."""
    join_world(rank, port, 3)
    mesh = ProcessGroupMesh(dp=3, name="train")
    mesh.connect(timeout=LONG_TIMEOUT)
    set_flag(folder, f"connected {rank}")
    if rank == 0:
        wait_for_flag(folder, "never")
    failed = attempt(lambda: mesh.stand_by(timeout=4 * WAIT_TIMEOUT))
    write_result(folder, f"failed {rank}", *failed)


@pytest.mark.fault("ranks stand by and no rank is left that can call `shrink`")
def test_spares_do_not_await_each_other(tmp_path: Path):
    with RankProcesses(stand_by_with_another, tmp_path) as ranks:
        for rank in range(3):
            ranks.start(rank, 0)
        wait_for_flags(tmp_path, "connected", range(3))
        ended = time.monotonic()
        ranks.newest[0].kill()
        for rank in (1, 2):
            failed = Attempt(*read_result(tmp_path, f"failed {rank}"))
            assert failed.kind == "MissingRanksError", failed
            assert re.search(KILLED, failed.text), failed
            assert "no other rank of it is left, so none can call shrink." in failed.text, failed
            assert re.search(r"rank [12] stands by too", failed.text), failed
            assert failed.end - ended < 2 * H + SLACK
