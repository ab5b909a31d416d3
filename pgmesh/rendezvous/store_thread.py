"""The background thread that performs this process's operations on the world's store, and its heartbeat.

A call into torch's store client may block for minutes with its lock held, and Python handles no signal meanwhile. So
pgmesh calls it only in this thread. A caller hands it a batch of operations, and waits for the answers in Python with
a timeout. The thread has a connection of its own (``world_store.py``), so that a wait inside torch does not delay a
heartbeat.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pgmesh.errors import MismatchError, WorldError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.batches import Batch, Queue
from pgmesh.rendezvous.heartbeat import Heartbeat
from pgmesh.rendezvous.operations import Delete, Operation, Read, Run
from pgmesh.rendezvous.statuses import PendingConnect
from pgmesh.rendezvous.world_store import AFTER_FAILURE, WorldStore


class StoreThread:
    """The store thread of one process in one world.

    Args:
        store: the world's store, of which only this thread performs operations.
    """

    def __init__(self, store: WorldStore) -> None:
        self.store = store
        self.pace = timing.pace(store.world_size)
        # Work, which any thread adds before it wakes this one:
        self._queue = Queue()  # batches, which are performed once
        self._tasks: list[Callable[[], bool]] = []  # of ``insist``, which are repeated until they return True
        self.heartbeat = Heartbeat(store)
        # The end:
        self.until_end: dict[str, str] = {}  # by key: values that this process deletes when it ends
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="pgmesh-store", daemon=True)
        self._thread.start()

    @property
    def lost_after(self) -> float:
        """Seconds without a heartbeat after which a rank counts as lost."""
        return timing.TIMING.missed_heartbeats * self.store.period

    @property
    def stalled(self) -> bool:
        """True if the store has not answered for a second."""
        return self.store.clock.operation_seconds > 1.0

    # -- operations, called by other threads ----------------------------------------------------------------------

    def run(self, *operations: Operation, seconds: float) -> list[Any]:
        """Perform operations in this order, and return the store's answers.

        Raises:
            WorldError: ``seconds`` passed without an answer of the store, to any thread, or the store has failed.
        """
        return self.store.board.request(operations, lambda: self._ask(operations, seconds)) if operations else []

    def _ask(self, operations: Sequence[Operation], seconds: float) -> list[Any]:
        """Hand a batch to the thread, and wait for the answers."""
        batch = Batch(operations)
        try:
            self._queue.put(batch)
            self._wait_for(batch, seconds)
        finally:
            batch.cancelled = True  # after a timeout or Ctrl-C, the thread performs no more of them
        if batch.error is None:
            return batch.answers
        try:
            raise batch.error
        finally:
            del batch  # else the error and this frame keep each other alive

    def _wait_for(self, batch: Batch, seconds: float) -> None:
        """Wait until a batch is done.

        Raises:
            WorldError: the store answered no thread for ``seconds``. Or ``late_answer`` more have passed: it answers
                other threads. Or this thread has ended.
        """
        address, start, waited = self.store.address, time.monotonic(), 0.0
        limit = seconds + timing.TIMING.late_answer  # behind batches of other threads, on a slow store
        # Not ``Thread.is_alive``: up to Python 3.12, it may return False for good after Ctrl-C inside it.
        while not self._ended:
            if batch.done.acquire(timeout=min(max(0.0, seconds - waited), timing.TIMING.thread_check)):
                return
            waited = self.store.clock.seconds_since_answer(start)  # a slow store answers meanwhile
            if self.store.server.is_gone():
                raise self.store.error("connection refused")
            if waited >= seconds:
                raise WorldError(f"the store at {address} did not answer for {waited:.1f} s. {AFTER_FAILURE}")
            if time.monotonic() - start >= limit:
                raise WorldError(f"the store at {address} is slow: a request took {limit:g} s. {AFTER_FAILURE}")
        if batch.done.locked():  # not done: the thread has ended before
            raise WorldError(f"this process has left the world, so it cannot use the store at {address}.")

    def insist(self, task: Callable[[Run], str], seconds: float) -> str | None:
        """Let the thread perform a task, and repeat it after each failure of the store, for ``Timing.insist``.

        Returns its result as soon as it is done; None after a timeout.

        Args:
            task: performs operations with the function that it is given. A mismatch ends it.
            seconds: the timeout.
        """
        done, results, end = threading.Event(), list[str](), time.monotonic() + timing.TIMING.insist

        def attempt() -> bool:
            try:
                results.append(task(self._run_here))
            except Exception as error:
                if not isinstance(error, MismatchError) and time.monotonic() < end:
                    return False
            done.set()
            return True

        self._tasks.append(attempt)
        self._queue.wake()
        done.wait(seconds)
        return results[0] if results else None

    def store_hint(self) -> str:
        """Return a reason why ranks may not find each other on this store, with a fix; "" for none."""
        if not self.store.served_another_world():
            return ""
        return (
            f"\n\nThe store at {self.store.address} has served another world too. Ranks that were in it use other "
            "keys than ranks that were not. Give each world a separate store or prefix:\n\n"
            "  dist.init_process_group(..., store=dist.PrefixStore('attempt-2', store))"
        )

    # -- the status, set by other threads ---------------------------------------------------------------------------

    def start_heartbeat(self) -> None:
        """Send the first heartbeat of this process now, and not a period after the first operation."""
        if not self.heartbeat.status.heartbeats:
            self._publish_soon()

    def set_pending(self, pending: tuple[PendingConnect, ...]) -> None:
        """Publish the groups that the calling thread waits for."""
        if self.heartbeat.status.set_pending(pending):
            self._publish_soon()

    def set_status(self, activity: str) -> None:
        """Publish the activity of the calling thread; "" for none. Returns at once."""
        self.heartbeat.status.set_activity(activity)
        self._publish_soon()

    def _publish_soon(self) -> None:
        self.heartbeat.at_once = True
        self._queue.wake()

    def stop(self, reason: str = "") -> None:
        """Let the thread publish the reason, leave the world and end.

            ``status.exited``    is in the last heartbeat, which the thread sends before it leaves
            ``server.leaving``   ends its attempts to reach the store again
            None in the queue    ends it once all batches before are done
            ``_ended``           is set at its end: later calls raise an error

        Waits for that for 5 s at most; without tasks, for half a second while the store does not answer. A thread that
        returns from the store's client while Python ends would abort the process.
        """
        self.heartbeat.status.exited = reason
        self.store.server.leaving = True
        self._queue.put(None)
        end = time.monotonic() + 5.0
        while self._thread.is_alive() and time.monotonic() < end:
            if not self._tasks and self.store.clock.operation_seconds >= 0.5:
                break
            self._thread.join(0.02)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (batch := self._next()) is not None:
                self._perform_batch(batch)
                del batch  # else its error and all frames of it live until the next batch
            self._leave()
        finally:
            self._ended = True
            self.store.close()

    def _run_here(self, *operations: Operation) -> list[Any]:
        return [*map(self.store.perform, operations)]

    def _next(self) -> Batch | None:
        """The next batch; None at the end. Heartbeats are sent meanwhile."""
        while True:
            self._perform_tasks()
            self.heartbeat.send_if_due(self._run_here)
            with contextlib.suppress(IndexError):
                return self._queue.take()
            self._queue.wait(self._seconds_to_next_work())

    def _seconds_to_next_work(self) -> float:
        """Seconds to the next heartbeat, or to the next attempt of the tasks."""
        seconds = self.heartbeat.due - time.monotonic()
        return min(seconds, timing.TIMING.longest_pause * self.pace) if self._tasks else seconds

    def _perform_tasks(self) -> None:
        for attempt in tuple(self._tasks):
            if attempt():
                self._tasks.remove(attempt)

    def _perform_batch(self, batch: Batch) -> None:
        try:
            for operation in batch.operations:
                if batch.cancelled:
                    break
                batch.answers.append(self.store.perform(operation))
                self.heartbeat.send_if_due(self._run_here)  # a long batch must not delay it
        except Exception as error:
            batch.error = error
        batch.done.release()
        self.heartbeat.expect()

    def _leave(self) -> None:
        """Publish the reason for the end, and leave the world."""
        with contextlib.suppress(Exception):
            self._perform_tasks()
            if self.heartbeat.status.heartbeats:
                self.heartbeat.publish(self._run_here)
            for key, value in [*self.until_end.items()]:
                if self.store.perform(Read(key)) == value.encode():
                    self.store.perform(Delete((key,)))
            self.store.leave()
