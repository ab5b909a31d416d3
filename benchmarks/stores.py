"""Benchmark of the store: number of operations on each rank, and capacity of one server.

The counts do not depend on the machine. Peers connect during creation, so their counts include the operations of the
backend. With Gloo these grow with the size of the group, since each member reads the address of every other member.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import OURS, Figure, Target
from benchmarks.sides import FAMILIES, compared_sizes, present
from pgmesh import ProcessGroupMesh
from pgmesh.launch import StoreProcess, spawn
from tests.support.board import faults
from tests.support.torch_tables import c10d, record_operations

DEADLINE = timedelta(seconds=120)
CONNECTED = 5
"""Repetitions of connect. A rank that waits longer for others polls the store more often."""
CLIENTS = 4
OPERATIONS = ("set", "compare_set", "add")


def figures(worlds: list[int], seconds: float) -> list[Figure]:
    found = []
    for ranks in worlds:
        results = spawn(count, ranks, compared_sizes(ranks), timeout=DEADLINE)

        def of_a_group(part: str, results: list[Any] = results) -> dict[str, float]:
            sides = [side for side in present() if (side, part) in results[0]]
            return {side: median(rank[side, part] for rank in results) / len(FAMILIES) for side in sides}

        making, using, connecting = map(of_a_group, ("make", "make and use", "connect"))
        what = f"operations a rank and group, {ranks} ranks"
        found += [
            Figure(f"{what}: made", making, "", (Target(most=1),)),
            Figure(f"{what}: made and used", using, ""),
            Figure(f"{what}: connect, its own", connecting, "", (Target(most=6),)),
        ]
    cost, busy = capacity(seconds)
    return [
        *found,
        Figure(f"one operation, as {CLIENTS} clients see it", {OURS: cost}),
        Figure("one operation, the server's own time", {OURS: busy}),
    ]


def count(sizes: dict[str, int]) -> dict[tuple[str, str], float]:
    """Number of store operations of each side on this rank."""
    counts: dict[tuple[str, str], float] = {}
    counts[OURS, "connect"] = median(connected(f"counted, connect {number}", sizes) for number in range(CONNECTED))
    for side, make in present().items():
        for part in ("make", "make and use"):
            dist.barrier()
            with record_operations() as done, _of_torch_too():  # until the end, since the counter lives no longer
                made = make(f"counted, {part}", sizes)
                if part == "make and use":
                    for group in made.groups:
                        dist.all_reduce(torch.ones(1), group=group)
                    del group
                counts[side, part] = len(done)
                dist.barrier()
                made.close()
                dist.barrier()
    return counts


def connected(name: str, sizes: dict[str, int]) -> int:
    """Number of operations of one call of connect."""
    with ProcessGroupMesh(name=name, **sizes) as mesh, faults() as board:
        dist.barrier()
        mesh.connect(*FAMILIES, timeout=DEADLINE)
        dist.barrier()
    return len(board.requested)


@contextmanager
def _of_torch_too() -> Iterator[None]:
    """Count the operations of torch's new_group too, which takes the store from a private table."""
    table, world = c10d._world.pg_map, dist.group.WORLD
    backend, store = table[world]
    table[world] = (backend, c10d._get_default_store())
    try:
        yield
    finally:
        table[world] = (backend, store)


def capacity(seconds: float) -> tuple[float, float]:
    """Seconds per operation, as measured by several clients, and as CPU time of the server."""
    with StoreProcess() as store:
        before = _busy(store.process.pid)
        done = sum(spawn(ask, CLIENTS, store.port, seconds, timeout=DEADLINE))
        return seconds / done, (_busy(store.process.pid) - before) / done


def ask(port: int, seconds: float) -> int:
    """Number of operations that one client completes in ``seconds``."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.barrier()
    done, end, key = 0, time.monotonic() + seconds, f"rank {dist.get_rank()}"
    while time.monotonic() < end:
        store.set(key, "x" * 64)
        store.compare_set(key, "?", "?")
        store.add(f"{key}, counted", 1)
        done += len(OPERATIONS)
    return done


def _busy(pid: int | None) -> float:
    """CPU seconds of a process; 0 if there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
