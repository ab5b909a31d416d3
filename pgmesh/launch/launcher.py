"""The statements of one launcher about this process: its environment variables, and the rank that they give.

``Launcher`` is a row of the table of launchers. ``Variables`` reads numbers from the variables of a launcher that are
set. ``LauncherInfo`` is the result. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pgmesh._util.formatting import format_calls, join_words
from pgmesh._util.validation import number_between
from pgmesh.errors import LaunchError

Environ = Mapping[str, str]

PORTS = range(20_000, 30_000)
"""Ports that are derived from a job's number. They are below the ephemeral ports of Linux, which start at 32768."""

LAST_PORT = 65_535
MAX_NUMBER = 0xFFFFFFFF


@dataclass(frozen=True)
class Launcher:
    """The environment variables of one launcher. Several variables for one number must agree, if they are set."""

    name: str
    command: str  # a command that starts ranks, for errors
    marks: tuple[str, ...]  # it sets at least one of these on every rank
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    job: tuple[str, ...] = ()  # equal on all ranks of a job, and different in every other job
    more: tuple[str, ...] = ("MASTER_ADDR", "MASTER_PORT")  # other variables that are read

    @property
    def numbers(self) -> tuple[str, ...]:
        """The variables that place a rank."""
        return (*self.rank, *self.size, *self.local_rank, *self.local_size)

    def values(self, environ: Environ) -> dict[str, str]:
        """All variables of this launcher that are set, with their values."""
        names = (*self.numbers, *self.marks, *self.job, *self.more)
        return {name: environ[name] for name in dict.fromkeys(names) if name in environ}


class Variables:
    """The variables of one launcher that are set."""

    def __init__(self, launcher: Launcher, environ: Environ) -> None:
        self.launcher, self.values = launcher, launcher.values(environ)

    def number(self, names: Sequence[str], least: int = 0, most: int = MAX_NUMBER) -> int | None:
        """The number that all of these variables hold, as far as they are set; None if none is set.

        Raises:
            LaunchError: one of them is no whole number in the range, or two differ.
        """
        texts = {name: self.values[name] for name in names if name in self.values}
        numbers = {int(text) if re.fullmatch("[0-9]{1,19}", text) else -1 for text in texts.values()}
        if len(numbers) > 1 or not all(least <= number <= most for number in numbers):
            raise self.error(f"{join_words(texts)} must hold one whole number from {least} to {most}.")
        return numbers.pop() if numbers else None

    def parsed(self, names: tuple[str, ...], parse: Callable[[str, str], tuple[Any, ...]]) -> tuple[Any, ...]:
        """The parsed value of the first of these variables that is set; empty if none is."""
        name = next((name for name in names if self.values.get(name)), None)
        return () if name is None else parse(self.values[name], name)

    def error(self, problem: str, *ways: tuple[str, str]) -> LaunchError:
        """An error with the problem, all variables of the launcher that are set, and a command that sets them."""
        return launch_error(problem, self.values, (self.launcher.command, "sets all of them"), *ways)


@dataclass(frozen=True)
class LauncherInfo:
    """The detected launcher, and the rank of this process according to it.

    Args:
        launcher: its name.
        why: the reason why it was detected.
        rank: rank of this process in the world.
        size: number of ranks of the world.
        local_rank: index of this process among the ranks on its host; None if unknown.
        local_size: number of ranks on this host; None if unknown.
        hosts: names of all hosts, in the launcher's order; empty if unknown.
        address: name or address of rank 0's host; None if unknown.
        port: port of the store on that host; None if unknown.
        read: the variables of the launcher that are set, with their values.
        replica: number of this launch if several form the world, whose store is at ``address`` and ``port``.

    >>> from pgmesh.launch import detect_launcher
    >>> info = detect_launcher({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    >>> info.rank, info.size, info.local_rank, info.local_size, info.hosts, info.address
    (3, 4, 1, 2, (), None)
    >>> print(info.line)
    rank 3 of 4, local rank 1 of 2: MPICH, because PMI_RANK is set
    """

    launcher: str
    why: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    hosts: tuple[str, ...] = ()
    address: str | None = None
    port: int | None = None
    read: tuple[tuple[str, str], ...] = ()
    replica: int | None = None

    @property
    def line(self) -> str:
        """The ranks, the launcher and the reason, in one line."""
        local = "" if self.local_rank is None else f", local rank {self.local_rank}"
        local += "" if self.local_size is None else f" of {self.local_size}"
        return f"rank {self.rank} of {self.size}{local}: {self.launcher}, because {self.why}"

    @property
    def needs_store(self) -> bool:
        """False for a world of one, unless its store has a host and a port."""
        return self.size > 1 or (self.address is not None and self.port is not None)

    def end_point(self) -> tuple[str, int]:
        """Host and port of the store, which rank 0 hosts.

        Raises:
            LaunchError: one of them is unknown.
        """
        if self.address is not None and self.port is not None:
            return self.address, self.port
        unknown = [word for word, value in (("host", self.address), ("port", self.port)) if value is None]
        raise self.error(
            f"{self.launcher} does not set the {' and the '.join(unknown)} of rank 0.",
            ("launch.join(host='n1', port=29500)", "the same on every rank"),
            ("export MASTER_ADDR=n1 MASTER_PORT=29500", "or in the environment of every rank"),
        )

    def error(self, problem: str, *ways: tuple[str, str]) -> LaunchError:
        """An error with the problem, the variables that were read, and suggested calls with their reasons."""
        return launch_error(problem, dict(self.read), *ways)


def parse_port(port: Any, least: int = 1) -> int:
    """A port as an int.

    Raises:
        LaunchError: it is not a port number.
    """
    number = number_between(port, least, LAST_PORT)
    if number is None:
        raise LaunchError(f"port is a whole number from {least} to {LAST_PORT}, such as port=29500, not {port!r}.")
    return number


def launch_error(problem: str, values: Environ, *ways: tuple[str, str]) -> LaunchError:
    """An error with the problem, variables with their values, and suggested calls with their reasons."""
    width = max(map(len, values), default=0)
    lines = "\n".join(f"  {name:<{width}} = {value}" for name, value in values.items())
    return LaunchError("\n\n".join(filter(None, (problem, lines, format_calls(ways)))))
