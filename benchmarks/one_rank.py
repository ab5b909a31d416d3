"""One rank of a huge world, on the fake backend: what a mesh and its six families of groups cost it.

Time: the sides take turns, each repetition in a world of its own; a small world beforehand has run the code of both.
Memory: each repetition in a fresh process, which looks at its resident set before and after.
"""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from statistics import median

from benchmarks import dry
from benchmarks.report import Figure, medians
from benchmarks.sides import SIDES
from pgmesh.launch import spawn

RANKS = 65_536
NO_GROWTH = 1 << 20  # bytes: as near to none as a resident set, which counts pages of all kinds, can tell
DEADLINE = timedelta(seconds=60)


def figures(repetitions: int) -> list[Figure]:
    time_figure = Figure(f"one rank of {RANKS:,}, six families made", *medians(seconds(repetitions)), asked=500)
    if not os.path.exists("/proc/self/statm"):
        return [time_figure]

    def grown(side: str, ranks: int) -> float:
        (growth,) = spawn(growth_of, 1, side, ranks, timeout=DEADLINE)
        return growth

    grew = [{side: grown(side, RANKS) for side in SIDES} for _ in range(repetitions)]
    ours, theirs = (median(each[side] for each in grew) for side in SIDES)
    others = [Figure(f"memory, one rank of {ranks:,}", grown("ours", ranks), None, "B") for ranks in (8_192, 1_048_576)]
    memory_figure = Figure(f"memory, one rank of {RANKS:,}", ours, theirs, "B", limit=NO_GROWTH)
    return [time_figure, memory_figure, *others]


def box(ranks: int) -> dict[str, int]:
    return {"dp": ranks // 64, "pp": 4, "cp": 2, "tp": 8}


def seconds(repetitions: int) -> dict[str, list[float]]:
    """What making took on each side, repetition by repetition."""
    took: dict[str, list[float]] = {side: [] for side in SIDES}
    _run_once()
    for _ in range(repetitions):
        for side, make in SIDES.items():
            with dry.world(RANKS):
                gc.collect()  # neither side pays for what the other left
                start = time.perf_counter()
                made = make("timed", box(RANKS))
                took[side].append(time.perf_counter() - start)
                made.close()
    return took


def growth_of(side: str, ranks: int) -> float:
    """In a fresh process: the bytes by which making has its resident set grow."""
    _run_once()
    with dry.world(ranks):
        gc.collect()
        before = _resident()
        made = SIDES[side]("weighed", box(ranks))
        gc.collect()
        grown = _resident() - before
        made.close()
    return grown


def _run_once() -> None:
    for make in SIDES.values():
        with dry.world(64):
            make("first", box(64)).close()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
