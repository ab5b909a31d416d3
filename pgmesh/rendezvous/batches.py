"""Batches of store operations, and the queue in which they wait for the store thread."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from pgmesh.rendezvous.operations import Operation


class Batch:
    """Operations of one caller, and their answers or the error that ended them."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        self.answers: list[Any] = []
        self.error: BaseException | None = None
        self.cancelled = False
        self.done = threading.Lock()  # held until the batch is done
        self.done.acquire()


class Queue:
    """A queue of batches. None tells the thread to end.

    Up to Python 3.12, ``SimpleQueue.get`` may wait forever if its timeout has expired before it begins to wait.
    """

    def __init__(self) -> None:
        self._batches: deque[Batch | None] = deque()
        self._signal = threading.Lock()  # released to end a wait
        self._signal.acquire()

    def put(self, batch: Batch | None) -> None:
        self._batches.append(batch)
        self.wake()

    def wake(self) -> None:
        """End ``wait``."""
        with contextlib.suppress(RuntimeError):  # already released
            self._signal.release()

    def wait(self, seconds: float) -> None:
        """Wait for a batch or ``wake`` with a timeout. The queue may still be empty afterwards."""
        if not self._batches:
            self._signal.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))

    def take(self) -> Batch | None:
        """Remove and return the oldest batch.

        Raises:
            IndexError: the queue is empty.
        """
        return self._batches.popleft()
