"""Listeners of processes: which answers say that a process has ended."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from pgmesh.liveness.listeners import Listener
from pgmesh.liveness.statuses import RankStatus
from tests.support.faults import wait_until
from tests.support.programs import free_port


@pytest.fixture
def listener():
    """That of a process on the host of the store."""
    found = Listener()
    found.open("127.0.0.1:29500")
    yield found
    found.close()


def is_refused(endpoint: tuple[str, int]) -> bool:
    try:
        socket.create_connection(endpoint, 5.0).close()
    except ConnectionError as error:  # it may be reset while the listener closes
        return isinstance(error, ConnectionRefusedError)
    return False


def test_closed_listener_means_that_process_has_ended(listener: Listener):
    """A loopback address of another host says nothing."""
    other = Listener()
    other.open("127.0.0.1:29500")
    status = RankStatus(endpoint=other.endpoint)
    assert not listener.has_ended(status, 100.0, 1.0)
    other.close()
    assert listener.has_ended(status, 0.0, 1.0)
    assert not listener.has_ended(RankStatus(), 0.0, 1.0)
    listener.endpoint = ("192.0.2.1", 4000)
    assert not listener.has_ended(status, 100.0, 1.0)


def test_other_host_must_miss_a_heartbeat_too(listener: Listener):
    """A firewall may refuse connections. Each address of 127/8 but the first is a host here."""
    status = RankStatus(endpoint=("127.0.0.2", free_port()))
    assert [listener.has_ended(status, seconds, 1.0) for seconds in (1.4, 1.6)] == [False, True]


def test_forked_child_closes_the_listener(listener: Listener):
    child = os.fork()
    if child == 0:
        time.sleep(30.0)
        os._exit(0)
    try:
        listener.close()
        wait_until(lambda: is_refused(listener.endpoint), "the end of the listener in the child")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("store", ["HashStore", "no.such.host.invalid:1", "127.0.0.1:no-port", ""])
def test_store_without_address_gives_no_listener(store: str):
    listener = Listener()
    listener.open(store)
    assert listener.endpoint == ()
    listener.drain()
    listener.close()
    assert not listener.has_ended(RankStatus(endpoint=("127.0.0.1", free_port())), 100.0, 1.0)


def test_drain_makes_room_for_more_connections(listener: Listener):
    host, port = listener.endpoint
    for _ in range(3):
        clients = [socket.create_connection((host, port), 5.0) for _ in range(100)]
        listener.drain()
        for client in clients:
            assert client.recv(1) == b""  # closed
            client.close()
