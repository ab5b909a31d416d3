"""Ranks that stand by: a new process in the place of a lost rank, until the survivors take it in, and spares."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from pgmesh import MembershipError, PgmeshError, ProcessGroupMesh
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    SLACK,
    WAIT_TIMEOUT,
    Attempt,
    H,
    attempt,
    read_result,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    write_result,
)
from tests.support.rank_processes import RankProcesses, join_world
from tests.support.worlds import check_sums, groups_of

RANKS, LOST = 4, 3
TIMEOUT = WAIT_TIMEOUT / 4  # seconds, of the groups: Gloo does not always wake a rank whose connections are shut down


def run(rank: int, port: int, folder: Path, process: int) -> None:
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

    with RankProcesses(run, tmp_path) as processes:
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


KILLED = r"rank 0 has (ended: its listener at 127\.0\.0\.1:\d+ refuses connections|sent no heartbeat for at least)"


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
            print(f"{failed.end - ended:.2f} s: {failed}")
            assert failed.kind == "MissingRanksError"
            assert re.search(KILLED, failed.text), failed
            assert "no other rank of it is left, so none can call shrink." in failed.text, failed
            assert re.search(r"rank [12] stands by too", failed.text), failed
            assert failed.end - ended < 2 * H + SLACK
