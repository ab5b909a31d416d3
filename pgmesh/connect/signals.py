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

Text = Callable[[], object]
"""Makes the text for a signal; None if there will never be one again."""

_printers: dict[int, list[Text]] = {}
_sender: socket.socket | None = None  # its descriptor is Python's wakeup descriptor; None before the first ``print_on``


def print_on(number: int, text: Text) -> None:
    """Print a text to stderr at each signal, also while the main thread waits in C++ and runs no Python.

    A program that sets another wakeup descriptor later, as an event loop does, gets the text once it runs Python.

    Raises:
        LifetimeError: this is not the main thread. Only that one can set signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LifetimeError("signal handlers can only be set in the main thread: call report_on there.")
    global _sender
    if _sender is None:
        receiver, _sender = socket.socketpair()
        _sender.setblocking(False)
        before = signal.set_wakeup_fd(_sender.fileno(), warn_on_full_buffer=False)
        listening = receiver, before, _file_of(before)
        threading.Thread(target=_listen, args=listening, name="pgmesh-signals", daemon=True).start()
    _printers.setdefault(number, []).append(text)
    signal.signal(number, _handle)  # replaces the default action; the thread prints


def _handle(number: int, frame: object) -> None:
    """Print if the thread was not woken, since the wakeup descriptor was another's; take the descriptor if it is free.

    the wakeup descriptor is      the thread was   so this prints, and the descriptor is afterwards
    this module's                 woken            no: the same
    another's                     not woken        yes: the other's
    closed by its owner, or none  not woken        yes: this module's
    """
    if _sender is None:
        return
    current = signal.set_wakeup_fd(_sender.fileno(), warn_on_full_buffer=False)
    if current == _sender.fileno():
        return
    if current >= 0:
        with contextlib.suppress(OSError, ValueError):  # its owner has closed it
            signal.set_wakeup_fd(current)
    with contextlib.suppress(OSError):  # full: the thread has enough to print
        _sender.send(bytes([number]))


def _listen(receiver: socket.socket, before: int, file: tuple[int, int] | None) -> None:
    """Print at each signal, and forward its number to the previous wakeup descriptor while it is open."""
    while numbers := receiver.recv(64):
        if file is not None and _file_of(before) == file:
            with contextlib.suppress(OSError):
                os.write(before, numbers)
        for number in numbers:
            for text in [*_printers.get(number, ())]:
                try:
                    if (said := text()) is None:
                        _printers[number].remove(text)
                    else:
                        print(said, file=sys.stderr, flush=True)
                except Exception:  # keep the thread for the next signal
                    traceback.print_exc()


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """What is open under a descriptor, which may be closed and given away meanwhile; None for nothing."""
    with contextlib.suppress(OSError):
        status = os.fstat(descriptor)
        return status.st_dev, status.st_ino
    return None


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
