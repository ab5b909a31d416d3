"""The liveness thread: its start, the status that it publishes, its tasks and looks, and its end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import LifetimeError, ProcessGroupMesh, WorldError
from pgmesh.groups.world import World, current_world
from pgmesh.launch import StoreProcess
from pgmesh.liveness import timing
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.liveness import Liveness, liveness_of
from pgmesh.liveness.operations import Add, Append, CompareSet, Operation, Read, Run, Set
from pgmesh.liveness.statuses import PendingConnect, RankStatus, Statuses, status_key
from pgmesh.options import GroupOptions
from tests.support.board import Fault, faults, raises
from tests.support.faults import SLACK, beat_fast, stopped, wait_until
from tests.support.logs import logged_lines
from tests.support.worlds import fresh_world, on_ranks

PENDING = PendingConnect("train.0/0", "group tp", "mesh 'train'", "0, 1", "train.py:9", (1,))


@pytest.fixture
def store():
    """A client of a store in a process of its own, which has the attribute ``process``."""
    with StoreProcess() as store:
        yield store


@pytest.fixture(autouse=True)
def fast_heartbeats(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "TIMING", timing.TIMING._replace(heartbeat=0.1))


@contextmanager
def ranks(store: StoreProcess, size: int = 2) -> Iterator[list[World]]:
    """The worlds of several ranks in this process, which end with the block."""

    def world(rank: int) -> World:
        client = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
        return World(client, rank, size, GroupOptions(), f"{store.host}:{store.port}")

    worlds = [world(rank) for rank in range(size)]
    try:
        yield worlds
    finally:
        for each in worlds:
            each.end("its process has exited")


@pytest.fixture
def world(store: StoreProcess):
    with ranks(store, 1) as (world,):
        yield world


@pytest.fixture
def rare_heartbeats(monkeypatch: pytest.MonkeyPatch):
    """What is published within a second is published at once."""
    monkeypatch.setattr(timing, "TIMING", timing.TIMING._replace(heartbeat=60.0))


def last_status(world: World) -> RankStatus:
    liveness_of(world).wait_for_heartbeat()
    status = RankStatus.unpack(world.rank, CallClient(world, 1.0).run(Read(status_key(world.rank)))[0])
    assert status is not None
    return status


def liveness_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pgmesh-liveness"]


# -- the start and the status ------------------------------------------------------------------------------------------


def test_first_call_starts_one_thread(world: World):
    before = len(liveness_threads())
    first = liveness_of(world)
    assert liveness_of(world) is first
    assert CallClient(world, 1.0).liveness is first
    assert len(liveness_threads()) == before + 1


def test_status_names_process_and_place(world: World):
    liveness = liveness_of(world)
    liveness.wait_for_heartbeat()
    status = last_status(world)
    assert (status.rank, status.world_size) == (0, 1)
    assert (status.host, status.pid) == (socket.gethostname(), os.getpid())
    assert status.place.line.startswith("test_liveness.py:")
    assert abs(status.sent - time.time()) < SLACK
    socket.create_connection(status.endpoint, 5.0).close()  # type: ignore[arg-type]
    wait_until(lambda: last_status(world).heartbeat > status.heartbeat, "another heartbeat")


def test_place_is_that_of_the_chosen_thread(world: World):
    end = threading.Event()

    def train() -> None:
        end.wait(10.0)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    liveness_of(world).places.thread = thread.ident
    wait_until(lambda: last_status(world).place.function == "train", "the place of the thread")
    end.set()


def test_pending_groups_of_threads_are_published_at_once(world: World, rare_heartbeats: None):
    liveness, other = liveness_of(world), PENDING._replace(group="group dp")
    liveness.wait_for_heartbeat()
    assert last_status(world).pending == ()
    liveness.set_pending((PENDING,))
    thread = threading.Thread(target=liveness.set_pending, args=((other,),))
    thread.start()
    thread.join()
    wait_until(lambda: last_status(world).pending == (PENDING, other), "both groups", SLACK)
    liveness.set_pending(())
    wait_until(lambda: last_status(world).pending == (other,), "one group", SLACK)
    heartbeat = last_status(world).heartbeat
    liveness.set_pending(())
    time.sleep(0.1)
    assert last_status(world).heartbeat == heartbeat  # nothing has changed


def test_activity_is_published_at_once(world: World, rare_heartbeats: None):
    liveness = liveness_of(world)
    liveness.set_activity("standing by for mesh 'train'")
    wait_until(lambda: f"{last_status(world)}" == "standing by for mesh 'train'", "the activity", SLACK)
    liveness.set_activity("")
    wait_until(lambda: last_status(world).activity == "", "no activity", SLACK)


def test_store_without_connections_has_statuses_too():
    world = World(dist.HashStore(), 0, 1, GroupOptions(), "HashStore")
    liveness_of(world).wait_for_heartbeat()
    assert last_status(world).endpoint == ()
    world.end("its process has exited")


# -- tasks and looks ---------------------------------------------------------------------------------------------------


def test_failed_task_is_repeated_until_it_succeeds(world: World):
    liveness = liveness_of(world)
    with faults(Fault(Set("told", "why"), before=raises(RuntimeError("not now")), times=2)):
        assert liveness.insist(lambda run: f"{run(Set('told', 'why'))}", 10.0) == "[None]"
    assert CallClient(world, 1.0).run(Read("told")) == [b"why"]


def test_insist_returns_none_after_its_time(store: StoreProcess, world: World):
    liveness = liveness_of(world)
    liveness.wait_for_heartbeat()
    with stopped([pid_of(store)]):
        start = time.monotonic()
        assert liveness.insist(lambda run: f"{run(Add('told'))}", 0.3) is None
        assert 0.25 < time.monotonic() - start < 0.3 + SLACK
    wait_until(lambda: CallClient(world, 1.0).run(Read("told")) == [b"1"], "the task")


def test_task_is_performed_before_the_thread_ends(store: StoreProcess):
    with ranks(store, 1) as (world,):
        liveness = liveness_of(world)
        liveness.wait_for_heartbeat()
        with stopped([pid_of(store)]):
            liveness.insist(lambda run: f"{run(Set('told', 'why'))}", 0.0)
            end = threading.Thread(target=world.end, args=("its process has exited",))
            end.start()
            end.join(0.3)
            assert end.is_alive()  # it waits until the store answers
        end.join(10.0)
        assert not end.is_alive()
    client = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    assert client.get("told") == b"why"


def test_look_is_called_until_it_returns_false(world: World):
    answers = [True, True, False]
    asked: list[Any] = []

    def look(run: Run) -> bool:
        asked.extend(run(Append("looked", "x"), Read("looked")))
        return answers.pop(0)

    liveness_of(world).looks.append(look)
    wait_until(lambda: not answers, "three looks")
    time.sleep(0.3)
    assert asked[1::2] == [b"x", b"xx", b"xxx"]
    assert liveness_of(world).looks == []


def test_error_in_look_is_logged_once_with_rank(world: World):
    calls: list[int] = []

    def look(_: Run) -> bool:
        calls.append(1)
        raise ValueError("broken by design")

    with logged_lines() as lines:
        liveness_of(world).looks.append(look)
        wait_until(lambda: len(calls) >= 3, "three looks")
        heartbeat = last_status(world).heartbeat
        wait_until(lambda: last_status(world).heartbeat > heartbeat, "another heartbeat")
    assert [line.text for line in lines] == ["rank 0: error in the liveness thread: broken by design"]


def test_slow_looks_take_turns_between_heartbeats(world: World):
    """Each may wait for a host that does not answer."""
    order: list[int] = []
    liveness = liveness_of(world)

    def slow_look(number: int) -> Callable[[Run], bool]:
        return lambda run: bool(order.append(number)) or not time.sleep(liveness.lost_after / 3)

    liveness.looks.extend(map(slow_look, range(3)))
    wait_until(lambda: len(order) >= 6, "six looks")
    assert order[:6] == [0, 1, 2] * 2
    assert last_status(world).heartbeat >= 5


# -- silence -----------------------------------------------------------------------------------------------------------


def pid_of(store: StoreProcess) -> int:
    assert store.process.pid is not None
    return store.process.pid


def watch(world: World, rank: int, seconds: float) -> tuple[Statuses, list[str]]:
    """Read the status of another rank for some seconds; return how it was known to be lost, if it was."""
    client, end, seen = CallClient(world, seconds), time.monotonic() + seconds, list[str]()
    statuses = client.liveness.new_statuses()
    while time.monotonic() < end:
        statuses.read(client.run, [rank])
        seen += statuses.lost([rank]).values()
        client.sleep(0.02)
    return statuses, seen


@pytest.mark.parametrize("seconds", [0.3, 2.0])
def test_paused_store_makes_no_rank_silent(store: StoreProcess, seconds: float):
    with ranks(store) as worlds:
        for world in worlds:
            liveness_of(world).wait_for_heartbeat()

        def pause() -> None:
            time.sleep(0.3)
            with stopped([pid_of(store)]):
                time.sleep(seconds)

        thread = threading.Thread(target=pause)
        thread.start()
        statuses, lost = watch(worlds[0], 1, seconds + 1.5)
        thread.join()
        assert lost == []
        assert statuses.record(1).status is not None


def test_silent_rank_is_lost_after_five_heartbeats(store: StoreProcess):
    with ranks(store) as worlds:
        liveness_of(worlds[1]).wait_for_heartbeat()
        blocked = threading.Event()
        liveness_of(worlds[1]).looks.append(lambda run: blocked.wait(5.0))
        start = time.monotonic()
        client = CallClient(worlds[0], 5.0)
        statuses = client.liveness.new_statuses()
        while not statuses.lost([1]):
            statuses.read(client.run, [1])
            client.sleep(0.02)
        took = time.monotonic() - start
        blocked.set()
        assert 0.4 < took < 1.0 + SLACK
        assert "rank 1 has sent no heartbeat for at least 0 s" in statuses.lost([1])[1]


@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_suspended_ranks_take_none_for_lost(seconds: float):
    with fresh_world(3) as own:
        pids = own.pids

        def suspend() -> None:
            time.sleep(0.5)
            with stopped(pids):
                time.sleep(seconds)

        thread = threading.Thread(target=suspend)
        thread.start()
        lost = own.run(watch_others, seconds + 2.0)
        thread.join()
    assert lost == [[], [], []]


def watch_others(seconds: float) -> list[str]:
    beat_fast()
    world = current_world()
    liveness_of(world).wait_for_heartbeat()
    dist.barrier()
    return watch(world, (world.rank + 1) % world.size, seconds)[1]


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["its process has exited", "torch.distributed was destroyed"])
def test_end_of_world_publishes_reason(store: StoreProcess, reason: str):
    with ranks(store) as worlds:
        liveness = liveness_of(worlds[1])
        liveness.wait_for_heartbeat()
        endpoint = last_status(worlds[1]).endpoint
        before = len(liveness_threads())
        worlds[1].end(reason)
        assert len(liveness_threads()) == before - 1
        statuses, _ = watch(worlds[0], 1, 0.1)
        assert statuses.lost([1]) == {1: f"rank 1 has left the world: {reason}"}
        assert is_refused(endpoint)  # type: ignore[arg-type]
        assert liveness.insist(lambda run: "done", 5.0) is None
        with pytest.raises(LifetimeError, match=f"no heartbeat: {reason}"):
            Liveness(worlds[1])


def test_dead_store_ends_thread_with_world_error(store: StoreProcess, world: World):
    liveness = liveness_of(world)
    liveness.wait_for_heartbeat()
    last_status(world)
    store.close()
    wait_until(lambda: liveness.failure, "the end of the thread")
    with pytest.raises(WorldError, match=f"the store at 127.0.0.1:{store.port} failed"):
        liveness.wait_for_heartbeat()
    with pytest.raises(WorldError, match=f"the store at 127.0.0.1:{store.port} failed"):
        CallClient(world, 1.0).run(CompareSet("a", "b"))
    assert liveness.insist(lambda run: f"{run(Add('a'))}", 5.0) is None
    assert last_words(world) == ""


def last_words(world: World) -> str:
    """End a world whose store is dead. Its listener stays open until then: it says that the process lives."""
    liveness = liveness_of(world)
    host, port = liveness._listeners.endpoint
    socket.create_connection((host, port), 5.0).close()
    world.end("its process has exited")
    return "" if liveness._exited else "not ended"


def is_refused(endpoint: tuple[str, int]) -> bool:
    try:
        socket.create_connection(endpoint, 5.0).close()
    except ConnectionRefusedError:
        return True
    return False


def test_forked_child_closes_the_listener(store: StoreProcess):
    with ranks(store) as worlds:
        liveness_of(worlds[1]).wait_for_heartbeat()
        endpoint: Any = last_status(worlds[1]).endpoint
        child = os.fork()
        if child == 0:
            time.sleep(30.0)
            os._exit(0)
        try:
            worlds[1].end("its process has exited")
            wait_until(lambda: is_refused(endpoint), "the end of the listener in the child")
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@on_ranks(2, fresh=True)
def test_group_alone_starts_no_liveness():
    mesh = ProcessGroupMesh(dp=2)
    dist.all_reduce(torch.ones(1), group=mesh.group("dp"))
    assert liveness_threads() == []
    mesh.report()
    assert len(liveness_threads()) == 1


def test_operations_of_a_call_are_counted(world: World):
    client = CallClient(world, 30.0)
    asked: list[Operation] = [Add("a"), Add("a"), Read("a")]
    assert client.run(*asked) == [1, 2, b"2"]
    assert client.operations == 3
    assert client.deadline - client.start == 30.0
    slept: list[float] = []
    client.on_sleep = lambda: slept.append(client.now())
    client.sleep(0.05)
    assert slept
    assert client.now() >= 0.05
