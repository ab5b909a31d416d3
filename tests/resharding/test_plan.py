"""The plan of a transfer: every element against an oracle, and shards against torch's own."""

from __future__ import annotations

import random
import time

import numpy as np
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.torch_version import TorchVersion

from pgmesh import Layout
from pgmesh.resharding import RankPlan, ReshardPlan, Transfer
from pgmesh.resharding.sharding import Sharding, length
from tests.support.transfer_oracle import check_plan, random_case, random_layout, random_placements


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
    by_axis = Sharding((5, 8), layout, {"tp": np.int64(1), "dp": Shard(-1)})
    by_position = Sharding((5, 8), layout, [Shard(1), Shard(1)])
    assert [*map(by_axis.region_of, layout)] == [*map(by_position.region_of, layout)]
    assert Sharding((5, 8), layout, {"dp": Replicate()}).replicas == Sharding((5, 8), layout, None).replicas == 4


def test_replicas_serve_in_turn_or_together():
    trainer, rollout = Layout(dp=2, ranks=[0, 4]), Layout(dp=6, ranks=[1, 2, 3, 5, 6, 7])
    plan = ReshardPlan((100,), trainer, None, rollout, None, hosts=[range(4), range(4, 8)])
    assert [(plan.of(rank).sent, plan.of(rank).leaving) for rank in trainer] == [(300, 0), (300, 0)]
    uneven = ReshardPlan((100,), trainer, None, Layout(3, ranks=[1, 2, 3]), None, hosts=[range(4), range(4, 8)])
    assert [(uneven.of(rank).sent, uneven.of(rank).leaving) for rank in trainer] == [(300, 0), (0, 0)]
    assert uneven.of(2).receives == (Transfer(0, (((0, 100),),)),)
    far = ReshardPlan((100,), trainer, None, Layout(4, ranks=[1, 2, 3, 5]), None)
    flat = ReshardPlan((3, 1000), Layout(4), None, Layout(1, ranks=[4]), None)  # more replicas than rows
    assert [far.of(0).sent, far.of(4).sent, *(flat.of(rank).sent for rank in range(4))] == [200, 200, *[750] * 4]
    replicas, halves = Layout(dp=4, ranks=[0, 1, 4, 5]), Layout(dp=2, tp=2, ranks=[2, 6, 3, 7])
    on_hosts = ReshardPlan((100,), replicas, None, halves, {"tp": 0}, hosts=[range(4), range(4, 8)])
    assert [(on_hosts.of(rank).sent, on_hosts.of(rank).leaving) for rank in replicas] == [(50, 0)] * 4
    single = ReshardPlan((100,), trainer, None, Layout(1, ranks=[2]), None)
    assert single.of(2).receives == (Transfer(0, (((0, 50),),)), Transfer(4, (((50, 100),),)))


def test_one_rank_of_a_million_plans_in_seconds():
    n = 1 << 20
    moved = Layout(dp=n // 16, tp=8, ranks=range(n - 1, n // 2 - 1, -1))
    hosts = [range(first, first + 8) for first in range(0, n, 8)]
    mine = timed(ReshardPlan((8192, 8192), Layout(dp=n // 8, tp=8), {"tp": 0}, moved, {"tp": 0}, hosts=hosts), n - 1)
    assert (mine.received, mine.floor, mine.sent) == (8192 * 1024, 8192 * 1024, 8192 * 1024)  # of the same host
    sharded, half = Layout(replicate=32, fsdp=n // 512, tp=8), Layout(dp=n // 16, tp=8, ranks=range(n // 2, n))
    mine = timed(ReshardPlan((8192, 8192), sharded, {"fsdp": 0, "tp": 1}, half, {"tp": 0}), n - 1)
    assert (mine.received, mine.floor, mine.sent) == (8192 * 1024, 8192 * 1024, 0)


def timed(plan: ReshardPlan, rank: int) -> RankPlan:
    before = time.process_time()
    mine = plan.of(rank)
    assert time.process_time() - before < 5, "about a second on a free core; the limit is for machines under load"
    return mine
