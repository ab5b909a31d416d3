"""The store and the clock of one call that has a deadline, such as ``connect`` or ``shrink``."""

from __future__ import annotations

import time
from typing import Any

from pgmesh.groups.world import World, pace
from pgmesh.liveness import operations
from pgmesh.liveness.liveness import liveness_of
from pgmesh.liveness.operations import Operation


class CallClient:
    """The store and the clock of one call. A world with such a call has a liveness thread.

    Args:
        world: the world.
        seconds: the deadline, from now on. An operation may last longer: it waits until the store answers.
    """

    def __init__(self, world: World, seconds: float) -> None:
        self.world, self.seconds = world, seconds
        self.liveness = liveness_of(world)
        self.pace = pace(world.size)  # the factor of pauses, to spare the store in a large world
        self.start = time.monotonic()

    def run(self, *asked: Operation) -> list[Any]:
        """Perform operations on the store in this order, and return its answers.

        Raises:
            WorldError: the store has failed.
        """
        store = self.world.store()
        with self.world.raising_errors():
            return [operations.perform(store, each) for each in asked]

    def now(self) -> float:
        """Seconds since the start of the call."""
        return time.monotonic() - self.start

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def set_pending(self, pending: dict[str, str]) -> None:
        """Publish what this rank waits for."""
        self.liveness.set_pending(pending)
