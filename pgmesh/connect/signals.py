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
from typing import Any

from pgmesh.errors import LifetimeError

Text = Callable[[], object]
"""Makes the text for a signal; None if there will never be one again."""

_printers: dict[int, list[Text]] = {}
_before: dict[int, Any] = {}  # by signal: the handler of the program, or the default action
_sender: socket.socket | None = None  # wakes the thread that prints; None before the first ``print_on``


def print_on(number: int, text: Text) -> None:
    """Print a text to stderr at each signal.

    At a signal, Python writes its number to the *wakeup descriptor*, also while the main thread waits in C++. A thread
    reads there, and prints. If a program has another wakeup descriptor, as an event loop does, that one stays. It then
    gets the text once it runs Python.

    Raises:
        LifetimeError: this is not the main thread. Only that one can set signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LifetimeError("signal handlers can only be set in the main thread: call report_on there.")
    global _sender
    if _sender is None:
        receiver, _sender = socket.socketpair()
        _sender.setblocking(False)
        threading.Thread(target=_listen, args=[receiver], name="pgmesh-signals", daemon=True).start()
    _printers.setdefault(number, []).append(text)
    _take_descriptor(_sender)
    if (before := signal.signal(number, _handle)) is not _handle:
        _before[number] = before  # which is called too


def _handle(number: int, frame: object) -> None:
    """Wake the thread, unless Python has done so, and call the handler of the program."""
    if _sender is not None and not _take_descriptor(_sender):
        with contextlib.suppress(OSError):  # full: the thread has enough to print
            _sender.send(bytes([number]))
    if callable(before := _before.get(number)):
        before(number, frame)


def _take_descriptor(sender: socket.socket) -> bool:
    """Make this the wakeup descriptor unless there is another. True if it was before."""
    current = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    if current not in (-1, sender.fileno()):
        with contextlib.suppress(OSError, ValueError):  # its owner has closed it
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
    return current == sender.fileno()


def _listen(receiver: socket.socket) -> None:
    while numbers := receiver.recv(64):
        for number in numbers:
            for text in [*_printers.get(number, ())]:
                try:
                    if (said := text()) is None:
                        _printers[number].remove(text)
                    else:
                        print(said, file=sys.stderr, flush=True)
                except Exception:  # keep the thread for the next signal
                    traceback.print_exc()


def _in_child() -> None:
    """Stop a forked child from writing to its parent's socket."""
    global _sender
    if _sender is not None:
        _printers.clear()
        _sender.close()
        _sender = None
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
