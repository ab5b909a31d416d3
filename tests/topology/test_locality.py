"""Locality of groups on hosts: the arithmetic against a loop over every rank, and its memory."""

from __future__ import annotations

import math
import sys
import tracemalloc
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from pgmesh import Layout, plan
from pgmesh.topology.hosts import HostLevel, parse_topology
from pgmesh.topology.locality import Locality, locality_of

A_MILLION = {"pp": 16, "dp": 512, "cp": 8, "tp": 16}


def by_hand(layout: Layout, axes: list[str], level: HostLevel) -> Locality:
    """The same by looking at every rank of every group."""
    edges = [unit for unit in range(level.count) for _ in level.ranks_of(unit)]
    blocks = layout.partition(*axes) if axes else [(rank,) for rank in layout.ranks()]
    units, hops, kinds = [], [], []
    for block in blocks:
        hosts = [edges[rank] for rank in block]
        units.append(len(set(hosts)))
        hops.append(sum(hosts[i] != hosts[(i + 1) % len(hosts)] for i in range(len(hosts))))
        kinds.append("intra" if units[-1] == 1 else "inter" if units[-1] == len(block) else "mixed")
    kind = kinds[0] if len({*kinds}) == 1 else "mixed"
    return Locality(level.name, kind, min(units), max(units), kinds.count("intra"), min(hops), max(hops))


@st.composite
def layouts(draw) -> Layout:
    """Up to 4 axes on ranks that follow one another, every so many, begin later or in any order; whole or in part."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda shape: math.prod(shape) <= 300))
    start, step = draw(st.integers(0, 7)), draw(st.sampled_from([1, 1, 1, 2, 3]))
    ranks = range(start, start + step * math.prod(shape), step)
    order = draw(st.sampled_from([ranks, ranks, ranks[::-1], Random(len(ranks)).sample(ranks, len(ranks))]))
    layout = Layout(**dict(zip("abcd", shape)), ranks=order)
    if draw(st.booleans()):
        axis = draw(st.sampled_from(layout.axes))
        indices = st.integers(0, layout.size(axis) - 1)
        cut = st.builds(slice, indices, st.none(), st.integers(1, 2))
        layout = layout.at({axis: draw(cut | st.lists(indices, min_size=1, unique=True))})
    return layout


@st.composite
def levels(draw, ranks: int) -> HostLevel:
    """Hosts of one size, of a few, or each of its own, that hold so many ranks."""
    runs: list[tuple[int, int]] = []
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    while sum(n * size for n, size in runs) < ranks:
        runs.append((draw(st.integers(1, 40)), draw(st.sampled_from(sizes))))
    return HostLevel("host", tuple(runs))


@settings(max_examples=100)
@given(layouts(), st.data())
def test_locality_equals_a_count_of_each_rank(layout, data):
    level = data.draw(levels(max(layout.ranks()) + 1))
    axes = data.draw(st.lists(st.sampled_from(layout.axes), unique=True))
    assert locality_of(layout, axes, level) == by_hand(layout, axes, level)


@pytest.mark.parametrize("nodes", ["131072x8", "8192x128"])
def test_locality_of_a_million_ranks_is_exact(nodes):
    layout = Layout(**A_MILLION)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    tracemalloc.start()
    sys.setprofile(count)
    try:
        planned = plan(
            layout, nodes=nodes, combinations=[("dp", "cp"), ("pp", "tp")], views={"moe": {"ep": 64, "edp": -1}}
        )
    finally:
        sys.setprofile(None)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert planned["tp"].localities[0].intra == len(layout) // 16 * (int(nodes.partition("x")[2]) >= 16)
    assert calls < 100_000  # of a million ranks, in eleven combinations of axes
    assert held < 1 << 20
    assert peak < 2_000_000


@pytest.mark.parametrize(
    ("nodes", "domains", "levels"),
    [
        ("8x8", None, ["8 hosts of 8"]),
        (" 2X8 , 4", None, ["3 hosts of 8, 8 and 4"]),
        ([8, 8, 4], None, ["3 hosts of 8, 8 and 4"]),
        ("3x4,4", None, ["4 hosts of 4"]),
        (None, "8x18x4", ["144 hosts of 4", "8 domains of 72"]),
        (None, [2, 4, 18, 4], ["144 hosts of 4", "8 domains of 72", "2 level-3 units of 288"]),
    ],
)
def test_parse_topology_reads_hosts_and_domains(nodes, domains, levels):
    assert [*map(str, parse_topology(nodes, domains))] == levels


@settings(max_examples=40)
@given(st.data())
def test_ranks_of_is_the_inverse_of_unit_of(data):
    level = data.draw(levels(data.draw(st.integers(1, 200))))
    assert [level.unit_of(rank) for rank in range(level.capacity)] == [
        unit for unit in range(level.count) for _ in level.ranks_of(unit)
    ]
    assert parse_topology(level.spell())[0].capacity == level.capacity
