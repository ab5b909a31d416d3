"""A thread that speaks with the world's store for this process: it asks with a deadline, and it beats.

The store's own client waits without end, holds a lock and is deaf to Ctrl-C while it does. So what may have to wait is
asked by a thread with a connection of its own, and who asked waits in Python. In between, the thread tells the others
that this process lives, and what it does.
"""

from __future__ import annotations

import math
import os
import queue
import socket
import threading
import time
from concurrent.futures import Future, TimeoutError as Late
from typing import Any

from pgmesh.errors import WorldError
from pgmesh.polling import perform
from pgmesh.rendezvous import MOST_ASKED, Say, Step, Told, Wait, told

BEAT = 1.0
"""Seconds between two beats, in a world of up to ``CROWD`` ranks; in a larger one so many times more that the store
hears no more beats than from that one."""

CROWD = 1024

STILL = "Groups that were connected go on working; nothing new can be connected without it."

SUSPICION = 5.0
"""Beats that have to fail before a rank counts as lost."""


def who() -> str:
    """This process, to tell it from another that takes itself for the same rank."""
    return f"process {os.getpid()} on {socket.gethostname()}"


class Heart:
    """The thread of one process in one world.

    Args:
        store: the world's store.
        where: the store's host and port, for messages.
        rank: this process's.
        world_size: of how many.
    """

    def __init__(self, store: Any, where: str, rank: int, world_size: int) -> None:
        self._store, self._where, self._rank = store, where, rank
        self.pace = max(1.0, world_size / CROWD)
        self.period = BEAT * self.pace
        self._jobs: queue.SimpleQueue[tuple[Step | None, Future[Any]]] = queue.SimpleQueue()
        self._beats = 0
        self._doing = ""
        self._waits: dict[int, tuple[Wait, ...]] = {}  # by thread
        self._gone = ""  # what the store failed with, once it did
        self._asked_at = math.inf  # when the store was asked what it has not answered
        self._thread = threading.Thread(target=self._run, name="pgmesh-heart", daemon=True)
        self._thread.start()

    @property
    def suspicion(self) -> float:
        """Seconds without a beat after which a rank counts as lost."""
        return SUSPICION * self.period

    def ask(self, step: Step, seconds: float) -> Any:
        """The answer of the store.

        Raises:
            WorldError: there was none in so many seconds, or the store is gone.
        """
        start = time.monotonic()
        answer: Future[Any] = Future()
        if isinstance(step, Say):
            self._waits[threading.get_ident()] = step.waits
        self._jobs.put((step, answer))
        try:
            return answer.result(max(seconds, 0.0))
        except (Late, TimeoutError):
            answer.cancel()  # what was not asked by now is not asked later, when nobody counts on it
            waited = time.monotonic() - start
            raise WorldError(f"the store at {self._where} gave no answer for {waited:.1f} s. {STILL}") from None
        except RuntimeError as error:
            what = str(error).splitlines()[0].rstrip(".")
            raise WorldError(f"the store at {self._where} is gone: {what}. {STILL}") from error

    @property
    def silent(self) -> bool:
        """Whether the store owes an answer for long."""
        return time.monotonic() - self._asked_at > 1.0

    def hush(self) -> None:
        """The thread that calls waits for nobody any more; the next beat says so."""
        self._waits.pop(threading.get_ident(), None)

    def say(self, doing: str) -> None:
        """Tell the others what this process does; "" for nothing that concerns them. Waits for nothing."""
        self._doing = doing
        self._jobs.put((Say(()), Future()))

    def stop(self, gone: str = "") -> None:
        """Tell the others why this process tells no more, and end the thread."""
        self._doing = gone
        self._jobs.put((None, Future()))
        self._thread.join(0.5)

    def _run(self) -> None:
        store: Any = None
        due = time.monotonic()
        while True:
            try:
                step, answer = self._jobs.get(timeout=min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX))
            except queue.Empty:
                step, answer = Say(()), Future()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                if self._gone:
                    raise RuntimeError(self._gone)
                self._asked_at = time.monotonic()
                store = store or _own(self._store)
                if step is None or isinstance(step, Say):
                    due = time.monotonic() + self.period
                    self._beat(store, gone=self._doing if step is None else "")
                    answer.set_result(None)
                else:
                    answer.set_result(perform(store, step))
            except Exception as error:
                if isinstance(error, RuntimeError):
                    self._gone = str(error)  # torch would tell of it at length each time that it is asked again
                answer.set_exception(error)
                due = time.monotonic() + (math.inf if self._gone else self.period)
            self._asked_at = math.inf
            if step is None:
                return

    def _beat(self, store: Any, gone: str) -> None:
        self._beats += 1
        waits = tuple(wait for waits in self._waits.values() for wait in waits)
        record = Told(self._rank, self._beats, "" if gone else self._doing, waits[:MOST_ASKED], alone(), gone)
        store.set(told(self._rank), record.pack())


def alone() -> bool:
    """Whether no other thread of this process could still come to a meeting: those that serve are daemons."""
    return not any(
        thread is not threading.main_thread() and thread.is_alive() and not thread.daemon
        for thread in threading.enumerate()
    )


def _own(store: Any) -> Any:
    """A connection of its own to the same store, where the store has such."""
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError, AttributeError):
        return store
