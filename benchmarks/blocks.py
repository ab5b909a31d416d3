"""Every block of the six families of a large mesh, without processes: who is in a group with whom."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.report import OURS, Figure, Wish, medians
from benchmarks.sides import FAMILIES, absent, grid, quietly
from pgmesh import Layout, plan

RANKS = 65_536
SIZES = {"dp": RANKS // 64, "pp": 4, "cp": 2, "tp": 8}
HUGE = 1_048_576
NUMPY = "numpy"


def figures(rounds: int) -> list[Figure]:
    lazily, one_by_one, lists = "its six partitions, the middle block of each", "every block, in turn", "all as lists"
    ways: dict[str, dict[str, Callable[[], Any]]] = {
        lazily: {OURS: _middles},
        one_by_one: {OURS: _each},
        lists: {OURS: _lists},
    }
    if "Megatron-Core" not in absent():
        generator = quietly("megatron.core.parallel_state").RankGenerator(
            tp=8, ep=1, dp=RANKS // 64, pp=4, cp=2, order="tp-cp-pp-dp"
        )
        for way in ways.values():  # it has one way, which makes all lists
            way["Megatron-Core"] = lambda: [generator.get_ranks("-".join(axes)) for axes in FAMILIES]
    if "HyperCommGrid" not in absent():
        box = grid(SIZES)
        for way in ways.values():
            way["HyperCommGrid"] = lambda: [
                box.get_rank_enum([axis for axis in SIZES if axis in axes]) for axes in FAMILIES
            ]
    try:
        import numpy
    except ImportError:
        pass
    else:
        ways[lists][NUMPY] = lambda: [_with_numpy(numpy, axes).tolist() for axes in FAMILIES]
    _see_that_all_agree(ways[lists])
    took: dict[str, dict[str, list[float]]] = {what: defaultdict(list) for what in ways}
    for number in range(rounds):
        for what, way in ways.items():
            for side, make in way.items():
                if number == 0 or sum(took[what][side]) < 2.0:
                    took[what][side].append(_timed(make))
    wishes = {
        lazily: (),
        one_by_one: (Wish(100, "Megatron-Core"),),
        lists: (Wish(1, NUMPY),),
    }
    found = [Figure(f"{RANKS:,} ranks: {what}", medians(each), wishes=wishes[what]) for what, each in took.items()]
    return [*found, *_plans(rounds)]


def _plans(rounds: int) -> list[Figure]:
    """A plan of a million ranks on hosts of 8, printed."""

    def make() -> str:
        return str(plan(Layout(dp=HUGE // 64, pp=4, cp=2, tp=8), nodes=f"{HUGE // 8}x8"))

    took = [_timed(make) for _ in range(rounds)]
    tracemalloc.start()
    make()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return [
        Figure(f"plan of {HUGE:,} ranks", {OURS: median(took)}),
        Figure("the most memory that it takes", {OURS: most}, "B"),
        *_command(),
    ]


def _command() -> list[Figure]:
    """The same on the command line: a process of its own, from its start to its end."""
    words = [f"dp={HUGE // 64}", "pp=4", "cp=2", "tp=8", "--nodes", f"{HUGE // 8}x8"]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "pgmesh", "plan", *words], stdout=subprocess.DEVNULL, check=True, timeout=60)
    return [Figure("the same on the command line", {OURS: time.perf_counter() - start})]


def _timed(make: Callable[[], Any]) -> float:
    """The seconds of one call. No garbage is collected meanwhile: it would fall to one side by chance."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        made = make()
        took = time.perf_counter() - start
        del made
    finally:
        gc.enable()
    return took


def _middles() -> Any:
    partitions = [Layout(**SIZES).partition(*axes) for axes in FAMILIES]
    return [partition[len(partition) // 2] for partition in partitions]


def _each() -> Any:
    layout = Layout(**SIZES)
    return [deque(layout.partition(*axes), maxlen=1) for axes in FAMILIES]  # which keeps the last alone


def _lists() -> Any:
    layout = Layout(**SIZES)
    return [list(layout.partition(*axes)) for axes in FAMILIES]


def _with_numpy(numpy: Any, axes: tuple[str, ...]) -> Any:
    """The blocks as the rows of an array."""
    box, order = numpy.arange(RANKS).reshape(*SIZES.values()), [axis for axis in SIZES if axis not in axes]
    inside = [axis for axis in SIZES if axis in axes]
    place = [*SIZES]
    return box.transpose([place.index(axis) for axis in (*order, *inside)]).reshape(-1, Layout(**SIZES).size(*axes))


def _see_that_all_agree(ways: dict[str, Callable[[], Any]]) -> None:
    """What is timed is right: each side has the same blocks."""
    found = {side: [sorted(map(tuple, blocks)) for blocks in make()] for side, make in ways.items()}
    wrong = [side for side, blocks in found.items() if blocks != found[OURS]]
    if wrong:
        raise SystemExit(f"{', '.join(wrong)} has other blocks than pgmesh: nothing that follows would mean anything")
