"""The listener by which a process shows that it lives, and questions to those of other processes.

A listener is open as long as its process. Each status has its host and port, so other ranks can ask it.
"""

from __future__ import annotations

import contextlib
import os
import socket

from pgmesh.liveness.statuses import RankStatus
from pgmesh.liveness.timing import heartbeat_period

_MISSED_PERIODS = 1.5
"""A heartbeat is missing after this many periods."""

_LOOPBACK = ("127.0.0.1", "::1")
"""The address of a rank on the store's host, if it reaches the store there. On other hosts it means another process."""


class Listener:
    """This process's listener. It asks those of others, whose answers depend on the hosts of both."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.endpoint: tuple[str, int] | tuple[()] = ()  # its host and port; () without one

    def open(self, store: str) -> None:
        """Listen where the host of the store can reach this process, if that is possible.

        Args:
            store: host and port of the store. Other text for a store that has none: there is no listener then.
        """
        with contextlib.suppress(OSError, ValueError):
            host, _, port = store.rpartition(":")
            family, kind, _, _, there = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(there)  # sends no packet
                self._socket = socket.create_server((probe.getsockname()[0], 0), family=family, backlog=1024)
            self._socket.setblocking(False)
            self.endpoint = self._socket.getsockname()[:2]
            if hasattr(os, "register_at_fork"):  # a child would keep the port open after its parent has ended
                os.register_at_fork(after_in_child=self._socket.close)

    def drain(self) -> None:
        """Accept and close the connections that other ranks have opened, so that there is room for more."""
        with contextlib.suppress(OSError):
            while self._socket is not None:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Refuse connections from now on."""
        if self._socket is not None:
            self._socket.close()

    def has_ended(self, status: RankStatus, seconds: float, wait: float) -> bool:
        """True if the process that published a status has ended: its listener refuses a connection.

        A firewall on another host may refuse too, so for other hosts a heartbeat must be missing as well.

        Args:
            seconds: the time without a new heartbeat.
            wait: the time in which the listener has to answer.
        """
        if not status.endpoint or not self.endpoint:
            return False
        host = status.endpoint[0]
        has_missed_one = seconds >= _MISSED_PERIODS * heartbeat_period(status.world_size)
        if host != self.endpoint[0] and (host in _LOOPBACK or not has_missed_one):
            return False
        try:
            socket.create_connection(status.endpoint, wait).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False
