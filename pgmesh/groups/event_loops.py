"""Gloo's event loops, in which connections that were shut down are silenced if Gloo does not close them.

A Gloo group ends its event loop once there are 10 ms without an event (loop.cc:200), and its destructor waits for that
(loop.cc:119). After a failed collective, Gloo may never read the rest of a message whose buffer is gone (pair.cc:448),
so the event for it repeats for ever. An event loop is an epoll descriptor of this process, and Linux says in /proc
which sockets it watches. ``connections.py`` says whose these lines are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import NamedTuple

from pgmesh._util.sockets import descriptors, inode_of, opened

_CLOSING_SECONDS = 0.2
"""The wait until Gloo has closed its connections after they were shut down. It usually takes less than 1 ms."""


_MODIFY = 3
"""EPOLL_CTL_MOD of Linux, which Python does not offer together with the data of an event."""

_EVENT = "=IQ" if platform.machine() in ("x86_64", "i686") else "@IQ"
"""The fields of an epoll event, a mask and its data. They are packed on x86."""


_ENTRY = re.compile(r"tfd:\s*(\d+) events:\s*(\w+) data:\s*(\w+) .*ino:(\w+)")
"""A watched file in /proc, such as "tfd:  38 events:  19 data:  7f0c4c0d1a70  pos:0 ino:fccbc6 sdev:9"."""


class _Watched(NamedTuple):
    """A file that an event loop watches.

    Args:
        number: its descriptor. The number may be another file's by now.
        events: the events that the event loop waits for.
        data: what they carry: the address of the object that handles them.
        inode: the inode of the file.
    """

    number: int
    events: int
    data: int
    inode: int


def find_loops(sockets: Set[int]) -> list[int]:
    """The event loops that watch at least one of some sockets, which are given by their inodes."""
    return [number for number in descriptors() if sockets & inodes([number])]


def inodes(loops: Iterable[int]) -> set[int]:
    """The inodes of the files that some event loops watch."""
    return {each.inode for loop in loops for each in _watched(loop)}


def end_connections(loops: Iterable[int]) -> None:
    """Shut down the connections that some event loops watch, but not their listeners."""
    for loop in loops:
        for _, connection in _connections(loop):
            with contextlib.suppress(OSError):
                connection.getpeername()  # raises for one that is still being opened: Gloo would only try again
                connection.shutdown(socket.SHUT_RDWR)


def end_events(loops: Iterable[int]) -> None:
    """Wait until Gloo has closed the connections that were shut down, and silence the others in its event loops."""
    deadline = time.monotonic() + _CLOSING_SECONDS
    while loops := [loop for loop in loops if _awaited(loop)]:
        if time.monotonic() < deadline:
            time.sleep(0.001)
            continue
        for loop in loops:
            for each in _awaited(loop):
                _silence(loop, each)
        return


def _silence(loop: int, watched: _Watched) -> None:
    """Let a socket have one more event, and then none.

    It stays in the event loop: Gloo may still remove it, and would end the process if it were not there (loop.cc:174).
    """
    event = struct.pack(_EVENT, select.EPOLLIN | select.EPOLLONESHOT, watched.data)
    ctypes.CDLL(None).epoll_ctl(loop, _MODIFY, watched.number, event)


def _awaited(loop: int) -> list[_Watched]:
    """The connections whose data an event loop waits for: not those that no pair of ranks has taken yet."""
    return [each for each, _ in _connections(loop) if each.events & select.EPOLLIN]


def _connections(loop: int) -> Iterator[tuple[_Watched, socket.socket]]:
    """The connections that an event loop watches, each with a duplicate of its socket."""
    for each in _watched(loop):
        with contextlib.suppress(OSError), opened(each.number) as connection:
            is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not is_listening and inode_of(connection) == each.inode:
                yield each, connection


def _watched(number: int) -> list[_Watched]:
    """What an event loop watches; nothing for other descriptors."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{number}") == "anon_inode:[eventpoll]":
            entries = _ENTRY.findall(Path(f"/proc/self/fdinfo/{number}").read_text())
            return [_Watched(int(entry[0]), *(int(each, 16) for each in entry[1:])) for entry in entries]
    return []
