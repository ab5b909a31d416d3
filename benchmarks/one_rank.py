"""Benchmark of one rank of a large world, on the fake backend: time and memory of a mesh and six kinds of groups.

Time: all sides take turns, and each repetition has a new world, after a warm-up in a small one. A peer whose
extrapolated time exceeds ``LONGEST`` is left out.
Memory: each repetition has a new process, which reads its resident set before and after. The bytes that Python
allocates for a mesh are counted too.
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

from benchmarks import fake
from benchmarks.report import OURS, Figure, Target, medians
from benchmarks.sides import FAMILIES, compared_sizes, present
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
    targets = {65_536: (Target(1000, "DeviceMesh"),), 1_048_576: (Target(most=10e-3),)}
    found = [
        Figure(f"one rank of {ranks:,}", took[ranks], targets=targets.get(ranks, ()), left_out=left_out[ranks])
        for ranks in sizes
    ]
    first, last = took[sizes[0]], took[sizes[-1]]
    grown = {side: last[side] / first[side] for side in last}
    found.append(Figure(f"growth from {sizes[0]:,} to {sizes[-1]:,}", grown, "x"))
    found.append(_same_groups(repetitions, sizes[0], sizes[-1]))
    held = {ranks: {OURS: _held_by_a_mesh(ranks)} for ranks in (sizes[0], sizes[-1])}
    limit = Target(most=held[sizes[0]][OURS] + 256)
    found.append(Figure(f"a mesh without groups, {sizes[0]:,} ranks", held[sizes[0]], "B"))
    found.append(Figure(f"a mesh without groups, {sizes[-1]:,}", held[sizes[-1]], "B", (limit,)))
    return [*found, *_memory()] if len(sizes) > 2 and os.path.exists("/proc/self/statm") else found


def seconds(
    repetitions: int, sizes: tuple[int, ...], longest: float
) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, str]]]:
    """Seconds of creation by world and side, and the reasons why sides were left out."""
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
                    took[side].append(_timed(make, f"timed {ranks} {number}", compared_sizes(ranks), ranks))
        found[ranks] = medians(took)
    return found, left_out


def _timed(make: Any, name: str, sizes: dict[str, int], ranks: int) -> float:
    with fake.world(ranks):
        gc.collect()  # no side pays for the garbage of another
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
            each.append(_timed(WithMore, f"same {number}", {"more": ranks // small, **compared_sizes(small)}, ranks))
    grown = {OURS: median(took[large]) / median(took[small])}
    return Figure(f"growth where groups stay as they are at {small:,}", grown, "x", (Target(most=1.5),))


def _held_by_a_mesh(ranks: int) -> float:
    """Bytes that Python allocates for a mesh. They do not depend on the machine."""
    with fake.world(ranks):
        ProcessGroupMesh(**compared_sizes(ranks), name="first").close()
        gc.collect()
        tracemalloc.start()
        mesh = ProcessGroupMesh(**compared_sizes(ranks), name="weighed")
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
        Figure(f"memory with groups, one rank of {ranks:,}", medians(grew), "B", (Target(most=NO_GROWTH),)),
        Figure("memory with groups, one rank of 1,048,576", huge, "B"),
    ]


def growth_of(side: str, ranks: int) -> float:
    """Growth of the resident set by the creation of a mesh and its groups, in bytes. Call it in a new process."""
    make = present()[side]
    with fake.world(64):
        make("first", compared_sizes(64)).close()
    with fake.world(ranks):
        gc.collect()
        before = _resident()
        made = make("weighed", compared_sizes(ranks))
        gc.collect()
        grown = _resident() - before
        made.close()
    return grown


def _run_once() -> None:
    for make in present().values():
        with fake.world(64):
            make("first", compared_sizes(64)).close()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
