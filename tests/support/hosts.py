"""Two network namespaces, which are two hosts to every program in them, joined by a veth pair. It takes root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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


@contextlib.contextmanager
def ranks_on(
    hosts: tuple[str, str], ranks: int, run: Callable[[Path], None], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many ranks on each host, which call ``run(folder)``, and a store on the first host, for the block.

    An error of the block shows what the ranks wrote.
    """
    serve = f"from pgmesh.launch import StoreProcess; store = StoreProcess({STORE_PORT}); input()"
    store = subprocess.Popen(on_host(hosts[0], sys.executable, "-c", serve), stdin=subprocess.PIPE)
    program = (
        f"from pathlib import Path; from {run.__module__} import {run.__name__} as run; run(Path({str(folder)!r}))"
    )
    shared = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": f"{STORE_PORT}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": f"{2 * ranks}", "LOCAL_WORLD_SIZE": f"{ranks}", "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(2 * ranks):
            host = hosts[rank // ranks]
            own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank % ranks}", "GLOO_SOCKET_IFNAME": host}
            with (folder / f"log {rank}").open("wb") as log:
                command = on_host(host, sys.executable, "-c", program)
                started.append(subprocess.Popen(command, env=os.environ | shared | own, stdout=log, stderr=log))
        yield started
    except AssertionError as error:
        logs = [f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(folder.glob("log *"))]
        raise AssertionError("\n".join([str(error), *logs])) from error
    finally:
        for process in (*started, store):
            process.kill()
            process.wait(10.0)
        assert store.stdin is not None
        store.stdin.close()


def set_link(host: str, state: str) -> None:
    """Set this host's end of the link "up" or "down"."""
    ip("-n", host, "link", "set", host, state)


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, timeout=10.0)


def on_host(host: str, *command: str) -> list[str]:
    """The command line that runs a command on this host."""
    return ["ip", "netns", "exec", host, *command]
