"""Ranks killed at random moments: `python -m tests.elastic.chaos [--kills N] [--seed S] [--load N] [--hosts]`.

Eight real processes train on a mesh of dp=3, tp=2 with two spares. Ranks are killed, stopped or ended at random
moments: of a step, and of the shrink and the transfer of weights that another fault has caused. After each fault the
survivors agree on one mesh, every sum is right, and a rank that came in has the weights of its place. A stopped rank
goes on afterwards. When too few ranks are left, all survivors say so, and the next world begins.

The store, all ranks or both are stopped for a while too. Without another fault, all ranks go on in the same mesh. Soon
after a fault, only the ranks that were killed or stopped alone are lost. Each sentence about a lost rank is true: a
silent rank has sent no heartbeat for that time, and an ended one was killed. `--load N` keeps N more processes busy,
with the heartbeats that users have.

Then the link between two hosts is cut in the middle of a step (`--hosts`: this part alone, which takes root). The side
with the store goes on, and takes a rank of the other side in once the link is mended.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import MembershipError, MissingRanksError, PgmeshError, ProcessGroupMesh, launch
from pgmesh.launch import StoreProcess
from pgmesh.rendezvous.operations import Read, perform
from pgmesh.rendezvous.statuses import RankStatus, status_key
from pgmesh.rendezvous.world_name import WORLD_KEY
from pgmesh.resharding import Resharder
from tests.support.faults import (
    SLACK,
    WAIT_TIMEOUT,
    H,
    attempt,
    beat_fast,
    busy_processes,
    set_flag,
    stopped,
    wait_for_flag,
)
from tests.support.hosts import ADDRESSES, STORE_PORT, NoHostsError, on_host, set_link, two_hosts
from tests.support.worlds import STARVED, World, fresh_world

RANKS, MEMBERS, DEADLINE = 8, 6, WAIT_TIMEOUT
AXES = (("tp",), ("dp",), ("dp", "tp"))
DEADLY = (signal.SIGKILL, signal.SIGTERM)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
PAUSE = 0.3, 3 * H  # seconds: the shortest and the longest pause of the store or the ranks
TIMEOUT = 3 * H + 1.0 + SLACK  # of collectives, which a pause must not exceed
SILENT = re.compile(r"rank (\d+) has sent no heartbeat for at least (\d+) s")
ENDED = re.compile(r"rank (\d+) has ended")

NEAR, FAR = (0, 1, 2), (3, 4, 5)  # the ranks on the host of the store, and those on the other one
PATIENCE = H + 2.0  # seconds: the timeout of collectives, and of shrink on the far host


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
    seen, is_ready = [repr(mesh)], True
    weights: torch.Tensor | None = weights_of(mesh) if mesh.rank in mesh else None
    (folder / "world").write_text(dist.distributed_c10d._get_default_store().get(WORLD_KEY).decode())
    set_flag(folder, f"ready {mesh.rank}")
    while not (folder / "over").exists():
        try:
            if mesh.rank in mesh:
                if not is_ready:
                    connect(mesh)
                    weights = transfer(mesh, weights)
                    is_ready = True
                step(mesh, folder, len(seen), weights)
                continue
            mesh = mesh.stand_by(timeout=DEADLINE)
        except (RuntimeError, TimeoutError) as error:
            if (folder / "over").exists():
                break
            tell(folder, f"told {mesh.rank} {time.monotonic_ns()}", str(error), {})
            after = next_mesh(mesh, error)
            if after is None:
                set_flag(folder, f"ended {mesh.rank}")
                break
            mesh = after
        seen.append(repr(mesh))
        tell(folder, f"told {mesh.rank} {time.monotonic_ns()}", "", mesh.shrunk.lost)
        is_ready = False
        if mesh.rank in mesh.shrunk.replaced_by.values():  # in another place than before
            weights = None
    with contextlib.suppress(RuntimeError, TimeoutError):
        mesh.stand_by(timeout=3 * H)  # so that the spares know that no rank will call shrink
    return seen


def connect(mesh: ProcessGroupMesh) -> None:
    """Connect the groups of all steps."""
    for axes in AXES:
        mesh.configure(*axes, timeout=TIMEOUT)  # Gloo does not wake each rank whose connection ends
    mesh.connect(*AXES, timeout=DEADLINE)


def next_mesh(mesh: ProcessGroupMesh, error: BaseException) -> ProcessGroupMesh | None:
    """The mesh after a fault; None if too few ranks are left."""
    if mesh.rank not in mesh:
        return None if isinstance(error, MissingRanksError) else mesh
    try:
        return mesh.shrink("dp", spares=range(RANKS), timeout=DEADLINE)
    except MembershipError:  # taken for lost, for instance on a busy machine
        with contextlib.suppress(MissingRanksError):
            return mesh.stand_by(timeout=DEADLINE)
        return None
    except MissingRanksError as failure:
        if "so nothing is left" in str(failure):
            return None
        raise


def weights_of(mesh: ProcessGroupMesh) -> torch.Tensor:
    """The weights of this rank's place; all replicas have the same."""
    return torch.arange(2.0**20) + mesh.index("tp")


