"""The status that this process publishes with its heartbeats.

Any thread says what it does and waits for. The store thread reads that at each heartbeat.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from pgmesh.rendezvous import timing
from pgmesh.rendezvous.statuses import PendingConnect, RankStatus, RunningCollective


class OwnStatus:
    """The status of this process, as its threads have set it.

    Args:
        rank: its rank in the world.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._activities: dict[int, str] = {}  # by thread
        self._pending: dict[int, tuple[PendingConnect, ...]] = {}  # by thread
        self._running: tuple[RunningCollective, ...] = ()
        self.exited = ""  # the reason for the end. Afterwards no collectives are published
        self.heartbeats = 0  # the number of statuses so far

    def set_activity(self, activity: str) -> None:
        """Set the activity of the calling thread; "" for none."""
        _set(self._activities, activity)

    def set_pending(self, pending: tuple[PendingConnect, ...]) -> bool:
        """Set the groups that the calling thread waits for. True if they are others than before."""
        changes = pending != self._pending.get(threading.get_ident(), ())
        _set(self._pending, pending)
        return changes

    def set_running(self, running: tuple[RunningCollective, ...]) -> bool:
        """Set the collectives of this process that run. True if they are others than before."""
        before, self._running = self._running, running
        return [each[:4] for each in running] != [each[:4] for each in before]  # apart from the seconds

    def next(self, endpoint: tuple[str, int] | tuple[()]) -> RankStatus:
        """The status of the next heartbeat.

        Args:
            endpoint: host and port of this process's listener; () without one.
        """
        self.heartbeats += 1
        pending = tuple(wait for pending in tuple(self._pending.values()) for wait in pending)
        return RankStatus(
            self._rank,
            self.heartbeats,
            "; ".join(tuple(self._activities.values())),
            pending[: timing.LIMITS.statuses],
            () if self.exited else self._running,
            self.exited,
            endpoint,
            time.time(),
        )


def _set(by_thread: dict[int, Any], value: Any) -> None:
    """Set the value of the calling thread, or delete an empty one."""
    if value:
        by_thread[threading.get_ident()] = value
    else:
        by_thread.pop(threading.get_ident(), None)
