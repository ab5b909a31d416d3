"""The liveness thread of this process: it says that the process lives and where it is, and looks at other ranks.

The first verb that needs it starts it. It has a client of the store of its own, so a store that does not answer blocks
this thread alone. Each ``period`` it publishes the status of this process, and calls ``look``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from pgmesh.errors import PgmeshError
from pgmesh.groups.world import World
from pgmesh.liveness import operations, timing
from pgmesh.liveness.listeners import Listener
from pgmesh.liveness.operations import Operation, Read, Run, Set
from pgmesh.liveness.places import PlaceFinder, counters_key, own_counters
from pgmesh.liveness.processes import HOST, own_process
from pgmesh.liveness.records import pack
from pgmesh.liveness.statuses import RankStatus, Statuses, status_key

log = logging.getLogger("pgmesh")


class Liveness:
    """The liveness thread of this process in one world.

    Args:
        world: the world.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.period = timing.heartbeat_period(world.size)
        self.lost_after = timing.MISSED_HEARTBEATS * self.period
        self.look: Callable[[Run], object] = lambda run: None
        """Called after each heartbeat with a function that performs operations. If it is long, this rank seems lost."""
        self.places = PlaceFinder()
        self.failure: PgmeshError | None = None  # that of the store, which has ended the thread
        self._listener = Listener()
        self._client: Any = None
        self._answered = 0.0, time.monotonic()  # ``answered_seconds`` at the store's last answer, and its time
        self.statuses = self.new_statuses()
        """Those that all calls share: a silence begins when one of them first reads the last heartbeat."""
        # Set by any thread, before it wakes this one:
        self._pending: dict[int, dict[str, str]] = {}  # by thread
        self._exited = ""
        self._wake, self._has_beaten, self._has_warned = threading.Event(), threading.Event(), False
        world.on_end.append(self._end)
        self._thread = threading.Thread(target=self._run, name="pgmesh-liveness", daemon=True)
        self._thread.start()

    # -- called by other threads ------------------------------------------------------------------------------------

    def new_statuses(self) -> Statuses:
        """For one call, which gives ranks that were cut off before it the time to send a heartbeat."""
        return Statuses(self.lost_after, self.answered_seconds, self._listener.has_ended)

    def answered_seconds(self) -> float:
        """The time in which the store answered this process: the clock of other ranks' silence.

        Each interval between two answers counts for one period at most. So a pause of the store, of this process or of
        the whole machine adds at most one period, and makes no rank seem lost.
        """
        seconds, last = self._answered
        return seconds + min(time.monotonic() - last, self.period)

    def set_pending(self, pending: dict[str, str]) -> None:
        """Publish what the calling thread waits for in ``connect``, at once if it is new."""
        thread = threading.get_ident()
        if pending != self._pending.get(thread, {}):
            self._pending[thread] = pending
            self._wake.set()

    def wait_for_heartbeat(self) -> None:
        """Wait until the first status of this rank is in the store.

        Raises:
            LifetimeError: this process has left the world.
            WorldError: the store has failed.
        """
        self._has_beaten.wait()
        if self.failure is not None:
            raise self.failure

    def _end(self) -> None:
        """Let the thread publish that this process leaves the world, and wait for its end.

        A thread that returns from the store's client while Python finalises would abort the process.
        """
        self._exited = f"has left the world: {self.world.ended}"
        self._wake.set()
        self._thread.join()
        self._listener.close()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._client = self.world.new_client()
            self._listener.open(self.world.address)
            while not self._exited:
                due = time.monotonic() + self.period
                self._attempt(self._publish)
                self._attempt(self.look)
                self._wake.wait(max(0.0, due - time.monotonic()))
                self._wake.clear()
            self._attempt(self._publish)
        except (RuntimeError, OSError) as error:  # a client does not connect again
            self.failure = error if isinstance(error, PgmeshError) else self.world.error(error)
        finally:
            self._client = None
            self._has_beaten.set()

    def _attempt(self, act: Callable[[Run], object]) -> None:
        """Call a function that performs operations. If it raises an error, that is logged once.

        Raises:
            DistNetworkError: the connection to the store has failed.
        """
        try:
            act(self._perform)
        except dist.DistNetworkError:
            raise
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("rank %s: error in the liveness thread: %s", self.world.rank, error, exc_info=True)

    def _perform(self, *asked: Operation) -> list[Any]:
        answers = []
        for each in asked:
            answers.append(operations.perform(self._client, each))
            self._answered = self.answered_seconds(), time.monotonic()
        return answers

    def _publish(self, run: Run) -> None:
        """Publish the status. The store answers the read once it has it."""
        self._listener.drain()
        counters, key = own_counters(self.world.name), status_key(self.world.rank)
        pending = [each for waits in tuple(self._pending.values()) for each in waits.items()]
        status = RankStatus(
            self.world.size,
            HOST,
            os.getpid(),
            pending=dict(pending[: timing.MOST_STATUSES]),
            place=self.places.find(counters),
            exited=self._exited,
            endpoint=self._listener.endpoint,
            sent=time.time(),
            process=own_process(),
        )
        run(Set(counters_key(self.world.rank), pack(counters=counters)), Set(key, status.pack()), Read(key))
        self._has_beaten.set()


def liveness_of(world: World) -> Liveness:
    """The liveness thread of this process in a world. The first call starts it."""
    return world.state_of(Liveness)
