"""The heartbeats of this process: it publishes its status, and then looks at the other ranks."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable

from pgmesh.errors import WorldError
from pgmesh.rendezvous.operations import Raw, Run
from pgmesh.rendezvous.own_status import OwnStatus
from pgmesh.rendezvous.statuses import RunningCollective, status_key
from pgmesh.rendezvous.world_store import WorldStore

log = logging.getLogger("pgmesh")


def warn_from_store_thread(text: str) -> None:
    """Log a warning in another thread, since a log handler may block and the store thread sends the heartbeats."""
    threading.Thread(target=log.warning, args=("%s", text), name="pgmesh-warning", daemon=True).start()


class Heartbeat:
    """The heartbeat of one process. The store thread sends it; any thread sets ``at_once`` and the status.

    Args:
        store: the world's store.
    """

    def __init__(self, store: WorldStore) -> None:
        self._store = store
        self.status = OwnStatus(store.rank)
        self.at_once = False  # the status has changed, so the next heartbeat is sent now
        self.due = math.inf  # the time of the next one
        self.look: Callable[[Run], tuple[RunningCollective, ...]] = lambda run: ()
        """Called after each heartbeat, with a function that performs operations. It returns the running collectives."""
        self._warned = False  # of an error of ``look``

    def expect(self) -> None:
        """Send a heartbeat within a period, after an operation in a world of several ranks."""
        if self._store.world_size > 1 and self._store.is_open:
            self.due = min(self.due, time.monotonic() + self._store.period)

    def send_if_due(self, run: Run) -> None:
        """Publish the status and look, if it is time. A failure is repeated at the next heartbeat.

        Args:
            run: performs operations on the store.
        """
        if not self.at_once and time.monotonic() < self.due:
            return
        self.at_once, began = False, time.monotonic()
        with contextlib.suppress(Exception):
            self._store.open()  # and the listener, for the status
            self.publish(run)
            self._look(run)
        # After a long look, other operations have half of a period.
        self.due = max(began + self._store.period, time.monotonic() + self._store.period / 2)

    def publish(self, run: Run) -> None:
        """Publish the status, unless another process has this rank too."""
        if not self._store.claim.same_rank:
            self._store.listeners.drain()
            status = self.status.next(self._store.listeners.endpoint)
            run(Raw("set", (status_key(self._store.rank), status.pack())))

    def _look(self, run: Run) -> None:
        """Call ``look``, and publish the running collectives if there are others than before.

        It may run between two operations of a batch, so their caller waits for it too. It follows the heartbeat, which
        must not wait. An error must not stop the heartbeats; the first is logged.
        """
        running: tuple[RunningCollective, ...] = ()
        try:
            running = self.look(run)
        except Exception as error:
            if not self._warned and not isinstance(error, WorldError):
                self._warned = True
                warn_from_store_thread(
                    f"this rank could not look for stuck collectives and lost ranks: {traceback.format_exc()}"
                )
        if self.status.set_running(running):
            self.publish(run)
