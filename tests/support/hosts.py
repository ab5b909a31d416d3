"""Two network namespaces, which are two hosts to every program in them, joined by a veth pair. It takes root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""The addresses of the two hosts."""

STORE_PORT = 29577


class NoHostsError(Exception):
    """The reason why there can be no two hosts here."""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """The names of two hosts, which are also the names of their network interfaces. They are removed at the end.

    Raises:
        NoHostsError: this takes root and iproute2, or namespaces cannot be made here.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NoHostsError("this takes root and iproute2")
    word = f"pg{os.getpid() % 100000}"
    a, b = hosts = f"{word}a", f"{word}b"
    try:
        try:
            for host in hosts:
                ip("netns", "add", host)
                ip("-n", host, "link", "set", "lo", "up")
            ip("link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
            for host, address in zip(hosts, ADDRESSES):
                ip("-n", host, "addr", "add", f"{address}/24", "dev", host)
                set_link(host, "up")
        except (subprocess.SubprocessError, OSError) as error:
            raise NoHostsError(f"namespaces cannot be made here: {error}") from error
        yield hosts
    finally:
        for host in hosts:
            ip("netns", "del", host, check=False)


def set_link(host: str, state: str) -> None:
    """Set this host's end of the link "up" or "down"."""
    ip("-n", host, "link", "set", host, state)


def ip(*words: str, check: bool = True) -> None:
    """Run a command of iproute2."""
    subprocess.run(["ip", *words], check=check, capture_output=True, timeout=10.0)


def on_host(host: str, *command: str) -> list[str]:
    """The command line that runs a command on this host."""
    return ["ip", "netns", "exec", host, *command]
