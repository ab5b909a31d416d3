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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from pgmesh.layout import Axis

STRAGGLER_FACTOR = 2.0
"""Slowdown from which a rank is a straggler, and a link slow."""


# -- measurements of one rank -----------------------------------------------------------------------------------------


@dataclass
class RankMeasurements:
    """Measurements of one rank in seconds, each the median of several repeats.

    Args:
        rank: the rank in the world.
        connect_seconds: time to connect all groups.
        compute_seconds: time of the fixed computation.
        all_reduce_seconds: for each combination, the time of one all-reduce of each size.
        link_seconds: for each combination and each neighbour, the time of one small and one large exchange.
    """

    rank: int
    connect_seconds: float = 0.0
    compute_seconds: float = 0.0
    all_reduce_seconds: dict[str, list[float]] = field(default_factory=dict)
    link_seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # JSON has no integers as keys


# -- results of all ranks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupResult:
    """The all-reduces of one group, for each size.

    Args:
        ranks: the members.
        seconds: time of one all-reduce on the slowest member.
        algbw: bytes / time, in bytes per second, as in NCCL-tests.
        busbw: algbw x 2(n-1)/n for a group of n ranks.
    """

    ranks: tuple[int, ...]
    seconds: list[float]
    algbw: list[float]
    busbw: list[float]


@dataclass(frozen=True)
class CombinationResult:
    """All groups along some axes, such as ``dp x cp``."""

    axes: str
    groups: list[GroupResult]


@dataclass(frozen=True)
class LinkResult:
    """A link of two ranks along some axes, and its time divided by the median of similar links."""

    axes: str
    ranks: tuple[int, int]
    slowdown: float


@dataclass(frozen=True)
class RankResult:
    """A rank, its slowdowns, and whether one of them reaches ``STRAGGLER_FACTOR``.

    Args:
        rank: the rank in the world.
        link_slowdown: that of its fastest link; 1 without links.
        compute_slowdown: the time of its computation divided by the median of all ranks.
    """

    rank: int
    link_slowdown: float
    compute_slowdown: float
    is_straggler: bool

    @property
    def slowdown(self) -> float:
        return max(self.link_slowdown, self.compute_slowdown)


@dataclass(frozen=True)
class CheckResults:
    """The result of a successful check.

    Args:
        axes: the axes of the mesh.
        shape: their sizes.
        backend: name of the backend.
        device: type of the device.
        hosts: the name of each rank's host.
        planned: the planned hosts as on the command line; None if none were given.
        bytes: sizes of the all-reduces.
        connect_seconds: seconds until the last rank had connected its groups.
        combinations: the groups along each combination of axes, with their times.
        links: the slowdown of each link.
        ranks: the slowdowns of each rank.
    """

    axes: tuple[Axis, ...]
    shape: tuple[int, ...]
    backend: str
    device: str
    hosts: list[str]
    planned: str | None
    bytes: list[int]
    connect_seconds: float
    combinations: list[CombinationResult]
    links: list[LinkResult]
    ranks: list[RankResult]

    def neighbours(self, rank: int) -> set[int]:
        """The ranks to which a rank has a link."""
        return {end for link in self.links if rank in link.ranks for end in link.ranks} - {rank}


def label_of(axes: Sequence[Axis]) -> str:
    """The name of a combination of axes.

    >>> label_of(("dp", "cp"))
    'dp x cp'
    """
    return " x ".join(map(str, axes))


def combination_results(
    measurements: Sequence[RankMeasurements], sizes: Sequence[int], groups: Mapping[str, Sequence[tuple[int, ...]]]
) -> list[CombinationResult]:
    """The all-reduces of each group.

    Args:
        measurements: the measurements of each rank, in rank order.
        sizes: sizes of the all-reduces in bytes.
        groups: the groups of each combination.

    >>> measurements = [RankMeasurements(rank, all_reduce_seconds={"tp": [0.5]}) for rank in range(4)]
    >>> combination_results(measurements, [1000], {"tp": [(0, 1, 2, 3)]})[0].groups
    [GroupResult(ranks=(0, 1, 2, 3), seconds=[0.5], algbw=[2000.0], busbw=[3000.0])]
    """
    results = {axes: CombinationResult(axes, []) for axes in groups}
    for axes, ranks in ((axes, ranks) for axes, partition in groups.items() for ranks in partition):
        seconds = [max(times) for times in zip(*(measurements[rank].all_reduce_seconds[axes] for rank in ranks))]
        algbw = [size / time for size, time in zip(sizes, seconds)]
        busbw = [rate * 2 * (len(ranks) - 1) / len(ranks) for rate in algbw]
        results[axes].groups.append(GroupResult(ranks, seconds, algbw, busbw))
    return [*results.values()]


def link_results(measurements: Sequence[RankMeasurements], hosts: Sequence[object]) -> list[LinkResult]:
    """The slowdown of each link for the worst size, by the slower of its two ends.

    Args:
        measurements: the measurements of each rank, in rank order.
        hosts: a value for each rank that is equal for ranks of the same host.
    """
    kinds: dict[tuple[str, bool], dict[tuple[int, int], list[float]]] = {}
    for each in measurements:
        for axes, peers in each.link_seconds.items():
            for word, seconds in peers.items():
                low, high = sorted((each.rank, int(word)))
                links = kinds.setdefault((axes, hosts[low] == hosts[high]), {})
                links[low, high] = [*map(max, zip(links.get((low, high), seconds), seconds))]
    results = []
    for (axes, _), links in kinds.items():
        medians = [*map(median_low, zip(*links.values()))]
        for ranks, seconds in links.items():
            slowdown = max(time / usual for time, usual in zip(seconds, medians))
            results.append(LinkResult(axes, ranks, slowdown))
    return results


def rank_results(measurements: Sequence[RankMeasurements], links: Sequence[LinkResult]) -> list[RankResult]:
    """The slowdowns of each rank."""
    usual = median_low(each.compute_seconds for each in measurements) or 1.0
    results = []
    for each in measurements:
        by_links = min((link.slowdown for link in links if each.rank in link.ranks), default=1.0)
        by_computation = each.compute_seconds / usual
        is_straggler = max(by_links, by_computation) >= STRAGGLER_FACTOR
        results.append(RankResult(each.rank, by_links, by_computation, is_straggler))
    return results
