"""Benchmark of going on without a lost rank, beside torchrun, which starts all ranks again.

Eight processes step on a mesh dp=4, tp=2. One is killed or stopped in the middle of its steps. The survivors shrink the
mesh along dp and go on. Under torchrun, the same steps go on from a checkpoint in memory-backed files. Times are from
the signal until the slowest rank is there. Each step checks its sums.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.report import OURS, Figure, Target
from pgmesh import PgmeshError, ProcessGroupMesh, launch
from pgmesh.groups.world import current_world
from pgmesh.launch.processes import process_context
from pgmesh.liveness import timing

RANKS, VICTIM, SIZES = 8, 3, {"dp": 4, "tp": 2}
STEPS_BEFORE, COUNTED = 5, 20
SECONDS = 60.0
H = timing.HEARTBEAT * timing.MISSED_HEARTBEATS  # seconds of silence after which a rank is lost


def figures(rounds: int) -> list[Figure]:
    killed = [_lose(signal.SIGKILL) for _ in range(rounds)]
    stopped = _lose(signal.SIGSTOP)
    what = f"{RANKS} ranks, one is"
    return [
        Figure(
            f"{what} killed: right sum on the new mesh",
            {OURS: median(each["sum"] for each in killed)},
            "s",
            (Target(most=1.0),),
        ),
        Figure(
            f"{what} killed: next finished step",
            {OURS: median(each["step"] for each in killed), "torchrun": _restart()},
            targets=(Target(most=2.0),),
        ),
        Figure(f"{what} stopped: right sum on the new mesh", {OURS: stopped["sum"]}, targets=(Target(most=H + 2.5),)),
        Figure("store operations a step, without heartbeats", {OURS: _count() / COUNTED}, "", (Target(most=0.0),)),
    ]


# ---- the job ----


def step(mesh: ProcessGroupMesh, weights: torch.Tensor) -> None:
    """One step: some arithmetic, and a checked sum along each axis."""
    total = torch.zeros(RANKS)
    total[mesh.rank] = 1
    weights += 0.01 * (weights @ weights).tanh()
    for axis in ("tp", "dp"):
        dist.all_reduce(total, group=mesh.group(axis))
    if sorted(mesh) != total.nonzero().flatten().tolist():
        raise ArithmeticError(f"the sum is wrong: {total}")


def _survive(rank: int, port: int, watched: bool, events: Any) -> None:
    """Step until the end, on the mesh of the survivors if a rank is lost."""
    torch.set_num_threads(1)
    launch.join("gloo", timeout=SECONDS, replica=rank, replicas=RANKS, host="127.0.0.1", port=port)
    mesh, weights = ProcessGroupMesh(SIZES, name="train"), torch.eye(64)
    mesh.connect("dp", "tp", timeout=SECONDS)
    if watched:
        mesh.abort_when_lost()
    number = 0
    while mesh.rank in mesh:
        try:
            if mesh.shrunk is not None and number == 0:
                total = torch.ones(1)
                dist.all_reduce(total, group=mesh.group())
                if total.item() != len(mesh):
                    raise ArithmeticError(f"the sum is wrong: {total}")
                events.send(("sum", time.monotonic()))
            step(mesh, weights)
            number += 1
            if number == (STEPS_BEFORE if mesh.shrunk is None else 1):
                events.send(("ready" if mesh.shrunk is None else "step", time.monotonic()))
        except (PgmeshError, RuntimeError):
            mesh, number = mesh.shrink("dp", timeout=SECONDS), 0
    signal.pause()


def _lose(sent: signal.Signals) -> dict[str, float]:
    """Seconds from a signal to a rank until the survivors' first sum and first step on the new mesh."""
    context: Any = process_context()
    with launch.StoreProcess() as store:
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        ranks = [
            context.Process(target=_survive, args=(rank, store.port, sent == signal.SIGSTOP, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for process in ranks:
                process.start()
            for mine, _ in pipes:
                _receive(mine, "ready")
            time.sleep(2 * timing.HEARTBEAT)  # each rank has heard of the next one
            start = time.monotonic()
            os.kill(ranks[VICTIM].pid, sent)
            dropped = VICTIM // SIZES["tp"]
            left = [mine for rank, (mine, _) in enumerate(pipes) if rank // SIZES["tp"] != dropped]
            return {what: max(_receive(mine, what) for mine in left) - start for what in ("sum", "step")}
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()


def _receive(pipe: Any, expected: str) -> float:
    if not pipe.poll(SECONDS):
        raise TimeoutError(f"a rank was not done in {SECONDS:g} s: {expected}")
    what, moment = pipe.recv()
    if what != expected:
        raise RuntimeError(f"a rank sent {what!r}, not {expected!r}")
    return float(moment)


# ---- torchrun ----


def _restart() -> float:
    """Seconds from the kill of a rank under torchrun until all ranks, started again, have finished a step."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += ["--max-restarts", "1", "--monitor-interval", "0.1", "-m", "benchmarks.elastic", folder]
        # A store of its own for each restart: Gloo would connect to the addresses of the ranks before.
        env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        job = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            first = [_wait_for(Path(folder, f"0.{rank}")) for rank in range(RANKS)]
            start = time.monotonic()
            os.kill(int(first[VICTIM].split()[0]), signal.SIGKILL)
            again = [_wait_for(Path(folder, f"1.{rank}")) for rank in range(RANKS)]
            return max(float(text.split()[1]) for text in again) - start
        finally:
            job.terminate()  # it ends its ranks
            job.wait(SECONDS)


def _wait_for(path: Path) -> str:
    end = time.monotonic() + 2 * SECONDS
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"torchrun's ranks were not done in {2 * SECONDS:g} s")
        time.sleep(0.01)
    return path.read_text()


def _step_under_torchrun(folder: Path) -> None:
    """Step, save a checkpoint after each step, and say so after the first ones. Runs on each rank."""
    torch.set_num_threads(1)
    with launch.join("gloo"):
        mesh, weights = ProcessGroupMesh(SIZES, name="train"), torch.eye(64)
        saved = folder / f"weights.{mesh.rank}"
        number, restart = 0, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if saved.exists():
            weights = torch.load(saved)
        while True:
            step(mesh, weights)
            torch.save(weights, folder / f"new weights {mesh.rank}")
            (folder / f"new weights {mesh.rank}").rename(saved)  # whole, whenever a rank is killed
            number += 1
            if number == (1 if restart else STEPS_BEFORE):
                new = folder / f"new {mesh.rank}"
                new.write_text(f"{os.getpid()} {time.monotonic()}")
                new.rename(folder / f"{restart}.{mesh.rank}")


# ---- counting ----


def _count() -> float:
    """Store operations of one rank in some steps, without heartbeats."""
    return max(launch.spawn(_counted, RANKS, timeout=2 * SECONDS))


def _counted() -> int:
    mesh, weights = ProcessGroupMesh(SIZES, name="train"), torch.eye(64)
    mesh.connect("dp", "tp")
    world = current_world()
    store = mock.Mock(wraps=world.store())
    with mock.patch.object(world, "store", return_value=store):
        for _ in range(COUNTED):
            step(mesh, weights)
    dist.barrier()
    return len(store.method_calls)


if __name__ == "__main__":
    _step_under_torchrun(Path(sys.argv[1]))
