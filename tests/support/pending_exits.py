"""Processes that end while an asynchronous first collective is pending: many small worlds, a few at a time.

``python -m tests.support.pending_exits PORT FOLDER SECONDS`` reads the cases from its standard input, and prints how
they ended. It imports torch once, and forks all ranks before anything is started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import signal
import subprocess
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
from pgmesh.groups.group import find_group
from tests.support.faults import WAIT_TIMEOUT, read_result, wait_until, write_result
from tests.support.programs import clean_env, is_running, wait_until_gone
from tests.support.worlds import STARVED

STATUS = 7
DEADLINE = 240.0 if STARVED else 45.0  # seconds, for one world; a passive side of a pair waits for five timeouts
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


class Ended(NamedTuple):
    """The exit statuses of all ranks, the seconds until the first one had ended, and the outputs if one is wrong.

    The seconds are -1 if the first rank ended after the others.
    """

    statuses: list[int]
    seconds: float
    outputs: list[str]

    def problem(self, case: Case) -> str:
        """What is wrong; "" if nothing is."""
        right = [case.status] + [0] * (case.size - 1)
        late = case.misses_members and not 0 <= self.seconds < LATE
        return f"{case}: {self}" if self.statuses != right or late else ""


def all_cases(times: int) -> list[Case]:
    """All ways to end, at all moments, and under all methods; each so often."""
    ways = [
        (end, moment, size, under)
        for end, moment, under in itertools.product(ENDS, MOMENTS, UNDER)
        for size in MOMENTS[moment]
    ]
    return [Case(*way, DELAYS[(time + i) % len(DELAYS)]) for time in range(times) for i, way in enumerate(ways)]


def chosen_cases() -> list[Case]:
    """Each way to end alone, at all moments, in the smallest world; under each method, with all members missing."""
    return [
        case
        for case in all_cases(1)
        if case.size == MOMENTS[case.moment][0] and (case.under == "alone" or case.moment == "no member")
    ]


def run_cases(cases: Sequence[Case], folder: Path, seconds: float) -> list[Ended]:
    """Run the world of each case, and begin none after some seconds; in the order of the cases."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "tests.support.pending_exits", f"{store.port}", f"{folder}", f"{seconds}"]
    given = json.dumps(cases)
    done = subprocess.run(
        command, input=given, env=clean_env(OMP_NUM_THREADS="1"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [Ended(*each) for each in json.loads(done.stdout.splitlines()[-1])]


# ---- inside a rank ----


def pending_collective(mesh: ProcessGroupMesh, case: Case) -> Any:
    """Enter the first collective of a group, asynchronously, and return what it has to be waited for by."""
    if case.under == "FSDP":
        return sharded(mesh).unshard(async_op=True)
    return dist.all_reduce(torch.ones(4), group=group_of(mesh, case), async_op=True)


_models: dict[ProcessGroupMesh, Any] = {}


def sharded(mesh: ProcessGroupMesh) -> Any:
    """A sharded model. It makes the group, and does not use it."""
    if mesh not in _models:
        _models[mesh] = fully_shard(torch.nn.Linear(8, 8), mesh=mesh.device_mesh("dp"))
    return _models[mesh]


def group_of(mesh: ProcessGroupMesh, case: Case) -> Any:
    """The group of the collective."""
    if case.under == "FSDP":
        sharded(mesh)
        return mesh.group("dp")
    return mesh.group("dp", tag="pending")


def wait_until_connected(mesh: ProcessGroupMesh, case: Case) -> None:
    """Wait until the pairs of the group are started."""
    record = find_group(group_of(mesh, case).group_name)
    assert record is not None
    wait_until(lambda: record.store.own_operations, "the pairs are started")


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


def run_rank(case: Case, rank: int, number: int, port: int, folder: Path) -> None:
    """One rank of a world. The worlds share a store, and each has a prefix of its own."""
    for descriptor in (1, 2):
        os.dup2(os.open(folder / f"{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.enable()
    store = dist.PrefixStore(f"{number}", dist.TCPStore("127.0.0.1", port))
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
            wait_until_connected(mesh, case)
            dist.barrier()
        (leave if rank == 0 else stay)(mesh, case, folder)


# ---- the parent ----


class Running(NamedTuple):
    """A world that runs, and when it has to be done."""

    number: int
    pids: list[int]
    folder: Path
    until: float


def start(case: Case, number: int, port: int, folder: Path) -> Running:
    """Fork the ranks of a world."""
    mine = folder / f"{number}"
    mine.mkdir()
    pids = []
    for rank in range(case.size):
        pid = os.fork()
        if pid == 0:
            run_rank(case, rank, number, port, mine)
            sys.exit(0)
        pids.append(pid)
    return Running(number, pids, mine, time.monotonic() + DEADLINE)


def result(world: Running, statuses: dict[int, int], case: Case) -> Ended:
    """How a world has ended, whose processes are gone."""
    gone = world.folder / "gone"
    seconds = json.loads(gone.read_text())[0] if gone.exists() else -1.0
    ended = Ended([statuses[pid] for pid in world.pids], seconds, [])
    if not ended.problem(case):
        return ended
    return ended._replace(outputs=[(world.folder / f"{rank}").read_text() for rank in range(case.size)])


def main(port: int, folder: Path, seconds: float) -> None:
    cases = [Case(*each) for each in json.load(sys.stdin)]
    gc.collect()
    gc.freeze()  # what was imported is not looked through at each end
    end = time.monotonic() + seconds
    waiting, running = list(enumerate(cases)), dict[int, Running]()
    statuses, ended = dict[int, int](), dict[int, Ended]()
    while running or (waiting and time.monotonic() < end):
        while waiting and len(running) < AT_ONCE and time.monotonic() < end:
            number, case = waiting.pop(0)
            running[number] = start(case, number, port, folder)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.005)
        for world in [*running.values()]:
            if all(pid in statuses for pid in world.pids):
                ended[world.number] = result(running.pop(world.number), statuses, cases[world.number])
            elif time.monotonic() > world.until:
                running[world.number] = world._replace(until=time.monotonic() + 5.0)
                for pid in world.pids:
                    if pid not in statuses:
                        os.kill(pid, signal.SIGABRT)  # which has it say where it stands
    print(json.dumps([ended[number] for number in sorted(ended)]))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
