"""Oracle of the recipes: the groups that each system's documentation specifies, searched in a table of all ranks.

Megatron's equation, for an order whose first axis is the fastest: rank = i0 + i1 * s0 + i2 * s0 * s1 + ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.layout_oracle import LayoutOracle

Block = tuple[int, ...]
Stages = Sequence[int] | Callable[[list[int]], Sequence[int]]


def groups(
    fastest_first: Sequence[str], sizes: Mapping[str, int], along: Sequence[str], offset: int = 0
) -> list[Block]:
    """Groups of the ranks that differ only along some axes, sorted by their other coords, slowest axis first."""
    axes = [*reversed(fastest_first)]
    shape = [sizes[axis] for axis in axes]
    return [*LayoutOracle(axes, shape, range(offset, offset + math.prod(shape))).partition(*along)]


def chunks(block: Sequence[Any], size: int) -> list[Any]:
    """A block, or a list of them, cut into contiguous pieces of a size."""
    return [block[start : start + size] for start in range(0, len(block), size)]


def strides(block: Block, size: int) -> list[Block]:
    """The first ranks of all pieces of ``size``, then the second ranks, and so on."""
    return [tuple(piece[i] for piece in chunks(block, size)) for i in range(size)]


def levels(block: Block, sizes: Sequence[int]) -> list[list[Block]]:
    """Groups of each level: contiguous on the first, and with the stride of all earlier levels on later ones."""
    found, below = [], 1
    for size in sizes:
        found.append([part for piece in chunks(block, below * size) for part in strides(piece, below)])
        below *= size
    return found


def tiles(ours: Sequence[Block], theirs: Sequence[Block], whole: Sequence[Block]) -> bool:
    """True if each block of ``whole`` is a grid of blocks of ``ours`` by blocks of ``theirs``."""
    for block in whole:
        rows = [each for each in ours if set(each) & set(block)]
        columns = [each for each in theirs if set(each) & set(block)]
        if not all(set(each) <= set(block) for each in (*rows, *columns)):
            return False
        if not all(len(set(row) & set(column)) == 1 for row in rows for column in columns):
            return False
    return True


def pick(pipeline: Block, stages: Stages) -> Block:
    """The ranks of some stages of a pipeline, each once, in the order given."""
    chosen = stages(list(pipeline)) if callable(stages) else [pipeline[stage] for stage in stages]
    return tuple(dict.fromkeys(chosen))


def megatron(
    world: int,
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    pp: int = 1,
    order: Sequence[str],
    offset: int = 0,
    instances: int = 1,
    hierarchical: Sequence[int] = (),
    embedding: Stages = (0, -1),
    position_embedding: Stages = (0,),
) -> dict[str, list[Block]]:
    """Every list of groups in Megatron's parallel state, by our names. ``between instances`` is of the experts only."""
    etp = tp if etp is None else etp
    dense = {"tp": tp, "cp": cp, "pp": pp, "ep": 1, "dp": world // (tp * cp * pp)}
    expert = {"tp": etp, "cp": 1, "pp": pp, "ep": ep, "dp": world // (etp * ep * pp)}

    def of_dense(*along: str) -> list[Block]:
        return groups(order, dense, along, offset)

    def of_expert(*along: str) -> list[Block]:
        return groups(order, expert, along, offset)

    pipelines = of_dense("pp")
    inside = dense["dp"] * cp // instances
    expert_inside = expert["dp"] // instances
    models = of_expert("tp", "ep", "pp")
    found = {
        "tensor": of_dense("tp"),
        "pipeline": pipelines,
        "model": of_dense("tp", "pp"),
        "data": of_dense("dp"),
        "data+context": of_dense("dp", "cp"),
        "context": of_dense("cp"),
        "tensor+data": of_dense("tp", "dp"),
        "tensor+data+context": of_dense("tp", "dp", "cp"),
        "tensor+context": of_dense("tp", "cp"),
        "amax": of_dense("tp", "dp"),
        "embedding": [pick(ranks, embedding) for ranks in pipelines],
        "position embedding": [pick(ranks, position_embedding) for ranks in pipelines],
        "expert": of_expert("ep"),
        "expert-tensor": of_expert("tp"),
        "expert-tensor+expert": of_expert("tp", "ep"),
        "expert-tensor+expert+pipeline": models,
        "expert-data": of_expert("dp"),
        "data+context in instance": [part for ranks in of_dense("dp", "cp") for part in chunks(ranks, inside)],
        "expert-data in instance": [part for ranks in of_expert("dp") for part in chunks(ranks, expert_inside)],
        "instance": [tuple(sorted(sum(part, ()))) for part in chunks(models, expert_inside)],
        "between instances": [part for ranks in of_expert("dp") for part in strides(ranks, expert_inside)],
    }
    for level in range(len(hierarchical)):
        parts = [part for ranks in of_dense("cp") for part in levels(ranks, hierarchical)[level]]
        found[f"context level {level + 1}"] = parts
    return found
