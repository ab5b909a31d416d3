"""Tools for tests in which ranks fail: fast heartbeats, waits with a deadline, ranks killed at a chosen moment."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.groups.world import current_world
from pgmesh.launch.spawning import Outcome
from pgmesh.liveness import timing
from pgmesh.liveness.operations import Read, perform
from pgmesh.liveness.statuses import RankStatus, status_key
from tests.support.programs import send_signal
from tests.support.worlds import STARVED, World, check_sums, world

BEAT = 1.0 if STARVED else 0.2
H = BEAT * timing.MISSED_HEARTBEATS  # seconds of silence after which a rank is suspected
NAMED = 0.5  # seconds until a process that has ended is named by ``connect``, on the same host
SLACK = 30.0 if STARVED else 1.0  # seconds that a busy machine may add to any bound
LONG_TIMEOUT = timedelta(seconds=60 if STARVED else 12)  # a deadline that no rank should reach
SEED = os.environ.get("PGMESH_SEED", "0")  # of the chaos runs
CHAOS = "PGMESH_SEED" in os.environ
STATES = 4_000 if CHAOS else 1_000  # a model checker explores a few times as many
WAIT_TIMEOUT = 120.0 if STARVED else 30.0  # seconds, for any wait of a test


class Attempt(NamedTuple):
    """The error that a call raised on this rank, if any, and the times of its start and end."""

    kind: str  # the error's type; "" if there was none
    text: str
    start: float
    end: float

    @property
    def took(self) -> float:
        return self.end - self.start


def attempt(act: Callable[[], Any]) -> Attempt:
    """Call ``act``, and record any error and the time it took."""
    start = time.monotonic()
    try:
        act()
    except BaseException as error:
        return Attempt(type(error).__name__, str(error), start, time.monotonic())
    return Attempt("", "", start, time.monotonic())


def wait_until(condition: Callable[[], Any], what: str, seconds: float = WAIT_TIMEOUT) -> Any:
    """Wait until a condition is true, and return its value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not in {seconds} s"
        time.sleep(0.005)
    return found


def last_status(rank: int) -> RankStatus | None:
    """The last status that a rank has written to the store."""
    return RankStatus.unpack(perform(current_world().store(), Read(status_key(rank))))


def wait_until_waiting(*ranks: int) -> None:
    """Wait until the statuses of these ranks say that they wait in ``connect``."""
    for rank in ranks:
        wait_until(lambda rank=rank: (last := last_status(rank)) and last.pending, f"rank {rank} waits")


def set_flag(folder: Path, name: str) -> None:
    """Create a file that other processes wait for."""
    (folder / name).touch()


def wait_for_flag(folder: Path, name: str) -> None:
    """Wait until another process has created this file."""
    wait_until((folder / name).exists, f"flag {name}")


def wait_for_flags(folder: Path, name: str, ranks: Iterable[int]) -> None:
    """Wait until each of these ranks has created its file of this name."""
    for rank in ranks:
        wait_for_flag(folder, f"{name} {rank}")


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` in a thread during the block, and wait for its end."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(WAIT_TIMEOUT)


def write_result(folder: Path, name: str, *values: Any) -> None:
    """Write values to a file, which other processes see once it is complete."""
    (folder / f"{name}.part").write_text(json.dumps(values))
    (folder / f"{name}.part").rename(folder / name)


def read_result(folder: Path, name: str) -> list[Any]:
    """Wait for the values that another process writes."""
    wait_for_flag(folder, name)
    return list(json.loads((folder / name).read_text()))


def beat_fast() -> None:
    """Shorten the interval of heartbeats."""
    timing.HEARTBEAT = BEAT
    logging.getLogger("pgmesh").addHandler(logging.NullHandler())  # keeps warnings off stderr


def fast_world(n: int) -> World:
    """The shared world of n ranks for tests that call ``beat_fast``, and in which all ranks create the same meshes."""
    return world(n, "fast")


def beat_fast_with_bystander(*but: int) -> ProcessGroupMesh:
    """Shorten the heartbeat interval; return a connected mesh of all ranks except ``but``, which must stay intact."""
    beat_fast()
    return connected_bystander(*but)


def connected_bystander(*but: int) -> ProcessGroupMesh:
    """A connected mesh of all ranks except ``but``, which must stay intact. All ranks send heartbeats then."""
    everyone, me = range(dist.get_world_size()), dist.get_rank()
    beating = ProcessGroupMesh(len(everyone), name="beating")
    beating.connect(timeout=LONG_TIMEOUT)
    wait_until(lambda: last_status(me), "a heartbeat")
    dist.barrier(beating.group())
    bystander = ProcessGroupMesh(-1, ranks=[rank for rank in everyone if rank not in but], name="bystander")
    if bystander.rank in bystander:
        bystander.connect(timeout=LONG_TIMEOUT)
    return bystander


def connect_and_check(mesh: ProcessGroupMesh, *families: Any) -> None:
    mesh.connect(*families, timeout=LONG_TIMEOUT)
    axes = [each if isinstance(each, tuple) else (each,) for each in families or mesh.axes]
    check_sums({f"{each}": (mesh.group(*each), mesh.ranks(*each)) for each in axes})


def kill_self(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Stop processes for the block."""
    for pid in pids:
        send_signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that take the time of the cores for the block. They end with this process too."""
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", loop]))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(5.0)


def results(outcomes: Sequence[Outcome], *but: int) -> list[Any]:
    """Results of all ranks except ``but``; asserts that none of them failed."""
    for outcome in outcomes:
        assert outcome.rank in but or not outcome.error, f"rank {outcome.rank} {outcome.error}\n{outcome.details}"
    return [outcome.result for outcome in outcomes if outcome.rank not in but]
