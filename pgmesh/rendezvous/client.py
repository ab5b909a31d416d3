"""The store and the clock of one call that has a deadline, such as ``connect`` or ``shrink``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pgmesh.errors import WorldError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Operation
from pgmesh.rendezvous.statuses import PendingConnect
from pgmesh.rendezvous.store_thread import StoreThread


class CallClient:
    """The store and the clock of one call.

    An operation times out at the deadline, and ``shortest_answer`` after its start at the earliest. After an
    interrupt or an error of the store, the timeout is shorter.

    Args:
        thread: the store thread.
        seconds: the deadline, from now on.
    """

    def __init__(self, thread: StoreThread, seconds: float) -> None:
        self.thread, self.seconds = thread, seconds
        self.on_sleep: Callable[[], object] = lambda: None  # called before each pause
        self.start = time.monotonic()
        self.deadline = self.start + seconds
        self.operations = 0
        self.ending = False  # an interrupt or an error of the store ends this call

    def run(self, *operations: Operation) -> list[Any]:
        """Perform operations on the store in this order, and return its answers."""
        self.operations += len(operations)
        try:
            return self.thread.run(*operations, seconds=self.timeout())
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException) -> None:
        """Let later operations time out soon if this error is an interrupt, or comes from the store."""
        if isinstance(error, WorldError) or not isinstance(error, Exception):
            self.ending = True

    def timeout(self) -> float:
        """Timeout of the next store operations, in seconds."""
        if self.ending:
            return timing.TIMING.interrupted_answer
        left = self.deadline - time.monotonic()
        return timing.TIMING.late_answer if left <= 0 else max(left, timing.TIMING.shortest_answer)

    def now(self) -> float:
        """Seconds since the start of the call."""
        return time.monotonic() - self.start

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.on_sleep()
        time.sleep(seconds)

    def set_pending(self, pending: tuple[PendingConnect, ...]) -> None:
        """Publish the groups that this rank waits for."""
        self.thread.set_pending(pending)
