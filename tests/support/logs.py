"""The lines that pgmesh logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class LogLine(NamedTuple):
    """The time of a line on the monotonic clock, its text, and the thread that logged it."""

    at: float
    text: str
    thread: str | None


class LogHandler(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[LogLine] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(LogLine(time.monotonic(), record.getMessage(), record.threadName))


@contextmanager
def logged_lines() -> Iterator[list[LogLine]]:
    """The lines that pgmesh logs during the block."""
    handler, log = LogHandler(), logging.getLogger("pgmesh")
    log.addHandler(handler)
    try:
        yield handler.lines
    finally:
        log.removeHandler(handler)