def transfer(mesh: ProcessGroupMesh, weights: torch.Tensor | None) -> torch.Tensor:
    """This rank's weights. A rank without any gets them from the ranks of its dp group that have them."""
    have = torch.zeros(RANKS)
    have[mesh.rank] = weights is not None
    dist.all_reduce(have, group=mesh.group("dp"))
    replicas = mesh.along("dp")
    givers = [index for index, rank in enumerate(replicas) if have[rank]]
    takers = [index for index, rank in enumerate(replicas) if not have[rank]]
    if not givers:  # as from a checkpoint
        return weights_of(mesh)
    if takers:
        state = {"weights": torch.zeros(2**20) if weights is None else weights}
        side = {"target" if weights is None else "source": state}
        Resharder(replicas.at(dp=givers), replicas.at(dp=takers), **side)()
        return state["weights"]
    assert weights is not None
    return weights


def step(mesh: ProcessGroupMesh, folder: Path, generation: int, weights: torch.Tensor | None) -> None:
    """Collectives along each axis, each with the right sum."""
    if weights is None or not torch.equal(weights, weights_of(mesh)):
        (folder / f"wrong {mesh.rank}").write_text(f"the weights of rank {mesh.rank} are not those of {mesh!r}")
        raise SystemExit(1)
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

    def __init__(self, folder: Path, own: World, store: StoreProcess, chance: random.Random, faults: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.pids, self.store, self.chance, self.faults = folder, own.pids, store, chance, faults
        self.dead: set[int] = set()
        self.stopped: set[int] = set()
        self.gone_at: dict[int, float] = {}  # time.monotonic() of the signal, by rank
        self.done: Counter[str] = Counter()
        self.trouble = ""
        self.times: list[float] = []

    def run(self) -> None:
        try:
            self.wait_for([f"ready {rank}" for rank in range(RANKS)], "the start")
            for _ in range(self.faults):
                goes_on = self.pause_alone() if self.chance.random() < 0.3 else self.strike()
                self.check_told()
                if not goes_on:
                    break
            else:
                self.wait_for_steps("the last fault")
                self.check_told()
        except AssertionError as error:
            self.trouble = f"{error}\n{self.stacks()}"
        finally:
            set_flag(self.folder, "over")
            for rank in self.stopped - self.dead:
                os.kill(self.pids[rank], signal.SIGCONT)

    def strike(self) -> bool:
        """One fault, or two at once, at a random moment, and perhaps a pause. False once too few ranks are left."""
        time.sleep(self.chance.uniform(0.0, 0.05))
        victims = self.chance.sample(self.living(), self.chance.choice((1, 1, 1, 2)))
        before, members = self.steps(), self.last_mesh()[1]
        start = time.monotonic()
        for victim in victims:
            self.send(victim)
            time.sleep(self.chance.uniform(0.0, 0.3))  # so that the second one falls into the shrink or the transfer
            if self.chance.random() < 0.3:
                self.pause("after a fault")
        if len(self.living()) < 2:
            return False
        if members.isdisjoint(victims):
            return True  # only spares, which nobody misses
        end = time.monotonic() + DEADLINE - 2.0  # before the ranks give up
        while not any(after > before.get(rank, 1) for rank, after in self.steps().items()):
            if self.has_given_up():
                return False
            assert time.monotonic() < end, (
                f"no step in {DEADLINE - 2:g} s after {victims} were lost, of {before}; left: {self.living()}"
            )
            time.sleep(0.005)
        self.times.append(time.monotonic() - start)
        return True

    def send(self, victim: int) -> None:
        """Send a random signal to a rank."""
        number = self.chance.choice(SIGNALS)
        self.gone_at[victim] = time.monotonic()
        (self.dead if number in DEADLY else self.stopped).add(victim)
        os.kill(self.pids[victim], number)
        self.done[number.name] += 1

    def pause(self, when: str) -> None:
        """Stop the store, the living ranks or both for a while."""
        what = self.chance.choice(("store", "ranks", "store and ranks"))
        store_pid = self.store.process.pid
        assert store_pid is not None
        pids = [store_pid] if "store" in what else []
        pids += [self.pids[rank] for rank in self.living()] if "ranks" in what else []
        self.done[f"{what} paused {when}"] += 1
        with stopped(pids):
            time.sleep(self.chance.uniform(*PAUSE))

    def pause_alone(self) -> bool:
        """A pause without another fault: nothing happens. False once too few ranks are left."""
        generation = self.wait_for_steps("the fault before a pause")
        told = sorted(self.folder.glob("told *[0-9]"))
        if not generation:
            return False
        self.pause("alone")
        self.wait_for_steps("a pause")
        time.sleep(self.chance.uniform(0.0, H))  # a rank that is taken for lost is noticed meanwhile
        after = self.wait_for_steps("a pause, again")
        new = [path.read_text() for path in sorted(self.folder.glob("told *[0-9]")) if path not in told]
        assert (after, new) == (generation, []), f"a pause alone, and mesh {generation} became {after}: {new}"
        return True

    def wait_for_steps(self, what: str) -> int:
        """Wait until all ranks of the last mesh live and have taken a step from now on.

        Returns:
            Its generation; 0 once too few ranks are left.
        """
        start, end = time.time() + 0.02, time.monotonic() + DEADLINE
        while time.monotonic() < end:
            generation, members = self.last_mesh()
            flags = [self.folder / f"stepped {rank} {generation}" for rank in members]
            if members <= {*self.living()} and all(flag.exists() and flag.stat().st_mtime > start for flag in flags):
                return generation
            if self.has_given_up():
                return 0
            time.sleep(0.005)
        raise AssertionError(f"after {what}, not all of {members} took a step in {DEADLINE:g} s: {self.steps()}")

    def has_given_up(self) -> bool:
        """True if a living rank says that too few are left."""
        left = self.living()
        ended = [rank for rank in left if (self.folder / f"ended {rank}").exists()]
        assert not ended or len(left) < 4, f"{ended} gave up, but {left} are left: four always hold a whole replica"
        return bool(ended)

    def check_told(self) -> None:
        """Assert that no living rank is lost, and that each sentence about a lost rank is true."""
        for path in self.folder.glob("told *[0-9]"):
            at, text, lost = json.loads(path.read_text())
            text += "".join(f"\n{why}" for why in lost.values())
            what = f"{path.name}, {at:.2f}: {text}\n  signals: {self.gone_at}"
            for rank in map(int, lost):
                assert self.gone_at.get(rank, at) < at, f"rank {rank} lives. {what}"
            unknown = [why for why in lost.values() if not SILENT.match(why) and not ENDED.match(why)]
            assert not unknown, f"an unknown reason: {what}"
            for rank, seconds in SILENT.findall(text):
                assert self.gone_at.get(int(rank), at) < at, f"rank {rank} lives. {what}"
                silence = at - self.last_heartbeat(int(rank))
                assert silence >= int(seconds), f"{silence:.2f} s of silence. {what}"
            for rank in map(int, ENDED.findall(text)):
                assert rank in self.dead, f"rank {rank} has not ended. {what}"
                assert self.gone_at[rank] < at, f"rank {rank} had not ended then. {what}"

    def last_heartbeat(self, rank: int) -> float:
        """The time.monotonic() at which a rank sent its last heartbeat."""
        client = dist.TCPStore(self.store.host, self.store.port, is_master=False, wait_for_workers=False)
        world = dist.PrefixStore(f"pgmesh.{(self.folder / 'world').read_text()}", client)
        status = RankStatus.unpack(rank, perform(world, Read(status_key(rank))))
        assert status is not None
        return time.monotonic() - (time.time() - status.sent)

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

    def last_mesh(self) -> tuple[int, set[int]]:
        """The generation and the ranks of the last mesh in which a step was taken."""
        meshes = [(int(path.name.split()[1]), path.read_text().split()) for path in self.folder.glob("mesh *")]
        generation, ranks = max((mesh for mesh in meshes if mesh[1]), default=(1, range(MEMBERS)))
        return generation, {*map(int, ranks)}

    def wait_for(self, names: Sequence[str], what: str) -> None:
        end = time.monotonic() + 2 * DEADLINE
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < end, f"{what}: not in {2 * DEADLINE:g} s"
            time.sleep(0.005)


def one_world(chance: random.Random, faults: int) -> tuple[Counter[str], list[float], list[str]]:
    """One world, and what was wrong in it."""
    with tempfile.TemporaryDirectory() as name, StoreProcess() as store, fresh_world(RANKS, store) as own:
        folder, problems = Path(name), list[str]()
        driver = Driver(folder, own, store, chance, faults)
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


# ---- two hosts ----


def live_on_a_host(folder: Path) -> None:
    """One of six ranks on two hosts: take steps until the link is cut, and go on when it is mended."""
    beat_fast()
    faulthandler.register(signal.SIGUSR1)
    launch.join("gloo", timeout=DEADLINE)
    mesh = ProcessGroupMesh(dp=2, tp=3, name="train")
    mesh.abort_when_lost()
    step(mesh, folder, 1, weights_of(mesh))
    mesh.set_timeout(timeout=PATIENCE)
    set_flag(folder, f"ready {mesh.rank}")
    step_until_fault(mesh, folder, 1)
    if mesh.rank in NEAR:
        mesh = mesh.shrink("dp", timeout=DEADLINE)
        step(mesh, folder, 2, weights_of(mesh))
        tell(folder, f"cut {mesh.rank}", repr(mesh), str(mesh.shrunk))
        step_until_fault(mesh, folder, 2)
        mesh = mesh.shrink(spares=FAR, timeout=DEADLINE)
    else:
        failed = attempt(lambda: mesh.shrink("dp", timeout=PATIENCE))
        tell(folder, f"cut {mesh.rank}", failed.kind, failed.text)
        wait_for_flag(folder, "mended")
        set_flag(folder, f"stands by {mesh.rank}")
        mesh = mesh.stand_by(timeout=DEADLINE)
    if mesh.rank in mesh:
        step(mesh, folder, 3, weights_of(mesh))
    tell(folder, f"mended {mesh.rank}", list(mesh), str(mesh.shrunk))
    time.sleep(DEADLINE)  # it is killed meanwhile


def step_until_fault(mesh: ProcessGroupMesh, folder: Path, generation: int) -> None:
    """Take steps until a collective fails."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        try:
            step(mesh, folder, generation, weights_of(mesh))
        except (RuntimeError, PgmeshError) as error:
            print(f"rank {mesh.rank}, generation {generation}: {error}", flush=True)
            return
    raise AssertionError(f"no fault in {DEADLINE:g} s")


def tell(folder: Path, name: str, *values: object) -> None:
    """Write values and the time to a file, at once."""
    (folder / f"{name}.part").write_text(json.dumps([time.monotonic(), *values]))
    (folder / f"{name}.part").rename(folder / name)


@pytest.mark.fault("one host of two is cut off")
def run_hosts(chance: random.Random) -> bool:
    """Cut and mend the link at either end. True if a promise was broken."""
    broken = False
    for cut_end in (0, 1):
        try:
            with two_hosts() as hosts, tempfile.TemporaryDirectory() as name:
                print(f"two hosts, cut at host {'ab'[cut_end]}", flush=True)
                problem = run_on_hosts(hosts, hosts[cut_end], Path(name), chance)
        except NoHostsError as error:
            print(f"two hosts: skipped, {error}")
            return False
        if problem:
            print(f"two hosts, broken: {problem}", flush=True)
            broken = True
    return broken


def run_on_hosts(hosts: tuple[str, str], cut_end: str, folder: Path, chance: random.Random) -> str:
    """Start a store and six ranks on two hosts, and cut the link. Returns the broken promise; "" if there is none."""
    serve = f"from pgmesh.launch import StoreProcess; store = StoreProcess({STORE_PORT}); input()"
    store = subprocess.Popen(on_host(hosts[0], sys.executable, "-c", serve), stdin=subprocess.PIPE)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in (*NEAR, *FAR):
            host = hosts[rank // len(NEAR)]
            env = {**os.environ, "GLOO_SOCKET_IFNAME": host, "OMP_NUM_THREADS": "1"}
            env |= {"RANK": f"{rank}", "WORLD_SIZE": "6", "LOCAL_RANK": f"{rank % 3}", "LOCAL_WORLD_SIZE": "3"}
            env |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": f"{STORE_PORT}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
            command = on_host(host, sys.executable, "-m", "tests.elastic.chaos", "--worker", str(folder))
            with (folder / f"log {rank}").open("wb") as log:
                ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        cut_and_mend(cut_end, folder, ranks, chance)
    except AssertionError as error:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        logs = [f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(folder.glob("log *"))]
        return "\n".join([str(error), *logs])
    finally:
        for process in ranks:
            process.kill()
            process.wait(5.0)
        store.kill()
        store.wait(5.0)
    return ""


def cut_and_mend(cut_end: str, folder: Path, ranks: Sequence[subprocess.Popen[bytes]], chance: random.Random) -> None:
    """Cut the link, check both sides, mend it, kill a rank near the store, and check that a far rank comes in."""
    await_all(folder, [f"ready {rank}" for rank in (*NEAR, *FAR)], 2 * DEADLINE)
    time.sleep(chance.uniform(0.0, 0.5))
    cut = time.monotonic()
    set_link(cut_end, "down")
    near = await_all(folder, [f"cut {rank}" for rank in NEAR], DEADLINE)
    for end, mesh, shrunk in near:
        assert mesh == "ProcessGroupMesh(dp=1, tp=3, ranks=range(3), name='train')", mesh
        for rank in FAR:
            assert f"lost: rank {rank} has sent no heartbeat for" in shrunk, f"rank {rank} is not silent in {shrunk}"
        assert end - cut < H + 3.0, f"{end - cut:.2f} s from the cut to a step on the side of the store"
    print(f"  the side of the store: a step after {max(end for end, *_ in near) - cut:.2f} s\n{near[0][2]}")
    far = await_all(folder, [f"cut {rank}" for rank in FAR], DEADLINE)
    for end, kind, text in far:
        assert kind == "WorldError", f"on the other side: {kind or 'a mesh'} {text}"
        assert end - cut < 2 * PATIENCE + 2.0, f"{end - cut:.2f} s from the cut to the error of shrink"
    print(f"  the other side: {far[0][1]} after {max(end for end, *_ in far) - cut:.2f} s: {far[0][2]}")
    set_link(cut_end, "up")
    mended = time.monotonic()
    set_flag(folder, "mended")
    await_all(folder, [f"stands by {rank}" for rank in FAR], DEADLINE)
    victim = chance.choice(NEAR)
    ranks[victim].kill()
    after = await_all(folder, [f"mended {rank}" for rank in NEAR if rank != victim], DEADLINE)
    members, shrunk = after[0][1:]
    came = [rank for rank in members if rank in FAR]
    assert len(came) == 1, f"{came} came in the place of rank {victim}: {shrunk}"
    assert members == [*NEAR[:victim], *came, *NEAR[victim + 1 :]], f"rank {victim} was killed: {members} {shrunk}"
    # The other far ranks may have stood by too late for this shrink, and wait for the next one.
    after += await_all(folder, [f"mended {came[0]}"], DEADLINE)
    assert all(each[1] == members for each in after), f"the ranks do not have the same mesh: {after}"
    print(f"  mended: a step after {max(end for end, *_ in after) - mended:.2f} s\n{shrunk}", flush=True)
    wrong = [path.read_text() for path in folder.glob("wrong *")]
    assert not wrong, f"wrong sums: {wrong}"


def await_all(folder: Path, names: Sequence[str], seconds: float) -> list[list[Any]]:
    """Wait for what ranks tell, and return it; for a flag, nothing."""
    end = time.monotonic() + seconds
    while missing := [name for name in names if not (folder / name).exists()]:
        assert time.monotonic() < end, f"not in {seconds:g} s: {missing}"
        time.sleep(0.005)
    return [json.loads((folder / name).read_text() or "[]") for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.elastic.chaos", description="Kill ranks at random moments.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", action="store_true", help="cut the link between two hosts, and nothing else")
    parser.add_argument("--load", type=int, default=0, help="the number of processes that keep the cores busy")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker is not None:
        live_on_a_host(given.worker)
        return 0
    if given.load and not STARVED:  # again, with the heartbeats and timeouts of a busy machine
        command = [sys.executable, "-m", "tests.elastic.chaos", *(sys.argv[1:] if arguments is None else arguments)]
        os.execve(sys.executable, command, {**os.environ, "PGMESH_STARVED": "1"})
    chance = random.Random(given.seed)
    print(f"seed {given.seed}, H is {H:g} s, {given.load} busy processes", flush=True)
    with busy_processes(given.load):
        broken = False if given.hosts else run_kills(given.kills, chance)
    return int(run_hosts(chance) or broken)


def run_kills(kills: int, chance: random.Random) -> bool:
    """Worlds until so many signals were sent. True if a promise was broken."""
    done, times, broken = Counter[str](), list[float](), 0
    worlds = 0
    while done.total() < kills:
        seed = chance.randrange(10**6)
        counts, more, problems = one_world(random.Random(seed), 5)
        worlds, done, times = worlds + 1, done + counts, times + more
        for problem in problems:
            print(f"world with seed {seed}: {problem}", flush=True)
        broken += bool(problems)
        print(f"{worlds} worlds, {done.total()} signals and pauses, {broken} worlds with a broken promise", flush=True)
    times.sort()
    print(f"{worlds} worlds, {done.total()} signals: {', '.join(f'{name} {n}' for name, n in done.items())}")
    if times:
        print(f"to the next step: median {times[len(times) // 2]:.2f} s, longest {times[-1]:.2f} s")
    print(f"worlds with a broken promise: {broken}")
    return broken > 0


if __name__ == "__main__":
    sys.exit(main())
