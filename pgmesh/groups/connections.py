"""The TCP connections of Gloo groups: shut them down, and find members whose process has ended.

Each Gloo group of pgmesh has devices of its own, one for each network interface. A device has a listener, and an event
loop that watches the listener and the connections. How Gloo uses them is private, so each fact that this file relies on
names a line of https://github.com/pytorch/gloo/tree/70dc360272dfc57e3617184c78ff9b06f8cd4757/gloo/transport/tcp.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pgmesh import torch_private
from pgmesh._util.listeners import ANSWER_SECONDS, refuses
from pgmesh._util.sockets import all_opened, inode_of
from pgmesh.groups.event_loops import EventLoop, end_connections, end_events, find_loops, inodes
from pgmesh.rendezvous.gloo_store import GlooStore

Endpoint = tuple[str, int]
"""Host and port of a listener."""


_OPENING_SECONDS = 0.05
"""The longest time for which an event loop does not watch a connection that Gloo opens. Usually it is below 0.1 ms.
Source: helpers.h:163 and 178."""


class Endpoints(NamedTuple):
    """The listeners of a Gloo group: this rank's, and those of the members it knows, each with the member's rank.

    A rank has one listener for each network interface.

    Args:
        places: the places in the group of the other members, if this rank has entered a collective.
    """

    own: list[Endpoint]
    members: list[tuple[int, Endpoint]]
    places: list[int]


def endpoints_of(store: GlooStore | None) -> Endpoints:
    """The listeners of a group from the addresses that its members published."""
    if store is None:
        return Endpoints([], [], [])
    own = map(torch_private.gloo_endpoint, store.own.values())
    members = [(rank, torch_private.gloo_endpoint(address)) for rank, address in store.known_addresses()]
    places = store.other_places() if store.used else []
    return Endpoints([*filter(None, own)], [(rank, each) for rank, each in members if each], places)


def shut_down(groups: Iterable[Endpoints]) -> None:
    """Shut down all connections of some groups. Data that was sent still arrives.

    Blocked collectives on both ends raise an error at once. The listeners stay open: Gloo aborts the process if
    accepting a connection fails (listener.cc:68). Without Linux's /proc, or a free descriptor, nothing is shut down.
    """
    groups = list(groups)
    own = {endpoint for group in groups for endpoint in group.own}
    members = {endpoint for group in groups for _, endpoint in group.members}
    if not own:
        return
    deadline = time.monotonic() + _OPENING_SECONDS
    while True:
        sockets = _find_sockets(own, members)
        loops = find_loops(sockets.accepted)
        complete = _all_are_watched(sockets, loops)  # before Gloo closes them
        end_connections(loops)
        if complete or time.monotonic() >= deadline:
            break
        time.sleep(0.001)
    end_events(loops)


class _Sockets(NamedTuple):
    """Sockets of this process, by their inodes.

    Args:
        accepted: the listeners of some groups, and the connections that they accepted.
        opened: the connections to listeners of members. A member may have closed its listener, and another program may
            have the port now. So only those that an event loop of the groups watches are theirs.
    """

    accepted: set[int]
    opened: set[int]


def _all_are_watched(sockets: _Sockets, loops: Sequence[EventLoop]) -> bool:
    """False if Gloo may be opening a connection, which no event loop watches for a moment."""
    return not loops or sockets.accepted | sockets.opened <= inodes(loops)


def _find_sockets(own: Collection[Endpoint], members: Collection[Endpoint]) -> _Sockets:
    found = _Sockets(set(), set())
    for each in all_opened():
        with contextlib.suppress(OSError):
            if each.getsockname()[:2] in own:
                found.accepted.add(inode_of(each))
            elif each.getpeername()[:2] in members:  # raises for a listener
                found.opened.add(inode_of(each))
    return found


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
