"""Ranks killed at random moments: `python -m tests.elastic.chaos [--kills N] [--seed S]`.

Eight real processes train on a mesh of dp=3, tp=2 with two spares. Ranks are killed, stopped or ended at random
moments: of a step, and of the shrink that another fault has caused. After each fault the survivors agree on one mesh,
and every sum is right. A stopped rank goes on afterwards, and is told that it was taken for lost. When too few
ranks are left, all survivors say so, and the next world begins.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from pgmesh import MembershipError, MissingRanksError, ProcessGroupMesh
from pgmesh.launch import StoreProcess
from tests.support.faults import H, beat_fast, set_flag
from tests.support.worlds import fresh_world

RANKS, MEMBERS, DEADLINE = 8, 6, 30.0
AXES = (("tp",), ("dp",), ("dp", "tp"))
DEADLY = (signal.SIGKILL, signal.SIGTERM)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)


def live(folder: Path) -> list[str]:
    """Take steps, and go on after each fault, until there is no mesh any more or the test ends.

    Returns:
        The meshes that this rank was in or saw, by generation.
    """
    beat_fast()
    faulthandler.register(signal.SIGUSR1, (folder / f"stack {dist.get_rank()}").open("w"))
    mesh = ProcessGroupMesh(dp=3, tp=2, ranks=range(MEMBERS), name="train")
    mesh.abort_when_lost()
    if mesh.rank in mesh:
        connect(mesh)
    seen, is_connected = [repr(mesh)], True
    set_flag(folder, f"ready {mesh.rank}")
    while not (folder / "over").exists():
        try:
            if mesh.rank in mesh:
                if not is_connected:
                    connect(mesh)
                    is_connected = True
                step(mesh, folder, len(seen))
                continue
            mesh = mesh.stand_by(timeout=DEADLINE)
        except (RuntimeError, TimeoutError) as error:
            if (folder / "over").exists():
                break
            after = next_mesh(mesh, error)
            if after is None:
                set_flag(folder, f"ended {mesh.rank}")
                break
            mesh = after
        seen.append(repr(mesh))
        is_connected = False
    return seen


def connect(mesh: ProcessGroupMesh) -> None:
    """Connect the groups of all steps."""
    mesh.connect(*AXES, timeout=DEADLINE)


def next_mesh(mesh: ProcessGroupMesh, error: BaseException) -> ProcessGroupMesh | None:
    """The mesh after a fault; None if too few ranks are left."""
    if mesh.rank not in mesh:
        return None if isinstance(error, MissingRanksError) else mesh
    try:
        return mesh.shrink("dp", spares=range(RANKS), timeout=DEADLINE)
    except MembershipError:  # taken for lost
        return mesh.stand_by(timeout=DEADLINE)
    except MissingRanksError as failure:
        if "so nothing is left" in str(failure):
            return None
        raise


def step(mesh: ProcessGroupMesh, folder: Path, generation: int) -> None:
    """Collectives along each axis, each with the right sum."""
    for axes in AXES:
        total = torch.tensor(2.0**mesh.rank, dtype=torch.float64)
        dist.all_reduce(total, group=mesh.group(*axes))
        expected = sum(2.0**rank for rank in mesh.ranks(*axes))
        if total.item() != expected:
            (folder / f"wrong {mesh.rank}").write_text(f"{total.item()} is not {expected} in {mesh!r} along {axes}")
            raise SystemExit(1)
    flag = folder / f"stepped {mesh.rank} {generation}"
    if not flag.exists():
        (folder / f"mesh {generation} {mesh.rank}").write_text(" ".join(map(str, mesh)))
        flag.touch()


class Driver(threading.Thread):
    """Sends the signals of one world, and checks after each that the survivors agree."""

    def __init__(self, folder: Path, pids: Sequence[int], chance: random.Random, faults: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.pids, self.chance, self.faults = folder, pids, chance, faults
        self.dead: set[int] = set()
        self.stopped: set[int] = set()
        self.done: Counter[str] = Counter()
        self.trouble = ""
        self.times: list[float] = []

    def run(self) -> None:
        try:
            self.wait_for([f"ready {rank}" for rank in range(RANKS)], "the start")
            for _ in range(self.faults):
                if not self.strike():
                    break
        except AssertionError as error:
            self.trouble = f"{error}\n{self.stacks()}"
        finally:
            set_flag(self.folder, "over")
            for rank in self.stopped - self.dead:
                os.kill(self.pids[rank], signal.SIGCONT)

    def strike(self) -> bool:
        """One fault, or two at once, at a random moment. False once too few ranks are left."""
        time.sleep(self.chance.uniform(0.0, 0.05))
        victims = self.chance.sample(self.living(), self.chance.choice((1, 1, 1, 2)))
        before, members = self.steps(), self.members()
        start = time.monotonic()
        for victim in victims:
            number = self.chance.choice(SIGNALS)
            os.kill(self.pids[victim], number)
            self.done[number.name] += 1
            (self.dead if number in DEADLY else self.stopped).add(victim)
            time.sleep(self.chance.uniform(0.0, 0.1))  # so that the second one falls into the shrink
        left = self.living()
        if len(left) < 2:
            return False
        if members.isdisjoint(victims):
            return True  # only spares, which nobody misses
        end = time.monotonic() + DEADLINE - 2.0  # before the ranks give up
        while time.monotonic() < end:
            ended = [rank for rank in left if (self.folder / f"ended {rank}").exists()]
            if ended or any(after > before.get(rank, 1) for rank, after in self.steps().items()):
                break
            time.sleep(0.005)
        else:
            raise AssertionError(f"no step in {DEADLINE - 2:g} s after {victims} were lost, of {before}; left: {left}")
        self.times.append(time.monotonic() - start)
        return not ended

    def living(self) -> list[int]:
        return [rank for rank in range(RANKS) if rank not in self.dead | self.stopped]

    def steps(self) -> dict[int, int]:
        """By rank, the last generation in which it has taken a step."""
        found: dict[int, int] = {}
        for path in self.folder.glob("stepped *"):
            _, rank, generation = path.name.split()
            found[int(rank)] = max(found.get(int(rank), 0), int(generation))
        return found

    def stacks(self) -> str:
        """The stacks of the living ranks."""
        for rank in self.living():
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(1.0)
        return "\n".join(f"rank {rank}:\n{(self.folder / f'stack {rank}').read_text()}" for rank in self.living())

    def members(self) -> set[int]:
        """The ranks of the last mesh in which a step was taken."""
        meshes = [path for path in self.folder.glob("mesh *") if path.read_text()]
        last = max(meshes, key=lambda path: int(path.name.split()[1]), default=None)
        return set(range(MEMBERS)) if last is None else {*map(int, last.read_text().split())}

    def wait_for(self, names: Sequence[str], what: str) -> None:
        end = time.monotonic() + 2 * DEADLINE
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < end, f"{what}: not in {2 * DEADLINE:g} s"
            time.sleep(0.005)


def one_world(chance: random.Random, faults: int) -> tuple[Counter[str], list[float], list[str]]:
    """One world, and what was wrong in it."""
    with tempfile.TemporaryDirectory() as name, StoreProcess() as store, fresh_world(RANKS, store) as own:
        folder, problems = Path(name), list[str]()
        driver = Driver(folder, own.pids, chance, faults)
        driver.start()
        outcomes = own.outcomes(live, folder, deadline=4 * DEADLINE)
        driver.join(DEADLINE)
        if driver.trouble:
            problems.append(driver.trouble)
        problems += [path.read_text() for path in folder.glob("wrong *")]
        histories = []
        for outcome in outcomes:
            if outcome.rank in driver.dead:
                continue
            if outcome.timed_out or outcome.error:
                problems.append(f"rank {outcome.rank} {outcome.error}\n{outcome.details}")
            elif outcome.rank not in driver.stopped:
                histories.append((outcome.rank, outcome.result))
        longest = max((history for _, history in histories), key=len, default=[])
        for rank, history in histories:
            if history != longest[: len(history)]:
                problems.append(f"rank {rank} saw {history}, another rank {longest}")
    return driver.done, driver.times, problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.elastic.chaos", description="Kill ranks at random moments.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}, {given.kills} faults, H is {H:g} s", flush=True)
    chance, done, times, broken = random.Random(given.seed), Counter[str](), list[float](), 0
    worlds = 0
    while done.total() < given.kills:
        seed = chance.randrange(10**6)
        counts, more, problems = one_world(random.Random(seed), 5)
        worlds, done, times = worlds + 1, done + counts, times + more
        for problem in problems:
            print(f"world with seed {seed}: {problem}", flush=True)
        broken += bool(problems)
    times.sort()
    print(f"{worlds} worlds, {done.total()} signals: {', '.join(f'{name} {n}' for name, n in done.items())}")
    if times:
        print(f"to the next step: median {times[len(times) // 2]:.2f} s, longest {times[-1]:.2f} s")
    print(f"worlds with a broken promise: {broken}")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
