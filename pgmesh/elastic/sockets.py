"""The TCP sockets of Gloo groups in this process, which an abort ends. No other file touches them. Needs Linux's /proc.

Gloo ends the process if a listener of it fails (listener.cc:68), or if a member connects after a wait for that member
has timed out (pair.cc:680), as a member does that was stopped and goes on. So a listener is closed in another way: its
descriptor becomes that of a socket to which nothing connects.
Source: https://github.com/pytorch/gloo/tree/70dc360272dfc57e3617184c78ff9b06f8cd4757/gloo/transport/tcp
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import threading
from collections.abc import Iterable

from pgmesh import torch_private
from pgmesh.groups.connecting import GroupStore

_Address = tuple[str, int]

_lock = threading.Lock()  # no thread finds the duplicates of another one


def shut_down(stores: Iterable[GroupStore]) -> None:
    """Shut down all connections of some groups, so that collectives on both ends raise, and refuse new ones.

    They are those that listeners of this process have accepted, or that lead to listeners of members.
    """
    own: set[_Address] = set()
    members: set[_Address] = set()
    for store in stores:
        own.update(filter(None, map(torch_private.gloo_endpoint, store.own.values())))
        members.update(filter(None, map(torch_private.gloo_endpoint, store.addresses())))
    with _lock, contextlib.suppress(FileNotFoundError):
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError), _duplicate(number) as each:  # closed meanwhile, or no connection
                is_own = each.getsockname()[:2] in own
                if is_own and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    os.dup2(_idle_listener().fileno(), number)
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


@functools.cache
def _idle_listener() -> socket.socket:
    """A listener without an address that others know: to accept on it fails as if no connection has come."""
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    listener.bind("")
    listener.listen()
    return listener
