"""The oracle of the recipes: groups as the systems' pages state them, by loops over every rank.

Megatron's equation, for an order whose first axis is the fastest: rank = i0 + i1 * s0 + i2 * s0 * s1 + ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Block = tuple[int, ...]


def coords(fastest_first: Sequence[str], sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """The index of each rank on each axis."""
    places = []
    for rank in range(10**6):
        rest, place = rank, {}
        for axis in fastest_first:
            place[axis] = rest % sizes[axis]
            rest //= sizes[axis]
        if rest:
            return places
        places.append(place)
    raise AssertionError("too many ranks for loops")


def groups(
    fastest_first: Sequence[str], sizes: Mapping[str, int], along: Sequence[str], offset: int = 0
) -> list[Block]:
    """The ranks that differ along some axes alone, a group for each place on the others; the fastest counts first."""
    others = [axis for axis in reversed(fastest_first) if axis not in along]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(coords(fastest_first, sizes)):
        found.setdefault(tuple(place[axis] for axis in others), []).append(offset + rank)
    return [tuple(found[place]) for place in sorted(found)]


def slices(block: Block, size: int) -> list[Block]:
    """A list cut into pieces of so many."""
    return [block[start : start + size] for start in range(0, len(block), size)]


def strides(block: Block, size: int) -> list[Block]:
    """The first of each piece of so many, the second of each, and so on."""
    return [tuple(piece[i] for piece in slices(block, size)) for i in range(size)]


def levels(block: Block, sizes: Sequence[int]) -> list[list[Block]]:
    """For each level its groups: the first is contiguous, each next one strides over those before it."""
    found, below = [], 1
    for size in sizes:
        found.append([part for piece in slices(block, below * size) for part in strides(piece, below)])
        below *= size
    return found


def tile(ours: Sequence[Block], theirs: Sequence[Block], whole: Sequence[Block]) -> bool:
    """Whether each block of ``whole`` is a box of blocks of ours by blocks of theirs."""
    for block in whole:
        rows = [each for each in ours if set(each) & set(block)]
        columns = [each for each in theirs if set(each) & set(block)]
        if not all(set(each) <= set(block) for each in (*rows, *columns)):
            return False
        if not all(len(set(row) & set(column)) == 1 for row in rows for column in columns):
            return False
    return True


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
) -> dict[str, list[Block]]:
    """Every list of Megatron's parallel state, by our names. ``between instances`` comes from the experts alone."""
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
    instance: list[Block] = []
    models = of_expert("tp", "ep", "pp")
    for start in range(0, len(models), expert_inside):
        instance.append(tuple(sorted(rank for model in models[start : start + expert_inside] for rank in model)))
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
        "embedding": [tuple(dict.fromkeys((ranks[0], ranks[-1]))) for ranks in pipelines],
        "position embedding": [ranks[:1] for ranks in pipelines],
        "expert": of_expert("ep"),
        "expert-tensor": of_expert("tp"),
        "expert-tensor+expert": of_expert("tp", "ep"),
        "expert-tensor+expert+pipeline": models,
        "expert-data": of_expert("dp"),
        "data+context in instance": [part for ranks in of_dense("dp", "cp") for part in slices(ranks, inside)],
        "expert-data in instance": [part for ranks in of_expert("dp") for part in slices(ranks, expert_inside)],
        "instance": instance,
        "between instances": [part for ranks in of_expert("dp") for part in strides(ranks, expert_inside)],
    }
    for level in range(len(hierarchical)):
        found[f"context level {level + 1}"] = [
            part for ranks in of_dense("cp") for part in levels(ranks, hierarchical)[level]
        ]
    return found
