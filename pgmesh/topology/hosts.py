"""The machine that ranks run on: hosts, and what holds hosts, each a row of units that hold consecutive ranks.

A level is written as runs of equal units, so that a hundred thousand hosts take no more room than eight:

    8x8        8 hosts of 8 ranks
    8,8,4      three hosts, and the ranks of each
    1000x8,4   a thousand hosts of 8 and one of 4
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

from pgmesh._util.formatting import name_ranks
from pgmesh.errors import ShapeError

LEVEL_NAMES = ("host", "domain")
"""What the two innermost levels are called; a level beyond them is called by its number."""


@dataclass(frozen=True)
class HostLevel:
    """Units of one kind, side by side: ``runs`` of how many, and how many ranks each of them holds.

    >>> hosts = HostLevel("host", ((2, 8), (1, 4)))
    >>> print(hosts), hosts.unit_of(15), hosts.unit_of(16)
    3 hosts of 8, 8 and 4
    (None, 1, 2)
    """

    name: str
    runs: tuple[tuple[int, int], ...]

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """Where each run begins, and where the last ends, in ranks."""
        return tuple(accumulate((n * size for n, size in self.runs), initial=0))

    @cached_property
    def _units_before(self) -> tuple[int, ...]:
        """How many units there are before each run, and in all."""
        return tuple(accumulate((n for n, _ in self.runs), initial=0))

    @property
    def count(self) -> int:
        """How many units there are."""
        return sum(n for n, _ in self.runs)

    @property
    def capacity(self) -> int:
        """How many ranks they hold."""
        return self.edges[-1]

    @property
    def largest(self) -> int:
        """How many ranks the largest unit holds."""
        return max(size for _, size in self.runs)

    def run_of(self, rank: int) -> int:
        """The run that a rank is in."""
        return bisect_right(self.edges, rank) - 1

    def unit_of(self, rank: int) -> int:
        """The unit that a rank is in."""
        run = self.run_of(rank)
        return self._units_before[run] + (rank - self.edges[run]) // self.runs[run][1]

    def ranks_of(self, unit: int) -> range:
        """The ranks of one unit.

        >>> HostLevel("host", ((2, 8), (1, 4))).ranks_of(2)
        range(16, 20)
        """
        run = bisect_right(self._units_before, unit) - 1
        size = self.runs[run][1]
        start = self.edges[run] + (unit - self._units_before[run]) * size
        return range(start, start + size)

    def spell(self) -> str:
        """As it is written on the command line.

        >>> HostLevel("host", ((2, 8), (1, 4))).spell()
        '2x8,4'
        """
        return ",".join(f"{n}x{size}" if n > 1 or len(self.runs) == 1 else f"{size}" for n, size in self.runs)

    def __str__(self) -> str:
        if len(self.runs) == 1:
            n, size = self.runs[0]
            return f"{n:,} {self.name}{'s' * (n > 1)} of {size:,}"
        if self.count <= 8:
            *most, last = (str(size) for n, size in self.runs for _ in range(n))
            return f"{self.count} {self.name}s of {', '.join(most)} and {last}"
        if len(self.runs) == 2:
            return " and ".join(f"{n:,} {self.name}{'s' * (n > 1)} of {size:,}" for n, size in self.runs)
        return f"{self.count:,} {self.name}s of {min(size for _, size in self.runs):,} to {self.largest:,}"


Topology = tuple[HostLevel, ...]
"""The levels of a machine, innermost first."""


def parse_topology(nodes: str | Sequence[int] | None, domains: str | Sequence[int] | None = None) -> Topology:
    """The levels of a machine as a user gives them.

    Args:
        nodes: hosts: ``"8x8"`` is 8 hosts of 8 ranks; ``"8,8,4"`` or ``[8, 8, 4]`` the ranks of each.
        domains: levels, outermost first: ``"4x18x4"`` is 4 domains of 18 hosts of 4 ranks.

    Raises:
        ShapeError: it is written otherwise, or both are given.

    >>> [level.spell() for level in parse_topology(None, "4x18x4")]
    ['72x4', '4x72']
    """
    if nodes is not None and domains is not None:
        raise ShapeError("give nodes or domains, not both: domains='4x18x4' has hosts too, 4 x 18 of 4 ranks.")
    if domains is not None:
        return tuple(_nested(domains))
    return () if nodes is None else (HostLevel("host", _join(_runs(nodes))),)


def _runs(nodes: str | Sequence[int]) -> Iterator[tuple[int, int]]:
    words = nodes.replace(" ", "").split(",") if isinstance(nodes, str) else [str(size) for size in nodes]
    for word in words:
        numbers = word.lower().split("x")
        if len(numbers) > 2 or not all(number.isdecimal() and int(number) for number in numbers):
            shown = nodes if isinstance(nodes, str) else list(nodes)
            raise ShapeError(
                f"nodes are written 8x8, for 8 hosts of 8 ranks, or 8,8,4, for the ranks of each host, not {shown!r}."
            )
        yield (int(numbers[0]) if len(numbers) == 2 else 1), int(numbers[-1])


def _join(runs: Iterator[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for n, size in runs:
        if joined and joined[-1][1] == size:
            n += joined.pop()[0]
        joined.append((n, size))
    if not joined:
        raise ShapeError("there is no host in nodes=[].")
    return tuple(joined)


def _nested(domains: str | Sequence[int]) -> Iterator[HostLevel]:
    words = domains.replace(" ", "").lower().split("x") if isinstance(domains, str) else [str(size) for size in domains]
    if len(words) < 3 or not all(word.isdecimal() and int(word) for word in words):
        shown = domains if isinstance(domains, str) else list(domains)
        raise ShapeError(f"domains are written 4x18x4, for 4 domains of 18 hosts of 4 ranks, not {shown!r}.")
    sizes = [int(word) for word in words]
    for i in range(1, len(sizes)):
        name = LEVEL_NAMES[i - 1] if i <= len(LEVEL_NAMES) else f"level-{i} unit"
        yield HostLevel(name, ((math.prod(sizes[:-i]), math.prod(sizes[-i:])),))


# -- where ranks really are -------------------------------------------------------------------------------------------


def hosts_from_names(names: Sequence[str]) -> HostLevel | None:
    """The hosts that ranks are on, by the name of each rank's; None where a host's ranks do not follow one another.

    >>> print(hosts_from_names(["n1", "n1", "n2", "n2"])), hosts_from_names(["n1", "n2", "n1", "n2"])
    2 hosts of 2
    (None, None)
    """
    runs = [(name, len(list(same))) for name, same in groupby(names)]
    if len({name for name, _ in runs}) < len(runs):
        return None
    return HostLevel(LEVEL_NAMES[0], _join((1, size) for _, size in runs))


def placement_faults(hosts: HostLevel, names: Sequence[str]) -> list[str]:
    """What is not as planned about where ranks are, a sentence for each fault; none if all is.

    Args:
        hosts: as planned.
        names: the name of the host that each rank is on.

    >>> placement_faults(HostLevel("host", ((2, 2),)), ["n1", "n1", "n2", "n3"])
    ['host 1 is planned for ranks 2, 3, but rank 2 is on n2 and rank 3 on n3.']
    >>> placement_faults(HostLevel("host", ((2, 2),)), ["n1"] * 4)
    ['ranks 0, 1 and ranks 2, 3 are planned on 2 hosts, but all are on n1.']
    """
    says = []
    holds: dict[str, dict[int, list[int]]] = {}
    for unit in range(hosts.count):
        there: dict[str, list[int]] = {}
        for rank in hosts.ranks_of(unit):
            there.setdefault(names[rank], []).append(rank)
            holds.setdefault(names[rank], {}).setdefault(unit, []).append(rank)
        if len(there) > 1:
            (first, ranks), *others = there.items()
            each = [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} on {first}"]
            each += [f"{name_ranks(others)} on {name}" for name, others in others]
            says.append(f"host {unit} is planned for {name_ranks(hosts.ranks_of(unit))}, but {_listed(each)}.")
    for name, units in holds.items():
        if len(units) > 1:
            each = [name_ranks(ranks) for ranks in units.values()]
            says.append(f"{_listed(each)} are planned on {len(units)} hosts, but all are on {name}.")
    return says


def _listed(words: Sequence[str]) -> str:
    """Some of these words, however many there are."""
    words = [*words[:3], f"{len(words) - 3} more"] if len(words) > 4 else list(words)
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
