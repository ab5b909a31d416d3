"""Gloo's event loops: they go quiet when their group has ended, whatever Gloo has not read."""

from __future__ import annotations

import os
import select
import socket

import pytest

from pgmesh._util.sockets import inode_of
from pgmesh.groups.event_loops import end_events, find_loops


@pytest.fixture
def connection():
    """A listener, and both ends of a connection to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as there:
        here, _ = listener.accept()
        with here:
            yield listener, here, there


def test_ended_connection_has_one_last_event(connection):
    listener, here, there = connection
    there.sendall(b"the rest of a message that nobody reads")
    with select.epoll() as loop:
        loop.register(listener, select.EPOLLIN)
        loop.register(here, select.EPOLLIN)
        here.shutdown(socket.SHUT_RDWR)
        assert loop.poll(0) == loop.poll(0) != []  # it repeats

        end_events(find_loops({inode_of(listener)}))

        assert [number for number, _ in loop.poll(0)] == [here.fileno()]
        assert loop.poll(0.05) == []


def test_late_event_loop_removes_its_connection(connection):
    # Gloo's thread may have had no time to close the connection. An error here would end the process there.
    listener, here, _ = connection
    with select.epoll() as loop:
        loop.register(listener, select.EPOLLIN)
        loop.register(here, select.EPOLLIN)
        here.shutdown(socket.SHUT_RDWR)

        end_events(find_loops({inode_of(listener)}))

        loop.unregister(here)


def test_other_loop_keeps_events_under_reused_number(connection):
    listener, here, there = connection
    there.sendall(b"unread")
    with select.epoll() as ended, select.epoll() as other:
        ended.register(listener, select.EPOLLIN)
        other.register(here, select.EPOLLIN)
        found = find_loops({inode_of(listener)})
        os.dup2(other.fileno(), ended.fileno())

        end_events(found)

        assert other.poll(0) == other.poll(0) != []
