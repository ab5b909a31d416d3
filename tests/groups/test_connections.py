"""The connections of a group: they are told from others to the same listeners by the group's event loop."""

from __future__ import annotations

import select
import socket
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from pgmesh import GroupOptions
from pgmesh.groups import connections, teardown
from pgmesh.groups.connections import Endpoints, shut_down
from pgmesh.groups.group import Group
from tests.support.resource_counts import CAN_COUNT

pytestmark = pytest.mark.skipif(not CAN_COUNT, reason="reads /proc")


@pytest.fixture
def group():
    """The event loop of a group, which watches its listener; its listeners; a connection to a member."""
    with (
        socket.create_server(("127.0.0.1", 0)) as own,
        socket.create_server(("127.0.0.1", 0)) as member,
        socket.create_connection(member.getsockname()) as connection,
        select.epoll() as loop,
    ):
        loop.register(own, select.EPOLLIN)
        yield loop, Endpoints([own.getsockname()], [(1, member.getsockname())], []), connection


def test_shut_down_spares_connection_of_another_program(group):
    """A member has closed its listener, and another program has its port now."""
    loop, endpoints, ours = group
    loop.register(ours, select.EPOLLIN | select.EPOLLONESHOT)
    with socket.create_connection(endpoints.members[0][1]) as other:
        shut_down([endpoints])
        other.sendall(b"still open")
    with pytest.raises(BrokenPipeError):
        ours.sendall(b"shut down")


def test_shut_down_includes_connection_being_opened(group, monkeypatch: pytest.MonkeyPatch):
    """Gloo has opened it, and tells its event loop a moment later."""
    loop, endpoints, ours = group
    sleep = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: loop.register(ours, select.EPOLLIN))
    monkeypatch.setattr(connections, "time", sleep)
    shut_down([endpoints])
    with pytest.raises(BrokenPipeError):
        ours.sendall(b"shut down")


def test_wake_skips_end_of_a_changed_timeout(monkeypatch: pytest.MonkeyPatch):
    """Gloo connects by the timeout that the group was made with, for five times as long."""
    woken: list[Endpoints] = []
    monkeypatch.setattr(teardown.connections, "wake", woken.append)
    monkeypatch.setattr(teardown, "busy_since", lambda: {"group": time.monotonic() - 10.0})
    group = Group("group tp", "mesh 'actor'", (0, 1), options=GroupOptions(timeout=2), new_timeout=timedelta(minutes=1))
    group.name = "group"
    monkeypatch.setattr(group, "is_known", lambda: True)
    monkeypatch.setattr(group, "endpoints", lambda: Endpoints([], [], [1]))
    teardown.wake([group])
    assert not woken
    group.options = GroupOptions(timeout=20)
    teardown.wake([group])
    assert woken
