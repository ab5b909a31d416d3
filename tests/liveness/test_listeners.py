"""Listeners of processes: which answers say that a process has ended."""

from __future__ import annotations

import socket
import time

import pytest

from pgmesh.liveness import timing
from pgmesh.liveness.listeners import Listeners
from pgmesh.liveness.statuses import RankStatus


@pytest.fixture
def listeners():
    """Those of a process on the host of the store."""
    found = Listeners(1.0)
    found.open("127.0.0.1:29500")
    yield found
    found.close()


def closed_endpoint() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        return str(host), int(port)


def test_closed_listener_means_that_process_has_ended(listeners: Listeners):
    assert listeners.has_ended(RankStatus(1, endpoint=closed_endpoint()), 0.0, 1.0)
    assert not listeners.has_ended(RankStatus(1), 0.0, 1.0)


def test_open_listener_means_that_process_runs(listeners: Listeners):
    other = Listeners(1.0)
    other.open("127.0.0.1:29500")
    status = RankStatus(1, endpoint=other.endpoint)
    assert not listeners.has_ended(status, 100.0, 1.0)
    other.close()
    assert not listeners.has_ended(status, 100.0, 1.0)  # it was asked just now
    time.sleep(timing.TIMING.ask_again)
    assert listeners.has_ended(status, 100.0, 1.0)


def test_loopback_of_another_host_says_nothing(listeners: Listeners):
    listeners.endpoint = ("192.0.2.1", 4000)
    assert not listeners.has_ended(RankStatus(1, endpoint=closed_endpoint()), 100.0, 1.0)


@pytest.mark.parametrize(("seconds", "ended"), [(1.4, False), (1.6, True)])
def test_other_host_must_miss_a_heartbeat_too(listeners: Listeners, seconds: float, ended: bool):
    """A firewall may refuse connections. Each address of 127/8 is a host here."""
    listeners.endpoint = ("127.0.0.2", 4000)
    assert listeners.has_ended(RankStatus(1, endpoint=closed_endpoint()), seconds, 1.0) == ended


def test_drain_makes_room_for_more_connections(listeners: Listeners):
    host, port = listeners.endpoint
    for _ in range(3):
        clients = [socket.create_connection((host, port), 5.0) for _ in range(100)]
        listeners.drain()
        for client in clients:
            assert client.recv(1) == b""  # closed
            client.close()


@pytest.mark.parametrize("store", ["HashStore", "no.such.host.invalid:1", "127.0.0.1:no-port", ""])
def test_store_without_address_gives_no_listener(store: str):
    listeners = Listeners(1.0)
    listeners.open(store)
    assert listeners.endpoint == ()
    listeners.drain()
    listeners.close()
    assert not listeners.has_ended(RankStatus(1, endpoint=closed_endpoint()), 100.0, 1.0)
