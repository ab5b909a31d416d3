"""Gloo's event loops, found by their listener: which connections they have, and how they go quiet in the end."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import time
from types import SimpleNamespace

import pytest

from pgmesh._util.sockets import descriptors, inode_of
from pgmesh.groups import connections
from pgmesh.groups.connections import Endpoints, shut_down
from pgmesh.groups.event_loops import end_events, find_loops
from pgmesh.groups.waking import wake
from tests.support.resource_counts import CAN_COUNT

pytestmark = pytest.mark.skipif(not CAN_COUNT, reason="reads /proc")


@pytest.fixture
def group():
    """The event loop of a group, which watches its listener; its listeners; both ends of a connection to a member."""
    with (
        socket.create_server(("127.0.0.1", 0)) as own,
        socket.create_server(("127.0.0.1", 0)) as member,
        socket.create_connection(member.getsockname()) as ours,
        member.accept()[0] as theirs,
        select.epoll() as loop,
    ):
        loop.register(own, select.EPOLLIN)
        endpoints = Endpoints([own.getsockname()], [(1, member.getsockname())], [])
        yield SimpleNamespace(loop=loop, own=own, endpoints=endpoints, ours=ours, theirs=theirs)


@contextlib.contextmanager
def free_descriptors(count: int):
    """Let this process open so many more files, and no others."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors()) + 1 + count, limits[1]))
    opened = []
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(opened.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in opened:
            os.close(each)


def test_shut_down_needs_two_free_descriptors(group):
    """The last of six event loops has the connection."""
    with contextlib.ExitStack() as stack:
        loops = [stack.enter_context(select.epoll()) for _ in range(5)]
        for loop in loops:
            loop.register(group.own, select.EPOLLIN)
        loops[-1].register(group.ours, select.EPOLLIN | select.EPOLLONESHOT)
        with free_descriptors(2):
            shut_down([group.endpoints])
    with pytest.raises(BrokenPipeError):
        group.ours.sendall(b"shut down")


def test_wake_needs_free_descriptors_for_gloo(group):
    """Gloo ends the process if it cannot accept a connection."""
    group.own.settimeout(0.1)
    waiting = group.endpoints._replace(places=[1])
    with free_descriptors(2):
        wake([waiting])
    with pytest.raises(TimeoutError):
        group.own.accept()
    wake([waiting])
    group.own.accept()[0].close()


def test_shut_down_spares_connection_of_another_program(group):
    """A member has closed its listener, and another program has its port now."""
    group.loop.register(group.ours, select.EPOLLIN | select.EPOLLONESHOT)
    with socket.create_connection(group.endpoints.members[0][1]) as other:
        shut_down([group.endpoints])
        other.sendall(b"still open")
    with pytest.raises(BrokenPipeError):
        group.ours.sendall(b"shut down")


def test_shut_down_includes_connection_being_opened(group, monkeypatch: pytest.MonkeyPatch):
    """Gloo has opened it, and tells its event loop a moment later."""
    register = lambda seconds: group.loop.register(group.ours, select.EPOLLIN)  # noqa: E731
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=time.monotonic, sleep=register))
    shut_down([group.endpoints])
    with pytest.raises(BrokenPipeError):
        group.ours.sendall(b"shut down")


def test_ended_connection_has_one_last_event(group):
    group.theirs.sendall(b"the rest of a message that nobody reads")
    group.loop.register(group.ours, select.EPOLLIN)
    group.ours.shutdown(socket.SHUT_RDWR)
    assert group.loop.poll(0) == group.loop.poll(0) != []  # it repeats

    end_events(find_loops({inode_of(group.own)}))

    assert [number for number, _ in group.loop.poll(0)] == [group.ours.fileno()]
    assert group.loop.poll(0.05) == []
    group.loop.unregister(group.ours)  # Gloo's thread may do so late; an error would end the process there


def test_other_loop_keeps_events_under_reused_number(group):
    group.theirs.sendall(b"unread")
    with select.epoll() as other:
        other.register(group.ours, select.EPOLLIN)
        found = find_loops({inode_of(group.own)})
        os.dup2(other.fileno(), group.loop.fileno())

        end_events(found)

        assert other.poll(0) == other.poll(0) != []
