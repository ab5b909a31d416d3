"""Worlds one after another: which ranks connect on which store, and what a world that ended leaves behind."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from pgmesh import LifetimeError, MissingRanksError, ProcessGroupMesh
from pgmesh.launch import StoreProcess
from pgmesh.rendezvous import timing, world_name
from pgmesh.rendezvous.operations import CompareSet
from pgmesh.rendezvous.store_thread import StoreThread
from pgmesh.rendezvous.world_name import REPLACED, leave_world
from pgmesh.rendezvous.world_store import WorldStore
from tests.support.board import CountedStore
from tests.support.memory_client import enter_world
from tests.support.resource_counts import CAN_COUNT, count_resources, growth
from tests.support.worlds import check_sums, fresh_world, groups_of

DEADLINE = timedelta(seconds=30)


# ---- the name of a world, on a store in memory ----


PROCESSES = range(4)
WORLDS = st.tuples(st.booleans(), st.sets(st.sampled_from(PROCESSES), min_size=1), st.sets(st.sampled_from(PROCESSES)))


@settings(max_examples=50)
@given(st.lists(WORLDS, max_size=6), st.randoms())
def test_ranks_agree_on_the_name_of_a_world(worlds: list[tuple[bool, set[int], set[int]]], order: random.Random):
    """On a fresh store all members get one name, and so do those with one past; others can detect that they do not.

    Each world is on a fresh store or on the one before. It has some processes as members, and some of these are killed:
    they never say that they left, and come back as new processes.
    """
    store, used = dist.HashStore(), set[str]()
    left: dict[int, set[str]] = {process: set() for process in PROCESSES}  # what each process left, on any store
    past: dict[int, list[int]] = {process: [] for process in PROCESSES}  # the worlds on this store that it was in
    for number, (is_fresh, members, killed) in enumerate(worlds):
        if is_fresh:
            store, past = dist.HashStore(), {process: [] for process in PROCESSES}
        nobody_in_it = not store.check([world_name.WORLD_KEY])
        named = "" if nobody_in_it else store.get(world_name.WORLD_KEY).decode()
        come = sorted(members)
        order.shuffle(come)
        names = {process: enter_world(store, left[process]) for process in come}
        if nobody_in_it or len({tuple(past[process]) for process in come}) == 1:
            assert len({*names.values()}) == 1
            # Known limit: killed processes leave the name of their world behind, for ranks that were not in it.
            left_behind = named and not any(named in left[process] for process in come)
            assert left_behind or not used & {*names.values()}
        now = store.get(world_name.WORLD_KEY).decode()
        assert len({*names.values()}) == 1 or all(name != now or name.endswith(REPLACED) for name in names.values())
        used |= {*names.values()}
        order.shuffle(come)
        for process in come:
            if process in killed:
                left[process], past[process] = set(), []
            else:
                left[process].add(names[process])
                past[process].append(number)
                leave_world(store, names[process])


@pytest.mark.parametrize(("returns", "number"), [*((False, i) for i in (1, 2, 3)), *((True, i) for i in range(1, 6))])
def test_entry_agrees_while_last_rank_leaves(returns: bool, number: int):
    """The last rank leaves before an operation of one that enters, and that may have left the same world before."""
    store, left = dist.HashStore(), set[str]()
    first = enter_world(store, set())
    if returns:
        assert enter_world(store, set()) == first
        leave_world(store, first)
        left = {first}
    second = enter_world(CountedStore(store, [number], lambda: leave_world(store, first)), left)
    assert second not in left
    assert [enter_world(store, each) for each in (left, set())] == [second, second]
    assert [leave_world(store, second) for _ in range(3)] == [False, False, True]
    assert store.num_keys() == 0


@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("returns", [True, False])
def test_last_leave_agrees_with_entry_meanwhile(monkeypatch: pytest.MonkeyPatch, returns: bool, number: int):
    """A process enters before an operation of the last one that leaves, which it takes for dead while it deletes."""
    monkeypatch.setattr(timing, "TIMING", timing.TIMING._replace(world_end=0.02))
    store, names = dist.HashStore(), list[str]()
    first = enter_world(store, set())
    past = {first} if returns else set[str]()
    leave_world(CountedStore(store, [number], lambda: names.append(enter_world(store, past))), first)
    assert names == [enter_world(store, {first} & past)]


def test_world_name_set_during_deletion_is_kept():
    store, names = dist.HashStore(), list[str]()
    asked, first = threading.Event(), enter_world(store, set())
    late = threading.Thread(
        target=lambda: names.append(enter_world(CountedStore(store, [2], asked.set, "compare_set"), {first}))
    )

    def enter_meanwhile() -> None:  # the name is over, and not yet deleted
        late.start()
        assert asked.wait(DEADLINE.total_seconds())

    assert leave_world(CountedStore(store, [3], enter_meanwhile, "delete_key"), first)
    late.join(DEADLINE.total_seconds())
    assert names == [enter_world(store, {first})]


def test_slow_store_leaves_time_for_the_last_rank(monkeypatch: pytest.MonkeyPatch):
    """The store answers late, with the name that the last rank is deleting. It deletes it within ``world_end``."""
    monkeypatch.setattr(timing, "TIMING", timing.TIMING._replace(world_end=0.02))
    clock, store = [0.0], dist.HashStore()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    store.set(world_name.WORLD_KEY, world_name.OVER)
    late = CountedStore(store, [1], lambda: time.sleep(2 * timing.TIMING.world_end), "compare_set")
    enter_world(late, set())
    assert clock[0] >= 3 * timing.TIMING.world_end


def test_slow_leave_leaves_no_store_key():
    """The last rank leaves, and deletes the keys, between two looks of one that left before it."""
    store = dist.HashStore()
    name = enter_world(store, set())
    enter_world(store, set())
    slow = CountedStore(store, [1], lambda: leave_world(store, name), "compare_set")
    assert not leave_world(slow, name)
    assert store.num_keys() == 0


def test_last_rank_to_leave_deletes_store_keys():
    store = dist.HashStore()
    threads = [StoreThread(WorldStore(store, "here", rank, 3, set())) for rank in range(3)]
    for each in threads:
        each.start_heartbeat()
        each.run(CompareSet("key", "value"), seconds=10.0)
    for left, each in enumerate(threads):
        assert store.check([world_name.WORLD_KEY])
        each.stop(f"left as number {left}")
    assert store.num_keys() == (0 if hasattr(store, "list_keys") else 1)  # torch 2.9 cannot list keys


# ---- real worlds, one after another in the same processes ----


@contextmanager
def world_on(store: dist.Store, rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=DEADLINE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=DEADLINE)


def wait_for(store: dist.Store, key: str) -> None:
    store.wait([key], DEADLINE)


def wait_for_both(store: dist.Store, key: str) -> None:
    """Wait until two ranks have called this, outside any world."""
    end = time.monotonic() + DEADLINE.total_seconds()
    store.add(key, 1)
    while store.add(key, 0) < 2:
        assert time.monotonic() < end, f"the other rank did not come to {key}"
        time.sleep(0.01)


@contextmanager
def left_for_others() -> Iterator[int]:
    """This rank leaves the tests' world for worlds of its own, and returns to one at the end, as the tests need."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # else torch's own world would find its old addresses on a used store
    try:
        yield rank
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def use(mesh: ProcessGroupMesh) -> None:
    mesh.connect(timeout=timedelta(seconds=10))
    check_sums(groups_of(mesh))


