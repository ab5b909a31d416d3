"""How a process shows that it lives, and what the listeners of other processes say of them.

A listener is open as long as its process. Each status has its host and port, so other ranks can ask it.
"""

from __future__ import annotations

import math
import time

from pgmesh._util.listeners import Listener, is_loopback, refuses
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.statuses import RankStatus

_MISSED_PERIODS = 1.5
"""A heartbeat is missing after this many periods."""


class Listeners:
    """This process's listener, and the answers of those of others.

    Args:
        period: seconds between two heartbeats of any rank.
    """

    def __init__(self, period: float) -> None:
        self._period = period
        self.own: Listener | None = None  # None before ``open``
        self._asked: dict[object, tuple[float, bool]] = {}  # by listener: when it was last asked, and if it refused

    def open(self, host: str) -> None:
        """Open this process's listener, unless that was done before."""
        if self.own is None:
            self.own = Listener(host)

    @property
    def endpoint(self) -> tuple[str, int] | tuple[()]:
        """Host and port of this process's listener; () if it is not open."""
        return () if self.own is None else (self.own.host, self.own.port)

    def drain(self) -> None:
        """Make room for further connections of ranks that ask."""
        if self.own is not None:
            self.own.drain()

    def close(self) -> None:
        """Close the listener, or the copy of it in a forked child, which would keep the port open."""
        if self.own is not None:
            self.own.close()

    def has_ended(self, status: RankStatus, seconds: float) -> bool:
        """True if the process that published a status has ended: its listener refuses a connection.

        A firewall on another host may refuse too, so for other hosts a heartbeat must be missing as well. A listener is
        asked a few times in a second at most: it has room for 128 connections until the next heartbeat.

        Args:
            seconds: the time without a new heartbeat.
        """
        if not status.endpoint or self.own is None:
            return False
        host = status.endpoint[0]
        # A rank that reaches the store over its loopback is on the store's host. Elsewhere that address means another.
        if is_loopback(host) != is_loopback(self.own.host):
            return False
        if host != self.own.host and seconds < _MISSED_PERIODS * self._period:
            return False
        asked_at, refused = self._asked.get(status.endpoint, (-math.inf, False))
        if time.monotonic() >= asked_at + timing.TIMING.ask_again:
            refused = refuses(status.endpoint)
            self._asked[status.endpoint] = time.monotonic(), refused
        return refused
