"""Waits of this rank for members that have not connected to it, and how they are ended.

Of each two members, one connects and the other waits. The one that waits has no socket to shut down. So it connects to
its own listener in the place of the other member, and closes that connection: the collective raises an error.

Once Gloo has given the wait up, such a connection would end the process. It gives up at two times. T is the timeout of
the group, T0 the one that the group was made with:

    enters the collective       T                               5 T0
    |---- safe to wake --------[.]----- safe to wake ----------[...]--- safe to wake: a wait that lasts began later
                          gives up messages of       gives up members
                          connected members, and     that were to connect
                          this wait with them

``connections.py`` says whose the lines of code are that this file names.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable

from pgmesh import torch_private
from pgmesh._util.listeners import ANSWER_SECONDS
from pgmesh._util.sockets import descriptors, open_connection
from pgmesh.groups.connections import Endpoints

_GLOO_TIMEOUTS = 5
"""Gloo waits for a member to connect for this many timeouts of the group. Source: pair.h:305."""

_MARGIN = 1.0
"""Seconds before and after the end of that wait, in which it is uncertain whether Gloo has given it up. Once it has,
such a connection ends the process. Source: pair.cc:680."""

_MESSAGE_MARGIN = 0.15
"""The same for a message of a connected member, for which Gloo waits for one timeout. It then gives up its other waits
too. Source: unbound_buffer.cc:59 and 76."""


def unsafe_seconds(seconds: float, timeout: float, first_timeout: float) -> float:
    """Seconds until it is safe to wake a wait: 0.0 if it is safe now, inf near 5 T0, at which Gloo ends the wait.

    Args:
        seconds: the time since the collective was entered.
        timeout: the timeout of the group in seconds, by which Gloo waits for messages.
        first_timeout: the one that it was made with, by which Gloo waits for connections. Source: pair.cc:57.

    >>> [round(unsafe_seconds(seconds, 1.0, first_timeout=1.0), 2) for seconds in (0.5, 0.9, 3.0, 4.5, 7.0)]
    [0.0, 0.25, 0.0, inf, 0.0]
    """
    if abs(seconds - _GLOO_TIMEOUTS * first_timeout) <= _MARGIN:
        return math.inf
    return timeout + _MESSAGE_MARGIN - seconds if abs(seconds - timeout) <= _MESSAGE_MARGIN else 0.0


def wake(groups: Iterable[Endpoints]) -> None:
    """End this rank's waits for members of some groups that have not connected to it.

    Which of two members connects: device.cc:327. Members that are connected are not affected: listener.cc:137.
    """
    wakes = [(own, place) for group in groups for own in group.own for place in group.places]
    used = len(descriptors())
    if not used or used + 2 * len(wakes) >= os.sysconf("SC_OPEN_MAX"):  # Gloo must be able to accept (listener.cc:68)
        return
    for own, place in wakes:
        with contextlib.suppress(OSError), open_connection(own, ANSWER_SECONDS) as connection:
            connection.sendall(torch_private.gloo_greeting(place))
