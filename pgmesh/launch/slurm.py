"""Parsers of the compressed lists in Slurm's variables: names of hosts, and numbers of tasks on each host.

a[1-2],b[3-4]     a1 a2 b3 b4
rack[1-2]n[01-02]-ib    rack1n01-ib rack1n02-ib rack2n01-ib rack2n02-ib
8(x2),4           8 8 4
"""

from __future__ import annotations

import itertools
import re

from pgmesh.errors import LaunchError

_NAME = re.compile(r"(?: [^\[\],\s] | \[ [0-9,-]+ \] )+", re.VERBOSE)
_PART = re.compile(r"\[ ([0-9,-]+) \] | ([^\[\]]+)", re.VERBOSE)
_RANGE = re.compile(r"([0-9]{1,20}) (?: - ([0-9]{1,20}) )?", re.VERBOSE)
_TASKS = re.compile(r"([0-9]{1,20}) (?: \( x ([0-9]{1,20}) \) )?", re.VERBOSE)


def parse_hosts(text: str, variable: str = "the list") -> tuple[str, ...]:
    """The hosts of a Slurm node list, in its order. The first bracket of a name varies slowest.

    Args:
        text: the list as Slurm writes it. Leading zeros are kept: ``n[08-10]`` is n08, n09, n10.
        variable: the variable that contains it, for error messages.

    Raises:
        LaunchError: the syntax is wrong.

    >>> parse_hosts("gpu[1-2]-ib,rack[1-2]n[09-10]")
    ('gpu1-ib', 'gpu2-ib', 'rack1n09', 'rack1n10', 'rack2n09', 'rack2n10')
    """
    names = _NAME.findall(text)
    if not names or ",".join(names) != text:
        raise _invalid(text, variable, "is not a Slurm list of hosts, such as a[1-2],b[3-4] or rack[1-2]n[01-12]")
    hosts: list[str] = []
    for name in names:
        parts = _PART.findall(name)
        pieces = [_expand_ranges(numbers, text, variable) if numbers else [word] for numbers, word in parts]
        hosts += map("".join, itertools.product(*pieces))
    return tuple(hosts)


def _expand_ranges(ranges: str, text: str, variable: str) -> list[str]:
    """The numbers of one bracket as text, padded to the width of the first number of their range."""
    numbers: list[str] = []
    for part in ranges.split(","):
        read = _RANGE.fullmatch(part)
        low, high = (int(read[1]), int(read[2] or read[1])) if read else (1, 0)
        if read is None or low > high:
            raise _invalid(
                text, variable, f"is not a Slurm list of hosts: {part!r} is not a number or an ascending range"
            )
        numbers += (f"{number:0{len(read[1])}d}" for number in range(low, high + 1))
    return numbers


def parse_task_counts(text: str, variable: str = "the list") -> tuple[int, ...]:
    """Number of tasks on each host, in the order of the node list.

    Args:
        text: the list as Slurm writes it.
        variable: the variable that contains it, for error messages.

    Raises:
        LaunchError: the syntax is wrong.

    >>> parse_task_counts("8(x2),4")
    (8, 8, 4)
    """
    counts: list[int] = []
    for part in text.split(","):
        read = _TASKS.fullmatch(part)
        times = int(read[2] or 1) if read else 0
        if read is None or not times:
            example = "a number such as 8, or a repeated number such as 8(x2)"
            raise _invalid(text, variable, f"is not a list of task counts: {part!r} is not {example}")
        counts += [int(read[1])] * times
    return tuple(counts)


def _invalid(text: str, variable: str, why: str) -> LaunchError:
    return LaunchError(f"{variable} is {text[:80]!r}, which {why}.")
