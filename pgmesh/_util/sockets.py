"""The TCP sockets of this process, also those that C++ code has opened. They are found in /proc, where there is one."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from typing import Any


def as_host(name: str) -> str | bytes:
    """The name of a host for ``socket.getaddrinfo``. Python needs 3 ms before the first one that is not bytes."""
    return name.encode() if name.isascii() else name


def open_connection(address: tuple[str, int], seconds: float) -> socket.socket:
    """Open a connection to a host and port, within so many seconds for each of the host's addresses.

    Raises:
        OSError: there was none.
        UnicodeError: the host can be no name.
    """
    return socket.create_connection((as_host(address[0]), address[1]), seconds)  # type: ignore[arg-type]


def descriptors() -> list[int]:
    """The descriptors of this process; none without /proc, or if it can open no more files."""
    with contextlib.suppress(OSError):
        return [*map(int, os.listdir("/proc/self/fd"))]
    return []


def opened(number: int) -> socket.socket:
    """A duplicate of a TCP socket: another thread may close the descriptor and reuse its number meanwhile.

    Raises:
        OSError: the descriptor is closed, or no TCP socket, or this process can open no more files.
    """
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(f"descriptor {number} is no socket")
    # If the program has set a default timeout, Python makes the socket itself non-blocking, unless its type says it is.
    each = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=os.dup(number))
    if each.proto != socket.IPPROTO_TCP:
        each.close()
        raise OSError(f"descriptor {number} is no TCP socket")
    return each


def all_opened() -> Iterator[socket.socket]:
    """A duplicate of each TCP socket of this process; not those for which there is no free descriptor."""
    for number in descriptors():
        with contextlib.suppress(OSError), opened(number) as each:
            yield each


def connections() -> Iterator[tuple[socket.socket, Any, Any]]:
    """This process's TCP connections: a duplicate of the socket, its own address, and that of the other end."""
    for each in all_opened():
        with contextlib.suppress(OSError):
            yield each, each.getsockname(), each.getpeername()  # raises for a listener


def inode_of(each: socket.socket) -> int:
    """What tells a socket from all others, also after its descriptor's number has become another file's."""
    return os.fstat(each.fileno()).st_ino


@contextlib.contextmanager
def ending_when_cut(port: int, seconds: float) -> Iterator[None]:
    """Let the kernel end the connections to a port that the block opens, once the other host is silent for so long.

    TCP repeats packets at growing intervals, so a connection may need long after a cut; a new one works at once. The
    kernel of the other host acknowledges packets for a stopped process too, so that is no silence.
    """
    before = {here for _, here, _ in connections()}
    yield
    for each, here, there in connections():
        if there[1] == port and here not in before:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)  # packets also while an answer is awaited
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