def use_after_different_pasts_and_again(port: int) -> None:
    """Rank 0 has been in two other worlds. Both ranks use the store of their first common world three times more."""
    with left_for_others() as rank:
        if rank == 0:
            for _ in range(2):
                with world_on(dist.HashStore(), 0, 1):
                    use(ProcessGroupMesh(dp=1))
        store = client(port)
        for number in range(4):
            with world_on(store, rank, 2):
                mesh = ProcessGroupMesh(dp=2, name="actor")
                if number:
                    assert "left the world" not in str(mesh.report())  # the other leaves only after the sums
                elif rank == 0:  # the other rank asks first
                    wait_for(dist.distributed_c10d._get_default_store(), world_name.WORLD_KEY)
                if number % 2:
                    check_sums(groups_of(mesh))  # first collectives without connect
                else:
                    use(mesh)
            wait_for_both(store, f"left {number}")


@pytest.mark.fault("a fresh store after other worlds, or a second world on the same store")
def test_ranks_with_different_pasts_use_the_store_again():
    with StoreProcess() as server, fresh_world(2) as own:
        own.run(use_after_different_pasts_and_again, server.port)


def use_with_process_of_another_past(port: int) -> str:
    """Rank 0 leaves a world in which rank 1 stays, for one with process 2, which asks the same store first."""
    with left_for_others() as process:
        tcp = client(port)
        store = dist.PrefixStore("first", tcp)
        if process != 2:
            dist.init_process_group("gloo", store=store, rank=process, world_size=2, timeout=DEADLINE)
            use(ProcessGroupMesh(dp=2, name="actor"))
            if process == 1:
                wait_for(tcp, "done")
                dist.destroy_process_group()
                return ""
            dist.destroy_process_group()
            tcp.set("left", "")
        else:
            wait_for(tcp, "left")  # before that, process 1 and this one would be rank 1 of one world
        error = ""
        for attempt in ("first", "second"):
            with world_on(dist.PrefixStore(attempt, tcp), min(process, 1), 2):
                mesh = ProcessGroupMesh(dp=2, name="actor")
                if attempt == "second":
                    use(mesh)
                    continue
                if process == 0:
                    wait_for(tcp, "asked")
                elif process == 2:
                    store_thread_of(mesh).run(CompareSet("asked", ""), seconds=10.0)
                    tcp.set("asked", "")
                with pytest.raises(MissingRanksError) as caught:
                    mesh.connect(timeout=timedelta(seconds=3))
                error = str(caught.value)
                wait_for_both(tcp, "failed")
        tcp.set("done", "")
        return error


