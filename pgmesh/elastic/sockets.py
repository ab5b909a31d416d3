"""The TCP connections of Gloo groups in this process, which an abort shuts down. No other file touches them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Collection, Iterable

from pgmesh import torch_private
from pgmesh.groups.connecting import GroupStore

_Address = tuple[str, int]

_OPENING_SECONDS = 0.005
"""The time in which Gloo completes a connection that it is opening, usually."""


def shut_down(stores: Iterable[GroupStore]) -> None:
    """Shut down all connections of some groups, so that collectives on both ends raise. It needs Linux's /proc.

    Gloo may be opening a connection. So all are shut down a second time, a few milliseconds later.
    """
    own: set[_Address] = set()
    members: set[_Address] = set()
    for store in stores:
        own.update(filter(None, map(torch_private.gloo_endpoint, store.own.values())))
        members.update(filter(None, map(torch_private.gloo_endpoint, store.addresses())))
    if members:
        _shut_down(own, members)
        time.sleep(_OPENING_SECONDS)
        _shut_down(own, members)


def _shut_down(own: Collection[_Address], members: Collection[_Address]) -> None:
    """Shut down connections that listeners of this process have accepted, or that lead to listeners of members.

    A listener itself is left alone: Gloo ends the process if it cannot accept.
    """
    with contextlib.suppress(FileNotFoundError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), _duplicate(int(number)) as each:  # closed meanwhile, or no connection
                if each.getpeername()[:2] in members or each.getsockname()[:2] in own:
                    each.shutdown(socket.SHUT_RDWR)


def _duplicate(number: int) -> socket.socket:
    """A duplicate of a socket: another thread may close the descriptor and reuse its number.

    Raises:
        OSError: the descriptor is closed, or no socket, or no descriptor is free.
    """
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(f"descriptor {number} is no socket")
    # If the program has set a default timeout, Python makes the socket itself non-blocking, unless its type says it is.
    return socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=os.dup(number))
