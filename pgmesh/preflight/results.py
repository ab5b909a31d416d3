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

from pgmesh.drawing.styled_text import Line, columns_with_ranks, wrapped
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


def axes_name(axes: Sequence[Axis]) -> str:
    """Name of a combination of axes.

    >>> axes_name(("dp", "cp"))
    'dp x cp'
    """
    return " x ".join(map(str, axes))


Results = dict[str, Any]
"""Results of all ranks, as JSON data. Times are in seconds, bandwidths in bytes per second:

- ``bytes``: sizes of the all-reduces;
- ``connected_seconds``: seconds until the last rank had connected its groups;
- ``families``: for each combination of axes its name, the size of its groups, its groups, and the ranks of the slowest
  group for each size. A group has ``seconds``, ``algbw`` and ``busbw`` for each size, of its slowest member;
- ``links``: for each link its two ranks and ``times``, its time divided by the median of similar links;
- ``each_rank``: for each rank the slowdown of its fastest link, or 1, the slowdown of its computation, and whether one
  of them reaches ``STRAGGLER_FACTOR``.
"""


def combine(
    measurements: Sequence[RankMeasurements],
    sizes: Sequence[int],
    groups: Mapping[str, Sequence[tuple[int, ...]]],
    hosts: Sequence[object],
) -> Results:
    """Results from the measurements of all ranks.

    Args:
        measurements: the measurements of each rank, in rank order.
        sizes: sizes of the all-reduces in bytes.
        groups: the measured groups of each combination of axes, by its name.
        hosts: a value for each rank that is equal for ranks of the same host.

    >>> measurements = [RankMeasurements(rank, 0.1, 1.0, {"tp": [0.5]}) for rank in range(4)]
    >>> results = combine(measurements, [1000], {"tp": [(0, 1, 2, 3)]}, "aaaa")
    >>> results["families"][0]["groups"]
    [{'ranks': [0, 1, 2, 3], 'seconds': [0.5], 'algbw': [2000.0], 'busbw': [3000.0]}]
    """
    families = []
    for name, partition in groups.items():
        measured = []
        for ranks in partition:
            seconds = [max(times) for times in zip(*(measurements[rank].all_reduces[name] for rank in ranks))]
            algbw = [size / time for size, time in zip(sizes, seconds)]
            busbw = [rate * 2 * (len(ranks) - 1) / len(ranks) for rate in algbw]
            measured.append({"ranks": list(ranks), "seconds": seconds, "algbw": algbw, "busbw": busbw})
        slowest = [_by_time(measured, i)[-1]["ranks"] for i in range(len(sizes))]
        families.append({"name": name, "size": len(partition[0]), "groups": measured, "slowest": slowest})
    links = _link_results(measurements, hosts)
    usual = median_low(each.compute_seconds for each in measurements) or 1.0
    each_rank = []
    for each in measurements:
        fastest = min((link["times"] for link in links if each.rank in link["ranks"]), default=1.0)
        own_work = each.compute_seconds / usual
        is_straggler = max(fastest, own_work) >= STRAGGLER_FACTOR
        each_rank.append({"rank": each.rank, "links": fastest, "own_work": own_work, "stands_out": is_straggler})
    slowest_rank = max(each_rank, key=_worst)
    return {
        "bytes": list(sizes),
        "formulas": {**FORMULAS, "source": SOURCE},
        "connected_seconds": max(each.connect_seconds for each in measurements),
        "families": families,
        "links": links,
        "each_rank": each_rank,
        "slowest_rank": slowest_rank["rank"],
        "slowest_rank_stands_out": slowest_rank["stands_out"],
    }


def _link_results(measurements: Sequence[RankMeasurements], hosts: Sequence[object]) -> list[dict[str, Any]]:
    """The slowdown of each link, relative to the median of the links of its kind, for the worst size."""
    kinds: dict[tuple[str, bool], dict[tuple[int, int], list[float]]] = {}
    for each in measurements:
        for name, peer, times in each.links:
            low, high = sorted((each.rank, peer))
            links = kinds.setdefault((name, hosts[low] == hosts[high]), {})
            links[low, high] = [*map(max, zip(links.get((low, high), times), times))]
    results = []
    for (name, _), links in kinds.items():
        medians = [*map(median_low, zip(*links.values()))]
        for ranks, times in links.items():
            slowdown = max(time / usual for time, usual in zip(times, medians))
            results.append({"family": name, "ranks": list(ranks), "times": slowdown})
    return results


