"""What outlives the call that ended groups: threads that end others, and collectives that do not return.

C++ code that returns to Python while Python ends would abort the process. So the end of the process waits for both.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed import distributed_c10d as c10d

from pgmesh import torch_private
from pgmesh.groups import connections

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
    """Wait until other threads have returned from the collectives that the end of their groups ends."""
    deadline, me = time.monotonic() + _EXIT_SECONDS, threading.get_ident()
    while time.monotonic() < deadline:
        frames = [frame for thread, frame in sys._current_frames().items() if thread != me]
        if not any(frame.f_globals.get("__name__") == c10d.__name__ for frame in frames):
            return
        time.sleep(0.005)


_kept: list[tuple[Any, connections.Endpoints, list[Any]]] = []  # process groups, their listeners, their collectives


def keep_until_done(process_group: Any, endpoints: connections.Endpoints, works: Iterable[Any]) -> None:
    """Keep a process group until collectives of it are over. Its destructor would wait for them, at exit too.

    Args:
        endpoints: its listeners.
    """
    if running := [work for work in works if not work.is_completed()]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
        _kept.append((process_group, endpoints, running))


def free_finished() -> None:
    """Free the kept process groups whose collectives are over."""
    for kept in [each for each in _kept if all(work.is_completed() for work in each[2])]:
        with contextlib.suppress(ValueError):  # another thread removed it
            _kept.remove(kept)
            connections.shut_down([kept[1]])  # a collective may have opened more connections
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(kept[0]))


def keep_all_groups() -> None:
    """Keep all groups alive in a forked child. Their destructors would wait for threads that do not exist."""
    for process_group in {*torch_private.all_groups(), *torch_private.destroyed}:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
