"""Tests of the results of ``pgmesh check``: which rank or link is slow, from the measurements of all ranks."""

from __future__ import annotations

import pytest

from pgmesh.drawing import styled_text
from pgmesh.preflight.microbenchmarks import link_rounds
from pgmesh.preflight.results import RankMeasurements, Results, combine, summary, table

FAMILIES = {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}


def results_of(
    compute: dict[int, float],
    links: dict[tuple[int, int], float],
    families: dict[str, list[tuple[int, ...]]] = FAMILIES,
) -> Results:
    """Results in which computation and links take 1 s, except for these."""
    measurements = [RankMeasurements(rank, 0.1, compute.get(rank, 1.0)) for rank in range(4)]
    for name, groups in families.items():
        for ranks in groups:
            for pairs in link_rounds(ranks):
                for low, high in map(sorted, pairs):
                    seconds = links.get((low, high), 1.0)
                    measurements[low].links.append((name, high, [1.0, seconds]))
                    measurements[high].links.append((name, low, [1.0, seconds]))
            for rank in ranks:
                measurements[rank].all_reduces[name] = [0.001]
    return combine(measurements, [4096], families, "aaaa")


@pytest.mark.parametrize(
    ("compute", "links", "families", "said"),
    [
        ({}, {}, FAMILIES, "No rank is a straggler. The slowest is rank 0: its fastest link takes 1.0x"),
        (
            {2: 3.0},
            {},
            FAMILIES,
            "Rank 2 computes slowly: its fastest link takes 1.0x the median time, its computation",
        ),
        (
            {},
            {(1, 3): 4.0, (0, 1): 3.0},
            FAMILIES,
            "Rank 1 communicates slowly: its fastest link takes 3.0x the median",
        ),
        ({}, {(2, 3): 4.0}, {"tp": FAMILIES["tp"]}, "Ranks 2 and 3: its fastest link takes 4.0x the median time"),
        ({}, {(1, 3): 5.0}, FAMILIES, "The link between 1 and 3 (dp) takes 5.0x the median time."),
    ],
)
def test_the_summary_names_what_is_slow(compute, links, families, said):
    text = " ".join(styled_text.plain(summary(results_of(compute, links, families))).split())
    assert said in text


def test_the_rank_and_its_numbers_in_the_data():
    results = results_of({}, {(1, 3): 4.0, (0, 1): 3.0})
    assert (results["slowest_rank"], results["slowest_rank_stands_out"]) == (1, True)
    assert [each["links"] for each in results["each_rank"]] == [1.0, 3.0, 1.0, 1.0]
    assert {"family": "dp", "ranks": [1, 3], "times": 4.0} in results["links"]
    first, *rows = styled_text.plain(table(results)).splitlines()
    assert first.split() == ["family", "size", "bytes", "time", "algbw", "busbw", "slowest", "slow", "rank", "group"]
    assert rows[0].split()[:6] == ["dp", "2", "4", "KiB", "1.00", "ms"]
