"""Benchmark of the start: imports, and joining a world of many ranks.

Imports are timed in new processes: ``pgmesh`` without other imports, and the modules that create groups after an import
of torch. All sides have compiled bytecode, as after an installation by pip; pgmesh is copied and compiled for it.
Joining is timed from the moment at which all processes are ready until the slowest one is done. Each side has separate
processes.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pgmesh
from benchmarks.report import OURS, Figure, Target, medians
from benchmarks.sides import FLOOR, absent, compared_sizes, sides_with_floor
from pgmesh.launch.processes import PRELOAD
from pgmesh.launch.spawning import FAILURE_GRACE, LocalWorld, pack_call, unwrap_results

PRELOAD.append("benchmarks.starting")  # a rank of each side would import it while it joins

DEADLINE = timedelta(seconds=120)
TIMED = """
import sys, time
{before}
start = time.perf_counter()
{what}
print(time.perf_counter() - start)
"""
ALONE = "init_process_group"


def figures(rounds: int, ranks: int) -> list[Figure]:
    return [*_import_figures(rounds), *_join_figures(ranks, min(rounds, 3))]


def _import_figures(rounds: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as home:
        shutil.copytree(Path(pgmesh.__file__).parent, Path(home, "pgmesh"))
        if not compileall.compile_dir(home, quiet=1):
            raise SystemExit("pgmesh does not compile")
        return _imports_from(home, rounds)


def _imports_from(home: str, rounds: int) -> list[Figure]:
    ours = ("", "import pgmesh")
    beyond = {
        OURS: ("import torch", "from pgmesh import ProcessGroupMesh"),
    }
    if rounds > 1 and "Megatron-Core" not in absent():
        beyond["Megatron-Core"] = ("import torch", "import megatron.core.parallel_state")
    took: dict[str, dict[str, list[float]]] = {"first": defaultdict(list), "beyond": defaultdict(list)}
    for number in range(rounds):
        took["first"][OURS].append(_in_a_fresh_process(home, *ours))
        for side, words in beyond.items():
            if number < 2 or side == OURS:
                took["beyond"][side].append(_in_a_fresh_process(home, *words))
    return [
        Figure("import pgmesh, beyond Python", medians(took["first"]), targets=(Target(most=30e-3),)),
        Figure(
            "import of what makes groups, beyond torch",
            medians(took["beyond"]),
            targets=(Target(most=30e-3),),
            left_out={"DeviceMesh": "is torch's"},
        ),
    ]


def _in_a_fresh_process(home: str, before: str, what: str) -> float:
    """Seconds of an import in a new Python process, started in this folder so that it is searched first."""
    script = TIMED.format(before=before, what=what)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=home, capture_output=True, text=True, timeout=60, check=True
    )
    return float(run.stdout)


# ---- joining a world ----


class ReadyWorld(LocalWorld):
    """A world whose ranks are started in advance and begin a call at the same time."""

    def run(self, *call: Any) -> tuple[float, list[Any]]:
        """time.monotonic() of the start of a call, and the results of all ranks."""
        for rank in self.ranks:
            if not rank.call_pipe.poll(60.0):
                raise TimeoutError(f"rank {rank.rank} did not start")
        start = time.monotonic()
        return start, unwrap_results(
            self.gather([pack_call(call[0], call[1:])] * len(self.ranks), DEADLINE.total_seconds(), grace=FAILURE_GRACE)
        )


def _join_figures(ranks: int, rounds: int) -> list[Figure]:
    joined: dict[str, list[float]] = defaultdict(list)
    used: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        joined[ALONE].append(_time_plain_join(ranks))
        for side in (OURS, "DeviceMesh", "HyperCommGrid", FLOOR):
            if side in sides_with_floor():
                with ReadyWorld(ranks, timeout=DEADLINE) as world:
                    start, moments = world.run(_use, side, compared_sizes(ranks))
                used[side].append(max(moment[1] for moment in moments) - start)
                if side == OURS:
                    joined[OURS].append(max(moment[0] for moment in moments) - start)
    targets = (Target(most=1.1, against=FLOOR),)
    return [
        Figure(f"{ranks} ranks join a world", medians(joined)),
        Figure(f"{ranks} ranks join, make six combinations, use each", medians(used), targets=targets),
    ]


def _use(side: str, sizes: dict[str, int]) -> tuple[float, float]:
    """time.monotonic() after joining, and after a collective on every group. Runs on each rank."""
    joined = time.monotonic()
    made = sides_with_floor()[side]("started", sizes)
    sums = [torch.ones(1) for _ in made.groups]
    for group, ones in zip(made.groups, sums):
        dist.all_reduce(ones, group=group)
    done = time.monotonic()
    if any(int(ones) != group.size() for group, ones in zip(made.groups, sums)):
        raise ArithmeticError("a sum is wrong")
    dist.barrier()
    del group
    made.close()
    return joined, done


def _time_plain_join(ranks: int) -> float:
    """Seconds of init_process_group of torch, in processes that are started in advance."""
    from pgmesh.launch.processes import process_context

    processes, store = process_context(), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [processes.Pipe() for _ in range(ranks)]
    started = [
        processes.Process(target=_plain_join, args=(rank, ranks, store.port, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for process in started:
            process.start()
        mine = [pipe for pipe, _ in pipes]
        for pipe in mine:
            if not pipe.poll(60.0):
                raise TimeoutError("a process did not start")
            pipe.recv()
        start, ends = time.monotonic(), []
        for pipe in mine:
            pipe.send(None)
        waiting = set(mine)
        while waiting:
            ready = wait(list(waiting), timeout=DEADLINE.total_seconds())
            if not ready:
                raise TimeoutError(f"{len(waiting)} processes did not join")
            for pipe in ready:
                ends.append(pipe.recv())
                waiting.discard(pipe)
        for pipe in mine:
            pipe.send(None)
        for process in started:
            process.join(10.0)
        return max(ends) - start
    finally:
        for process in started:
            process.kill()


def _plain_join(rank: int, ranks: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    pipe.send(None)
    pipe.recv()
    dist.init_process_group("gloo", timeout=DEADLINE)
    pipe.send(time.monotonic())
    pipe.recv()
    dist.destroy_process_group()
