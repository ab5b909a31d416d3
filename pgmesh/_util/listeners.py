"""Whether a TCP port is open."""

from __future__ import annotations

import socket

ANSWER_SECONDS = 0.5
"""Timeout for one connection to a listener."""


def refuses(endpoint: tuple[str, int]) -> bool:
    """True if the endpoint refuses a connection. No answer is no proof."""
    try:
        socket.create_connection(endpoint, ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
