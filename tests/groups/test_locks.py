"""No thread waits for the store with the lock of a mesh: other threads go on, and an abort has its effect."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from pgmesh import LifetimeError, ProcessGroupMesh
from pgmesh.launch import StoreProcess
from tests.support.programs import send_signal
from tests.support.worlds import fresh_world

WAIT_TIMEOUT = 30.0


def with_stopped_store(act: Callable[[ProcessGroupMesh, threading.Thread], Any], store_pid: int) -> Any:
    """What ``act`` returns on rank 0, while its other thread releases a connected group and the store is stopped."""
    mesh = ProcessGroupMesh(dp=2, tp=1, name="train")
    mesh.connect("dp")
    dist.barrier()  # over the group of the world: the other rank is past its use of the store
    if mesh.rank != 0:
        dist.barrier()
        mesh.close()
        return None
    send_signal(store_pid, signal.SIGSTOP)
    release = threading.Thread(target=mesh.release, args=("dp",))
    try:
        release.start()
        while mesh.held():  # the group is destroyed; now the thread waits for the store
            assert release.is_alive()
        return act(mesh, release)
    finally:
        os.kill(store_pid, signal.SIGCONT)
        release.join(WAIT_TIMEOUT)
        dist.barrier()
        mesh.close()


def create_group(mesh: ProcessGroupMesh, release: threading.Thread) -> tuple[int, bool]:
    return mesh.group("tp").size(), release.is_alive()


def abort_and_ask(mesh: ProcessGroupMesh, _release: threading.Thread) -> str:
    mesh.group("tp")
    mesh.abort("a test did")
    with pytest.raises(LifetimeError) as raised:
        mesh.group("tp")
    return str(raised.value)


def run(act: Callable[[ProcessGroupMesh, threading.Thread], Any]) -> Any:
    with StoreProcess() as store, fresh_world(2, store) as own:
        return own.run(with_stopped_store, act, store.process.pid)[0]


def test_group_is_created_while_release_waits():
    assert run(create_group) == (1, True)


def test_abort_ends_groups_while_release_waits():
    assert "mesh 'train' was aborted by rank 0" in run(abort_and_ask)
