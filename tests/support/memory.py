"""Memory that a call takes, as Python counts it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable


def memory(call: Callable[[], object]) -> tuple[int, int]:
    """The bytes that the result of a call holds, and the bytes that the call takes at its peak."""
    call()
    tracemalloc.start()
    try:
        result = call()
        peak = tracemalloc.get_traced_memory()[1]
        gc.collect(1)  # what the call left is young
        held = tracemalloc.get_traced_memory()[0]
        del result
        return held, peak
    finally:
        tracemalloc.stop()
