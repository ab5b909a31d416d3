"""Resource leaks after each kind of fault that a process survives: none.

Four ranks run into one kind of fault again and again. Early and late, each counts its descriptors, its threads, the
entries of torch's tables and the keys in the store, of which none may be more, and its resident memory, which may grow
by MOST in TIMES faults: for each, by less than the 175 KiB of a group. `python -m tests.faults.chaos --part ledger`
does so for 500 cycles in which nothing fails.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.connect import connecting
from pgmesh.groups import backends, teardown
from pgmesh.groups.cache import GroupCache, store_thread
from pgmesh.rendezvous import polling_store
from pgmesh.rendezvous.polling_store import PollingStore
from pgmesh.rendezvous.protocol import Pause, StoreProtocol
from tests.support.faults import LONG_TIMEOUT, beat_fast_with_bystander, wait_until
from tests.support.resource_counts import CAN_COUNT, count_resources, resident_kib
from tests.support.torch_tables import c10d
from tests.support.worlds import World, check_sums, fresh_world

pytestmark = pytest.mark.skipif(not CAN_COUNT, reason="counts in /proc")

FIRST, TIMES = 3, 8
"""So many faults before the first count, and so many from then to the last."""

MOST = 1024
"""KiB."""

SOON, SOONER = timedelta(seconds=0.15), timedelta(seconds=0.05)
ALL = ("dp", "tp")


# ---- faults, on each rank of a new mesh ----


def fails(kind: str, act: Callable[[], Any], keep: Callable[[BaseException], Any] = lambda error: None) -> None:
    try:
        act()
    except BaseException as error:
        assert type(error).__name__ == kind, error  # noqa: PT017
        keep(error)
    else:
        raise AssertionError(f"no {kind}")


def never_comes(mesh: ProcessGroupMesh) -> None:
    if mesh.rank < 3:
        fails("MissingRanksError", lambda: mesh.connect(ALL, timeout=SOONER))


def comes_too_late(mesh: ProcessGroupMesh) -> None:
    never_comes(mesh)
    dist.barrier()
    if mesh.rank == 3:
        fails("MissingRanksError", lambda: mesh.connect(ALL, timeout=LONG_TIMEOUT))
    mesh.connect(ALL, timeout=LONG_TIMEOUT)
    check_sums({"all": (mesh.group(), mesh.ranks())})


def never_comes_to_the_first_collective(mesh: ProcessGroupMesh) -> None:
    if mesh.rank < 3:
        group = mesh.group(timeout=SOONER)
        fails("MissingRanksError", lambda: dist.all_reduce(torch.ones(1), group=group))


def means_another_mesh(mesh: ProcessGroupMesh) -> None:
    """What told of it goes when all have come to a mesh of that name again."""
    with ProcessGroupMesh(dp=4 if mesh.rank == 3 else 2, tp=-1, name="another") as wrong:
        fails("MismatchError", lambda: wrong.connect(ALL, timeout=LONG_TIMEOUT))
    with ProcessGroupMesh(dp=2, tp=2, name="another") as right:
        right.connect(ALL, timeout=LONG_TIMEOUT)
        dist.barrier()


def means_other_options(mesh: ProcessGroupMesh) -> None:
    mesh.configure(*ALL, timeout=timedelta(seconds=7 + (mesh.rank == 3)))
    fails("MismatchError", lambda: mesh.connect(ALL, timeout=LONG_TIMEOUT))


def uses_other_options(mesh: ProcessGroupMesh) -> None:
    """Who finds its neighbours in the ring there learns of it when the collective has timed out."""
    mesh.configure(*ALL, timeout=SOON * (1 + (mesh.rank == 3)))
    if mesh.rank == 3:  # each rank has its part, the same each time: what is run for the first time takes memory
        dist.barrier()
        fails("MismatchError", mesh.group)
        dist.barrier()
    else:
        group = mesh.group()
        dist.barrier()
        dist.barrier()
        fails("MismatchError", lambda: dist.all_reduce(torch.ones(1), group=group))


def waits_in_a_circle(mesh: ProcessGroupMesh) -> None:
    first = {0: "tp", 1: "dp", 3: "tp", 2: "dp"}[mesh.rank]  # 0 waits for 1, 1 for 3, 3 for 2, 2 for 0
    fails("CircleError", lambda: mesh.connect(first, timeout=LONG_TIMEOUT))


def is_released_while_it_waits(
    mesh: ProcessGroupMesh, keep: Callable[[BaseException], Any] = lambda error: None
) -> None:
    if mesh.rank > 0:
        return
    looked, look = [], PollingStore._look

    def seen_to_look(store: PollingStore, key: str) -> StoreProtocol[bool]:
        looked.append(key)
        return (yield from look(store, key))

    with mock.patch.object(PollingStore, "_look", seen_to_look):
        work = dist.all_reduce(torch.ones(1), group=mesh.group(), async_op=True)
        wait_until(lambda: len(looked) > 1, "it has written its address, and looked for another's")
    mesh.release(*ALL)
    fails("LifetimeError", work.wait, keep)


def is_released_as_it_begins(mesh: ProcessGroupMesh) -> None:
    if mesh.rank > 0:
        return
    began, stopped = threading.Event(), threading.Event()
    agree_on_mesh, close = GroupCache._agree_on_mesh, PollingStore.close

    def agree_late(family: GroupCache) -> StoreProtocol[None]:
        began.set()
        while not stopped.is_set():
            yield Pause(0.01)
        yield from agree_on_mesh(family)

    def seen_to_close(store: PollingStore) -> None:
        close(store)
        stopped.set()

    with (
        mock.patch.object(GroupCache, "_agree_on_mesh", agree_late),
        mock.patch.object(PollingStore, "close", seen_to_close),
    ):
        work = dist.all_reduce(torch.ones(1), group=mesh.group(), async_op=True)
        wait_until(began.is_set, "the collective begins")
        mesh.release(*ALL)
        fails("LifetimeError", work.wait)


def is_refused(mesh: ProcessGroupMesh) -> None:
    fails("ShapeError", lambda: ProcessGroupMesh(dp=3, tp=2))
    fails("PlaceError", lambda: mesh.group_of([0, 0]))
    fails("AxisError", lambda: mesh.connect("dp", "pp"))
    fails("OptionsError", lambda: mesh.group("tp", high_priority=True))
    fails("OptionsError", lambda: mesh.group("tp", backend="carrier pigeon"))


def cannot_make(mesh: ProcessGroupMesh) -> None:
    broken = mock.patch.dict(backends._DIRECT, gloo=mock.Mock(side_effect=OSError("Too many open files")))
    one_stops("OSError", mesh, broken)


def is_interrupted(mesh: ProcessGroupMesh) -> None:
    one_stops("KeyboardInterrupt", mesh, mock.patch.object(connecting, "_unbroken", side_effect=KeyboardInterrupt))


def is_interrupted_in_the_first_collective(mesh: ProcessGroupMesh) -> None:
    """The others hang in Gloo until the group's timeout."""
    mesh.configure(*ALL, timeout=SOON)
    interrupted = mock.patch.object(connecting._Warming, "begin", side_effect=KeyboardInterrupt)
    one_stops("KeyboardInterrupt", mesh, interrupted)


