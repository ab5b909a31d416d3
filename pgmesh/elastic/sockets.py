"""The TCP sockets of Gloo groups in this process, which an abort ends. No other file touches them. Needs Linux's /proc.

A listener is never shut down: Gloo ends the process if it cannot accept (listener.cc:68). It gets a filter that drops
all packets. Gloo also ends the process if a member connects after a wait for it has timed out (pair.cc:680), as a rank
does that was stopped, and goes on. Source: https://github.com/pytorch/gloo/tree/70dc360/gloo/transport/tcp
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import time
from collections.abc import Collection, Iterable

from pgmesh import torch_private
from pgmesh.groups.connecting import GroupStore

_Address = tuple[str, int]

_OPENING_SECONDS = 0.005
"""The time in which Gloo completes a connection that it is opening, usually."""

_SO_ATTACH_FILTER = 26
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # of each packet, pass on 0 bytes
_FILTER = struct.pack("HP", 1, ctypes.addressof(_DROP))


def shut_down(stores: Iterable[GroupStore]) -> None:
    """Shut down all connections of some groups, so that collectives on both ends raise, and accept no others.

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
    """Shut down connections that listeners of this process have accepted, or that lead to listeners of members."""
    with contextlib.suppress(FileNotFoundError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), _duplicate(int(number)) as each:  # closed meanwhile, or no connection
                is_own = each.getsockname()[:2] in own
                if is_own and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _FILTER)
                elif is_own or each.getpeername()[:2] in members:
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
