"""The TCP sockets of this process, as they are found in /proc."""

from __future__ import annotations

import os
import resource
import socket
import sys
from typing import Any

import pytest

from pgmesh._util.sockets import connections, opened
from tests.support.resource_counts import CAN_COUNT

pytestmark = pytest.mark.skipif(not CAN_COUNT, reason="reads /proc")


@pytest.fixture
def client():
    """One end of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        yield client


def test_opened_socket_keeps_its_blocking_mode(client: socket.socket):
    """A default timeout of the program would make the socket itself non-blocking, if only between two lines."""
    modes = []

    def look(*event: Any) -> Any:
        modes.append(os.get_blocking(client.fileno()))
        return look

    socket.setdefaulttimeout(5.0)
    sys.settrace(look)
    try:
        with opened(client.fileno()) as same:
            assert same.getsockname() == client.getsockname()
    finally:
        sys.settrace(None)
        socket.setdefaulttimeout(None)
    assert len(modes) > 3
    assert all(modes)


def test_connections_are_empty_without_free_descriptors(client: socket.socket):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = [*connections()]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == []
    assert client.getsockname() in [here for _, here, _ in connections()]
