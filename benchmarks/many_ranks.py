"""Many gloo processes on one machine: the six families of groups made, and made and used, by every rank at once.

All of it happens in the same processes, in turn: each repetition makes a mesh with its groups on one side and destroys
them, then on the next, and every other repetition goes through the sides backwards. Every part starts at a barrier and
is timed by each rank for itself; a figure is the median over the repetitions of the median over the ranks. To use the
groups is one all_reduce on each, whose sum is checked. Megatron-Core, which takes ten times as long as any other, takes
part in one repetition or two. Our own ``connect`` stands beside what the peers, which connect as they make, take to
make. Bare Gloo is no peer, but the floor below us.

64 ranks make the mesh of the other parts of the benchmark, dp=1 x pp=4 x cp=2 x tp=8, on which cp and dp x cp are one
group of pgmesh's, and then dp=2 x pp=4 x cp=2 x tp=4, on which no two families are alike.
"""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.report import BEST, OURS, Figure, Wish
from benchmarks.sides import FAMILIES, FLOOR, box, dealt, with_floor
from pgmesh import ProcessGroupMesh
from pgmesh.launch import PRELOAD, spawn

DEADLINE = timedelta(seconds=240)
ASKED_AT = 64
"""At this many ranks most is asked for."""

Took = dict[tuple[str, str], list[float]]
"""By side and part, what each repetition took."""

PRELOAD += ["benchmarks.many_ranks", "megatron.core.parallel_state"]  # where it is not there, it is passed over


def figures(ranks: int, repetitions: int) -> list[Figure]:
    """At so many ranks, which make one mesh; 64 make a second one, with half the repetitions."""
    asked = ranks == ASKED_AT
    boxes = [box(ranks), dealt(ranks)] if asked else [box(ranks)]
    slow = {"Megatron-Core": 1 if asked else 2}
    told = [*zip(*spawn(measure, ranks, boxes, repetitions, slow, timeout=DEADLINE))]
    found = _figures(f"{ranks} gloo ranks", boxes[0], told[0], asked=asked)
    if asked:
        return [*found, *_figures(f"{ranks} gloo ranks, dp=2", boxes[1], told[1])[:3]]
    return found if ranks == 16 else found[:3]


def _figures(who: str, sizes: dict[str, int], told: Sequence[Took], *, asked: bool = False) -> list[Figure]:
    """What it takes to make the groups, to make and use them and to connect them, and what they hold.

    Args:
        told: by every rank.
        asked: more is asked for here than of all.
    """
    shape = " ".join(f"{axis}={size}" for axis, size in sizes.items())

    def figure(what: str, part: str, unit: str, best: float, against_torch: float) -> Figure:
        values = {
            side: median(median(values) for values in zip(*(rank[side, part] for rank in told)))
            for side in with_floor()
            if (side, part) in told[0]
        }
        if part == "connect":  # the peers connect as they make
            made = figure("", "make", unit, 0, 0).values
            values |= {side: value for side, value in made.items() if side not in (OURS, FLOOR)}
        wishes = [Wish(best, BEST)] * (best > 0) + [Wish(against_torch, "DeviceMesh")] * (asked and against_torch > 0)
        return Figure(f"{who}: {what}", values, unit, tuple(wishes))

    half = 2 * asked
    return [
        figure(f"made ({shape})", "make", "s", 10, 8),
        figure("made and used", "make and use", "s", 2, 1.8),
        figure("connect, the peers' making", "connect", "s", 0, 1),
        figure("threads a rank holds for them", "threads", "", half, 0),
        figure("descriptors a rank holds for them", "descriptors", "", half, 0),
    ]


class Connected:
    """A mesh of pgmesh whose groups are connected."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.mesh = ProcessGroupMesh(name=name, **sizes)
        self.mesh.connect(*FAMILIES, timeout=DEADLINE)
        self.groups = [self.mesh.group(*axes) for axes in FAMILIES]

    def close(self) -> None:
        self.mesh.close()


def measure(boxes: list[dict[str, int]], repetitions: int, slow: dict[str, int]) -> list[Took]:
    """On every rank, for each mesh: the seconds and the counts of each side and part, repetition by repetition.

    Args:
        slow: in how many repetitions these sides take part, and with the first mesh alone.
    """
    gc.collect()
    gc.freeze()  # what is here now is no garbage, and costs later collections nothing
    first, *others = boxes
    never = dict.fromkeys(slow, 0)
    return [_measure(first, repetitions, slow), *(_measure(sizes, repetitions // 2, never) for sizes in others)]


def _measure(sizes: dict[str, int], repetitions: int, slow: dict[str, int]) -> Took:
    took: Took = defaultdict(list)
    sides = with_floor()
    turns = [(side, make, part) for part in ("make", "make and use") for side, make in sides.items()]
    turns.append((OURS, Connected, "connect"))
    for repetition in range(repetitions):
        for side, make, part in turns[:: 1 if repetition % 2 else -1]:
            if repetition >= slow.get(side, repetitions):
                continue
            before = _held()
            dist.barrier()
            start = time.perf_counter()
            made = make(f"{part}, repetition {repetition} of {sizes}", sizes)
            sums = [torch.ones(1) for _ in made.groups] if part == "make and use" else []
            for group, ones in zip(made.groups, sums):
                dist.all_reduce(ones, group=group)
            took[side, part].append(time.perf_counter() - start)
            dist.barrier()  # nobody counts, or destroys, while others still make
            for group, ones in zip(made.groups, sums):
                if int(ones) != group.size():
                    raise ArithmeticError(f"{side}: a group of {group.size()} adds up to {int(ones)}")
            group = None
            if part == "make and use":
                for what, after in _held().items():
                    took[side, what].append(after - before[what])
            made.close()
            del made
            gc.collect()
            dist.barrier()
    return dict(took)


def _held() -> dict[str, int]:
    """How many threads and file descriptors this process holds, where Linux tells."""
    where = {"threads": "/proc/self/task", "descriptors": "/proc/self/fd"}
    return {what: len(os.listdir(path)) if os.path.isdir(path) else 0 for what, path in where.items()}