def store_thread_of(mesh: ProcessGroupMesh) -> StoreThread:
    return mesh._mesh_groups.world.store_thread()


@pytest.mark.fault("a store is used again, by processes of its first world and by new ones")
def test_error_explains_store_of_an_earlier_world():
    with StoreProcess() as server, fresh_world(3) as own:
        one, _, other = own.run(use_with_process_of_another_past, server.port)
    for error in (one, other):
        assert f"127.0.0.1:{server.port} has served another world too" in error
        assert "store=dist.PrefixStore('attempt-2', store)" in error
    assert "rank 1" in one
    assert "rank 0" in other


# ---- what a world that ended leaves behind ----


def live_in(worlds: int, port: int) -> list[dict[str, int]]:
    """Live in so many worlds, closing the mesh in every other one; what each leaves behind."""
    left, kept, early = [], [], {"keys": 0}
    with left_for_others() as rank:
        tcp = client(port)
        for number in range(worlds):
            with world_on(dist.PrefixStore(f"world {number}", tcp), rank, 2):
                mesh = ProcessGroupMesh(dp=2, tp=1, name="actor")
                use(mesh)
                group = mesh.group("dp")
                dist.barrier()
                if number % 2:
                    mesh.close()
            with pytest.raises(LifetimeError, match="closed" if number % 2 else "ended when torch.distributed"):
                mesh.group("dp")
            mesh.close()
            kept.append(mesh)  # a mesh that outlives its world holds no connection
            del group
            wait_for_both(tcp, f"left {number}")
            gc.collect()
            left.append(growth([early], lambda: count_with_our_keys(tcp)))
            if number == 1:
                early = count_with_our_keys(tcp)
            wait_for_both(tcp, f"counted {number}")
    return left


def count_with_our_keys(store: dist.TCPStore) -> dict[str, int]:
    keys = store.list_keys() if hasattr(store, "list_keys") else []  # torch 2.9 cannot list keys
    return {**count_resources(), "keys": sum("pgmesh" in str(key) for key in keys)}


@pytest.mark.fault("the world is destroyed with meshes open, repeatedly")
@pytest.mark.skipif(not CAN_COUNT, reason="needs /proc")
def test_ended_world_leaves_nothing_behind():
    with StoreProcess() as server, fresh_world(2) as own:
        assert own.run(live_in, 20, server.port) == [[{}] * 20] * 2
