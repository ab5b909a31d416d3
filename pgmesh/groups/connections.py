"""The TCP connections of Gloo groups: shut them down, and find members whose process has ended.

Each Gloo group of pgmesh has a device of its own, so its connections are those whose local end is the group's listener
or whose other end is the listener of a member.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pgmesh import torch_private
from pgmesh._util.listeners import ANSWER_SECONDS, refuses
from pgmesh.rendezvous.polling_store import PollingStore

Endpoint = tuple[str, int]
"""Host and port of a listener."""

_DESCRIPTORS = "/proc/self/fd"

_CLOSING_SECONDS = 0.2
"""The wait until Gloo has closed its connections after they were shut down. It usually takes less than 1 ms."""


class Endpoints(NamedTuple):
    """The listeners of a Gloo group: this rank's, and those of the members it knows, each with the member's rank.

    A rank has one listener for each network interface.
    """

    own: list[Endpoint]
    members: list[tuple[int, Endpoint]]


def endpoints_of(store: PollingStore | None) -> Endpoints:
    """The listeners of a group from the addresses that its members published."""
    if store is None:
        return Endpoints([], [])
    own = map(torch_private.gloo_endpoint, store.own_addresses())
    members = [(rank, torch_private.gloo_endpoint(address)) for rank, address in store.member_addresses()]
    return Endpoints([each for each in own if each], [(rank, each) for rank, each in members if each])


def shut_down(groups: Iterable[Endpoints]) -> int:
    """Shut down all connections of some groups, and return their number. Data that was sent still arrives.

    Blocked collectives on both ends raise an error at once. The listeners stay open: Gloo aborts the process if
    accepting a connection fails. Without /proc, nothing is shut down.
    """
    groups = list(groups)
    own = {endpoint for group in groups for endpoint in group.own}
    members = {endpoint for group in groups for _, endpoint in group.members}
    inodes: dict[int, int] = {}  # by descriptor that was shut down
    if not own and not members:
        return 0
    for number in _descriptors():
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            # A duplicate: another thread may close the descriptor and reuse its number meanwhile.
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer = connection.getpeername()[:2]  # raises for a listener
                if connection.getsockname()[:2] in own or peer in members:
                    connection.shutdown(socket.SHUT_RDWR)
                    inodes[number] = status.st_ino
    _detach(inodes)
    return len(inodes)


def _detach(inodes: Mapping[int, int]) -> None:
    """Wait until Gloo has closed these connections, and remove the others from its event loops.

    A Gloo group ends its event loop once there are 10 ms without an event, and its destructor waits for that. After a
    failed collective, Gloo may never read the rest of a message whose buffer is gone, so the event for it repeats for
    ever.

    Args:
        inodes: the inode of each descriptor. Gloo may close it, and the process may reuse its number.
    """
    deadline = time.monotonic() + _CLOSING_SECONDS
    while (left := [number for number, inode in inodes.items() if _inode(number) == inode]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.001)
    loops = [number for number in _descriptors() if left and _is_event_loop(number)]
    for loop in loops:
        with contextlib.suppress(OSError), select.epoll.fromfd(os.dup(loop)) as events:
            for number in left:
                with contextlib.suppress(OSError):  # another loop has it
                    events.unregister(number)


def _descriptors() -> list[int]:
    """The descriptors of this process; none without /proc."""
    with contextlib.suppress(FileNotFoundError):
        return [*map(int, os.listdir(_DESCRIPTORS))]
    return []


def _inode(number: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.fstat(number).st_ino
    return None


def _is_event_loop(number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"{_DESCRIPTORS}/{number}") == "anon_inode:[eventpoll]"
    return False


def find_dead(group: Endpoints) -> dict[int, Endpoint]:
    """The members whose listeners refuse a connection: their processes have ended, or freed the group.

    If this rank's own listener refuses too, the addresses are unreliable, and none is named.
    """
    if not group.own or any(map(refuses, group.own)):
        return {}
    end = time.monotonic() + 4 * ANSWER_SECONDS
    dead = {}
    for rank, endpoint in group.members:
        if refuses(endpoint):
            dead[rank] = endpoint
        if time.monotonic() > end:  # several hosts do not answer
            break
    return dead
