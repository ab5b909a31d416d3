"""Many gloo processes on one machine: the six families of groups made, and made and used, by every rank at once.

All of it happens in the same processes, in turn: each repetition makes a mesh with its groups on one side and destroys
them, then on the next, and every other repetition goes through the sides backwards. Every part starts at a barrier and
is timed by each rank for itself; a figure is the median over the repetitions of the median over the ranks. To use the
groups is one all_reduce on each, whose sum is checked. Megatron-Core, which takes ten times as long as any other, takes
part in two repetitions. Our own ``connect`` stands beside what the peers, which connect as they make, take to make.
Bare Gloo is no peer, but the floor below us.
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

from benchmarks.report import BEST, OURS, Figure, Wish
from benchmarks.sides import FAMILIES, FLOOR, with_floor
from pgmesh import ProcessGroupMesh
from pgmesh.launch import PRELOAD, spawn

DEADLINE = timedelta(seconds=240)
ASKED_AT = 64
"""Threads and descriptors are asked for at this many ranks."""

PRELOAD += ["benchmarks.many_ranks", "megatron.core.parallel_state"]  # where it is not there, it is passed over


def figures(ranks: int, repetitions: int) -> list[Figure]:
    sizes = box(ranks)
    told = spawn(measure, ranks, sizes, repetitions, timeout=DEADLINE)
    shape = " ".join(f"{axis}={size}" for axis, size in sizes.items())

    def figure(what: str, part: str, unit: str, *wishes: Wish) -> Figure:
        values = {
            side: median(median(values) for values in zip(*(rank[side, part] for rank in told)))
            for side in with_floor()
            if (side, part) in told[0]
        }
        if part == "connect":
            values |= {
                side: value for side, value in figure("", "make", unit).values.items() if side not in (OURS, FLOOR)
            }
        return Figure(f"{ranks} gloo ranks: {what}", values, unit, wishes)

    found = [
        figure(f"made ({shape})", "make", "s", Wish(10, BEST)),
        figure("made and used", "make and use", "s", Wish(2, BEST)),
        figure("connect, the peers' making", "connect", "s", *[Wish(1, "DeviceMesh")] * (ranks == ASKED_AT)),
    ]
    half = [Wish(2, BEST)] * (ranks == ASKED_AT)
    counts = [
        figure("threads a rank holds for them", "threads", "", *half),
        figure("descriptors a rank holds for them", "descriptors", "", *half),
    ]
    return [*found, *counts] if ranks in (16, ASKED_AT) else found


def box(ranks: int) -> dict[str, int]:
    """Sizes that hold so many ranks, twos dealt to the axes in turn: 64 is dp=2 x pp=4 x cp=2 x tp=4."""
    sizes, axes = {"dp": 1, "pp": 1, "cp": 1, "tp": 1}, cycle(("cp", "tp", "pp", "dp", "tp", "pp"))
    while ranks % 2 == 0:
        sizes[next(axes)] *= 2
        ranks //= 2
    sizes["dp"] *= ranks
    return sizes


class Connected:
    """A mesh of pgmesh whose groups are connected."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.mesh = ProcessGroupMesh(name=name, **sizes)
        self.mesh.connect(*FAMILIES, timeout=DEADLINE)
        self.groups = [self.mesh.group(*axes) for axes in FAMILIES]

    def close(self) -> None:
        self.mesh.close()


def measure(sizes: dict[str, int], repetitions: int) -> dict[tuple[str, str], list[float]]:
    """On every rank: the seconds and the counts of each side and part, repetition by repetition."""
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    gc.collect()
    gc.freeze()  # what is here now is no garbage, and costs later collections nothing
    sides = with_floor()
    turns = [(side, make, part) for part in ("make", "make and use") for side, make in sides.items()]
    turns.append((OURS, Connected, "connect"))
    for repetition in range(repetitions):
        for side, make, part in turns[:: 1 if repetition % 2 else -1]:
            if repetition > 1 and side == "Megatron-Core":
                continue
            before = _held()
            dist.barrier()
            start = time.perf_counter()
            made = make(f"{part}, repetition {repetition}", sizes)
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
