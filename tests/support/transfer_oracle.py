"""An oracle for transfers between layouts: it marks every element of a tensor, and cuts it as DTensor does."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from pgmesh import Layout
from pgmesh.resharding import Resharder

TRAINER, ROLLOUT = Layout(2), Layout(2, ranks=[2, 3])


def resharder(source: Any, target: Any, trainer: Any = TRAINER, **options: Any) -> Resharder:
    """From ranks 0 and 1, which pass the source, to ranks 2 and 3, which pass the target."""
    side = {"source": source} if dist.get_rank() < 2 else {"target": target}
    return Resharder(trainer, ROLLOUT, **side, **options)


def value(name: str, *shape: int) -> torch.Tensor:
    """Random values, equal on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode()) + sum(shape)))


class Case(NamedTuple):
    """A random transfer."""

    shape: tuple[int, ...]
    source: Layout
    source_placements: list[Any]
    target: Layout
    target_placements: list[Any]
    hosts: list[list[int]] | None


def random_case(random: Random, world: int = 8) -> Case:
    """A transfer between two random layouts of ranks of a world, permuted, overlapping or disjoint."""
    shape = tuple(random.choice([0, 1, 2, 3, 5, 8, 9]) for _ in range(random.randint(0, 4)))
    source, target = random_layout(random, world), random_layout(random, world)
    ranks = random.sample(range(world), world)
    hosts = random.choice([None, [ranks[:3], ranks[3:4], ranks[4:]], [ranks[:4], ranks[4:]]])
    sides = ((layout, random_placements(random, layout, len(shape))) for layout in (source, target))
    return Case(shape, *itertools.chain.from_iterable(sides), hosts)


def random_layout(random: Random, world: int) -> Layout:
    shape = random.choice([each for each in SHAPES if math.prod(each) <= world])
    return Layout(dict(zip("abc", shape)), ranks=random.sample(range(world), math.prod(shape)))


SHAPES = [(1,), (2,), (3,), (4,), (5,), (8,), (2, 2), (2, 3), (4, 2), (1, 4), (2, 2, 2), (2, 1, 3)]


def random_placements(random: Random, layout: Layout, dimensions: int, *, strided: bool = True) -> list[Any]:
    """For each axis: replicated, or a dimension that it shards, also one that another axis shards."""

    def placement() -> Any:
        if not dimensions or random.random() < 0.35:
            return Replicate()
        dimension = random.randrange(dimensions)
        if strided and random.random() < 0.25:
            return _StridedShard(dimension, split_factor=random.choice([2, 3]))
        return Shard(dimension)

    return [placement() for _ in layout.axes]


def shard_of(whole: torch.Tensor, layout: Layout, placements: list[Any], rank: int) -> torch.Tensor:
    """A rank's shard of a tensor, cut with ``torch.chunk`` from the first axis to the last."""
    for n, i, placement in zip(layout.shape, layout.coord_of(rank), placements):
        if isinstance(placement, _StridedShard):
            chunks = [chunk(each, n, placement.dim)[i] for each in chunk(whole, placement.split_factor, placement.dim)]
            whole = torch.cat(chunks, placement.dim)
        elif isinstance(placement, Shard):
            whole = chunk(whole, n, placement.dim)[i]
    return whole


def chunk(tensor: torch.Tensor, n: int, dimension: int) -> list[torch.Tensor]:
    """``n`` chunks, the last ones empty where torch.chunk returns fewer."""
    chunks = [*torch.chunk(tensor, n, dimension)]
    return chunks + [tensor.narrow(dimension, 0, 0)] * (n - len(chunks))


def elements(shape: tuple[int, ...], region: Any) -> list[int]:
    """The numbers of a region's elements, in row-major order."""
    indices = itertools.product(*([i for start, stop in each for i in range(start, stop)] for each in region))
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return [sum(i * stride for i, stride in zip(index, strides)) for index in indices]


def check_plan(plan: Any, case: Case) -> None:
    """Assert that every wanted element arrives once, from a rank that holds it, and from its own host if one does."""
    numbers = torch.arange(math.prod(case.shape)).reshape(case.shape)
    held = {rank: Counter(shard_of(numbers, *case[1:3], rank).flatten().tolist()) for rank in case.source}
    wanted = {rank: Counter(shard_of(numbers, *case[3:5], rank).flatten().tolist()) for rank in case.target}
    plans = {rank: plan.of(rank) for rank in range(8)}
    load: Counter[int] = Counter()
    nearby: Counter[int] = Counter()
    near = {rank: {*next(each for each in case.hosts if rank in each)} if case.hosts else set() for rank in range(8)}
    sends = {(rank, *each) for rank, mine in plans.items() for each in mine.sends}
    receives = {(each.peer, rank, *each[1:]) for rank, mine in plans.items() for each in mine.receives}
    assert sends == receives
    assert len({each[:2] for each in sends}) == len(sends) == sum(len(each.sends) for each in plans.values())
    for rank, mine in plans.items():
        arrived = Counter(elements(case.shape, mine.copied) if mine.copied is not None else [])
        assert arrived <= held.get(rank, Counter())
        for peer, region in mine.receives:
            moved = Counter(elements(case.shape, region))
            assert moved
            assert peer != rank
            assert moved <= held[peer]
            arrived += moved
            load[peer] += moved.total()
            nearby[peer] += moved.total() * (peer in near[rank])
        assert arrived == wanted.get(rank, Counter())
        need = sum((wanted.get(rank, Counter()) - held.get(rank, Counter())).values())
        assert (mine.received, mine.floor) == (need, need)
        far = sum(each.size for each in mine.sends if each.peer not in near[rank])
        assert mine.leaving == (far if case.hosts else 0)
    for holders in replicas(held):
        missing = {
            rank: sum(((wanted[rank] - held.get(rank, Counter())) & held[holders[0]]).values()) for rank in wanted
        }
        assert sum(load[rank] for rank in holders) == sum(missing.values())
        for host in case.hosts or ():
            here = [rank for rank in holders if rank in host]
            near_ones = sum(missing.get(rank, 0) for rank in host) if here else 0
            assert sum(nearby[rank] for rank in here) == near_ones, "near ranks come first"


def replicas(held: dict[int, Counter[int]]) -> list[list[int]]:
    """The ranks that hold the same elements, unless these are none."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, marks in held.items():
        found.setdefault(tuple(marks), []).append(rank)
    return [ranks for marks, ranks in found.items() if marks]
