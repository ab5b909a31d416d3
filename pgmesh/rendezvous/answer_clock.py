"""When the store answered this process: three durations for three questions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any


class AnswerClock:
    """When the store answered this process. The store thread calls ``ask``; any thread reads.

        operation_seconds       how long the operation that runs has taken so far
        seconds_since_answer    the silence of the store, as a caller sees it that waits since a given time
        answered_seconds        the time in which the store answered: the clock of other ranks' silence

    Args:
        period: seconds between two heartbeats of any rank.
    """

    def __init__(self, period: float) -> None:
        self._period = period
        self._asked = math.inf  # the start of the operation that runs; inf if none does
        self._answered = 0.0, time.monotonic()  # ``answered_seconds`` at the last answer, and its time

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that asks the store once. Its return is the store's answer."""
        self._asked = time.monotonic()
        try:
            answer = function(*arguments)
            self._answered = self.answered_seconds(), time.monotonic()
            return answer
        finally:
            self._asked = math.inf

    @property
    def operation_seconds(self) -> float:
        """Seconds since the start of the operation that runs; 0.0 or less if none does."""
        return time.monotonic() - self._asked

    def seconds_since_answer(self, start: float) -> float:
        """Seconds since the store's last answer to this process, or since a later start."""
        return time.monotonic() - max(start, self._answered[1])

    def answered_seconds(self) -> float:
        """Time in which the store answered this process.

        Each interval between two answers counts for one heartbeat period at most. So a pause of the store, of this
        process or of the whole machine adds at most one period, and makes nobody seem lost.
        """
        seconds, last = self._answered
        return seconds + min(time.monotonic() - last, self._period)
