"""Listeners on TCP ports, which show other ranks that a process lives."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

ANSWER_SECONDS = 0.5
"""Timeout for one connection to a listener."""


class Listener:
    """An open TCP port that shows that this process lives: when it ends, connections to the port are refused.

    Args:
        host: an address of this host.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self._socket.setblocking(False)
        self.host, self.port = self._socket.getsockname()[:2]

    def drain(self) -> None:
        """Accept and close the connections that other ranks have opened, so that there is room for more."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Close the port, or this process's copy of it after a fork."""
        self._socket.close()


def is_loopback(host: str) -> bool:
    """True for an address that every host has for itself."""
    with contextlib.suppress(ValueError):  # not an address
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False


def refuses(endpoint: tuple[str, int]) -> bool:
    """True if the endpoint refuses a connection. No answer is no proof."""
    try:
        socket.create_connection(endpoint, ANSWER_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False
