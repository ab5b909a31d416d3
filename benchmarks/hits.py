"""Benchmark of repeated calls, for groups, indices and slices that exist already.

All sides are timed by timeit, one after the other in each round, without corrections. A figure is the median over all
rounds. A dict look-up is timed too, as the lower bound on this machine and Python.
"""

from __future__ import annotations

from collections import defaultdict
from timeit import Timer
from typing import Any

from benchmarks import fake
from benchmarks.report import OURS, Figure, Target, medians
from benchmarks.sides import present
from pgmesh import ProcessGroupMesh

SIZES = {"dp": 2, "pp": 2, "cp": 2, "tp": 2}
DICT = "a dict"
NANOSECONDS = 34.0
"""Time of a dict look-up on the reference machine. Targets are multiples of it."""
ROUND = 4e-3
"""Seconds of one round of a side."""


def figures(rounds: int) -> list[Figure]:
    with fake.world(16):
        mesh = ProcessGroupMesh(**SIZES)
        made = {name: side(f"hits of {name}", SIZES) for name, side in present().items() if name != OURS}
        device_mesh = made["DeviceMesh"].mesh  # type: ignore[attr-defined]
        known = {"mesh": mesh, "device_mesh": device_mesh, "table": {("cp", "tp"): 1}}
        flat = device_mesh["cp", "tp"]
        grid, state = (
            getattr(made.get("HyperCommGrid"), "grid", None),
            getattr(made.get("Megatron-Core"), "state", None),
        )
        known |= {"grid": grid, "state": state, "flat": flat}

        def figure(what: str, nanoseconds: float, *targets: Target, **calls: str) -> Figure:
            names = {"ours": OURS, "device_mesh": "DeviceMesh", "grid": "HyperCommGrid", "state": "Megatron-Core"}
            timers = {
                names[side]: call for side, call in calls.items() if known.get(side) is not None or side == "ours"
            }
            values = in_turn({**timers, DICT: 'table["cp", "tp"]'}, known, rounds)
            limit = Target(most=nanoseconds / NANOSECONDS, against=DICT)
            return Figure(f"{what} again", values, targets=(*targets, limit))

        found = [
            figure(
                'group("tp")',
                120,
                Target(8, "DeviceMesh"),
                ours='mesh.group("tp")',
                device_mesh='device_mesh.get_group("tp")',
                grid='grid.get_pg("tp")',
                state="state.get_tensor_model_parallel_group()",
            ),
            figure(
                'group("cp", "tp")',
                160,
                ours='mesh.group("cp", "tp")',
                device_mesh='device_mesh["cp_tp"].get_group()',
                grid='grid.get_pg(["cp", "tp"])',
                state="state.get_tensor_and_context_parallel_group()",
            ),
            figure(
                'index("tp")',
                300,
                ours='mesh.index("tp")',
                device_mesh='device_mesh.get_local_rank("tp")',
                state="state.get_tensor_model_parallel_rank()",
            ),
            figure(
                'size("tp")',
                300,
                ours='mesh.size("tp")',
                device_mesh="device_mesh.size(3)",
                state="state.get_tensor_model_parallel_world_size()",
            ),
            figure(
                'neighbor("pp", +1)',
                300,
                ours='mesh.neighbor("pp", 1)',
                state="state.get_pipeline_model_parallel_next_rank()",
            ),
            figure('along("cp", "tp")', 1500, ours='mesh.along("cp", "tp")', device_mesh='device_mesh["cp", "tp"]'),
            figure("at(pp=1)", 1500, ours="mesh.at(pp=1)"),
        ]
        for side in made.values():
            side.close()
    return found


def in_turn(calls: dict[str, str], known: dict[str, Any], rounds: int) -> dict[str, float]:
    """Seconds of one call on each side."""
    timers = {side: Timer(call, globals=known) for side, call in calls.items()}
    times = {side: max(5, int(ROUND / (timer.timeit(5) / 5 + 1e-8))) for side, timer in timers.items()}
    took: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for side, timer in timers.items():
            took[side].append(timer.timeit(times[side]) / times[side])
    return medians(took)
