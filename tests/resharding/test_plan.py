"""The plan of a transfer: every element against an oracle, and shards against torch's own."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.torch_version import TorchVersion

from pgmesh import Layout, ShapeError
from pgmesh.resharding import RankPlan, ReshardPlan, Transfer
from pgmesh.resharding.plan import balance
from pgmesh.resharding.sharding import Sharding, length
from tests.support.transfer_oracle import Case, check_plan, random_case, random_layout, random_placements


def test_every_element_arrives_once_from_a_holder():
    for seed in range(200):
        case = random_case(random.Random(seed))
        check_plan(ReshardPlan(*case[:5], hosts=case.hosts), case)


@settings(max_examples=150)
@given(st.integers(0, 1 << 32))
def test_shards_are_those_of_torch(seed):
    rng = random.Random(seed)
    layout, shape = random_layout(rng, 8), tuple(rng.choice([0, 1, 2, 3, 5, 8, 9]) for _ in range(rng.randint(0, 4)))
    # torch 2.9 computes other offsets of strided shards than it cuts.
    strided = TorchVersion(torch.__version__) >= "2.10"
    placements = random_placements(rng, layout, len(shape), strided=strided)
    sharding = Sharding(shape, layout, placements)
    for rank in layout:
        region = sharding.region_of(rank)
        size, offset = _compute_local_shape_and_global_offset(shape, layout.shape, layout.coord_of(rank), placements)
        assert tuple(map(length, region)) == size
        assert all(intervals[0][0] == start for intervals, start in zip(region, offset) if intervals)
        part = sharding.part_of(rank)
        assert sharding.ranks_of(part)[sharding.replica_of(rank)] == rank


def test_placements_by_axis_are_those_by_position():
    layout = Layout(dp=2, tp=2)
    by_axis = Sharding((5, 8), layout, {"tp": 1, "dp": Shard(-1)})
    by_position = Sharding((5, 8), layout, [Shard(1), Shard(1)])
    assert [*map(by_axis.region_of, layout)] == [*map(by_position.region_of, layout)]
    assert Sharding((5, 8), layout, {"dp": Replicate()}).replicas == Sharding((5, 8), layout, None).replicas == 4


def test_replicas_share_load_and_serve_own_host_first():
    trainer, rollout = Layout(dp=2, ranks=[0, 4]), Layout(dp=6, ranks=[1, 2, 3, 5, 6, 7])
    plan = ReshardPlan((100,), trainer, None, rollout, None, hosts=[range(4), range(4, 8)])
    assert [(plan.of(rank).sent, plan.of(rank).leaving) for rank in trainer] == [(300, 0), (300, 0)]
    uneven = ReshardPlan((100,), trainer, None, Layout(3, ranks=[1, 2, 3]), None, hosts=[range(4), range(4, 8)])
    assert [(uneven.of(rank).sent, uneven.of(rank).leaving) for rank in trainer] == [(150, 0), (150, 150)]
    assert uneven.of(2).receives == (Transfer(0, (((0, 100),),), 0, 50), Transfer(4, (((0, 100),),), 50, 100))


def random_model(rng: random.Random) -> list[tuple[Case, int]]:
    """Transfers of several tensors with the same hosts, each for one to three tensors of 1 or 2 bytes an element."""
    first = random_case(rng)
    cases = [first, *(random_case(rng)._replace(hosts=first.hosts) for _ in range(rng.randint(1, 4)))]
    return [(case, rng.randint(1, 3)) for case in cases]


def least_load(sent: dict[tuple[int, ...], int]) -> float:
    """The least that the greatest sender can send: some ranks alone hold some of it, and share it evenly at best."""
    ranks = sorted({rank for holders in sent for rank in holders})
    groups = itertools.chain.from_iterable(itertools.combinations(ranks, n + 1) for n in range(len(ranks)))
    return max(
        (sum(each for holders, each in sent.items() if {*holders} <= {*some}) / len(some) for some in groups), default=0
    )


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 32))
def test_load_of_a_model_is_even(seed):
    model = random_model(random.Random(seed))
    plans = [
        (ReshardPlan(*case[:5], itemsize=1 + number % 2, hosts=case.hosts), count)
        for number, (case, count) in enumerate(model)
    ]
    balance(dict(plans))
    load: Counter[int] = Counter()
    sent: Counter[tuple[int, ...]] = Counter()  # by the ranks that could send it
    for (plan, count), (case, _) in zip(plans, model):
        check_plan(plan, case, is_even=False)
        for rank in case.source:
            bytes_sent = plan.of(rank).sent * plan.itemsize * count
            load[rank] += bytes_sent
            sent[tuple(sorted(plan.source.ranks_of(plan.source.part_of(rank))))] += bytes_sent
    slack = sum(plan.itemsize * count for plan, count in plans)  # an element of each tensor
    assert max(load.values()) <= 1.1 * least_load(sent) + slack


def test_one_rank_of_a_million_plans_in_seconds():
    n = 1 << 20
    moved = Layout(dp=n // 16, tp=8, ranks=range(n - 1, n // 2 - 1, -1))
    hosts = [range(first, first + 8) for first in range(0, n, 8)]
    mine = timed(ReshardPlan((8192, 8192), Layout(dp=n // 8, tp=8), {"tp": 0}, moved, {"tp": 0}, hosts=hosts), n - 1)
    assert (mine.received, mine.floor, mine.sent) == (8192 * 1024, 8192 * 1024, 8192 * 1024 // 2)  # two for each one
    sharded, half = Layout(replicate=32, fsdp=n // 512, tp=8), Layout(dp=n // 16, tp=8, ranks=range(n // 2, n))
    mine = timed(ReshardPlan((8192, 8192), sharded, {"fsdp": 0, "tp": 1}, half, {"tp": 0}), n - 1)
    assert (mine.received, mine.floor, mine.sent) == (8192 * 1024, 8192 * 1024, 0)


def timed(plan: ReshardPlan, rank: int) -> RankPlan:
    before = time.process_time()
    mine = plan.of(rank)
    assert time.process_time() - before < 5, "about a second on a free core; the limit is for machines under load"
    return mine


def test_partial_placement_is_refused():
    with pytest.raises(ShapeError, match=r"redistribute\(placements="):
        ReshardPlan((4,), Layout(2), [Partial()], Layout(2), [0])


def test_numpy_integer_is_a_placement():
    plans = [ReshardPlan((4,), Layout(2), [dim], Layout(2), None) for dim in (0, np.int64(0))]
    assert str(plans[0]) == str(plans[1])


def test_a_plan_of_many_ranks_prints_the_first():
    text = str(ReshardPlan((4096,), Layout(4096), [0], Layout(2048, ranks=range(4095, 2047, -1)), [0]))
    assert text.endswith("and 4,032 more ranks: print(plan.of(rank)) shows one")
    assert len(text.splitlines()) == 67
