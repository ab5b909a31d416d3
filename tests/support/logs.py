"""The lines that pgmesh logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class LogLine(NamedTuple):
    """The time of a line on the monotonic clock, and its text."""

    at: float
    text: str


@contextmanager
def logged_lines() -> Iterator[list[LogLine]]:
    """The lines that pgmesh logs during the block."""
    lines: list[LogLine] = []
    handler, log = logging.Handler(), logging.getLogger("pgmesh")
    handler.emit = lambda record: lines.append(LogLine(time.monotonic(), record.getMessage()))  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
