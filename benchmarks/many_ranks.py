"""Benchmark of many Gloo processes on one machine: creation and first use of the six kinds of groups.

All sides run in the same processes. Each repetition creates a mesh with its groups on one side, destroys it, and
continues with the next side; every second repetition has the reverse order. Each part starts at a barrier, and each
rank measures its time. A figure is the median over repetitions of the median over ranks. "Used" means one all_reduce
on each group, whose sum is checked. Megatron-Core takes ten times as long as the others, so it has one or two
repetitions. ``connect`` of pgmesh is compared with creation on the peers, which connect during creation. Bare Gloo is
not a peer, but a lower bound.

64 ranks create the mesh of the other benchmarks, dp=1 x pp=4 x cp=2 x tp=8, in which cp and dp x cp are the same group
of pgmesh, and then dp=2 x pp=4 x cp=2 x tp=4, in which all groups differ.
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

from benchmarks.report import BEST, OURS, Figure, Target
from benchmarks.sides import FAMILIES, FLOOR, compared_sizes, even_sizes, sides_with_floor
from pgmesh import ProcessGroupMesh
from pgmesh.launch import spawn
from pgmesh.launch.processes import PRELOAD

DEADLINE = timedelta(seconds=240)
REFERENCE_RANKS = 64
"""The number of ranks for which all targets apply."""

Took = dict[tuple[str, str], list[float]]
"""Seconds or counts of each repetition, by side and part."""

PRELOAD += ["benchmarks.many_ranks", "megatron.core.parallel_state"]  # modules that do not exist are ignored


def figures(ranks: int, repetitions: int) -> list[Figure]:
    """Figures for a number of ranks with one mesh. 64 ranks have a second mesh, with half the repetitions."""
    is_reference = ranks == REFERENCE_RANKS
    boxes = [compared_sizes(ranks), even_sizes(ranks)] if is_reference else [compared_sizes(ranks)]
    slow = {"Megatron-Core": 1 if is_reference else 2}
    results = [*zip(*spawn(measure, ranks, boxes, repetitions, slow, timeout=DEADLINE))]
    found = _figures(f"{ranks} gloo ranks", boxes[0], results[0], is_reference=is_reference)
    if is_reference:
        return [*found, *_figures(f"{ranks} gloo ranks, dp=2", boxes[1], results[1])[:3]]
    return found if ranks == 16 else found[:3]


def _figures(who: str, sizes: dict[str, int], results: Sequence[Took], *, is_reference: bool = False) -> list[Figure]:
    """Figures of one mesh: creation, creation and use, connection, threads and file descriptors.

    Args:
        who: name of the world.
        sizes: sizes of the mesh.
        results: measurements of every rank.
        is_reference: True if all targets apply.
    """
    shape = " ".join(f"{axis}={size}" for axis, size in sizes.items())

    def figure(what: str, part: str, unit: str, best: float, against_torch: float) -> Figure:
        values = {
            side: median(median(values) for values in zip(*(rank[side, part] for rank in results)))
            for side in sides_with_floor()
            if (side, part) in results[0]
        }
        if part == "connect":  # the peers connect during creation
            made = figure("", "make", unit, 0, 0).values
            values |= {side: value for side, value in made.items() if side not in (OURS, FLOOR)}
        targets = [Target(best, BEST)] * (best > 0)
        targets += [Target(against_torch, "DeviceMesh")] * (is_reference and against_torch > 0)
        return Figure(f"{who}: {what}", values, unit, tuple(targets))

    half = 2 * is_reference
    return [
        figure(f"made ({shape})", "make", "s", 10, 8),
        figure("made and used", "make and use", "s", 2, 1.8),
        figure("connect, the peers' making", "connect", "s", 0, 1),
        figure("threads a rank holds for them", "threads", "", half, 0),
        figure("descriptors a rank holds for them", "descriptors", "", half, 0),
    ]


class Connected:
    """A mesh of pgmesh with connected groups."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.mesh = ProcessGroupMesh(name=name, **sizes)
        self.mesh.connect(*FAMILIES, timeout=DEADLINE)
        self.groups = [self.mesh.group(*axes) for axes in FAMILIES]

    def close(self) -> None:
        self.mesh.close()


def measure(boxes: list[dict[str, int]], repetitions: int, slow: dict[str, int]) -> list[Took]:
    """Measurements of this rank for each mesh: seconds and counts of each side and part.

    Args:
        boxes: sizes of each mesh.
        repetitions: number of repetitions with the first mesh; half of them with the others.
        slow: number of repetitions of slow sides, which use the first mesh only.
    """
    gc.collect()
    gc.freeze()  # existing objects are excluded from later collections
    first, *others = boxes
    never = dict.fromkeys(slow, 0)
    return [_measure(first, repetitions, slow), *(_measure(sizes, repetitions // 2, never) for sizes in others)]


def _measure(sizes: dict[str, int], repetitions: int, slow: dict[str, int]) -> Took:
    took: Took = defaultdict(list)
    sides = sides_with_floor()
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
            dist.barrier()  # count and destroy only after all ranks are done
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
    """Number of threads and file descriptors of this process; 0 if there is no /proc."""
    where = {"threads": "/proc/self/task", "descriptors": "/proc/self/fd"}
    return {what: len(os.listdir(path)) if os.path.isdir(path) else 0 for what, path in where.items()}