def one_stops(kind: str, mesh: ProcessGroupMesh, broken: Any) -> None:
    if mesh.rank == 3:
        with broken:
            fails(kind, lambda: mesh.connect(ALL, timeout=LONG_TIMEOUT))
    else:
        fails("MissingRanksError", lambda: mesh.connect(ALL, timeout=LONG_TIMEOUT))


FAULTS: list[Callable[[ProcessGroupMesh], None]] = [
    never_comes,
    comes_too_late,
    never_comes_to_the_first_collective,
    means_another_mesh,
    means_other_options,
    uses_other_options,
    waits_in_a_circle,
    is_released_while_it_waits,
    is_released_as_it_begins,
    is_refused,
    cannot_make,
    is_interrupted,
    is_interrupted_in_the_first_collective,
]

# ---- faults on purpose in the ledger's own sense: something stays ----

kept: list[Any] = []


def keeps_memory(mesh: ProcessGroupMesh) -> None:
    is_refused(mesh)
    kept.append(b"\1" * (2 * MOST * 1024 // TIMES))


def keeps_its_error(mesh: ProcessGroupMesh) -> None:
    is_released_while_it_waits(mesh, kept.append)


def keeps_a_key(mesh: ProcessGroupMesh) -> None:
    is_refused(mesh)
    c10d._get_default_store().set(f"kept {len(kept)}", "")
    kept.append(0)


LEAKS: dict[Callable[[ProcessGroupMesh], None], set[str]] = {
    keeps_memory: {"KiB"},
    keeps_its_error: {"descriptors", "threads"},
    keeps_a_key: {"keys"},
}


# ---- a mesh that was refused, and then may be introduced ----


def refused_and_then_alone() -> list[int]:
    """How many keys there are before, after one mesh in vain, and after two that are alike."""
    store, seen = c10d._get_default_store(), []

    def count() -> None:
        dist.barrier()
        seen.append(store.num_keys())
        dist.barrier()

    ProcessGroupMesh(2, name="first").connect()
    count()
    mesh = ProcessGroupMesh(**({"dp": 2, "tp": 1} if dist.get_rank() == 0 else {"dp": 1, "tp": 2}), name="actor")
    if mesh.rank == 0:
        mesh.group(timeout=LONG_TIMEOUT)
    dist.barrier()
    if mesh.rank == 1:
        fails("MismatchError", lambda: mesh.group(timeout=LONG_TIMEOUT))
    dist.barrier()
    if mesh.rank == 0:
        mesh.close()
    dist.barrier()
    if mesh.rank == 1:  # nobody holds another meaning against it any more
        mesh.group(timeout=LONG_TIMEOUT)
        mesh.close()
    count()
    for first in (1, 0):  # to be introduced; the last takes away what it knows of, and rank 1 alone was refused
        with ProcessGroupMesh(dp=2, tp=1, name="actor") as alike:
            if alike.rank == first:
                store_thread().run(alike._group_cache.register_mesh(listed=True), LONG_TIMEOUT.total_seconds())
            dist.barrier()
            alike.connect("dp")
            dist.barrier()
        count()
    return seen


def test_a_refusal_goes_also_where_the_refused_mesh_was_introduced_in_the_end():
    with fresh_world(2) as own:
        for before, *after in own.run(refused_and_then_alone):
            assert after == [before + 1, before + 1, before]


# ---- what is kept for who keeps its error ----


def fails_alone(mesh: ProcessGroupMesh, how: str) -> None:
    work = dist.all_reduce(torch.ones(1), group=mesh.group(timeout=SOONER), async_op=True)
    if how == "waited for late":
        wait_until(work.is_completed, "it fails")
        teardown.free_finished()
    fails("MissingRanksError", work.wait, lambda error: (teardown.free_finished(), kept.append(error)))
    if how == "the work is gone":
        del work


def last_of(place: Any) -> Any:
    """The traceback that debuggers begin with."""
    while place.tb_next:
        place = place.tb_next
    return place


def errors_keep_their_frames() -> None:
    for how in ("waited for late", "waited for", "the work is gone"):
        mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
        if mesh.rank > 0:
            mesh.close()
            continue
        fails_alone(mesh, how)
        mesh.close()
        (error,) = kept
        passed = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        assert "fails" in {frame.f_code.co_name for frame in passed}, how
        del passed
        kept.append(last_of(error.__traceback__))
        del error
        teardown.free_finished()
        assert kept[0].__traceback__, how
        kept.clear()
        teardown.free_finished()
        assert not polling_store.raised, how


def test_an_error_keeps_its_frames_for_as_long_as_somebody_has_it(four: World):
    four.run(errors_keep_their_frames)


def test_of_two_threads_that_sweep_at_once_one_lets_go():
    both, group = threading.Barrier(2), object()
    held = sys.getrefcount(group)
    teardown.keep_until_done(group, mock.Mock(is_completed=lambda: both.wait(10.0) >= 0))
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(teardown.free_finished) for _ in range(2)]:
            done.result()
    assert sys.getrefcount(group) == held


# ---- the ledger ----


class Count(NamedTuple):
    """What a rank holds, and what is in the store."""

    held: dict[str, int]
    memory: int


def again_and_again(fault: Callable[[ProcessGroupMesh], None]) -> list[Count]:
    beat_fast_with_bystander()
    seen = []
    for i in range(1, FIRST + TIMES + 1):
        mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
        fault(mesh)
        dist.barrier()
        mesh.close()
        del mesh
        if i in (FIRST, FIRST + TIMES):
            memory = resident_kib()  # which collects what is garbage first
            wait_until(lambda: not count_resources()["stranded"], "collectives that hang in Gloo end")
            dist.barrier()
            seen.append(Count(count_resources() | {"keys": c10d._get_default_store().num_keys()}, memory))
            dist.barrier()
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    mesh.connect(ALL, timeout=LONG_TIMEOUT)
    check_sums({"all": (mesh.group(), mesh.ranks())})
    return seen


def grown(early: Count, late: Count) -> dict[str, int]:
    """What is more than it was, and by how much; of memory, what is more than may be."""
    more = {what: late.held[what] - early.held[what] for what in early.held}
    more["KiB"] = max(0, late.memory - early.memory - MOST)
    return {what: number for what, number in more.items() if number > 0}


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with fresh_world(4) as own:
        yield own


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_that_is_survived_leaves_nothing_behind(four: World, fault: Callable[[ProcessGroupMesh], None]):
    for early, late in four.run(again_and_again, fault):
        print(late.memory - early.memory, "KiB", late.held)
        assert not grown(early, late)


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
def test_the_ledger_sees_what_stays(four: World, leak: Callable[[ProcessGroupMesh], None]):
    ranks = [grown(early, late) for early, late in four.run(again_and_again, leak)]
    print(ranks)
    assert {what for more in ranks for what in more} == LEAKS[leak]
