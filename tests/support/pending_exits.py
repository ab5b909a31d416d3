"""Processes that end while an asynchronous first collective is pending: many small worlds, a few at a time."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pgmesh import ProcessGroupMesh
from tests.support.exiting import run_to_exit
from tests.support.faults import WAIT_TIMEOUT, read_result, wait_until, write_result
from tests.support.programs import is_running, wait_until_gone
from tests.support.torch_tables import is_connecting
from tests.support.worlds import STARVED

STATUS = 7
AT_ONCE = 3  # worlds
SHORT, LONG = (60.0, 120.0) if STARVED else (10.0, 30.0)
"""Timeouts of groups in seconds. An exit may last as long if all have made the group, not if members are missing."""
LATE = LONG / 3
"""Seconds after which the end of a process that misses members is certainly late, also on a busy machine."""

ENDS = ("exit", "exception", "close", "release", "destroy", "drop", "signal")
UNDER = ("alone", "DDP", "FSDP")
DELAYS = (0.0, 0.03, 0.3)
"""Seconds between the collective and the end. The pairs of a group are started after 0.25 s."""

MOMENTS: dict[str, tuple[int, ...]] = {
    "no member": (2, 4),
    "one member": (4,),
    "all members": (2, 4),
    "connected": (2, 4),
    "one member in it": (4,),
    "all members in it": (2, 4),
}
"""What the others have done when the first rank ends, by the sizes of worlds in which that can be."""


class Case(NamedTuple):
    """How the first rank of a world ends, what the others have done, the number of ranks, and what it is under."""

    end: str
    moment: str
    size: int
    under: str = "alone"
    delay: float = 0.0

    @property
    def misses_members(self) -> bool:
        return self.moment in ("no member", "one member")

    @property
    def timeout(self) -> float:
        """Timeout of the groups in seconds."""
        return LONG if self.misses_members else SHORT

    @property
    def status(self) -> int:
        """The right exit status of the first rank."""
        return 1 if self.end == "exception" else STATUS


def all_cases(times: int) -> list[Case]:
    """All ways to end, at all moments, and under all methods; each so often."""
    ways = [
        (end, moment, size, under)
        for end, moment, under in itertools.product(ENDS, MOMENTS, UNDER)
        for size in MOMENTS[moment]
    ]
    return [Case(*way, DELAYS[(time + i) % len(DELAYS)]) for time in range(times) for i, way in enumerate(ways)]


def chosen_cases() -> list[Case]:
    """Each way to end alone, in the smallest world, at half of the moments; and under one method, with all missing."""
    small = [case for case in all_cases(1) if case.size == MOMENTS[case.moment][0]]
    alone = [case for case in small if case.under == "alone"]
    missing = [case for case in small if case.moment == "no member"]
    moments = [*MOMENTS]
    return [
        *(case for case in alone if (ENDS.index(case.end) + moments.index(case.moment)) % 2 == 0),
        *(case for case in missing if case.under == ("DDP", "FSDP")[ENDS.index(case.end) % 2]),
    ]


def problems(cases: Sequence[Case], folder: Path, seconds: float) -> tuple[list[str], list[float]]:
    """Run the world of each case, and begin none after some seconds.

    Returns:
        What was wrong in each world; and where members were missing, the seconds until the first rank had ended.
    """
    worlds = {f"{number}": (run_rank, case.size, case, f"{number}") for number, case in enumerate(cases)}
    for name in worlds:
        (folder / name).mkdir()
    found, took = [], []
    for name, ended in run_to_exit(folder, worlds, at_once=AT_ONCE, seconds=seconds, join=False).items():
        case, gone = cases[int(name)], folder / name / "gone"
        seconds = json.loads(gone.read_text())[0] if gone.exists() else -1.0  # it ended after the others
        late = case.misses_members and not 0 <= seconds < LATE
        noise = case.misses_members and case.end != "exception" and any(each.err.strip() for each in ended)
        if late or noise or [each.status for each in ended] != [case.status] + [0] * (case.size - 1):
            found.append(f"{case}: {seconds} s, {ended}")
        took += [seconds] if case.misses_members else []
    return found, took


def pending_collective(mesh: ProcessGroupMesh, case: Case) -> Any:
    """Enter the first collective of a group, asynchronously, and return what it has to be waited for by."""
    if case.under == "FSDP":
        return sharded(mesh).unshard(async_op=True)
    return dist.all_reduce(torch.ones(4), group=group_of(mesh, case), async_op=True)


@functools.cache
def sharded(mesh: ProcessGroupMesh) -> Any:
    """The sharded model of a mesh. It makes the group, and does not use it."""
    return fully_shard(torch.nn.Linear(8, 8), mesh=mesh.device_mesh("dp"))


def group_of(mesh: ProcessGroupMesh, case: Case) -> Any:
    """The group of the collective."""
    if case.under == "FSDP":
        sharded(mesh)
        return mesh.group("dp")
    return mesh.group("dp", tag="pending")


@contextlib.contextmanager
def trained(mesh: ProcessGroupMesh, case: Case) -> Iterator[None]:
    """Hold a model that was trained for a step under DDP, in a group of its own."""
    if case.under != "DDP":
        yield
        return
    model = DistributedDataParallel(torch.nn.Linear(8, 8), process_group=mesh.group("dp"))
    model(torch.ones(2, 8)).sum().backward()
    yield
    del model


def leave(mesh: ProcessGroupMesh, case: Case, folder: Path) -> None:
    """End this process while the collective is pending."""
    work = pending_collective(mesh, case)
    if case.end == "drop":
        del work
        gc.collect()
    if case.end == "signal":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(STATUS))
    time.sleep(case.delay)
    write_result(folder, "leaves", os.getpid(), time.monotonic())
    if case.end == "exception":
        raise ZeroDivisionError("by design")
    if case.end == "close":
        mesh.close()
    if case.end == "release":
        mesh.release("dp")
    if case.end == "destroy":
        dist.destroy_process_group()
    if case.end == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(WAIT_TIMEOUT)
    sys.exit(STATUS)


def stay(mesh: ProcessGroupMesh, case: Case, folder: Path) -> None:
    """End after the first rank, which may wait for this one unless members are missing."""
    takes_part = case.moment == "all members in it" or (case.moment == "one member in it" and mesh.rank == 1)
    work = pending_collective(mesh, case) if takes_part else None
    pid, left_at = read_result(folder, "leaves")
    wait_until_gone([pid], LATE if case.misses_members else 0.3)
    if not is_running(pid) and mesh.rank == 1:
        write_result(folder, "gone", time.monotonic() - left_at)
    del work


def run_rank(given: list[Any], folder: str) -> None:
    """One rank of a world. The worlds share a store, and each has a prefix of its own."""
    case, rank, path = Case(*given), int(os.environ["RANK"]), Path(folder)
    store = dist.PrefixStore(folder, dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"])))
    limit = timedelta(seconds=WAIT_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.size, timeout=limit)
    mesh = ProcessGroupMesh(dp=-1, name="actor")
    mesh.configure("dp", timeout=case.timeout)
    mesh.configure("dp", tag="pending", timeout=case.timeout)
    with trained(mesh, case):
        if not case.misses_members or (case.moment == "one member" and rank == 1):
            group_of(mesh, case)
        dist.barrier()
        if case.moment == "connected":
            wait_until(lambda: not is_connecting(group_of(mesh, case)), "the pairs are started")
            dist.barrier()
        (leave if rank == 0 else stay)(mesh, case, path)
