"""Reader of the PBS node file, in which each line names a host; a host is repeated for each of its slots."""

from __future__ import annotations

from pathlib import Path

from pgmesh.errors import LaunchError

MAX_BYTES = 64 << 20
"""Largest accepted size of the file, in bytes."""


def read_node_file(path: str) -> tuple[str, ...]:
    """The hosts in a PBS node file, without repetitions, in the order of the file. Empty if the file does not exist.

    Args:
        path: the value of PBS_NODEFILE.

    Raises:
        LaunchError: the file cannot be read, or is not a list of hosts.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise LaunchError(f"PBS_NODEFILE is {path!r}, which cannot be read: {error.strerror}.") from None
    lines = [line.strip() for line in content.decode(errors="replace").splitlines()]
    hosts = tuple(dict.fromkeys(filter(None, lines)))
    wrong = next((number for number, line in enumerate(lines, 1) if len(line.split()) > 1 or "\ufffd" in line), None)
    if wrong is not None or len(content) > MAX_BYTES or not hosts:
        example = f"; line {wrong} is {lines[wrong - 1][:40]!r}" if wrong else ""
        raise LaunchError(f"PBS_NODEFILE is {path!r}, which is not a list with one host in each line{example}.")
    return hosts
