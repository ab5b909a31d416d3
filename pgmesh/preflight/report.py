"""The text of a successful ``pgmesh check``: findings, a table of times, and the stragglers."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pgmesh._util.formatting import count_of, format_sizes, name_ranks
from pgmesh.drawing.styled_text import Line, columns_with_ranks, marked, wrapped
from pgmesh.planning.text_report import sample_of
from pgmesh.preflight.results import STRAGGLER_FACTOR, CheckResults, RankResult
from pgmesh.topology.hosts import hosts_from_names

BYTES = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
RATES = {"GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3}  # decimal, as in NCCL-tests

HEAD = ("axes", "size", "bytes", "time", "algbw", "busbw", "slowest")

EXPLANATION = """time: median group. slowest: slowest group / median group. algbw = bytes / time,
busbw = algbw x 2(n-1)/n, see doc/PERFORMANCE.md of NCCL-tests."""


def report(results: CheckResults, width: int = 80) -> list[Line]:
    """The whole report."""
    title = f"{count_of(len(results.hosts), 'rank')} over {results.backend} on {results.device}"
    lines: list[Line] = [[(title, "bold")], *findings(results, width), [], *table(results, width), []]
    return [*lines, *wrapped(EXPLANATION, width, "dim"), [], *stragglers(results, width)]


def findings(results: CheckResults, width: int) -> list[Line]:
    """The checks that passed."""
    hosts, actual = results.hosts, hosts_from_names(results.hosts)
    where = str(actual) if actual else f"{len({*hosts})} hosts with ranks that are not consecutive"
    on_hosts = ("--", f"ranks are on {where}{f'; --nodes {actual.spell()} checks it' if actual else ''}")
    if results.planned:
        on_hosts = ("ok", f"ranks are on the planned hosts: {where}")
    sizes = format_sizes(dict(zip(results.axes, results.shape)))
    groups = count_of(sum(len(each.groups) for each in results.combinations), "group")
    along = count_of(len(results.combinations), "combination")
    found = [
        ("ok", f"{count_of(len(hosts), 'rank')} joined with the same arguments: {sizes}"),
        on_hosts,
        ("ok", f"{groups} along {along} of axes connected, in {results.connect_seconds:.2f} s"),
        ("ok", f"every sum is correct, of {', '.join(scaled(size, BYTES) for size in results.bytes)}"),
    ]
    return [line for mark, text in found for line in marked(mark, text, width)]


def table(results: CheckResults, width: int = 80) -> list[Line]:
    """A table with a row for each combination of axes and each size."""
    rows = [[(word, "dim") for word in HEAD]]
    groups = []
    for combination in results.combinations:
        for i, size in enumerate(results.bytes):
            by_time = sorted(combination.groups, key=lambda group: group.seconds[i])
            median, slowest = by_time[(len(by_time) - 1) // 2], by_time[-1]
            ratio = slowest.seconds[i] / median.seconds[i]
            words = [str(len(slowest.ranks)), scaled(size, BYTES), scaled(median.seconds[i], SECONDS)]
            words += [scaled(rate, RATES) if size >= 1024 else "-" for rate in (median.algbw[i], median.busbw[i])]
            row = [(combination.axes, "bold"), *((word, "") for word in words)]
            rows.append([*row, (f"{ratio:.1f}x", "yellow" if ratio >= STRAGGLER_FACTOR else "")])
            groups.append((sample_of(slowest.ranks), len(slowest.ranks)))
    return columns_with_ranks(rows, [False, *[True] * 6], "group", groups, width)


def stragglers(results: CheckResults, width: int = 80) -> list[Line]:
    """The slowest rank, other stragglers, and slow links that no straggler explains."""
    slowest = max(results.ranks, key=lambda each: each.slowdown)
    lines = wrapped(_describe(slowest, results), width, "yellow" if slowest.is_straggler else "green")
    slow = [each.rank for each in results.ranks if each.is_straggler]
    if len(slow) > 1:
        lines += wrapped(f"All stragglers: {name_ranks(slow)}.", width, "yellow")
    links = [link for link in results.links if link.slowdown >= STRAGGLER_FACTOR and not {*slow} & {*link.ranks}]
    for link in sorted(links, key=lambda link: -link.slowdown)[:4]:
        text = f"The link between {link.ranks[0]} and {link.ranks[1]} ({link.axes}) takes {link.slowdown:.1f}x the"
        lines += wrapped(f"{text} median time.", width, "yellow")
    local, cores = results.hosts.count(results.hosts[0]), os.cpu_count() or 1
    if (slow or links) and local > cores:
        text = f"It may be chance: {local} ranks share {cores} cores of {results.hosts[0]}. Repeat the check."
        lines += wrapped(text, width, "yellow")
    return lines


def _describe(slowest: RankResult, results: CheckResults) -> str:
    """The slowest rank, and whether its computation or its communication is slow."""
    rank = slowest.rank
    numbers = f"its fastest link takes {slowest.link_slowdown:.1f}x the median time, its computation "
    numbers += f"{slowest.compute_slowdown:.1f}x."
    if not slowest.is_straggler:
        return f"No rank is a straggler. The slowest is rank {rank}: {numbers}"
    if slowest.compute_slowdown >= STRAGGLER_FACTOR:
        return f"Rank {rank} computes slowly: {numbers}"
    peers = results.neighbours(rank)
    if len(peers) == 1 and results.neighbours(*peers) == {rank}:
        low, high = sorted({rank, *peers})
        unknown = "Which of the two is slow is unknown, since each has links only to the other."
        return f"Ranks {low} and {high}: {numbers} {unknown}"
    return f"Rank {rank} communicates slowly: {numbers}"


def scaled(value: float, units: Mapping[str, float]) -> str:
    """A value in the largest unit that is not larger than it, with three digits.

    >>> scaled(65536, BYTES), scaled(0.0000123, SECONDS), scaled(1.234e9, RATES), scaled(1.8e12, RATES)
    ('64 KiB', '12.3 us', '1.23 GB/s', '1,800 GB/s')
    >>> scaled(0.0009996, SECONDS)
    '1 ms'
    """
    unit = next((unit for unit, scale in units.items() if value >= 0.9995 * scale), [*units][-1])
    number = value / units[unit]
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"
