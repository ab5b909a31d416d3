"""The TCP connections of Gloo groups: shut them down, and find members whose process has ended.

Each Gloo group of pgmesh has a device of its own, so its connections are those whose local end is the group's listener
or whose other end is the listener of a member.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterable
from typing import NamedTuple

from pgmesh import torch_private
from pgmesh._util.listeners import ANSWER_SECONDS, refuses
from pgmesh.rendezvous.polling_store import PollingStore

Endpoint = tuple[str, int]
"""Host and port of a listener."""

_DESCRIPTORS = "/proc/self/fd"


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
    count = 0
    if not own and not members:
        return count
    with contextlib.suppress(FileNotFoundError):
        for number in map(int, os.listdir(_DESCRIPTORS)):
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue
                # A duplicate: another thread may close the descriptor and reuse its number meanwhile.
                with socket.socket(fileno=os.dup(number)) as connection:
                    if connection.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    peer = connection.getpeername()[:2]  # raises for a listener
                    if connection.getsockname()[:2] in own or peer in members:
                        connection.shutdown(socket.SHUT_RDWR)
                        count += 1
    return count


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
