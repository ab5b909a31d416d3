"""The topology of a job: its hosts and, optionally, the domains that contain them.

A topology is a tuple of levels. Each level is a sequence of units (hosts, domains) that hold consecutive ranks.
Consecutive units of one size are stored as one run, so 100,000 equal hosts need as much memory as eight:

    8x8        8 hosts of 8 ranks
    8,8,4      three hosts, and the number of ranks on each
    1000x8,4   1,000 hosts of 8 ranks and one of 4
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

from pgmesh._util.formatting import count_of, join_words, name_ranks
from pgmesh._util.validation import whole_number
from pgmesh.errors import ShapeError


@dataclass(frozen=True)
class HostLevel:
    """Units of one kind, such as hosts.

    Args:
        name: the kind, such as ``host`` or ``domain``.
        runs: pairs of (number of units, ranks in each unit), one for each run of units of equal size.

    >>> hosts = HostLevel("host", ((2, 8), (1, 4)))
    >>> print(hosts), hosts.unit_of(15), hosts.unit_of(16)
    3 hosts of 8, 8 and 4
    (None, 1, 2)
    """

    name: str
    runs: tuple[tuple[int, int], ...]

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """The first rank of each run, then the number of ranks in all."""
        return tuple(accumulate((n * size for n, size in self.runs), initial=0))

    @cached_property
    def _units_before(self) -> tuple[int, ...]:
        """The number of units before each run, then the number in all."""
        return tuple(accumulate((n for n, _ in self.runs), initial=0))

    @property
    def count(self) -> int:
        """The number of units."""
        return sum(n for n, _ in self.runs)

    @property
    def capacity(self) -> int:
        """The number of ranks that all units hold."""
        return self.edges[-1]

    @property
    def largest(self) -> int:
        """The number of ranks in the largest unit."""
        return max(size for _, size in self.runs)

    def unit_of(self, rank: int) -> int:
        """The index of the unit that contains a rank."""
        run = bisect_right(self.edges, rank) - 1
        return self._units_before[run] + (rank - self.edges[run]) // self.runs[run][1]

    def ranks_of(self, unit: int) -> range:
        """The ranks of a unit.

        >>> HostLevel("host", ((2, 8), (1, 4))).ranks_of(2)
        range(16, 20)
        """
        run = bisect_right(self._units_before, unit) - 1
        size = self.runs[run][1]
        start = self.edges[run] + (unit - self._units_before[run]) * size
        return range(start, start + size)

    def spell(self) -> str:
        """The level in the notation of the command line.

        >>> HostLevel("host", ((2, 8), (1, 4))).spell()
        '2x8,4'
        """
        return ",".join(f"{n}x{size}" if n > 1 or len(self.runs) == 1 else f"{size}" for n, size in self.runs)

    def __str__(self) -> str:
        if len(self.runs) > 1 and self.count <= 8:
            return f"{self.count} {self.name}s of {join_words(size for n, size in self.runs for _ in range(n))}"
        if len(self.runs) <= 2:
            return join_words(f"{count_of(n, self.name)} of {size:,}" for n, size in self.runs)
        return f"{self.count:,} {self.name}s of {min(size for _, size in self.runs):,} to {self.largest:,}"


Topology = tuple[HostLevel, ...]
"""The levels, innermost first; empty if the hosts are unknown."""


def parse_topology(nodes: str | Sequence[int] | None, domains: str | Sequence[int] | None = None) -> Topology:
    """Parse the hosts, or the nested domains, of a job.

    Args:
        nodes: the hosts. ``"8x8"`` is 8 hosts of 8 ranks; ``"8,8,4"`` or ``[8, 8, 4]`` lists the ranks of each host.
        domains: nested levels, outermost first. ``"4x18x4"`` or ``[4, 18, 4]`` is 4 domains of 18 hosts of 4 ranks.

    Raises:
        ShapeError: the notation is invalid, or both arguments are given.

    >>> [level.spell() for level in parse_topology(None, "4x18x4")]
    ['72x4', '4x72']
    """
    if nodes is not None and domains is not None:
        raise ShapeError("give nodes or domains, not both: domains='4x18x4' includes the hosts, 4 x 18 of 4 ranks.")
    if domains is not None:
        return tuple(_nested(domains))
    return () if nodes is None else (HostLevel("host", _join(_runs(nodes))),)


def _words(given: str | Sequence[int], separator: str) -> list[str]:
    """The words of a notation, or the numbers of a sequence. Other values are one word that is no number."""
    if isinstance(given, str):
        return [word.strip() for word in given.lower().split(separator)]
    with suppress(TypeError):
        return [str(whole_number(size)) for size in given]
    return ["?"]


def _runs(nodes: str | Sequence[int]) -> Iterator[tuple[int, int]]:
    for word in _words(nodes, ","):
        numbers = _words(word, "x")
        if len(numbers) > 2 or not all(number.isdecimal() and int(number) for number in numbers):
            raise ShapeError(
                f"nodes are written 8x8, for 8 hosts of 8 ranks, or 8,8,4, for the ranks of each host, not {nodes!r}."
            )
        yield (int(numbers[0]) if len(numbers) == 2 else 1), int(numbers[-1])


def _join(runs: Iterator[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same units with one run for each sequence of equal ones."""
    joined = tuple((sum(n for n, _ in same), size) for size, same in groupby(runs, lambda run: run[1]))
    if not joined:
        raise ShapeError("there is no host in nodes=[].")
    return joined


def _nested(domains: str | Sequence[int]) -> Iterator[HostLevel]:
    words = _words(domains, "x")
    if len(words) < 3 or not all(word.isdecimal() and int(word) for word in words):
        raise ShapeError(f"domains are written 4x18x4, for 4 domains of 18 hosts of 4 ranks, not {domains!r}.")
    sizes = [*map(int, words)]
    for depth in range(1, len(sizes)):
        name = {1: "host", 2: "domain"}.get(depth, f"level-{depth} unit")
        yield HostLevel(name, ((math.prod(sizes[:-depth]), math.prod(sizes[-depth:])),))


# -- the actual hosts of the ranks ------------------------------------------------------------------------------------


def hosts_from_names(names: Sequence[str]) -> HostLevel | None:
    """The host level that matches the host name of each rank; None if the ranks of a host are not consecutive.

    >>> print(hosts_from_names(["n1", "n1", "n2", "n2"])), hosts_from_names(["n1", "n2", "n1", "n2"])
    2 hosts of 2
    (None, None)
    """
    runs = [(name, len(list(same))) for name, same in groupby(names)]
    if len({name for name, _ in runs}) < len(runs):
        return None
    return HostLevel("host", _join((1, size) for _, size in runs))


def placement_faults(hosts: HostLevel, names: Sequence[str]) -> list[str]:
    """One sentence for each difference between the planned and the actual hosts of the ranks.

    Args:
        hosts: the planned hosts.
        names: the name of each rank's actual host, in the order of the ranks.

    >>> placement_faults(HostLevel("host", ((2, 2),)), ["n1", "n1", "n2", "n3"])
    ['host 1 is planned for ranks 2, 3, but n2 holds rank 2 and n3 holds rank 3.']
    """
    ranks_on: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks_on.setdefault(name, []).append(rank)
    faults = []
    for unit in range(hosts.count):
        planned = hosts.ranks_of(unit)
        actual = {names[rank]: ranks_on[names[rank]] for rank in planned}
        if list(actual.values()) != [[*planned]]:
            where = [f"{name} holds {name_ranks(ranks)}" for name, ranks in actual.items()]
            faults.append(f"host {unit} is planned for {name_ranks(planned)}, but {join_words(where)}.")
    return faults
