"""Texts that are printed at signals, also while the main thread waits in C++ and runs no Python."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable

from pgmesh.errors import LifetimeError

_printers: dict[int, list[Callable[[], object]]] = {}


def print_on(number: int, text: Callable[[], object]) -> None:
    """Print a text to stderr at each signal, also while the main thread waits in C++ and runs no Python.

    Raises:
        LifetimeError: this is not the main thread. Only that one can set signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LifetimeError("signal handlers can only be set in the main thread: call report_on there.")
    if not _printers:
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        before = signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
        threading.Thread(target=_listen, args=(receiver, before), name="pgmesh-signals", daemon=True).start()
    _printers.setdefault(number, []).append(text)
    signal.signal(number, lambda *_: None)  # replaces the default action; the thread prints


def _listen(receiver: socket.socket, before: int) -> None:
    """Print at each signal, and forward its number to the previous wakeup descriptor."""
    while numbers := receiver.recv(64):
        if before >= 0:
            with contextlib.suppress(OSError):
                os.write(before, numbers)
        for number in numbers:
            for text in _printers.get(number, ()):
                try:
                    print(text(), file=sys.stderr, flush=True)
                except Exception:  # keep the thread for the next signal
                    traceback.print_exc()


def _in_child() -> None:
    """Stop a forked child from writing to its parent's socket."""
    if _printers:
        _printers.clear()
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
