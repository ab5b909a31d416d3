"""Results of ``pgmesh check``: times for each combination of axes, its slowest group, and stragglers.

A collective ends on all members at about the same time, so its times do not show which rank is slow. Two other
measurements do:

- *links*: neighbours on the ring of each group exchange messages, and no rank uses two links at once. The slowdown of
  a rank is that of its fastest link, in all its groups. A slow rank slows down all its links. A slow link is only one
  of the links of its two ranks;
- *computation*: all ranks run the same fixed computation at once, without communication.

The reference for a link is the median of all links of the same combination of axes and the same kind: inside a host,
or between hosts. For an even number of links it is the lower of the two middle values, so that the slower of two links
is detected.

The output calls a combination of axes a *family*, as the command line does: all groups along these axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from pgmesh.drawing.styled_text import Line, columns, ranks_in, wrapped
from pgmesh.layout import Axis
from pgmesh.planning.text_report import sample_of

STRAGGLER_FACTOR = 2.0
"""Slowdown from which a rank is a straggler, and a link slow."""

SOURCE = "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"
FORMULAS = {"algbw": "bytes / time", "busbw": "algbw x 2(n-1)/n"}
"""Bandwidths of an all-reduce over n ranks, as NCCL-tests defines them."""


@dataclass
class RankMeasurements:
    """Measurements of one rank in seconds, each the median of several repeats.

    Args:
        rank: the rank in the world.
        connect_seconds: time to connect all groups.
        compute_seconds: time of the fixed computation.
        all_reduces: for each combination of axes, the time of one all-reduce of each size.
        links: for each combination of axes and each neighbour, the times of one small and one large exchange: triples
            of the name of the combination, the neighbour and the times.
    """

    rank: int
    connect_seconds: float = 0.0
    compute_seconds: float = 0.0
    all_reduces: dict[str, list[float]] = field(default_factory=dict)
    links: list[tuple[str, int, list[float]]] = field(default_factory=list)


@dataclass(frozen=True)
class GroupResult:
    """Result of one group: the seconds of an all-reduce of each size, on its slowest member."""

    ranks: tuple[int, ...]
    seconds: tuple[float, ...]

    def algbw(self, sizes: Sequence[int]) -> list[float]:
        """Algorithm bandwidth for each size, in bytes per second."""
        return [size / seconds for size, seconds in zip(sizes, self.seconds)]

    def busbw(self, sizes: Sequence[int]) -> list[float]:
        """Bus bandwidth for each size, in bytes per second.

        >>> GroupResult((0, 1, 2, 3), (0.5,)).algbw([1000]), GroupResult((0, 1, 2, 3), (0.5,)).busbw([1000])
        ([2000.0], [3000.0])
        """
        n = len(self.ranks)
        return [algbw * 2 * (n - 1) / n for algbw in self.algbw(sizes)]


@dataclass(frozen=True)
class AxesResult:
    """Results of all groups along one combination of axes."""

    name: str
    groups: tuple[GroupResult, ...]

    @property
    def size(self) -> int:
        """Number of ranks of each group."""
        return len(self.groups[0].ranks)

    def median_group(self, i: int) -> GroupResult:
        """The group with the median time for size number ``i``."""
        return sorted(self.groups, key=lambda group: group.seconds[i])[(len(self.groups) - 1) // 2]

    def slowest_group(self, i: int) -> GroupResult:
        """The slowest group for size number ``i``."""
        return max(self.groups, key=lambda group: group.seconds[i])


@dataclass(frozen=True)
class LinkResult:
    """Result of one link: the time of an exchange divided by the median of similar links, for the worst size."""

    axes: str
    ranks: tuple[int, int]
    slowdown: float


@dataclass(frozen=True)
class RankSlowdown:
    """Slowdown of a rank: links relative to links of the same kind, computation relative to all ranks.

    Args:
        rank: the rank in the world.
        links: slowdown of its fastest link; 1 if it has no links.
        compute: slowdown of its computation.
    """

    rank: int
    links: float
    compute: float

    @property
    def worst(self) -> float:
        """The larger of the two slowdowns."""
        return max(self.links, self.compute)

    @property
    def is_straggler(self) -> bool:
        """True if one of the slowdowns reaches ``STRAGGLER_FACTOR``."""
        return self.worst >= STRAGGLER_FACTOR


@dataclass(frozen=True)
class Results:
    """Results of all ranks.

    Args:
        sizes: sizes of the all-reduces in bytes.
        by_axes: results for each combination of axes.
        connect_seconds: seconds until the last rank had connected its groups.
        slowdowns: slowdown of each rank.
        links: result of each link.
    """

    sizes: tuple[int, ...]
    by_axes: tuple[AxesResult, ...]
    connect_seconds: float
    slowdowns: tuple[RankSlowdown, ...]
    links: tuple[LinkResult, ...]

    @property
    def slowest(self) -> RankSlowdown:
        """Slowdown of the slowest rank."""
        return self.slowest_in(range(len(self.slowdowns)))

    def slowest_in(self, ranks: Sequence[int]) -> RankSlowdown:
        """Slowdown of the slowest of these ranks."""
        return max((self.slowdowns[rank] for rank in ranks), key=lambda slowdown: slowdown.worst)

    def data(self) -> dict[str, Any]:
        """The results as objects that JSON can represent."""
        return {
            "bytes": list(self.sizes),
            "formulas": {**FORMULAS, "source": SOURCE},
            "connected_seconds": self.connect_seconds,
            "families": [
                {
                    "name": result.name,
                    "size": result.size,
                    "groups": [
                        {
                            "ranks": list(group.ranks),
                            "seconds": list(group.seconds),
                            "algbw": group.algbw(self.sizes),
                            "busbw": group.busbw(self.sizes),
                        }
                        for group in result.groups
                    ],
                    "slowest": [list(result.slowest_group(i).ranks) for i in range(len(self.sizes))],
                }
                for result in self.by_axes
            ],
            "links": [{"family": link.axes, "ranks": list(link.ranks), "times": link.slowdown} for link in self.links],
            "each_rank": [
                {"rank": each.rank, "links": each.links, "own_work": each.compute, "stands_out": each.is_straggler}
                for each in self.slowdowns
            ],
            "slowest_rank": self.slowest.rank,
            "slowest_rank_stands_out": self.slowest.is_straggler,
        }


GroupsOfAxes = Mapping[str, Sequence[tuple[int, ...]]]
"""The groups of each combination of axes, by its name."""


def axes_name(axes: Sequence[Axis]) -> str:
    """Name of a combination of axes.

    >>> axes_name(("dp", "cp"))
    'dp x cp'
    """
    return " x ".join(map(str, axes))


def combine(
    measurements: Sequence[RankMeasurements], sizes: Sequence[int], groups: GroupsOfAxes, hosts: Sequence[object]
) -> Results:
    """Results from the measurements of all ranks.

    Args:
        measurements: the measurements of each rank, in rank order.
        sizes: sizes of the all-reduces in bytes.
        groups: the measured groups of each combination of axes.
        hosts: a value for each rank that is equal for ranks of the same host.
    """
    by_axes = []
    for name, partition in groups.items():
        seconds = [zip(*(measurements[rank].all_reduces[name] for rank in ranks)) for ranks in partition]
        by_group = [GroupResult(ranks, tuple(map(max, each))) for ranks, each in zip(partition, seconds)]
        by_axes.append(AxesResult(name, tuple(by_group)))
    links = _link_results(measurements, hosts)
    usual = median_low(each.compute_seconds for each in measurements) or 1.0
    slowdowns = []
    for each in measurements:
        fastest = min((link.slowdown for link in links if each.rank in link.ranks), default=1.0)
        slowdowns.append(RankSlowdown(each.rank, fastest, each.compute_seconds / usual))
    connect_seconds = max(each.connect_seconds for each in measurements)
    return Results(tuple(sizes), tuple(by_axes), connect_seconds, tuple(slowdowns), tuple(links))


def _link_results(measurements: Sequence[RankMeasurements], hosts: Sequence[object]) -> list[LinkResult]:
    """The slowdown of each link, relative to the median of the links of its kind."""
    kinds: dict[tuple[str, bool], dict[tuple[int, int], list[float]]] = {}
    for each in measurements:
        for axes, peer, times in each.links:
            low, high = sorted((each.rank, peer))
            links = kinds.setdefault((axes, hosts[low] == hosts[high]), {})
            links[low, high] = [*map(max, zip(links.get((low, high), times), times))]
    results = []
    for (axes, _), links in kinds.items():
        medians = [*map(median_low, zip(*links.values()))]
        for ranks, times in links.items():
            results.append(LinkResult(axes, ranks, max(time / usual for time, usual in zip(times, medians))))
    return results


# -- text -------------------------------------------------------------------------------------------------------------


def table(results: Results, width: int = 80) -> list[Line]:
    """A table with a row for each combination of axes and each size."""
    head = ["family", "size", "bytes", "time", "algbw", "busbw", "slowest", "slow rank", "group"]
    rows: list[list[tuple[str, str]]] = []
    slowest_ranks = []
    for result in results.by_axes:
        for i, size in enumerate(results.sizes):
            median, slowest = result.median_group(i), result.slowest_group(i)
            slowdown = slowest.seconds[i] / median.seconds[i]
            rank = results.slowest_in(slowest.ranks)
            small = size < 1024
            slowest_ranks.append(slowest.ranks)
            rows.append(
                [
                    (result.name if i == 0 else "", "bold"),
                    (f"{result.size:,}" if i == 0 else "", ""),
                    (format_bytes(size), ""),
                    (format_seconds(median.seconds[i]), ""),
                    ("-" if small else format_rate(median.algbw(results.sizes)[i]), ""),
                    ("-" if small else format_rate(median.busbw(results.sizes)[i]), ""),
                    (f"{slowdown:.1f}x", "yellow" if slowdown >= STRAGGLER_FACTOR else ""),
                    (f"{rank.rank} {rank.worst:.1f}x", "yellow" if rank.is_straggler else ""),
                ]
            )
    cells = [[(word, "dim") for word in head[:-1]], *rows]
    used = sum(max(len(text) for text, _ in column) + 2 for column in zip(*cells))
    cells[0].append((head[-1], "dim"))
    for row, ranks in zip(rows, slowest_ranks):
        row.append((ranks_in(max(5, width - used), sample_of(ranks), len(ranks)), ""))
    return columns(cells, [False, *[True] * 7, False])


def summary(results: Results, width: int = 80) -> list[Line]:
    """Explanation of the table, the slowest rank, and slow links that no straggler explains."""
    lines = wrapped(
        "time: median group. slowest: slowest group / median group. slow rank: slowest rank of the slowest group. "
        f"algbw = {FORMULAS['algbw']}, busbw = {FORMULAS['busbw']}, as in NCCL-tests (doc/PERFORMANCE.md).",
        width,
        "dim",
    )
    rank, style = results.slowest, "yellow"
    ends = {end for link in results.links if rank.rank in link.ranks for end in link.ranks}
    numbers = f"its fastest link takes {rank.links:.1f}x the median time, its computation {rank.compute:.1f}x."
    if not rank.is_straggler:
        text, style = f"No rank is a straggler. The slowest is rank {rank.rank}: {numbers}", "green"
    elif rank.compute >= STRAGGLER_FACTOR:
        text = f"Rank {rank.rank} computes slowly: {numbers}"
    elif len(ends) == 2 and all({*link.ranks} == ends for link in results.links if ends & {*link.ranks}):
        text = f"Ranks {min(ends)} and {max(ends)}: {numbers}"
        text += " Which of the two is slow is unknown, since each has links only to the other."
    else:
        text = f"Rank {rank.rank} communicates slowly: {numbers}"
    lines += [[], *wrapped(text, width, style)]
    stragglers = {each.rank for each in results.slowdowns if each.is_straggler}
    slow_links = [
        link for link in results.links if link.slowdown >= STRAGGLER_FACTOR and not stragglers & {*link.ranks}
    ]
    for link in sorted(slow_links, key=lambda link: -link.slowdown)[:4]:
        low, high = link.ranks
        text = f"The link between {low} and {high} ({link.axes}) takes {link.slowdown:.1f}x the median time."
        lines += wrapped(text, width, "yellow")
    return lines


def format_bytes(size: int) -> str:
    """A number of bytes with a binary unit, if it is a multiple of one.

    >>> format_bytes(8), format_bytes(65536), format_bytes(1 << 24), format_bytes(1500)
    ('8 B', '64 KiB', '16 MiB', '1,500 B')
    """
    for scale, word in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= scale and size % scale == 0:
            return f"{size // scale:,} {word}"
    return f"{size:,} B"


def format_seconds(seconds: float) -> str:
    """A time with its unit.

    >>> format_seconds(0.0000123), format_seconds(0.123), format_seconds(12.3)
    ('12.3 us', '123 ms', '12.3 s')
    """
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")))


def format_rate(rate: float) -> str:
    """A bandwidth with a decimal unit, as in NCCL-tests.

    >>> format_rate(1.234e9), format_rate(56e6)
    ('1.23 GB/s', '56.0 MB/s')
    """
    return _scaled(rate, ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")))


def _scaled(value: float, scales: Sequence[tuple[float, str]]) -> str:
    """A value in the largest unit that is not larger than it."""
    scale, word = next((s for s in scales if value >= s[0]), scales[-1])
    number = value / scale
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f} {word}"
