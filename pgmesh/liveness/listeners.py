"""How a process shows that it lives, and what the listeners of other processes say of them.

A listener is open as long as its process. Each status has its host and port, so other ranks can ask it.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time

from pgmesh.liveness import timing
from pgmesh.liveness.statuses import RankStatus

_MISSED_PERIODS = 1.5
"""A heartbeat is missing after this many periods."""


class Listeners:
    """This process's listener, and the answers of those of others.

    Args:
        period: seconds between two heartbeats of any rank.
    """

    def __init__(self, period: float) -> None:
        self._period = period
        self._own: socket.socket | None = None  # this process's listener
        self.endpoint: tuple[str, int] | tuple[()] = ()  # its host and port; () without one
        self._asked: dict[object, tuple[float, bool]] = {}  # by listener: when it was last asked, and if it refused

    def open(self, store: str) -> None:
        """Open this process's listener where the host of the store can reach it, if that is possible.

        Args:
            store: host and port of the store. Other text for a store that has none: there is no listener then.
        """
        with contextlib.suppress(OSError, ValueError):
            host, _, port = store.rpartition(":")
            family, kind, _, _, there = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(there)  # sends no packet
                self._own = socket.create_server((probe.getsockname()[0], 0), family=family, backlog=128)
            self._own.setblocking(False)
            self.endpoint = self._own.getsockname()[:2]

    def drain(self) -> None:
        """Accept and close the connections that other ranks have opened, so that there is room for more."""
        with contextlib.suppress(OSError):
            while self._own is not None:
                self._own.accept()[0].close()

    def close(self) -> None:
        """Close the listener, or the copy of it in a forked child, which would keep the port open."""
        if self._own is not None:
            self._own.close()

    def has_ended(self, status: RankStatus, seconds: float, wait: float) -> bool:
        """True if the process that published a status has ended: its listener refuses a connection.

        A firewall on another host may refuse too, so for other hosts a heartbeat must be missing as well. A listener is
        asked a few times in a second at most: it has room for 128 connections until the next heartbeat.

        Args:
            seconds: the time without a new heartbeat.
            wait: the time in which the listener has to answer.
        """
        if not status.endpoint or not self.endpoint:
            return False
        host, own_host = status.endpoint[0], self.endpoint[0]
        # A rank that reaches the store over its loopback is on the store's host. Elsewhere that address means another.
        if _is_loopback(host) != _is_loopback(own_host):
            return False
        if host != own_host and seconds < _MISSED_PERIODS * self._period:
            return False
        asked_at, refused = self._asked.get(status.endpoint, (-math.inf, False))
        if time.monotonic() >= asked_at + timing.TIMING.ask_again:
            refused = _refuses(status.endpoint, wait)
            self._asked[status.endpoint] = time.monotonic(), refused
        return refused


def _is_loopback(host: str) -> bool:
    """True for an address that every host has for itself."""
    return host.startswith("127.") or host == "::1"


def _refuses(endpoint: tuple[str, int], wait: float) -> bool:
    """True if the endpoint refuses a connection. No answer in so many seconds is no proof."""
    try:
        socket.create_connection(endpoint, wait).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False
