"""Groups that have ended are freed, also if their mesh ends while another thread works with it."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from pgmesh import LifetimeError, ProcessGroupMesh, torch_private
from pgmesh.groups import teardown
from tests.support.faults import attempt, wait_until
from tests.support.worlds import check_sums, fresh_world, groups_of


def abort_and_wait() -> None:
    mesh = ProcessGroupMesh(dp=1, tp=2, name="actor")
    mesh.connect("tp")
    check_sums(groups_of(mesh))
    reference = weakref.ref(mesh.group("tp"))
    dist.barrier()
    mesh.abort()
    wait_until(lambda: reference() is None, "the aborted group is freed")


def test_abort_frees_process_groups():
    with fresh_world(2) as own:
        own.run(abort_and_wait)


def abort_during_call() -> None:
    """Another thread holds the mesh's lock, as a slow call in torch does, when the mesh is aborted."""
    mesh = ProcessGroupMesh(dp=1, tp=2, name="actor")
    group: Any = mesh.group("tp")
    check_sums(groups_of(mesh))
    dist.barrier()
    held, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with mesh._group_cache.lock:
            held.set()
            may_go_on.wait(30.0)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30.0)
    mesh.abort()
    assert mesh.is_closed
    for use in (lambda: mesh.group("tp"), lambda: mesh.group("dp")):
        assert attempt(use).kind == "LifetimeError"
    may_go_on.set()
    thread.join(30.0)
    wait_until(lambda: not torch_private.is_known(group), "the group is destroyed")
    assert attempt(lambda: dist.all_reduce(torch.ones(1), group=group)).kind == LifetimeError.__name__


def test_abort_during_another_call_destroys_groups():
    with fresh_world(2) as own:
        own.run(abort_during_call)


def set_and_report() -> str:
    mesh = ProcessGroupMesh(2, name="actor")
    mesh.group()
    mesh.set_timeout(timeout=7)
    return str(mesh.report())


def test_report_has_the_timeout_that_was_set():
    with fresh_world(2) as own:
        assert all("timeout=datetime.timedelta(seconds=7)" in text for text in own.run(set_and_report))


def watch_twice() -> int:
    mesh = ProcessGroupMesh(2, name="actor")
    mesh.abort_when_lost()
    mesh.abort_when_lost(lost_after=30)
    return len(mesh._group_cache.registry.at_heartbeat)


def test_second_abort_when_lost_adds_no_second_watch():
    with fresh_world(2) as own:
        assert own.run(watch_twice) == [1, 1]


def test_exit_waits_for_threads_in_collectives():
    """A thread of the program that returns from torch's C++ while Python ends would abort the process."""
    code = {"__name__": dist.distributed_c10d.__name__, "sleep": time.sleep}
    exec("def all_reduce(): sleep(0.5)", code)
    thread = threading.Thread(target=code["all_reduce"], daemon=True)
    thread.start()
    start = time.monotonic()
    teardown.wait_for_collectives()
    assert 0.2 < time.monotonic() - start < 2.0
    thread.join(1.0)
    assert not thread.is_alive()
    start = time.monotonic()
    teardown.wait_for_collectives()
    assert time.monotonic() - start < 0.2
