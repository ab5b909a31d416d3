"""Threads that end groups in the background, and the wait for them and for blocked collectives when the process ends.

C++ code that returns to Python while Python ends would abort the process.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d as c10d

_EXIT_SECONDS = 2.0
"""The longest wait for the end of aborted groups when the process exits."""


_background: set[threading.Thread] = set()
exiting = threading.Event()


def in_background(function: Callable[..., object], *args: Any) -> None:
    """Call a function that ends groups in a thread of its own, which ``finish_background`` waits for."""
    thread = threading.Thread(target=function, args=args, name="pgmesh-end", daemon=True)
    _background.difference_update([each for each in tuple(_background) if not each.is_alive()])
    try:
        thread.start()
    except RuntimeError:  # Python ends, and starts no threads
        function(*args)
    else:
        _background.add(thread)


def finish_background() -> None:
    """Wait for these threads."""
    exiting.set()
    deadline = time.monotonic() + _EXIT_SECONDS
    while running := [each for each in tuple(_background) if each.is_alive()]:  # one may start another
        if time.monotonic() >= deadline:
            return
        running[0].join(max(0.0, deadline - time.monotonic()))


def wait_for_collectives() -> None:
    """Wait until no other thread is blocked in a collective. Their groups have ended, so each will raise an error.

    Only the top frame of a thread is examined: that of a function of torch.distributed, which is blocked in C++ code. A
    thread that called a method of a group or of a work itself is not waited for.
    """
    deadline, me = time.monotonic() + _EXIT_SECONDS, threading.get_ident()
    while time.monotonic() < deadline:
        frames = [frame for thread, frame in sys._current_frames().items() if thread != me]
        if not any(frame.f_globals.get("__name__") == c10d.__name__ for frame in frames):
            return
        time.sleep(0.005)
