"""A mesh that is aborted before its first use on a rank, or while another thread of the process holds its lock."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, WorldError
from pgmesh.groups.registry import ABORTS_KEY, Registry
from pgmesh.launch import StoreProcess
from pgmesh.rendezvous.operations import Read
from pgmesh.rendezvous.records import Decision
from tests.support.fake_world import fake_rank
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    SLACK,
    Attempt,
    attempt,
    beat_fast,
    results,
    set_flag,
    wait_for_flag,
    wait_until,
)
from tests.support.worlds import check_sums, fresh_world, groups_of


def use_after_abort(folder: Path) -> Attempt | None:
    """Rank 0 aborts the mesh. Only then do the others use it, in groups without rank 0."""
    beat_fast()
    mesh = ProcessGroupMesh(dp=3, name="train")
    other = ProcessGroupMesh(3, name="other")
    other.connect(timeout=LONG_TIMEOUT)
    if mesh.rank == 0:
        mesh.abort("rank 0 has enough")
        time.sleep(3 * BEAT)  # the others' heartbeats have counted it
        set_flag(folder, "aborted")
        wait_for_flag(folder, "done")
        return None
    wait_for_flag(folder, "aborted")
    group = mesh.group_of([1, 2])

    def steps() -> None:
        while True:
            dist.all_reduce(torch.ones(1), group=group)

    failed = attempt(steps)
    set_flag(folder, "done")
    return failed


def test_first_use_after_abort_fails_within_heartbeats(tmp_path: Path):
    with StoreProcess() as store, fresh_world(3, store) as own:
        for failed in results(own.outcomes(use_after_abort, tmp_path))[1:]:
            print(failed)
            assert failed.kind in ("LifetimeError", "MissingRanksError", "RuntimeError")
            assert failed.took < 3 * BEAT + 1.0 + SLACK


def abort_while_locked(folder: Path) -> str:
    """Another thread of rank 0 holds the lock of the mesh, as one that waits for the store does."""
    beat_fast()
    mesh = ProcessGroupMesh(dp=2, name="train")
    mesh.connect("dp", timeout=LONG_TIMEOUT)
    check_sums(groups_of(mesh))
    dist.barrier()
    if mesh.rank == 1:
        assert attempt(lambda: dist.all_reduce(torch.ones(1), group=mesh.group("dp"))).kind
    else:
        release, locked = threading.Event(), threading.Event()

        def hold() -> None:
            with mesh._group_cache.lock:
                locked.set()
                release.wait(LONG_TIMEOUT.total_seconds())

        threading.Thread(target=hold, daemon=True).start()
        wait_until(locked.is_set, "the lock")
        mesh.abort("another thread holds it")
        assert mesh.is_closed
        release.set()
    after = mesh.shrink("dp", timeout=LONG_TIMEOUT)
    check_sums(groups_of(after))
    return repr(after)


def test_abort_works_while_a_thread_holds_lock(tmp_path: Path):
    with StoreProcess() as store, fresh_world(2, store) as own:
        seen = results(own.outcomes(abort_while_locked, tmp_path))
    assert seen == ["ProcessGroupMesh(dp=2, name='train')"] * 2


def test_brief_store_failure_loses_no_abort():
    ended = threading.Event()
    identity = SimpleNamespace(registered=True, key="mesh", refusal_key="mesh/mismatch")
    cache = SimpleNamespace(identity=identity, end_aborted=lambda text: ended.set())
    answers = iter([b"1", WorldError("the store failed"), b"1", Decision("aborted", "why").pack().encode()])
    asked: list[Read] = []

    def perform(operation: Read) -> bytes:
        asked.append(operation)
        answer = next(answers)
        if isinstance(answer, WorldError):
            raise answer
        return answer

    with fake_rank(0, 2):
        registry = Registry()
        with mock.patch.object(registry, "open_caches", return_value=[cache]):
            assert attempt(lambda: registry._on_heartbeat(perform)).kind == "WorldError"
            registry._on_heartbeat(perform)
    assert asked == [Read(ABORTS_KEY), Read("mesh/mismatch")] * 2
    wait_until(ended.is_set, "the end of the mesh")
