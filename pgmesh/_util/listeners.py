"""Listeners of other processes: a process that has ended refuses connections."""

from __future__ import annotations

import contextlib
import ipaddress

from pgmesh._util.sockets import open_connection

ANSWER_SECONDS = 0.5
"""Timeout for one connection to a listener, unless another one is given."""


def is_loopback(host: str) -> bool:
    """True for an address that every host has for itself."""
    with contextlib.suppress(ValueError):  # not an address
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False


def refuses(endpoint: tuple[str, int], wait: float = ANSWER_SECONDS) -> bool:
    """True if the endpoint refuses a connection. No answer in so many seconds is no proof."""
    try:
        open_connection(endpoint, wait).close()
    except (OSError, UnicodeError) as error:  # or a host that can be no name
        return isinstance(error, ConnectionRefusedError)
    return False
