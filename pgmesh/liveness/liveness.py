"""The liveness thread of this process: it says that the process lives and where it is, and looks at other ranks.

The first verb that needs it starts it. It has a client of the store of its own, so a store that does not answer blocks
this thread alone. Each ``period`` it publishes the status of this process, and calls ``looks``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist

from pgmesh.errors import LifetimeError, PgmeshError
from pgmesh.groups.world import World
from pgmesh.liveness import operations, timing
from pgmesh.liveness.counters import GroupCounter, counters_key, own_counters, pack_counters
from pgmesh.liveness.listeners import Listeners
from pgmesh.liveness.operations import Operation, Read, Run, Set
from pgmesh.liveness.places import PlaceFinder
from pgmesh.liveness.processes import HOST
from pgmesh.liveness.statuses import NOWHERE, PendingConnect, RankStatus, Statuses, status_key

log = logging.getLogger("pgmesh")

R = TypeVar("R")


class Liveness:
    """The liveness thread of this process in one world.

    Args:
        world: the world.

    Raises:
        LifetimeError: this process has left the world.
    """

    def __init__(self, world: World) -> None:
        if world.ended:
            raise LifetimeError(f"this process has no heartbeat: {world.ended}.")
        self.world = world
        self.pace, self.period = timing.pace(world.size), timing.heartbeat_period(world.size)
        self.lost_after = timing.TIMING.missed_heartbeats * self.period
        self.looks: list[Callable[[Run], bool]] = []
        """Called after each heartbeat with a function that performs operations, until they return False."""
        self.places = PlaceFinder()
        self.failure: PgmeshError | None = None  # that of the store, which has ended the thread
        self._listeners = Listeners(self.period)
        self._client: Any = None
        self._answered = 0.0, time.monotonic()  # ``answered_seconds`` at the store's last answer, and its time
        self.statuses = self.new_statuses()
        """Those that all calls share: a silence begins when one of them first reads the last heartbeat."""
        # Set by any thread, before it wakes this one:
        self._pending: dict[int, tuple[PendingConnect, ...]] = {}  # by thread
        self._activities: dict[int, str] = {}  # by thread
        self._tasks: dict[Future[str], Callable[[Run], str]] = {}
        self._exited = ""
        self._wake = threading.Event()
        self._heartbeats, self._has_beaten, self._has_warned = 0, threading.Event(), False
        _open_listeners.add(self._listeners)
        world.on_end.append(self._end)
        self._thread = threading.Thread(target=self._run, name="pgmesh-liveness", daemon=True)
        self._thread.start()

    # -- called by other threads ------------------------------------------------------------------------------------

    def new_statuses(self) -> Statuses:
        """For one call, which gives ranks that were cut off before it the time to send a heartbeat."""
        return Statuses(self.lost_after, self.answered_seconds, self._listeners.has_ended)

    def answered_seconds(self) -> float:
        """The time in which the store answered this process: the clock of other ranks' silence.

        Each interval between two answers counts for one period at most. So a pause of the store, of this process or of
        the whole machine adds at most one period, and makes no rank seem lost.
        """
        seconds, last = self._answered
        return seconds + min(time.monotonic() - last, self.period)

    def set_pending(self, pending: tuple[PendingConnect, ...]) -> None:
        """Publish the groups that the calling thread waits for in ``connect``."""
        self._set(self._pending, pending)

    def set_activity(self, text: str) -> None:
        """Publish what the calling thread does, such as "standing by for mesh 'train'"; "" for nothing."""
        self._set(self._activities, text)

    def _set(self, by_thread: dict[int, Any], value: Any) -> None:
        """Set a value of the calling thread, or delete an empty one. Publish at once if it is another one."""
        thread = threading.get_ident()
        if value != by_thread.get(thread, type(value)()):
            by_thread[thread] = value
            if not value:
                del by_thread[thread]
            self._wake.set()

    def insist(self, act: Callable[[Run], str], seconds: float) -> str | None:
        """Let the thread do something, again at each heartbeat until it raises no error, also when its world ends.

        Args:
            act: performs operations with the function that it is given.
            seconds: the time to wait for its result.

        Returns:
            Its result; None if there is none yet, or if the store has failed.
        """
        result: Future[str] = Future()
        self._tasks[result] = act
        self._wake.set()
        if self._thread.is_alive():
            wait([result], seconds)
        return result.result() if result.done() and not result.cancelled() else None

    def wait_for_heartbeat(self) -> None:
        """Wait until the first status of this rank is in the store.

        Raises:
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
        self._listeners.close()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._client = self.world.new_client()
            self._listeners.open(self.world.address)
            while not self._exited:
                due = time.monotonic() + self.period
                self._beat()
                self._wake.wait(max(0.0, due - time.monotonic()))
                self._wake.clear()
            self._beat()
        except (RuntimeError, OSError) as error:  # a client does not connect again
            self.failure = error if isinstance(error, PgmeshError) else self.world.error(error)
        finally:
            self._client = None
            self._has_beaten.set()
            for result in [*self._tasks]:
                result.cancel()

    def _beat(self) -> None:
        """Perform the tasks, publish the status, and look at other ranks."""
        for result, act in [*self._tasks.items()]:
            if (answer := self._attempt(act)) is not None:
                result.set_result(answer)
                del self._tasks[result]
        if self._attempt(self._publish) and not self._exited:
            self._look()

    def _attempt(self, act: Callable[[Run], R]) -> R | None:
        """The result of a function that performs operations; None if it raised an error. The first one is logged.

        Raises:
            DistNetworkError: the connection to the store has failed.
        """
        try:
            return act(self._perform)
        except dist.DistNetworkError:
            raise
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("rank %s: error in the liveness thread: %s", self.world.rank, error, exc_info=True)
            return None

    def _perform(self, *asked: Operation) -> list[Any]:
        answers = []
        for each in asked:
            answers.append(operations.perform(self._client, each))
            self._answered = self.answered_seconds(), time.monotonic()
        return answers

    def _publish(self, run: Run) -> bool:
        self._listeners.drain()
        self._heartbeats += 1
        counters, key = own_counters(), status_key(self.world.rank)
        run(Set(counters_key(self.world.rank), pack_counters(counters)), Set(key, self._status(counters).pack()))
        run(Read(key))  # which the store answers, once it has the status
        self._has_beaten.set()
        return True

    def _status(self, counters: tuple[GroupCounter, ...]) -> RankStatus:
        pending = [each for waits in tuple(self._pending.values()) for each in waits]
        return RankStatus(
            self.world.rank,
            self._heartbeats,
            self.world.size,
            HOST,
            os.getpid(),
            "; ".join(tuple(self._activities.values())),
            tuple(pending[: timing.LIMITS.statuses]),
            NOWHERE if self._exited else self.places.find(counters),
            self._exited,
            self._listeners.endpoint,
            time.time(),
        )

    def _look(self) -> None:
        """Call ``looks`` in turn. If they take long, the next heartbeat goes on: this rank must not seem lost."""
        end = time.monotonic() + self.lost_after / 4
        for look in tuple(self.looks):
            self.looks.remove(look)
            self.looks.append(look)  # the last one of the next heartbeat
            if self._attempt(look) is False:
                self.looks.remove(look)
            if time.monotonic() > end:
                break


def liveness_of(world: World) -> Liveness:
    """The liveness thread of this process in a world. The first call starts it."""
    return world.state_of(Liveness)


_open_listeners: weakref.WeakSet[Listeners] = weakref.WeakSet()


def _close_listeners() -> None:
    """Close the listeners in a forked child, where they would keep their ports open after the parent has ended."""
    for listeners in [*_open_listeners]:
        listeners.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_listeners)
