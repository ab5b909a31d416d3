"""What groups ask of the world's store: operations counted on every rank, and how many one server can do.

The counts do not depend on the machine. A peer connects as it makes, so what it asks for is its backend's too; with
Gloo that grows with the group, whoever makes it, since each member reads the address of every other.
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

from benchmarks.report import OURS, Figure, Wish
from benchmarks.sides import FAMILIES, box, present
from pgmesh import ProcessGroupMesh
from pgmesh.launch import StoreProcess, spawn
from tests.support.torch_tables import c10d, record_operations

DEADLINE = timedelta(seconds=120)
CONNECTED = 5
"""How many times connect is counted: who waits looks more often where the others come late."""
CLIENTS = 4
OPERATIONS = ("set", "compare_set", "add")


def figures(worlds: list[int], seconds: float) -> list[Figure]:
    found = []
    for ranks in worlds:
        told = spawn(count, ranks, box(ranks), timeout=DEADLINE)

        def of_a_group(part: str, told: list[Any] = told) -> dict[str, float]:
            sides = [side for side in present() if (side, part) in told[0]]
            return {side: median(rank[side, part] for rank in told) / len(FAMILIES) for side in sides}

        making, using, connecting = map(of_a_group, ("make", "make and use", "connect"))
        what = f"operations a rank and group, {ranks} ranks"
        found += [
            Figure(f"{what}: made", making, "", (Wish(most=1),)),
            Figure(f"{what}: made and used", using, ""),
            Figure(f"{what}: connect, its own", connecting, "", (Wish(most=6),)),
        ]
    cost, busy = capacity(seconds)
    return [
        *found,
        Figure(f"one operation, as {CLIENTS} clients see it", {OURS: cost}),
        Figure("one operation, the server's own time", {OURS: busy}),
    ]


def count(sizes: dict[str, int]) -> dict[tuple[str, str], float]:
    """On every rank: the operations that each side asks of the store, in all."""
    counts: dict[tuple[str, str], float] = {}
    counts[OURS, "connect"] = median(connected(f"counted, connect {number}", sizes) for number in range(CONNECTED))
    for side, make in present().items():
        for part in ("make", "make and use"):
            dist.barrier()
            with record_operations() as done, _of_torch_too():  # to the end: what counts lives no longer
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
    """The operations of one call of connect."""
    with ProcessGroupMesh(name=name, **sizes) as mesh:
        dist.barrier()
        asked = mesh.connect(*FAMILIES, timeout=DEADLINE).operations
        dist.barrier()
    return asked


@contextmanager
def _of_torch_too() -> Iterator[None]:
    """torch's new_group finds the world's store in a table of its own: it finds the one that counts there."""
    table, world = c10d._world.pg_map, dist.group.WORLD
    backend, store = table[world]
    table[world] = (backend, c10d._get_default_store())
    try:
        yield
    finally:
        table[world] = (backend, store)


def capacity(seconds: float) -> tuple[float, float]:
    """Seconds for an operation: as many clients at once have them done, and as the server's own clock counts them."""
    with StoreProcess() as store:
        before = _busy(store.process.pid)
        done = sum(spawn(ask, CLIENTS, store.port, seconds, timeout=DEADLINE))
        return seconds / done, (_busy(store.process.pid) - before) / done


def ask(port: int, seconds: float) -> int:
    """One client: how many operations it had done in that time."""
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
    """The processor's time that a process took, where Linux tells."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
