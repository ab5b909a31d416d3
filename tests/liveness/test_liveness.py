"""The liveness thread: its start, the status that it publishes, its looks, and its end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from pgmesh import LifetimeError, WorldError
from pgmesh.groups.world import World
from pgmesh.launch import StoreProcess
from pgmesh.liveness import timing
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.liveness import Liveness, liveness_of
from pgmesh.liveness.operations import CompareSet, Read, Run
from pgmesh.liveness.statuses import RankStatus, status_key
from pgmesh.options import GroupOptions
from tests.liveness.test_listeners import is_refused
from tests.support.faults import SLACK, wait_until
from tests.support.logs import logged_lines

PENDING, OTHER = {"train.0/tp/0": "connecting group tp"}, {"train.0/dp/0": "connecting group dp"}


@pytest.fixture
def store():
    """A client of a store in a process of its own, which has the attribute ``process``."""
    with StoreProcess() as store:
        yield store


@pytest.fixture(autouse=True)
def fast_heartbeats(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "HEARTBEAT", 0.1)


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
def rare_heartbeats(fast_heartbeats: None, monkeypatch: pytest.MonkeyPatch):
    """What is published within a second is published at once."""
    monkeypatch.setattr(timing, "HEARTBEAT", 60.0)


def last_status(world: World) -> RankStatus:
    liveness_of(world).wait_for_heartbeat()
    status = RankStatus.unpack(CallClient(world, 1.0).run(Read(status_key(world.rank)))[0])
    assert status is not None
    return status


def liveness_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pgmesh-liveness"]


def test_one_thread_publishes_process_and_place(world: World):
    before = len(liveness_threads())
    status = last_status(world)
    assert len(liveness_threads()) == before + 1
    assert (status.world_size, status.host, status.pid) == (1, socket.gethostname(), os.getpid())
    assert status.place.line.startswith("test_liveness.py:")
    assert abs(status.sent - time.time()) < SLACK
    socket.create_connection(status.endpoint, 5.0).close()  # type: ignore[arg-type]
    wait_until(lambda: last_status(world).sent > status.sent, "another heartbeat")


def test_pending_groups_of_threads_are_published_at_once(world: World, rare_heartbeats: None):
    liveness = liveness_of(world)
    assert last_status(world).pending == {}
    liveness.set_pending(PENDING)
    thread = threading.Thread(target=liveness.set_pending, args=(OTHER,))
    thread.start()
    thread.join()
    wait_until(lambda: last_status(world).pending == {**PENDING, **OTHER}, "both groups", SLACK)
    liveness.set_pending({})
    wait_until(lambda: last_status(world).pending == OTHER, "one group", SLACK)
    sent = last_status(world).sent
    liveness.set_pending({})
    time.sleep(0.1)
    assert last_status(world).sent == sent  # nothing has changed


def test_error_in_look_is_logged_once_with_rank(world: World):
    calls: list[int] = []

    def look(_: Run) -> None:
        calls.append(1)
        raise ValueError("broken by design")

    with logged_lines() as lines:
        liveness_of(world).look = look
        wait_until(lambda: len(calls) >= 3, "three looks")
    assert [line.text for line in lines] == ["rank 0: error in the liveness thread: broken by design"]


def test_end_of_world_publishes_reason(store: StoreProcess):
    reason = "torch.distributed was destroyed"
    with ranks(store) as worlds:
        endpoint: Any = last_status(worlds[1]).endpoint
        before = len(liveness_threads())
        worlds[1].end(reason)
        assert len(liveness_threads()) == before - 1
        client = CallClient(worlds[0], 1.0)
        statuses = client.liveness.new_statuses()
        statuses.read(client.run, [1])
        assert statuses.lost([1]) == {1: f"rank 1 has left the world: {reason}"}
        assert is_refused(endpoint)
        with pytest.raises(LifetimeError, match=f"no store: {reason}"):
            Liveness(worlds[1]).wait_for_heartbeat()


def test_dead_store_ends_thread_with_world_error(store: StoreProcess, world: World):
    liveness = liveness_of(world)
    endpoint: Any = last_status(world).endpoint
    store.close()
    wait_until(lambda: liveness.failure, "the end of the thread")
    with pytest.raises(WorldError, match=f"the store at 127.0.0.1:{store.port} failed"):
        liveness.wait_for_heartbeat()
    with pytest.raises(WorldError, match=f"the store at 127.0.0.1:{store.port} failed"):
        CallClient(world, 1.0).run(CompareSet("a", "b"))
    socket.create_connection(endpoint, 5.0).close()  # it says that the process lives
    world.end("its process has exited")
    assert is_refused(endpoint)
