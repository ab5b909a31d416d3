"""Asking again: what a program does all the time, for a group and for a slice that are there already.

The two sides are timed in turn, round after round, by timeit and with nothing subtracted; a figure is the median over
the rounds.
"""

from __future__ import annotations

from timeit import Timer

from torch.distributed.device_mesh import init_device_mesh

from benchmarks import dry
from benchmarks.report import Figure, medians
from pgmesh import ProcessGroupMesh

SIZES = {"pp": 2, "dp": 2, "tp": 2}


def figures(rounds: int) -> list[Figure]:
    with dry.world(8):
        mesh = ProcessGroupMesh(**SIZES)
        device_mesh = init_device_mesh("cpu", tuple(SIZES.values()), mesh_dim_names=tuple(SIZES))
        group = in_turn(
            Timer('group("tp")', globals={"group": mesh.group}),
            Timer('get_group("tp")', globals={"get_group": device_mesh.get_group}),
            rounds,
        )
        part = in_turn(
            Timer('along("dp", "tp")', globals={"along": mesh.along}),
            Timer('device_mesh["dp", "tp"]', globals={"device_mesh": device_mesh}),
            rounds,
        )
    return [
        Figure('group("tp") again, get_group("tp") again', *group, asked=6),
        Figure('along("dp", "tp") again, device_mesh["dp", "tp"] again', *part, asked=100),
    ]


def in_turn(ours: Timer, theirs: Timer, rounds: int) -> tuple[float, float]:
    """The seconds of one call on each side."""
    timers = {"ours": ours, "theirs": theirs}
    calls = {side: max(1, timer.autorange()[0] // 4) for side, timer in timers.items()}
    took: dict[str, list[float]] = {side: [] for side in timers}
    for _ in range(rounds):
        for side, timer in timers.items():
            took[side].append(timer.timeit(calls[side]) / calls[side])
    return medians(took)
