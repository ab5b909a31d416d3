"""Gloo's event loops, in which connections that were shut down are silenced if Gloo does not close them.

A Gloo group ends its event loop once there are 10 ms without an event, and its destructor waits for that. After a
failed collective, Gloo may never read the rest of a message whose buffer is gone, so the event for it repeats for ever.
An event loop is an epoll descriptor of this process, and Linux says in /proc which sockets it watches.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import socket
import struct
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from pgmesh._util.sockets import descriptors, opened

_CLOSING_SECONDS = 0.2
"""The wait until Gloo has closed its connections after they were shut down. It usually takes less than 1 ms."""


_MODIFY = 3
"""EPOLL_CTL_MOD of Linux, which Python does not offer together with the data of an event."""

_EVENT = "=IQ" if platform.machine() in ("x86_64", "i686") else "@IQ"
"""The fields of an epoll event, a mask and its data. They are packed on x86."""


class _Watched(NamedTuple):
    """A TCP socket that an event loop waits for.

    Args:
        number: its file descriptor.
        data: what its events carry: the address of the object that handles them.
        is_listener: it is one of the listeners of the groups.
    """

    number: int
    data: int
    is_listener: bool


def end_events(own: Collection[tuple[str, int]]) -> None:
    """Wait until Gloo has closed the connections of some groups, and silence the others in its event loops.

    Args:
        own: the listeners of these groups. The event loop of each has its listener.
    """
    loops = [number for number in descriptors() if any(each.is_listener for each in _watched(number, own))]
    deadline = time.monotonic() + _CLOSING_SECONDS
    while loops := [loop for loop in loops if not all(each.is_listener for each in _watched(loop, own))]:
        if time.monotonic() < deadline:
            time.sleep(0.001)
            continue
        for loop in loops:
            for each in _watched(loop, own):
                if not each.is_listener:
                    _silence(loop, each)
        return


def _silence(loop: int, watched: _Watched) -> None:
    """Let a socket have one more event, and then none.

    It stays in the event loop: Gloo may only be late, and if it did not find a socket there, it would end the process.
    """
    event = struct.pack(_EVENT, select.EPOLLIN | select.EPOLLONESHOT, watched.data)
    ctypes.CDLL(None).epoll_ctl(loop, _MODIFY, watched.number, event)


def _watched(number: int, own: Collection[tuple[str, int]]) -> list[_Watched]:
    """The TCP sockets that an event loop waits for.

    Not those that it ignores: connections that no pair of ranks has taken yet. None for other descriptors.
    """
    found: list[_Watched] = []
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{number}") != "anon_inode:[eventpoll]":
            return found
        lines = Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()
        entries = [line.split() for line in lines if line.startswith("tfd:")]  # "tfd: 38 events: 19 data: 7f0c ..."
        for entry in entries:
            if not int(entry[3], 16) & select.EPOLLIN:
                continue
            with contextlib.suppress(OSError), opened(int(entry[1])) as each:
                is_listening = bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                is_listener = is_listening and each.getsockname()[:2] in own
                found.append(_Watched(int(entry[1]), int(entry[5], 16), is_listener))
    return found
