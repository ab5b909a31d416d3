"""Groups that have ended are freed, also while other threads work with their mesh or wait for the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pgmesh import LifetimeError, ProcessGroupMesh, torch_private
from pgmesh.groups import background
from pgmesh.launch import StoreProcess
from tests.support.fake_world import fake_rank
from tests.support.faults import WAIT_TIMEOUT, attempt, wait_until
from tests.support.programs import send_signal
from tests.support.torch_tables import timeout_of
from tests.support.worlds import check_sums, fresh_world, groups_of, on_ranks


def test_exit_waits_for_threads_that_threads_start():
    """An abort in the background frees the groups in one more thread, which must not return while Python ends."""
    done = threading.Event()

    def free() -> None:
        time.sleep(0.1)
        done.set()

    def abort() -> None:
        background.exiting.wait(10.0)
        background.in_background(free)

    with (
        mock.patch.object(background, "exiting", threading.Event()),
        mock.patch.object(background, "_background", set()),
    ):
        background.in_background(abort)
        background.finish_background()
        assert done.is_set()


def test_exit_during_another_call_starts_no_thread():
    """Another thread holds the mesh's lock for good. Nothing would wait for a thread that is started now."""
    held, may_go_on, exiting = threading.Event(), threading.Event(), threading.Event()
    exiting.set()

    def hold() -> None:
        with mesh._mesh_groups.lock:
            held.set()
            may_go_on.wait(30.0)

    with fake_rank(0, 2), mock.patch.object(background, "exiting", exiting):
        mesh = ProcessGroupMesh(2, name="actor")
        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(30.0)
        mesh._mesh_groups.close_because("ended with its process.")
        assert mesh.is_closed
        assert "pgmesh-end" not in [each.name for each in threading.enumerate()]
        may_go_on.set()
        thread.join()


@on_ranks(2)
def test_abort_during_another_call_destroys_groups():
    """Another thread holds the mesh's lock, as a slow call in torch does, when the mesh is aborted."""
    mesh = ProcessGroupMesh(dp=1, tp=2, name="actor")
    group: Any = mesh.group("tp")
    check_sums(groups_of(mesh))
    dist.barrier()
    held, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with mesh._mesh_groups.lock:
            held.set()
            may_go_on.wait(30.0)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30.0)
    aborting = attempt(mesh.abort)
    assert not aborting.kind
    assert aborting.took < 10.0
    assert mesh.is_closed
    for use in (lambda: mesh.group("tp"), lambda: mesh.group("dp")):
        refused = attempt(use)
        assert refused.kind == "LifetimeError"
        assert refused.took < 10.0
    may_go_on.set()
    thread.join(30.0)
    wait_until(lambda: not torch_private.is_known(group), "the group is destroyed")
    assert attempt(lambda: dist.all_reduce(torch.ones(1), group=group)).kind == LifetimeError.__name__


EXITING = """
import atexit
import sys
import threading
import time

import torch.distributed as dist

code = {"__name__": dist.distributed_c10d.__name__, "sleep": time.sleep}
exec("def all_reduce(): sleep(0.5)", code)
thread = threading.Thread(target=code["all_reduce"], daemon=True)
atexit.register(lambda: print("it runs" if thread.is_alive() else "it has returned"))  # after that of pgmesh

import pgmesh.mesh

thread.start()
"""


def test_process_ends_after_its_threads_left_collectives():
    done = subprocess.run([sys.executable, "-c", EXITING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "it has returned\n"


@on_ranks(2)
def test_timeout_that_was_set_is_reported_and_kept():
    mesh = ProcessGroupMesh(2, name="actor")
    mesh.connect()
    mesh.set_timeout(timeout=7)
    assert "timeout=datetime.timedelta(seconds=7)" in str(mesh.report())
    (group,) = mesh._mesh_groups.made()
    before = group.name
    mesh._mesh_groups.discard([group], "broke.")
    again = mesh.group()
    check_sums(groups_of(mesh))
    assert again.group_name != before
    assert timeout_of(again).total_seconds() == 7.0


# ---- no thread waits for the store with the lock of a mesh ----


def act_while_release_waits(store_pid: int) -> None:
    """Rank 0 creates a group and aborts its mesh, while its other thread releases a group and the store is stopped."""
    mesh = ProcessGroupMesh(dp=2, tp=1, name="train")
    mesh.connect("dp")
    dist.barrier()  # over the group of the world: the other rank is past its use of the store
    if mesh.rank != 0:
        dist.barrier()
        mesh.close()
        return
    send_signal(store_pid, signal.SIGSTOP)
    release = threading.Thread(target=mesh.release, args=("dp",))
    try:
        release.start()
        while mesh.held():  # the group is destroyed; now the thread waits for the store
            assert release.is_alive()
        assert mesh.group("tp").size() == 1
        assert release.is_alive()
        mesh.abort("a test did")
        with pytest.raises(LifetimeError, match="mesh 'train' was aborted by rank 0"):
            mesh.group("tp")
    finally:
        os.kill(store_pid, signal.SIGCONT)
        release.join(WAIT_TIMEOUT)
        dist.barrier()
        mesh.close()


def test_groups_are_created_and_aborted_while_release_waits():
    with StoreProcess() as store, fresh_world(2, store) as own:
        own.run(act_while_release_waits, store.process.pid)