def _by_time(groups: Sequence[dict[str, Any]], i: int) -> list[dict[str, Any]]:
    """The groups by their time for size number ``i``, slowest last."""
    return sorted(groups, key=lambda group: group["seconds"][i])


def _worst(rank: dict[str, Any]) -> float:
    """The larger slowdown of a rank: that of its links or that of its computation."""
    return float(max(rank["links"], rank["own_work"]))


# -- text -------------------------------------------------------------------------------------------------------------


def table(results: Results, width: int = 80) -> list[Line]:
    """A table with a row for each combination of axes and each size."""
    head = ["family", "size", "bytes", "time", "algbw", "busbw", "slowest", "slow rank"]
    rows = [[(word, "dim") for word in head]]
    groups = []
    for family in results["families"]:
        for i, size in enumerate(results["bytes"]):
            by_time = _by_time(family["groups"], i)
            median, slowest = by_time[(len(by_time) - 1) // 2], by_time[-1]
            slowdown = slowest["seconds"][i] / median["seconds"][i]
            rank = max((results["each_rank"][rank] for rank in slowest["ranks"]), key=_worst)
            rates = [format_rate(median[kind][i]) if size >= 1024 else "-" for kind in ("algbw", "busbw")]
            words = [
                "" if i else f"{family['size']:,}",
                format_bytes(size),
                format_seconds(median["seconds"][i]),
                *rates,
            ]
            row = [("" if i else family["name"], "bold"), *((word, "") for word in words)]
            row.append((f"{slowdown:.1f}x", "yellow" if slowdown >= STRAGGLER_FACTOR else ""))
            row.append((f"{rank['rank']} {_worst(rank):.1f}x", "yellow" if rank["stands_out"] else ""))
            rows.append(row)
            groups.append((sample_of(slowest["ranks"]), len(slowest["ranks"])))
    return columns_with_ranks(rows, [False, *[True] * 7], "group", groups, width)


def summary(results: Results, width: int = 80) -> list[Line]:
    """Explanation of the table, the slowest rank, and slow links that no straggler explains."""
    lines = wrapped(
        "time: median group. slowest: slowest group / median group. slow rank: slowest rank of the slowest group. "
        f"algbw = {FORMULAS['algbw']}, busbw = {FORMULAS['busbw']}, as in NCCL-tests (doc/PERFORMANCE.md).",
        width,
        "dim",
    )
    slowest, style = results["each_rank"][results["slowest_rank"]], "yellow"
    rank, links = slowest["rank"], results["links"]
    ends = {end for link in links if rank in link["ranks"] for end in link["ranks"]}
    numbers = (
        f"its fastest link takes {slowest['links']:.1f}x the median time, its computation {slowest['own_work']:.1f}x."
    )
    if not slowest["stands_out"]:
        text, style = f"No rank is a straggler. The slowest is rank {rank}: {numbers}", "green"
    elif slowest["own_work"] >= STRAGGLER_FACTOR:
        text = f"Rank {rank} computes slowly: {numbers}"
    elif len(ends) == 2 and all({*link["ranks"]} == ends for link in links if ends & {*link["ranks"]}):
        text = f"Ranks {min(ends)} and {max(ends)}: {numbers}"
        text += " Which of the two is slow is unknown, since each has links only to the other."
    else:
        text = f"Rank {rank} communicates slowly: {numbers}"
    lines += [[], *wrapped(text, width, style)]
    stragglers = {each["rank"] for each in results["each_rank"] if each["stands_out"]}
    slow_links = [link for link in links if link["times"] >= STRAGGLER_FACTOR and not stragglers & {*link["ranks"]}]
    for link in sorted(slow_links, key=lambda link: -link["times"])[:4]:
        low, high = link["ranks"]
        text = f"The link between {low} and {high} ({link['family']}) takes {link['times']:.1f}x the median time."
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
