"""Reports that are printed at signals, also while the main thread waits in C++ and runs no Python.

Python writes the number of each signal to its *wakeup descriptor*, of which a process has one. Here it is a socket that
a thread reads. Another library may replace it at any time, as ``asyncio`` does. The next signal is then printed as soon
as the main thread runs Python, and takes the descriptor back. The other library gets the numbers from the thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
import weakref
from typing import TYPE_CHECKING

from pgmesh.connect.report import report
from pgmesh.errors import LifetimeError

if TYPE_CHECKING:
    from pgmesh.groups.mesh_groups import MeshGroups

_meshes: dict[int, weakref.WeakKeyDictionary[MeshGroups, None]] = {}  # by signal, in the order of the calls
_sender: socket.socket | None = None  # the thread reads the other end; None before the first call
_before: tuple[int, os.stat_result] | None = None  # the descriptor that this one replaced, and its file


def print_on(number: int, mesh: MeshGroups) -> None:
    """Print the report of a mesh to stderr at each signal, while the mesh is there.

    Raises:
        LifetimeError: this is not the main thread. Only that one can set signal handlers.
    """
    global _sender
    if threading.current_thread() is not threading.main_thread():
        raise LifetimeError("signal handlers can only be set in the main thread: call report_on there.")
    _meshes.setdefault(number, weakref.WeakKeyDictionary())[mesh] = None
    if _sender is None:
        receiver, _sender = socket.socketpair()
        _sender.setblocking(False)
        threading.Thread(target=_listen, args=(receiver,), name="pgmesh-signals", daemon=True).start()
    _take(_sender)
    signal.signal(number, _handle)  # replaces the default action


def _handle(number: int, _: object) -> None:
    """Tell the thread of a signal if Python has not done so. The main thread calls it once it runs Python."""
    if _sender is not None and not _take(_sender):
        with contextlib.suppress(BlockingIOError):
            _sender.send(bytes([number]))


def _take(sender: socket.socket) -> bool:
    """Make a socket the wakeup descriptor. True if it was that already."""
    global _before
    replaced = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    if replaced == sender.fileno():
        return True
    _before = None
    with contextlib.suppress(OSError):  # there was none, or it is closed
        _before = replaced, os.fstat(replaced)
    return False


def _listen(receiver: socket.socket) -> None:
    """Print at each signal, and forward its number to the descriptor that was replaced."""
    while numbers := receiver.recv(64):
        _forward(numbers)
        for number in filter(_meshes.__contains__, numbers):
            try:
                _print(number)
            except Exception:  # keep the thread for the next signal
                traceback.print_exc()


def _print(number: int) -> None:
    meshes = [mesh for reference in _meshes[number].keyrefs() if (mesh := reference()) is not None]
    texts = [str(report(mesh)) for mesh in meshes] or ["the mesh was garbage-collected"]
    print(*texts, sep="\n", file=sys.stderr, flush=True)


def _forward(numbers: bytes) -> None:
    """Write to the descriptor that was replaced, unless it was closed: its number may be that of another file now."""
    if _before is not None:
        number, file = _before
        with contextlib.suppress(OSError), open(os.dup(number), "wb", buffering=0) as copy:
            if os.path.samestat(os.fstat(copy.fileno()), file):
                copy.write(numbers)


def _in_child() -> None:
    """Stop a forked child from writing to its parent's socket."""
    global _sender
    if _sender is not None:
        _sender = None
        _meshes.clear()
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
