"""The TCP connections of Gloo groups: shut them down, and find members whose process has ended.

Each Gloo group of pgmesh has a device of its own, so its connections are those whose local end is the group's listener
or whose other end is the listener of a member.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

from pgmesh import torch_private
from pgmesh._util.listeners import ANSWER_SECONDS, refuses
from pgmesh._util.sockets import connections
from pgmesh.groups.event_loops import end_events
from pgmesh.rendezvous.gloo_store import GlooStore

Endpoint = tuple[str, int]
"""Host and port of a listener."""


_GLOO_TIMEOUTS = 5
"""Gloo waits for a member to connect for this many timeouts of the group."""

_MARGIN = 1.0
"""Seconds before and after the end of that wait, in which it is uncertain whether Gloo has given it up."""

_MESSAGE_MARGIN = 0.15
"""The same for a message of a connected member, for which Gloo waits for one timeout."""


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


def is_safe_to_wake(seconds: float, timeout: float) -> bool:
    """True if Gloo gives up no wait for a member about now: a wait for its message, or for its connection.

    Args:
        seconds: the time since the collective was entered. If that is long ago, it began to wait later.
        timeout: the timeout of the group in seconds.

    >>> [is_safe_to_wake(seconds, timeout=1.0) for seconds in (0.5, 0.9, 3.0, 4.5, 7.0)]
    [True, False, True, False, True]
    """
    ends = ((timeout, _MESSAGE_MARGIN), (_GLOO_TIMEOUTS * timeout, _MARGIN))
    return all(abs(seconds - end) > margin for end, margin in ends)


def wake(group: Endpoints) -> None:
    """End this rank's waits for members that have not connected to it.

    Of each two members, Gloo lets one wait for the other to connect, for up to five times the group's timeout. There is
    no socket to shut down. So this rank connects to its own listener in the place of each other member, and closes that
    connection. Members that are connected are not affected.
    """
    for own in group.own:
        for place in group.places:
            with contextlib.suppress(OSError), socket.create_connection(own, ANSWER_SECONDS) as connection:
                connection.sendall(torch_private.gloo_greeting(place))


def shut_down(groups: Iterable[Endpoints]) -> None:
    """Shut down all connections of some groups. Data that was sent still arrives.

    Blocked collectives on both ends raise an error at once. The listeners stay open: Gloo aborts the process if
    accepting a connection fails. Without /proc, nothing is shut down.
    """
    groups = list(groups)
    own = {endpoint for group in groups for endpoint in group.own}
    members = {endpoint for group in groups for _, endpoint in group.members}
    if not own and not members:
        return
    for connection, here, there in connections():
        if here[:2] in own or there[:2] in members:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
    end_events(own)


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
