"""Gloo's event loops: which sockets they watch, and what is done with each when their group ends.

An event loop is an epoll descriptor of this process, and Linux says in /proc which sockets it watches, and for what:

    a socket                           the event loop waits for    what we do
    a listener                         data, again and again       nothing: Gloo aborts if accepting a connection fails
    a connection that Gloo opens       its opening, once           nothing: Gloo would only open it again
    an open or accepted connection     its greeting, once          shut it down: Gloo closes it
    one that no pair of ranks uses     nothing                     shut it down: Gloo closes it with the group
    one of a pair of ranks             data, again and again       shut it down: Gloo closes it in less than 1 ms
    one of a pair, shut down before    data, again and again       *silence* it
    a silenced connection              nothing                     nothing

A connection is silenced by a change of what its event loop waits for: one more event, and then none.

Gloo may never read the rest of a message whose buffer is gone (pair.cc:448), so it does not find the end of that
connection, and its event repeats for ever. But an event loop ends once there are 10 ms without an event (loop.cc:200),
and the destructor of its group waits for that (loop.cc:119). ``connections.py`` says whose these lines are.
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
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from pgmesh._util.sockets import descriptors, inode_of, opened

_CLOSING_SECONDS = 0.2
"""The wait for Gloo to close its connections after they were shut down, before they are silenced."""

_MODIFY = 3
"""EPOLL_CTL_MOD of Linux, which Python does not offer together with the data of an event."""

_EVENT = "=IQ" if platform.machine() in ("x86_64", "i686") else "@IQ"
"""The fields of an epoll event, a mask and its data. They are packed on x86."""

_ENTRY = re.compile(r"tfd:\s*(\d+) events:\s*(\w+) data:\s*(\w+) .*ino:(\w+)")
"""A watched file in /proc, such as "tfd:  38 events:  19 data:  7f0c4c0d1a70  pos:0 ino:fccbc6 sdev:9"."""


class EventLoop(NamedTuple):
    """An event loop that watches at least one of some sockets.

    Gloo may end it at any time. Its number may be that of another event loop then, which does not watch these sockets.

    Args:
        number: its descriptor.
        sockets: the sockets, given by their inodes.
    """

    number: int
    sockets: Set[int]


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


def find_loops(sockets: Set[int]) -> list[EventLoop]:
    """The event loops that watch at least one of some sockets, which are given by their inodes."""
    loops = [EventLoop(number, sockets) for number in descriptors() if _is_event_loop(number)]
    return [loop for loop in loops if _watched(loop)]


def _is_event_loop(number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}") == "anon_inode:[eventpoll]"
    return False


def inodes(loops: Iterable[EventLoop]) -> set[int]:
    """The inodes of the files that some event loops watch."""
    return {each.inode for loop in loops for each in _watched(loop)}


def end_connections(loops: Iterable[EventLoop]) -> None:
    """Shut down the connections that some event loops watch, but not their listeners."""
    for loop in loops:
        for _, connection in _connections(loop):
            with contextlib.suppress(OSError):
                connection.getpeername()  # raises for one that is still being opened
                connection.shutdown(socket.SHUT_RDWR)


def end_events(loops: Sequence[EventLoop]) -> None:
    """Wait until Gloo has closed the connections that were shut down, and silence the others in its event loops."""
    deadline = time.monotonic() + _CLOSING_SECONDS
    while any(map(_repeated, loops)) and time.monotonic() < deadline:
        time.sleep(0.001)
    for loop in loops:
        for each in _repeated(loop):
            _silence(loop, each)


def _repeated(loop: EventLoop) -> list[_Watched]:
    """The connections whose data an event loop waits for."""
    return [each for each, _ in _connections(loop) if each.events & select.EPOLLIN]


def _silence(loop: EventLoop, watched: _Watched) -> None:
    """Silence a connection of an event loop.

    It stays in the event loop: Gloo may still remove it, and would end the process if it were not there (loop.cc:174).
    The number of an event loop may become another one's at any time. That of a duplicate cannot, so it is checked, and
    then used.
    """
    event = struct.pack(_EVENT, select.EPOLLIN | select.EPOLLONESHOT, watched.data)
    with contextlib.suppress(OSError), select.epoll.fromfd(os.dup(loop.number)) as same:
        if _watched(loop._replace(number=same.fileno())):
            ctypes.CDLL(None).epoll_ctl(same.fileno(), _MODIFY, watched.number, event)


def _connections(loop: EventLoop) -> Iterator[tuple[_Watched, socket.socket]]:
    """The connections that an event loop watches, each with a duplicate of its socket."""
    for each in _watched(loop):
        with contextlib.suppress(OSError), opened(each.number) as connection:
            is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not is_listening and inode_of(connection) == each.inode:
                yield each, connection


def _watched(loop: EventLoop) -> list[_Watched]:
    """What an event loop watches; nothing if it has ended, or if this process can open no more files."""
    with contextlib.suppress(OSError):
        entries = _ENTRY.findall(Path(f"/proc/self/fdinfo/{loop.number}").read_text())
        watched = [_Watched(int(number), *(int(each, 16) for each in others)) for number, *others in entries]
        if any(each.inode in loop.sockets for each in watched):
            return watched
    return []
