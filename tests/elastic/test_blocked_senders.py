"""A rank that sends more than the connection's buffers hold, to a rank that is killed.

Gloo does not wake it: when a connection ends, it tells only the operations that have not begun to send. So this rank
raises at the timeout of its group, and the others wait for it in ``shrink``.
"""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.launch import StoreProcess
from tests.support.faults import LONG_TIMEOUT, SLACK, Attempt, attempt, beat_fast, results, set_flag, wait_for_flag
from tests.support.worlds import World, check_sums, fresh_world, groups_of

TIMEOUT = 4.0  # seconds, of the groups
SIZE = 2**24  # elements of 4 bytes: more than the buffers of a TCP connection


def send_or_wait(folder: Path) -> tuple[Attempt, str]:
    beat_fast()
    mesh = ProcessGroupMesh(dp=3, name="train")
    mesh.configure("dp", timeout=TIMEOUT)
    mesh.connect("dp", timeout=LONG_TIMEOUT)
    group, values = mesh.group("dp"), torch.zeros(SIZE)
    dist.all_to_all_single(torch.zeros(3), torch.zeros(3), group=group)  # connects every pair of ranks
    if mesh.rank == 1:
        received = dist.irecv(values, 0, group=group)
        set_flag(folder, "ready")
        received.wait()
    wait_for_flag(folder, "stopped")
    set_flag(folder, f"begins {mesh.rank}")
    if mesh.rank == 0:
        failed = attempt(lambda: dist.send(values, 1, group=group))
    else:
        failed = attempt(lambda: dist.all_reduce(torch.ones(1), group=group))
    after = mesh.shrink("dp", timeout=LONG_TIMEOUT)
    check_sums(groups_of(after))
    return failed, repr(after)


def test_a_rank_that_sends_to_a_killed_one_raises_within_the_timeout_of_its_group(tmp_path: Path):
    def stop_and_kill(own: World) -> None:
        wait_for_flag(tmp_path, "ready")
        own.kill(1, signal.SIGSTOP)
        set_flag(tmp_path, "stopped")
        wait_for_flag(tmp_path, "begins 0")
        time.sleep(0.5)  # until the buffers are full; if they are not, the rank raises at once
        own.kill(1, signal.SIGKILL)

    with StoreProcess() as store, fresh_world(3, store) as own:
        thread = threading.Thread(target=stop_and_kill, args=(own,), daemon=True)
        thread.start()
        try:
            seen = results(own.outcomes(send_or_wait, tmp_path), 1)
        finally:
            thread.join(LONG_TIMEOUT.total_seconds())
    assert len(seen) == 2
    for failed, mesh in seen:
        print(failed, failed.took)
        assert failed.kind
        assert failed.took < TIMEOUT + 1.0 + SLACK
        assert mesh == "ProcessGroupMesh(dp=2, ranks=range(0, 4, 2), name='train')"
