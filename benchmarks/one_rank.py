"""One rank of a huge world, on the fake backend: what a mesh and its six families of groups cost it.

Time: the sides take turns, each repetition in a world of its own; a small world beforehand has run the code of all. A
peer that would take more than ``LONGEST`` for a world, by what it took for one before, is left out there.
Memory: each repetition in a fresh process, which looks at its resident set before and after; and what Python itself
holds of a mesh, byte by byte.
"""

from __future__ import annotations

import gc
import os
import time
import tracemalloc
from collections import defaultdict
from datetime import timedelta
from statistics import median
from typing import Any

from benchmarks import dry
from benchmarks.report import OURS, Figure, Wish, medians
from benchmarks.sides import FAMILIES, box, present
from pgmesh import ProcessGroupMesh
from pgmesh.launch import spawn

SIZES = (1_024, 8_192, 65_536, 1_048_576)
LONGEST = 8.0
"""Seconds."""
ENOUGH = 1.5
"""Seconds after which a side is not repeated."""
NO_GROWTH = 1 << 20  # bytes: as near to none as a resident set, which counts pages of all kinds, can tell
DEADLINE = timedelta(seconds=60)


def figures(repetitions: int, sizes: tuple[int, ...] = SIZES, longest: float = LONGEST) -> list[Figure]:
    took, left_out = seconds(repetitions, sizes, longest)
    wishes = {65_536: (Wish(1000, "DeviceMesh"),), 1_048_576: (Wish(most=10e-3),)}
    found = [
        Figure(f"one rank of {ranks:,}", took[ranks], wishes=wishes.get(ranks, ()), left_out=left_out[ranks])
        for ranks in sizes
    ]
    first, last = took[sizes[0]], took[sizes[-1]]
    grown = {side: last[side] / first[side] for side in last}
    found.append(Figure(f"growth from {sizes[0]:,} to {sizes[-1]:,}", grown, "x"))
    found.append(_same_groups(repetitions, sizes[0], sizes[-1]))
    held = {ranks: {OURS: _held_by_a_mesh(ranks)} for ranks in (sizes[0], sizes[-1])}
    limit = Wish(most=held[sizes[0]][OURS] + 256)
    found.append(Figure(f"a mesh without groups, {sizes[0]:,} ranks", held[sizes[0]], "B"))
    found.append(Figure(f"a mesh without groups, {sizes[-1]:,}", held[sizes[-1]], "B", (limit,)))
    return [*found, *_memory()] if len(sizes) > 2 and os.path.exists("/proc/self/statm") else found


def seconds(
    repetitions: int, sizes: tuple[int, ...], longest: float
) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, str]]]:
    """By world, what making took on each side, and why a side was left out."""
    found: dict[int, dict[str, float]] = {}
    left_out: dict[int, dict[str, str]] = {}
    _run_once()
    for ranks in sizes:
        took: dict[str, list[float]] = defaultdict(list)
        before = max(found, default=0)
        left_out[ranks] = {
            side: f"over {longest:g} s"
            for side in present()
            if before and found[before].get(side, longest) * ranks / before > longest
        }
        for number in range(repetitions):
            for side, make in present().items():
                if side not in left_out[ranks] and (number == 0 or sum(took[side]) < ENOUGH):
                    took[side].append(_timed(make, f"timed {ranks} {number}", box(ranks), ranks))
        found[ranks] = medians(took)
    return found, left_out


def _timed(make: Any, name: str, sizes: dict[str, int], ranks: int) -> float:
    with dry.world(ranks):
        gc.collect()  # no side pays for what another left
        start = time.perf_counter()
        made = make(name, sizes)
        took = time.perf_counter() - start
        made.close()
    return took


def _same_groups(repetitions: int, small: int, large: int) -> Figure:
    """Groups of the same sizes in a small world and in a large one."""

    class WithMore:
        def __init__(self, name: str, sizes: dict[str, int]) -> None:
            self.mesh = ProcessGroupMesh(name=name, **sizes)
            self.groups = [self.mesh.group(*axes) for axes in FAMILIES]

        def close(self) -> None:
            self.mesh.close()

    took: dict[int, list[float]] = {small: [], large: []}
    for number in range(3 * repetitions):
        for ranks, each in took.items():
            each.append(_timed(WithMore, f"same {number}", {"more": ranks // small, **box(small)}, ranks))
    grown = {OURS: median(took[large]) / median(took[small])}
    return Figure(f"growth where groups stay as they are at {small:,}", grown, "x", (Wish(most=1.5),))


def _held_by_a_mesh(ranks: int) -> float:
    """The bytes that Python holds for a mesh, counted: they do not depend on the machine."""
    with dry.world(ranks):
        ProcessGroupMesh(**box(ranks), name="first").close()
        gc.collect()
        tracemalloc.start()
        mesh = ProcessGroupMesh(**box(ranks), name="weighed")
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        mesh.close()
    return held


def _memory(repetitions: int = 2, ranks: int = 65_536) -> list[Figure]:
    sides = [
        side for side in present() if side not in ("Megatron-Core", "all blocks")
    ]  # which take long, and it is known
    grew: dict[str, list[float]] = defaultdict(list)
    for _ in range(repetitions):
        for side in sides:
            grew[side] += spawn(growth_of, 1, side, ranks, timeout=DEADLINE)
    huge = {OURS: spawn(growth_of, 1, OURS, 1_048_576, timeout=DEADLINE)[0]}
    return [
        Figure(f"memory with groups, one rank of {ranks:,}", medians(grew), "B", (Wish(most=NO_GROWTH),)),
        Figure("memory with groups, one rank of 1,048,576", huge, "B"),
    ]


def growth_of(side: str, ranks: int) -> float:
    """In a fresh process: the bytes by which making has its resident set grow."""
    make = present()[side]
    with dry.world(64):
        make("first", box(64)).close()
    with dry.world(ranks):
        gc.collect()
        before = _resident()
        made = make("weighed", box(ranks))
        gc.collect()
        grown = _resident() - before
        made.close()
    return grown


def _run_once() -> None:
    for make in present().values():
        with dry.world(64):
            make("first", box(64)).close()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
