"""Benchmark of the blocks of a large mesh, without processes: the ranks of every group of six kinds."""

from __future__ import annotations

import gc
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from benchmarks.report import OURS, Figure, Target, medians
from benchmarks.sides import FAMILIES, absent, grid, import_quietly
from pgmesh import Layout

RANKS = 65_536
SIZES = {"dp": RANKS // 64, "pp": 4, "cp": 2, "tp": 8}
NUMPY = "numpy"


def figures(rounds: int) -> list[Figure]:
    lazily, one_by_one, lists = "its six partitions, the middle block of each", "every block, in turn", "all as lists"
    ways: dict[str, dict[str, Callable[[], Any]]] = {
        lazily: {OURS: _middles},
        one_by_one: {OURS: _each},
        lists: {OURS: _lists},
    }
    if "Megatron-Core" not in absent():
        generator = import_quietly("megatron.core.parallel_state").RankGenerator(
            tp=8, ep=1, dp=RANKS // 64, pp=4, cp=2, order="tp-cp-pp-dp"
        )
        for way in ways.values():  # it can only create all lists
            way["Megatron-Core"] = lambda: [generator.get_ranks("-".join(axes)) for axes in FAMILIES]
    if "HyperCommGrid" not in absent():
        process_grid = grid(SIZES)
        for way in ways.values():
            way["HyperCommGrid"] = lambda: [
                process_grid.get_rank_enum([axis for axis in SIZES if axis in axes]) for axes in FAMILIES
            ]
    try:
        import numpy
    except ImportError:
        pass
    else:
        ways[lists][NUMPY] = lambda: [_with_numpy(numpy, axes).tolist() for axes in FAMILIES]
    _check_same_blocks(ways[lists])
    took: dict[str, dict[str, list[float]]] = {what: defaultdict(list) for what in ways}
    for number in range(rounds):
        for what, way in ways.items():
            for side, make in way.items():
                if number == 0 or sum(took[what][side]) < 2.0:
                    took[what][side].append(_timed(make))
    targets = {
        lazily: (),
        one_by_one: (Target(100, "Megatron-Core"),),
        lists: (Target(1, NUMPY),),
    }
    return [Figure(f"{RANKS:,} ranks: {what}", medians(each), targets=targets[what]) for what, each in took.items()]


def _timed(make: Callable[[], Any]) -> float:
    """Seconds of one call. Garbage collection is disabled, since it would add noise to one side."""
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
    return [deque(layout.partition(*axes), maxlen=1) for axes in FAMILIES]  # keeps only the last block


def _lists() -> Any:
    layout = Layout(**SIZES)
    return [list(layout.partition(*axes)) for axes in FAMILIES]


def _with_numpy(numpy: Any, axes: tuple[str, ...]) -> Any:
    """The blocks as rows of an array."""
    array, outside = numpy.arange(RANKS).reshape(*SIZES.values()), [axis for axis in SIZES if axis not in axes]
    inside = [axis for axis in SIZES if axis in axes]
    dims = [[*SIZES].index(axis) for axis in (*outside, *inside)]
    return array.transpose(dims).reshape(-1, Layout(**SIZES).size(*axes))


def _check_same_blocks(ways: dict[str, Callable[[], Any]]) -> None:
    """Exit if a side returns other blocks than pgmesh."""
    found = {side: [sorted(map(tuple, blocks)) for blocks in make()] for side, make in ways.items()}
    wrong = [side for side, blocks in found.items() if blocks != found[OURS]]
    if wrong:
        raise SystemExit(f"{', '.join(wrong)} returns other blocks than pgmesh, so times cannot be compared")
