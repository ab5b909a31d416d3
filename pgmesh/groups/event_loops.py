"""Gloo's event loops, from which connections that were shut down are removed if Gloo does not do it.

A Gloo group ends its event loop once there are 10 ms without an event, and its destructor waits for that. After a
failed collective, Gloo may never read the rest of a message whose buffer is gone, so the event for it repeats for ever.
An event loop is an epoll descriptor of this process, and Linux says in /proc which sockets it watches.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Collection
from pathlib import Path

from pgmesh._util.sockets import descriptors, opened

_CLOSING_SECONDS = 0.2
"""The wait until Gloo has closed its connections after they were shut down. It usually takes less than 1 ms."""


def end_events(own: Collection[tuple[str, int]]) -> None:
    """Wait until Gloo has closed the connections of some groups, and remove the others from its event loops.

    Args:
        own: the listeners of these groups. The event loop of each has its listener.
    """
    loops = [number for number in descriptors() if any(is_listener for _, is_listener in _watched(number, own))]
    deadline = time.monotonic() + _CLOSING_SECONDS
    while loops := [loop for loop in loops if not all(is_listener for _, is_listener in _watched(loop, own))]:
        if time.monotonic() < deadline:
            time.sleep(0.001)
            continue
        for loop in loops:
            with contextlib.suppress(OSError), select.epoll.fromfd(os.dup(loop)) as events:
                for number, is_listener in _watched(loop, own):
                    if not is_listener:
                        events.unregister(number)
        return


def _watched(number: int, own: Collection[tuple[str, int]]) -> list[tuple[int, bool]]:
    """The TCP sockets that an event loop waits for, each with whether it is one of these listeners.

    Not those that it ignores: connections that no pair of ranks has taken yet. None for other descriptors.
    """
    found: list[tuple[int, bool]] = []
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{number}") != "anon_inode:[eventpoll]":
            return found
        lines = Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()
        entries = [line.split() for line in lines if line.startswith("tfd:")]  # "tfd: 38 events: 19 data: ..."
        for watched in (int(entry[1]) for entry in entries if int(entry[3], 16) & select.EPOLLIN):
            with contextlib.suppress(OSError), opened(watched) as each:
                is_listening = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                found.append((watched, bool(is_listening) and each.getsockname()[:2] in own))
    return found
