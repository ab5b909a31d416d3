"""What PBS writes: a file with the name of a host in each line, once for each place that the job has on it."""

from __future__ import annotations

from pathlib import Path

from pgmesh.errors import LaunchError

MAX_BYTES = 64 << 20
"""Bytes of a file; a longer one was not written by PBS."""


def read_node_file(path: str) -> tuple[str, ...]:
    """The hosts of the file that PBS_NODEFILE names, each once, in its order; none where there is no such file here.

    Raises:
        LaunchError: it is there, but cannot be read, or is no list of hosts.
    """
    try:
        with Path(path).open("rb") as file:
            read = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise LaunchError(f"PBS_NODEFILE is {path!r}, which cannot be read: {error.strerror}.") from None
    lines = [line.strip() for line in read.decode(errors="replace").splitlines()]
    hosts = tuple(dict.fromkeys(filter(None, lines)))
    wrong = next((number for number, line in enumerate(lines, 1) if len(line.split()) > 1 or "\ufffd" in line), None)
    if wrong is not None or len(read) > MAX_BYTES or not hosts:
        where = f", as its line {wrong} shows: {lines[wrong - 1][:40]!r}" if wrong else ""
        raise LaunchError(f"PBS_NODEFILE is {path!r}, which is no list of hosts, one in a line{where}.")
    return hosts
