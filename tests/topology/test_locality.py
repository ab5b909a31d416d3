"""Locality of groups on hosts: the arithmetic against a loop over every rank, and its memory."""

from __future__ import annotations

import math
import sys
import tracemalloc

import pytest
from hypothesis import example, given, settings, strategies as st

from pgmesh import Layout, ShapeError, plan
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
    """Up to 4 axes on ranks that follow one another, every so many, or that begin later; whole or with a part cut."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda shape: math.prod(shape) <= 300))
    start, step = draw(st.integers(0, 7)), draw(st.sampled_from([1, 1, 1, 2, 3]))
    layout = Layout(**dict(zip("abcd", shape)), ranks=range(start, start + step * math.prod(shape), step))
    if draw(st.booleans()):
        axis = draw(st.sampled_from(layout.axes))
        first = draw(st.integers(0, layout.size(axis) - 1))
        layout = layout.at({axis: slice(first, None, draw(st.integers(1, 2)))})
    return layout


@st.composite
def levels(draw, ranks: int) -> HostLevel:
    """Hosts of one size, of a few, or each of its own, that hold so many ranks."""
    runs: list[tuple[int, int]] = []
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    while sum(n * size for n, size in runs) < ranks:
        runs.append((draw(st.integers(1, 40)), draw(st.sampled_from(sizes))))
    return HostLevel("host", tuple(runs))


@settings(max_examples=150)
@given(layouts(), st.data())
def test_locality_equals_a_count_of_each_rank(layout, data):
    level = data.draw(levels(max(layout.ranks()) + 1))
    axes = data.draw(st.lists(st.sampled_from(layout.axes), unique=True))
    assert locality_of(layout, axes, level) == by_hand(layout, axes, level)


@settings(max_examples=50)
@given(st.permutations(range(24)), st.data())
@example(list(range(23, -1, -1)), None)
def test_locality_of_irregular_ranks_equals_a_count(ranks, data):
    layout = Layout(a=2, b=3, c=4, ranks=ranks)
    level = data.draw(levels(24)) if data else HostLevel("host", ((3, 8),))
    axes = ["a", "c"]
    assert locality_of(layout, axes, level) == by_hand(layout, axes, level)


@settings(max_examples=60)
@given(layouts(), st.data())
def test_locality_of_uneven_slice_equals_a_count(layout, data):
    axis = data.draw(st.sampled_from(layout.axes))
    keep = data.draw(st.lists(st.integers(0, layout.size(axis) - 1), min_size=1, unique=True))
    layout = layout.at({axis: keep})
    level = data.draw(levels(max(layout.ranks()) + 1))
    assert locality_of(layout, layout.axes[:1], level) == by_hand(layout, list(layout.axes[:1]), level)


TOPOLOGIES = ["131072x8", "8192x128", "1024x1024"]


@pytest.mark.parametrize("nodes", TOPOLOGIES)
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
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert planned["tp"].localities[0].intra == len(layout) // 16 * (int(nodes.partition("x")[2]) >= 16)
    assert calls < 100_000  # of a million ranks, in eleven combinations of axes
    assert peak < 2_000_000


def test_locality_of_many_permuted_ranks_is_exact():
    ranks = [rank ^ 1 for rank in range(1 << 17)]
    found = plan(Layout(dp=1 << 14, tp=8, ranks=ranks), nodes="16384x8")["tp"].localities[0]
    assert (found.low, found.high, found.intra, found.kind) == (1, 1, 1 << 14, "intra")


# ---- topologies ----


@given(st.data())
def test_ranks_of_is_the_inverse_of_unit_of(data):
    level = data.draw(levels(data.draw(st.integers(1, 200))))
    assert [level.unit_of(rank) for rank in range(level.capacity)] == [
        unit for unit in range(level.count) for _ in level.ranks_of(unit)
    ]
    assert parse_topology(level.spell())[0].capacity == level.capacity


@pytest.mark.parametrize(
    ("nodes", "spelled"),
    [("8x8", "8x8"), ("8,8,4", "2x8,4"), ([8, 8, 4], "2x8,4"), (" 2X8 , 4", "2x8,4"), ("8", "1x8"), ("3x4,4", "4x4")],
)
def test_parse_topology_reads_hosts(nodes, spelled):
    assert parse_topology(nodes)[0].spell() == spelled


def test_parse_topology_reads_domains_innermost_first():
    hosts, domains = parse_topology(None, "8x18x4")
    assert (hosts.name, hosts.spell(), str(hosts)) == ("host", "144x4", "144 hosts of 4")
    assert (domains.name, domains.spell()) == ("domain", "8x72")
    assert parse_topology(None, [8, 18, 4]) == (hosts, domains)


def test_parse_topology_reads_levels_above_domains():
    hosts, domains, pods = parse_topology(None, "2x4x18x4")
    assert (hosts.spell(), domains.spell(), str(pods)) == ("144x4", "8x72", "2 level-3 units of 288")


@pytest.mark.parametrize(
    ("nodes", "domains", "message"),
    [
        (
            "8*8",
            None,
            "nodes are written 8x8, for 8 hosts of 8 ranks, or 8,8,4, for the ranks of each host, not '8*8'.",
        ),
        (
            "8x0",
            None,
            "nodes are written 8x8, for 8 hosts of 8 ranks, or 8,8,4, for the ranks of each host, not '8x0'.",
        ),
        *(
            (
                nodes,
                None,
                f"nodes are written 8x8, for 8 hosts of 8 ranks, or 8,8,4, for the ranks of each host, not {nodes!r}.",
            )
            for nodes in ([4.9, 4.2], ["a"], 8, "8 8 4")
        ),
        ([], None, "there is no host in nodes=[]."),
        (None, [4, 18], "domains are written 4x18x4, for 4 domains of 18 hosts of 4 ranks, not [4, 18]."),
        (None, "4 18 4", "domains are written 4x18x4, for 4 domains of 18 hosts of 4 ranks, not '4 18 4'."),
        (None, "4x18", "domains are written 4x18x4, for 4 domains of 18 hosts of 4 ranks, not '4x18'."),
        ("8x8", "4x18x4", "give nodes or domains, not both: domains='4x18x4' includes the hosts, 4 x 18 of 4 ranks."),
    ],
)
def test_parse_topology_refuses_invalid_hosts(nodes, domains, message):
    with pytest.raises(ShapeError) as caught:
        parse_topology(nodes, domains)
    assert str(caught.value) == message
