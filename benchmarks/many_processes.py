"""Many gloo processes on one machine: the six families of groups made, and made and used, by every rank at once.

All of it happens in the same processes, in turn: each repetition makes a mesh with its groups on one side, and
destroys them, then on the other, and the side that goes first alternates. Every part starts at a barrier and is timed
by each rank for itself; a figure is the median over the repetitions of the median over the ranks. To use the groups is
one all_reduce on each, whose sum is checked.
"""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from datetime import timedelta
from itertools import cycle
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.report import Figure
from benchmarks.sides import SIDES
from pgmesh.launch import spawn

DEADLINE = timedelta(seconds=120)


def figures(ranks: int, repetitions: int, *, binding: bool) -> list[Figure]:
    """What the ranks measured; binding where the figures that are asked for are asked for this many ranks."""
    sizes = box(ranks)
    told = spawn(measure, ranks, sizes, repetitions, timeout=DEADLINE)
    shape = " ".join(f"{axis}={size}" for axis, size in sizes.items())

    def figure(what: str, part: str, unit: str, asked: float | None = None) -> Figure:
        ours, theirs = (
            median(median(values) for values in zip(*(rank[side, part] for rank in told))) for side in SIDES
        )
        return Figure(f"{ranks} gloo ranks, {what}", ours, theirs, unit, asked if binding else None)

    return [
        figure(f"six families made ({shape})", "make", "s", 8),
        figure("six families made and used", "make and use", "s", 1.8),
        figure("threads that a rank holds for them", "threads", ""),
        figure("descriptors that a rank holds for them", "descriptors", ""),
    ]


def box(ranks: int) -> dict[str, int]:
    """Sizes that hold so many ranks, twos dealt to the axes in turn: 64 is dp=2 x pp=4 x cp=2 x tp=4."""
    sizes, axes = {"dp": 1, "pp": 1, "cp": 1, "tp": 1}, cycle(("cp", "tp", "pp", "dp", "tp", "pp"))
    while ranks % 2 == 0:
        sizes[next(axes)] *= 2
        ranks //= 2
    sizes["dp"] *= ranks
    return sizes


def measure(sizes: dict[str, int], repetitions: int) -> dict[tuple[str, str], list[float]]:
    """On every rank: the seconds and the counts of each side and part, repetition by repetition."""
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    gc.collect()
    gc.freeze()  # what is here now is no garbage, and costs later collections nothing
    for repetition in range(repetitions):
        for part in ("make", "make and use"):
            for side in list(SIDES)[:: 1 if repetition % 2 else -1]:
                name = f"{part}, repetition {repetition}"
                before = _held()
                dist.barrier()
                start = time.perf_counter()
                made = SIDES[side](name, sizes)
                if part == "make and use":
                    sums = [torch.ones(1) for _ in made.groups]
                    for group, ones in zip(made.groups, sums):
                        dist.all_reduce(ones, group=group)
                took[side, part].append(time.perf_counter() - start)
                dist.barrier()  # nobody counts, or destroys, while others still make
                if part == "make and use":
                    assert [int(ones) for ones in sums] == [group.size() for group in made.groups]
                    del group
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
