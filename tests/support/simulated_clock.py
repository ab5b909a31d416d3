"""A simulated clock for threads. One thread runs at a time: the one whose pause ends first."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class SimulatedClock:
    """The time in seconds, which passes only in pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, threading.Lock]] = []
        self._numbers = itertools.count()
        self._own = threading.local()
        self._end = threading.Event()
        self._error: BaseException | None = None

    def start(self, when: float, function: Callable[[], object]) -> None:
        """Call a function in a thread, at a time."""
        turn = threading.Lock()  # held until it is the thread's turn
        turn.acquire()
        threading.Thread(target=self._run, args=(turn, function), daemon=True).start()
        self._wake_at(when, turn)

    def run(self) -> None:
        """Run all threads to their end, and raise the error of one of them."""
        self._go_on()
        assert self._end.wait(60.0)
        if self._error is not None:
            raise self._error

    def pause(self, seconds: float) -> None:
        """Let other threads run for some seconds."""
        self._wake_at(self.now + seconds, self._own.turn)
        self._go_on()
        self._own.turn.acquire()

    def _run(self, turn: threading.Lock, function: Callable[[], object]) -> None:
        self._own.turn = turn
        turn.acquire()
        try:
            function()
        except BaseException as error:
            self._error = error
        self._go_on()

    def _wake_at(self, when: float, turn: threading.Lock) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), turn))

    def _go_on(self) -> None:
        if self._due:
            self.now, _, turn = heapq.heappop(self._due)
            turn.release()
        else:
            self._end.set()
