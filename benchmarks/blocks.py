"""Every block of the six families of a large mesh, without processes: who is in a group with whom."""

from __future__ import annotations

import gc
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from benchmarks.report import OURS, Figure, Wish, medians
from benchmarks.sides import FAMILIES, absent, grid, quietly
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
    return [Figure(f"{RANKS:,} ranks: {what}", medians(each), wishes=wishes[what]) for what, each in took.items()]


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
