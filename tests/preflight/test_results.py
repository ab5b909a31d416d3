"""Tests of the results of ``pgmesh check``: which rank or link is slow, from the measurements of all ranks."""

from __future__ import annotations

import pytest

from pgmesh.drawing import styled_text
from pgmesh.preflight import report, results
from pgmesh.preflight.microbenchmarks import ring_links
from pgmesh.preflight.results import CheckResults, LinkResult, RankMeasurements

COMBINATIONS = {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}


def results_of(
    compute: dict[int, float],
    slow_links: dict[tuple[int, int], float],
    combinations: dict[str, list[tuple[int, ...]]] = COMBINATIONS,
) -> CheckResults:
    """Results in which computation and links take 1 s, except for these."""
    measurements = [RankMeasurements(rank, 0.1, compute.get(rank, 1.0)) for rank in range(4)]
    for name, groups in combinations.items():
        for ranks in groups:
            for rank in ranks:
                measurements[rank].all_reduce_seconds[name] = [0.001]
                measurements[rank].link_seconds[name] = {}
            for low, high in map(sorted, ring_links(ranks)):
                seconds = slow_links.get((low, high), 1.0)
                measurements[low].link_seconds[name][str(high)] = [1.0, seconds]
                measurements[high].link_seconds[name][str(low)] = [1.0, seconds]
    links = results.link_results(measurements, "aaaa")
    groups = results.combination_results(measurements, [4096], combinations)
    ranks = results.rank_results(measurements, links)
    return CheckResults(("dp", "tp"), (2, 2), "gloo", "cpu", [*"aaaa"], None, [4096], 0.1, groups, links, ranks)


@pytest.mark.parametrize(
    ("compute", "links", "combinations", "said"),
    [
        ({}, {}, COMBINATIONS, "No rank is a straggler. The slowest is rank 0: its fastest link takes 1.0x"),
        (
            {2: 3.0},
            {},
            COMBINATIONS,
            "Rank 2 computes slowly: its fastest link takes 1.0x the median time, its computation 3.0x.",
        ),
        ({2: 3.0, 1: 2.5}, {}, COMBINATIONS, "computation 3.0x. All stragglers: ranks 1, 2."),
        (
            {},
            {(1, 3): 4.0, (0, 1): 3.0},
            COMBINATIONS,
            "Rank 1 communicates slowly: its fastest link takes 3.0x the median",
        ),
        ({}, {(2, 3): 4.0}, {"tp": COMBINATIONS["tp"]}, "Ranks 2 and 3: its fastest link takes 4.0x the median time"),
        ({}, {(1, 3): 5.0}, COMBINATIONS, "The link between 1 and 3 (dp) takes 5.0x the median time."),
    ],
)
def test_summary_names_slow_ranks_and_links(compute, links, combinations, said):
    text = " ".join(styled_text.plain(report.stragglers(results_of(compute, links, combinations))).split())
    assert said in text


def test_results_have_slowdowns_and_times():
    found = results_of({}, {(1, 3): 4.0, (0, 1): 3.0})
    assert [each.rank for each in found.ranks if each.is_straggler] == [1]
    assert [each.link_slowdown for each in found.ranks] == [1.0, 3.0, 1.0, 1.0]
    assert LinkResult("dp", (1, 3), 4.0) in found.links
    first, *rows = styled_text.plain(report.table(found)).splitlines()
    assert first.split() == ["axes", "size", "bytes", "time", "algbw", "busbw", "slowest", "group"]
    assert rows[0].split()[:6] == ["dp", "2", "4", "KiB", "1", "ms"]
