"""Faults on purpose, at random but by a seed: `python -m tests.faults.chaos [--minutes M] [--seed S] [--only N,N,...]`.

Real processes, and every fault at every moment to every victim: what docs/faults.md promises has to hold each time.
Then every crash point, what stays behind after 500 cycles, two hosts whose link is cut, and all of test_faults.py while
other processes keep all cores busy. A table at the end says what was tried, what came of it and how long it took; what
there was no time for, and how to try that; the exit status is 1 if a promise was broken. `--list` shows the numbers
that `--only` takes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import logging
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, launch
from pgmesh.launch import StoreProcess
from pgmesh.launch.processes import PRELOAD
from pgmesh.rendezvous.operations import Add, Operation
from tests.support import faults
from tests.support.board import Fault, at_all_reduce, faults as faults_at
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    ORDERS,
    SLACK,
    Attempt,
    H,
    attempt,
    beat_fast,
    busy_processes,
    connect_and_beat,
    connect_and_check,
    die_at_each,
    set_flag,
    wait_for_flag,
    wait_until_waiting,
)
from tests.support.hosts import ADDRESSES, STORE_PORT, NoHostsError, on_host, set_link, two_hosts
from tests.support.resource_counts import count_resources, count_with_keys, growth, resident_kib
from tests.support.worlds import check_sums, fresh_world, groups_of

# True in the program and in its ranks, false where pytest imports this file: other tests keep their settings.
if __name__ != "tests.faults.chaos":
    faults.WAIT_TIMEOUT = 60.0  # where a name server loses questions, a connection to the store takes half a minute
    PRELOAD[:] = ["__main__", "torch"]  # what other tests need, seconds each, is not needed here

D = 4.0  # seconds: the deadline of the calls that faults fall into
N = 4

PHASES = ("before arriving", "after arriving", "after the decision", "in the first collective", "after it")
UNDECIDED = PHASES[:2]
DEADLY = ("SIGKILL", "SIGTERM", "SIGSEGV")
HARMLESS = ("nothing", "slow", "SIGSTOP, short", "GIL held, short")
FAULTS = (*DEADLY, "SIGSTOP", "SIGSTOP, short", "exception", "GIL held", "GIL held, short", "slow")
STORE_FAULTS = ("SIGKILL", "SIGSTOP", "SIGSTOP, short")
SHORT, LONGER = 0.4 * H, 2.5 * H
LEFT = Path(__file__).parents[2] / ".pytest_cache" / "chaos-left.json"
"""The cases for which there was no time, with which the next run begins."""

SIDE_BY_SIDE = 3
"""How many cases are tried at once."""

SHARES = (0.05, 0.15, 0.3, 0.7, 0.97)
"""By when each part ends, of the whole time."""


@dataclass(frozen=True)
class Case:
    """One fault, at one moment, to one victim."""

    number: int
    fault: str
    phase: str
    victim: str

    def __str__(self) -> str:
        return f"{self.number:3} {self.fault:<16} {self.phase:<24} {self.victim}"


def all_cases() -> list[Case]:
    kinds = [("nothing", PHASES[0], "nobody")]
    kinds += [(fault, phase, victim) for victim in ("member", "outsider") for fault in FAULTS for phase in PHASES]
    kinds += [(fault, phase, "store") for fault in STORE_FAULTS for phase in PHASES]
    return [Case(number, *kind) for number, kind in enumerate(kinds)]


@dataclass(frozen=True)
class Plan:
    """A case with what the seed decides."""

    case: Case
    victim: int  # a rank; who triggers the fault where the victim is no member
    beats_fast: bool
    others_wait: bool  # whether the fault waits until the others wait

    @property
    def members(self) -> list[int]:
        outside = self.victim if self.case.victim == "outsider" else None
        return [rank for rank in range(N) if rank != outside]

    @property
    def trigger(self) -> int:
        """The member at whose moment the fault comes."""
        return self.victim if self.case.victim != "outsider" else self.members[self.victim % len(self.members)]

    @property
    def dies(self) -> bool:
        return self.case.fault in DEADLY and self.case.victim != "store"

    @property
    def harmless(self) -> bool:
        """Whether every member that lives gets its group."""
        return self.case.fault in HARMLESS or self.case.victim == "outsider" or self.case.phase == "after it"

    @property
    def alive(self) -> list[int]:
        """Who lives in the end."""
        return [rank for rank in range(N) if not (self.dies and rank == self.victim)]


# ---- inside a rank ----


class Chaos(Exception):
    """An exception in the middle of things."""


def hold_the_gil(seconds: float) -> None:
    """No thread of this process runs Python meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def strike(plan: Plan, folder: Path) -> None:
    """The moment has come, on the rank that triggers the fault."""
    set_flag(folder, "now")
    if plan.case.victim != "outsider":
        suffer_it(plan, folder)
    wait_for_flag(folder, "struck")


def suffer_it(plan: Plan, folder: Path) -> None:
    """What the victim does to itself; what is done to it, and to the store, comes from outside."""
    fault = plan.case.fault
    own = plan.case.victim != "store" and not fault.startswith("SIG")
    if not own:
        wait_for_flag(folder, "struck")
        return
    set_flag(folder, "struck")
    if fault == "exception":
        raise Chaos("by design")
    if fault.startswith("GIL"):
        hold_the_gil(SHORT if "short" in fault else LONGER)
    if fault == "slow":
        time.sleep(LONGER)


@contextlib.contextmanager
def at_its_phase(plan: Plan, folder: Path) -> Iterator[None]:
    """Have the fault strike at its moment, once."""
    once = iter([True])

    def strike_in(phase: str) -> None:
        if plan.case.phase == phase and next(once, False):
            strike(plan, folder)

    def counts(operation: Operation) -> bool:
        return isinstance(operation, Add) and operation.key.endswith("/count")

    arriving = Fault(counts, after=lambda: strike_in("after arriving"), in_caller=True)
    before, after = "after the decision", "in the first collective"
    with faults_at(arriving), at_all_reduce(lambda: strike_in(before), lambda: strike_in(after)):
        yield


def live_through(plan: Plan, folder: Path) -> tuple[Attempt, str, Attempt, dict[str, int]]:
    """One rank's part: the call that the fault falls into, old groups, a retry of all who live, and what stays."""
    case, me = plan.case, dist.get_rank()
    logging.getLogger("pgmesh").addHandler(logging.NullHandler())
    if plan.beats_fast:
        beat_fast()
    connect_and_beat(beating := ProcessGroupMesh(N, name="beating"))
    bystander = ProcessGroupMesh(-1, ranks=plan.alive, name="bystander")
    if me in plan.alive:
        connect_and_check(bystander)
        connect_and_check(bystander, (0,))
        with ProcessGroupMesh(-1, ranks=plan.alive, name="first") as first:  # what is made once in a process
            connect_and_check(first)
    gc.collect()
    before = count_resources()
    mesh = ProcessGroupMesh(-1, ranks=plan.members, name="actor")

    def call() -> None:
        if me not in plan.members:
            wait_for_flag(folder, "now")
            suffer_it(plan, folder)
            return
        if me != plan.trigger or case.fault == "nothing":
            mesh.connect(timeout=timedelta(seconds=D))
        else:
            if plan.others_wait and case.phase in UNDECIDED:
                wait_until_waiting(*(rank for rank in plan.members if rank != me))
            if case.phase == "before arriving":
                strike(plan, folder)
            with at_its_phase(plan, folder):
                mesh.connect(timeout=timedelta(seconds=D))
            if case.phase == "after it":
                strike(plan, folder)

    dist.barrier(beating.group())  # a rank that is D late, where no core is free, is not the fault that is tried
    failed = attempt(call)
    set_flag(folder, f"done {me}")
    sums = attempt(lambda: check_sums(groups_of(bystander))).text
    if plan.harmless and not plan.dies and me in plan.members and not sums:
        sums = attempt(lambda: check_sums({"actor": (mesh.group(), plan.members)})).text
    wait_for_flag(folder, "over")
    again = ProcessGroupMesh(-1, ranks=plan.alive, name="again")
    retry = attempt(lambda: connect_and_check(again))
    again.close()
    mesh.close()
    return failed, sums, retry, what_stays(before)


def what_stays(before: dict[str, int]) -> dict[str, int]:
    """What this process holds more than before, also after some seconds."""

    def collect_and_count() -> dict[str, int]:
        gc.collect()
        return count_resources()

    return growth([before], collect_and_count, 5.0)


# ---- outside: the one who does it ----


@dataclass
class Tally:
    """What was tried, what came of it, and which promises broke."""

    rows: dict[tuple[str, str, str], tuple[Counter[str], list[float]]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # what there was no time for
    cases_left: list[int] = field(default_factory=list)

    def add(self, fault: str, phase: str, victim: str, outcome: str, seconds: float) -> None:
        outcomes, times = self.rows.setdefault((fault, phase, victim), (Counter(), []))
        outcomes[outcome] += 1
        times.append(seconds)

    def breaks(self, what: str) -> None:
        print(f"  BROKEN: {what}", flush=True)
        self.broken.append(what)

    def write(self, path: Path) -> None:
        rows = [[*what, dict(outcomes), times] for what, (outcomes, times) in self.rows.items()]
        path.write_text(json.dumps({"rows": rows, "broken": self.broken, "left": self.cases_left}))

    def read(self, path: Path) -> None:
        """Add what another wrote."""
        found = json.loads(path.read_text())
        for fault, phase, victim, outcomes, times in found["rows"]:
            mine, so_far = self.rows.setdefault((fault, phase, victim), (Counter(), []))
            mine.update(outcomes)
            so_far += times
        self.broken += found["broken"]
        self.cases_left += found["left"]

    def show(self) -> None:
        line = "{:<26} {:<24} {:<9} {:>5}  {:<44} {:>7}".format
        print("\n" + line("fault", "phase", "victim", "tried", "outcomes", "worst"))
        for (fault, phase, victim), (outcomes, times) in self.rows.items():
            words = ", ".join(f"{count} {what}" for what, count in outcomes.most_common())
            print(line(fault, phase, victim, len(times), words, f"{max(times):.2f} s"))
        if self.cases_left:
            only = ",".join(map(str, self.cases_left))
            self.left.append(f"{len(self.cases_left)} cases: make chaos begins with them, or --only {only}")
        print("".join(f"\nno time for {what}" for what in self.left))
        print(f"\n{len(self.broken)} promises broken" + "".join(f"\n  {what}" for what in self.broken))


def do_it(plan: Plan, folder: Path, pids: Sequence[int], store: int) -> None:
    """Strike from outside, and make up for it once all others are done."""
    case = plan.case
    if case.fault.startswith("SIG"):
        wait_for_flag(folder, "now")
        pid = store if case.victim == "store" else pids[plan.victim]
        number = getattr(signal, case.fault.partition(",")[0])
        stopped = number == signal.SIGSTOP
        try:
            os.kill(pid, number)
            if not (case.victim == "store" and stopped):
                set_flag(folder, "struck")
            if stopped and "short" in case.fault:
                set_flag(folder, "struck")
                time.sleep(SHORT if plan.beats_fast else SHORT * 5)
            elif stopped:
                set_flag(folder, "struck")
                for rank in range(N):
                    if case.victim == "store" or rank != plan.victim:
                        wait_for_flag(folder, f"done {rank}")
        finally:
            if stopped:
                os.kill(pid, signal.SIGCONT)
    for rank in plan.alive:
        wait_for_flag(folder, f"done {rank}")
    set_flag(folder, "over")


def run_case(case: Case, seed: int, tally: Tally, *, beats_fast: bool = True, load: str = "") -> None:
    """Run one case in a world of its own, and hold what came of it against what is promised."""
    chance = random.Random(f"{seed} {case.number}")
    plan = Plan(case, chance.randrange(N), beats_fast, chance.random() < 0.7)
    factor = 1.0 if beats_fast else 5.0
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name, StoreProcess() as store, fresh_world(N, store) as own:
        folder = Path(name)
        own.run(dist.get_rank)
        assert store.process.pid is not None
        did: list[Attempt] = []
        actor = threading.Thread(
            target=lambda: did.append(attempt(lambda: do_it(plan, folder, own.pids, store.process.pid or 0))),
            daemon=True,
        )
        actor.start()
        outcomes = own.outcomes(live_through, plan, folder, deadline=150.0)
        actor.join(5.0)
    text = f"{case}{load} (seed {seed})"

    def promise(holds: bool, words: str) -> None:
        if not holds:
            tally.breaks(f"{text}: {words}")

    promise(bool(did) and not did[0].kind, f"the one who strikes: {did}")
    seen: dict[int, tuple[Attempt, str, Attempt, dict[str, tuple[int, int]]]] = {}
    for outcome in outcomes:
        if outcome.rank in plan.alive:
            promise(not outcome.error, f"rank {outcome.rank} {outcome.error} {outcome.details[-400:]}")
            if not outcome.error:
                seen[outcome.rank] = outcome.result
        else:
            number = getattr(signal, case.fault)
            promise(outcome.exitcode == -number, f"the victim: {outcome.error}")
    peers = {rank: each[0] for rank, each in seen.items() if rank in plan.members and rank != plan.victim}
    kinds = {failed.kind for failed in peers.values()}
    told = [f"{rank}: {failed.kind} {failed.took:.2f} s {failed.text[:300]!r}" for rank, failed in peers.items()]
    worst = max((failed.took for failed in peers.values()), default=0.0)
    limit = 2 * D + SLACK + LONGER
    if case.fault in DEADLY and case.victim == "member":
        limit = 2 * (H + BEAT) * factor + SLACK + 1.0
    elif case.fault == "exception" and case.victim == "member" and case.phase != "before arriving":
        limit = 0.2 + 2 * SLACK
        if case.phase == "after arriving":
            cancelled = [failed.took for failed in peers.values() if "was cancelled because" in failed.text]
            promise(bool(cancelled) or not plan.others_wait, f"no rank reports the exception: {told}")
            promise(max(cancelled, default=0.0) < limit * (1.0 if beats_fast else 2.0), f"reported late: {told}")
            if not plan.others_wait:  # a rank that arrives after the exception is in the next attempt, until its D
                limit = D + 2 * SLACK
    promise(worst < limit * (1.0 if beats_fast else 2.0), f"took {worst:.2f} s, not {limit:.2f}: {told}")
    allowed = {"", "MissingRanksError"} | ({"WorldError"} if case.victim == "store" else set())
    promise(kinds <= allowed, f"{told}")
    if plan.harmless:
        promise(kinds == {""}, f"a false report: {told}")
    elif case.phase in UNDECIDED and case.victim == "member":
        promise(len(kinds) == 1, f"not one outcome for all: {told}")
        named = all(f"rank {plan.victim}" in failed.text for failed in peers.values() if failed.kind)
        promise(named, f"rank {plan.victim} is not named: {told}")
    for rank, (_, sums, retry, stays) in seen.items():
        promise(not sums, f"an older group on rank {rank}: {sums[:300]}")
        gone = case.victim == "store" and case.fault == "SIGKILL"
        promise(retry.kind == ("WorldError" if gone else ""), f"the retry on rank {rank}: {retry.kind} {retry.text}")
        promise(
            retry.took < (1.0 + SLACK if gone else LONG_TIMEOUT.total_seconds()), f"the retry took {retry.took:.2f} s"
        )
        if "unfinished" in stays:  # a hanging collective is freed at its group's timeout, with its resources
            holds = {
                "unfinished": 1,
                "threads": 3,  # of its device, of its backend, and of the backend that raises for later uses
                "descriptors": 2 + N,
            }  # of one group
            stays = {what: more for what, more in stays.items() if more > stays["unfinished"] * holds.get(what, 0)}
            told_of = "".join(failed.text for failed in peers.values())
            promise("first collective" in told_of or case.victim == "store", f"rank {rank} kept a group: {told_of}")
        promise(not stays, f"rank {rank} holds more than before: {stays}")
    outcome = "/".join(sorted(kind or "connected" for kind in kinds))
    tally.add(case.fault + load, case.phase, case.victim, outcome, worst)
    print(f"{case}{load}: {outcome} in {worst:.2f} s ({time.monotonic() - start:.1f} s)", flush=True)


# ---- every crash point ----


@pytest.mark.fault("a member dies at any of its operations on the store")
def run_crashes(end: float, tally: Tally) -> None:
    """A rank dies at its first operation, its second, ... until it has done all it had to do."""
    left = dict.fromkeys(ORDERS, True)
    for k in itertools.count(1):
        points = [(k, order) for order, more in left.items() if more]
        if not points or k > 200:
            break
        if time.monotonic() > end:
            tally.left.append(f"crash points after operation {k - 1}: python -m tests.faults.chaos --part crashes")
            break
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            try:
                words = die_at_each(Path(name), points)
            except AssertionError as error:
                tally.breaks(f"crash point {k}: {str(error)[:1500]}")
                continue
        for (_, order), word in zip(points, words):
            left[order] = word != ""
            tally.add("crash point", f"arriving {order}", "member", word or "survived", time.monotonic() - start)
        print(
            f"crash points at operation {k}: { {order: word for (_, order), word in zip(points, words)} }", flush=True
        )


# ---- what stays behind ----


def cycle(times: int) -> tuple[dict[str, int], int]:
    """Connect, use, release; what is held more at the end than early, and how many KiB of memory more."""
    beat_fast()
    mesh, memory = ProcessGroupMesh(dp=2, tp=2, name="actor"), []
    for i in range(1, times + 1):
        connect_and_check(mesh, "dp", "tp", ("dp", "tp"))
        for axes in (("dp",), ("tp",), ()):
            mesh.release(*axes)
        if i in (times // 5, times):
            dist.barrier()
            memory.append(resident_kib())
            if i < times:
                early = count_with_keys()
            else:
                more = growth([early], count_with_keys)
            dist.barrier()
    return more, memory[1] - memory[0]


@pytest.mark.fault("connect, use, release, 500 times; any fault that a process survives, repeatedly")
def run_counts(times: int, tally: Tally) -> None:
    """Connect, use and release, again and again."""
    start = time.monotonic()
    with StoreProcess() as store, fresh_world(N, store) as own:
        for rank, (more, kib) in enumerate(own.run(cycle, times, deadline=240.0)):
            if more or kib > 4096:
                tally.breaks(f"{times} cycles, rank {rank}: {more} more, and {kib} KiB more")
            print(f"counts, rank {rank}: {more} and {kib} KiB more", flush=True)
    tally.add(f"{times} cycles", "", "", "done", time.monotonic() - start)


# ---- no core is free ----


RESULT = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED) (tests/\S+::.+?)\s*$", re.MULTILINE)


def run_starved(seed: int, end: float, tally: Tally) -> None:
    """All of test_faults.py while every core is busy, at the beat that users have: later reports, and no false ones.

    Then, for as long as there is time, cases in which nothing but time is lost, and so nothing may be reported.
    """
    with busy_processes(2 * (os.cpu_count() or 1)):
        run_all_tests(end, tally)
        harmless = [case for case in all_cases() if case.fault in HARMLESS and case.victim != "outsider"]
        for case in random.Random(f"{seed} starved").sample(harmless, len(harmless)):
            if time.monotonic() > end:
                break
            run_case(case, seed, tally, beats_fast=False, load=", starved")


def run_all_tests(end: float, tally: Tally) -> None:
    """All of test_faults.py, several tests at once."""
    command = [sys.executable, "-m", "pytest", "-v", "-n", "4", "--dist", "load", "-p", "no:cacheprovider"]
    command += ["--durations=0", "tests/faults/test_faults.py"]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        env = {**os.environ, "PGMESH_STARVED": "1"}
        tests = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            tests.wait(max(1.0, end - start))
        except subprocess.TimeoutExpired:
            tally.left.append("the rest of test_faults.py, starved: python -m tests.faults.chaos --part starved")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tests.pid, signal.SIGKILL)  # its ranks too
            tests.wait(5.0)
        log.seek(0)
        text = log.read()
    results = {test: result for result, test in RESULT.findall(text)}
    times = {test: float(took) for took, test in re.findall(r"^([\d.]+)s call +(\S.*?)\s*$", text, re.MULTILINE)}
    for test, result in results.items():
        tally.add("no core is free", "tests/faults/test_faults.py", "", result.lower(), times.get(test, 0.0))
        if result in ("FAILED", "ERROR"):
            tally.breaks(f"starved: {test}")
    if not results:
        tally.breaks("starved: no test ended")
    if {*results.values()} - {"PASSED", "SKIPPED"} or not results:
        print(text[-12000:])
    print(f"starved: {dict(Counter(results.values()))} in {time.monotonic() - start:.0f} s", flush=True)


# ---- two hosts ----


def be_a_worker(folder: Path) -> None:
    """One rank of two hosts, two on each, whose link is cut and mended."""
    beat_fast()
    launch.join("gloo", timeout=timedelta(seconds=60))
    me = dist.get_rank()
    (folder / f"pid {me}").write_text(str(os.getpid()))
    connect_and_beat(ProcessGroupMesh(4, name="beating"))
    host = ProcessGroupMesh(-1, ranks=[me // 2 * 2, me // 2 * 2 + 1], name=f"host {me // 2}")
    connect_and_check(host)
    set_flag(folder, f"ready {me}")
    wait_for_flag(folder, "cut")
    failed = attempt(lambda: ProcessGroupMesh(4, name="actor").connect(timeout=timedelta(seconds=D)))
    sums = attempt(lambda: check_sums(groups_of(host))).text
    new = (
        attempt(lambda: connect_and_check(ProcessGroupMesh(-1, ranks=host.ranks(), name=f"new {me // 2}")))
        if me < 2
        else None
    )
    set_flag(folder, f"done {me}")
    wait_for_flag(folder, "mended")
    retry = attempt(lambda: ProcessGroupMesh(4, name="again").connect(timeout=timedelta(seconds=25)))
    sums += "" if retry.kind else attempt(lambda: connect_and_check(ProcessGroupMesh(4, name="once more"))).text
    (folder / f"told {me}.part").write_text(json.dumps([failed, sums, new, retry]))
    (folder / f"told {me}.part").rename(folder / f"told {me}")
    wait_for_flag(folder, "over")


@pytest.mark.fault("one host of two is cut off")
def run_hosts(tally: Tally) -> None:
    """Two hosts with two ranks each, and the link between them is cut and mended."""
    try:
        with two_hosts() as (a, b), tempfile.TemporaryDirectory() as name:
            _run_hosts(a, b, Path(name), tally)
    except NoHostsError as error:
        print(f"two hosts: skipped, {error}")


def _run_hosts(a: str, b: str, folder: Path, tally: Tally) -> None:
    agents: list[subprocess.Popen[bytes]] = []
    try:
        for i, host in enumerate((a, b)):
            command = on_host(host, sys.executable, "-m", "torch.distributed.run")
            command += ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", f"{i}"]
            command += ["--master-addr", ADDRESSES[0], "--master-port", f"{STORE_PORT}"]
            command += ["--module", "tests.faults.chaos", "--worker", str(folder)]
            env = {**os.environ, "GLOO_SOCKET_IFNAME": host, "OMP_NUM_THREADS": "1"}
            log = (folder / f"log {i}").open("wb")
            agents.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
        _cut_and_mend(a, folder, tally)
    except AssertionError as error:
        logs = "".join(path.read_text(errors="replace")[-800:] for path in sorted(folder.glob("log *")))
        tally.breaks(f"two hosts: {error}\n{logs}")
    finally:
        set_flag(folder, "over")
        for agent in agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(10.0)
            agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(5.0)
            agent.kill()
        for path in folder.glob("pid *"):
            with contextlib.suppress(OSError):  # a worker that its agent left behind
                if b"tests.faults.chaos" in Path(f"/proc/{path.read_text()}/cmdline").read_bytes():
                    os.kill(int(path.read_text()), signal.SIGKILL)


def _cut_and_mend(a: str, folder: Path, tally: Tally) -> None:
    for rank in range(4):
        wait_for_flag(folder, f"ready {rank}")
    set_link(a, "down")
    cut = time.monotonic()
    set_flag(folder, "cut")
    for rank in range(4):
        wait_for_flag(folder, f"done {rank}")
    set_link(a, "up")
    set_flag(folder, "mended")
    for rank in range(4):
        wait_for_flag(folder, f"told {rank}")
        failed, sums, new, retry = json.loads((folder / f"told {rank}").read_text())
        failed, retry = Attempt(*failed), Attempt(*retry)
        took = failed.end - cut
        side = "with the store" if rank < 2 else "without the store"
        print(f"two hosts, rank {rank}: {failed.kind} {took:.2f} s {failed.text!r}; then {retry.kind or 'connected'}")
        tally.add("link cut", side, "2 members", failed.kind, took)
        tally.add("link mended", side, "2 members", retry.kind or "connected", retry.took)
        if rank < 2:
            words = "ranks 2, 3 did not arrive" in failed.text and "no heartbeat" in failed.text
            if failed.kind != "MissingRanksError" or not words or took > H + BEAT + SLACK:
                tally.breaks(f"two hosts, rank {rank}: after {took:.2f} s {failed.kind} {failed.text}")
            if Attempt(*new).kind:
                tally.breaks(f"two hosts, rank {rank}: no new group on this side: {new}")
        elif failed.kind != "WorldError" or took > D + SLACK + 1.0:
            tally.breaks(f"two hosts, rank {rank}: after {took:.2f} s {failed.kind} {failed.text}")
        if sums or retry.kind:
            tally.breaks(f"two hosts, rank {rank}: sums {sums!r}, the retry {retry}")


# ---- all of it ----


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after so many")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", type=numbers, metavar="N,N", help="these cases alone")
    parser.add_argument("--part", choices=("cases", "crashes", "counts", "starved", "hosts"), help="this part alone")
    parser.add_argument("--list", action="store_true", help="show the cases")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        be_a_worker(args.worker)
        return 0
    cases = all_cases()
    if args.list:
        print(*cases, sep="\n")
        return 0
    seed = args.seed if args.seed is not None else random.randrange(10**6)
    if args.into is None:
        print(f"seed {seed}", flush=True)
    tally, start = Tally(), time.monotonic()

    def by(share: float) -> float:
        return start + 60.0 * args.minutes * share

    if args.only is not None:
        run_these([cases[number] for number in args.only], seed, by(1.0), tally)
        if args.into is not None:
            tally.write(args.into)
            return 0
    else:
        parts: dict[str, Callable[[float], None]] = {
            "hosts": lambda end: run_hosts(tally),
            "counts": lambda end: run_counts(500 if args.minutes >= 5 else 100, tally),
            "crashes": lambda end: run_crashes(end, tally),
            "cases": lambda end: run_cases(cases, seed, end, tally),
            "starved": lambda end: run_starved(seed, end, tally),
        }
        for part, share in zip(parts, SHARES):
            if args.part in (None, part):
                begun = time.monotonic()
                parts[part](by(1.0 if args.part else share))
                print(f"-- {part}: {time.monotonic() - begun:.0f} s", flush=True)
    tally.show()
    return 1 if tally.broken else 0


def numbers(text: str) -> list[int]:
    return [*map(int, text.split(","))]


def run_these(cases: Sequence[Case], seed: int, end: float, tally: Tally) -> None:
    """These cases, for as long as there is time."""
    for i, case in enumerate(cases):
        if time.monotonic() > end:
            tally.cases_left += [each.number for each in cases[i:]]
            break
        run_case(case, seed, tally)


def run_cases(cases: list[Case], seed: int, end: float, tally: Tally) -> None:
    """All cases, those first that were left the last time, and else in an order that the seed decides.

    Most of their time they wait, so some go on side by side.
    """
    earlier = json.loads(LEFT.read_text()) if LEFT.exists() else []
    order = random.Random(seed).sample(cases, len(cases))
    order.sort(key=lambda case: case.number not in earlier)
    minutes = f"{max(0.0, end - time.monotonic()) / 60:.3f}"
    with tempfile.TemporaryDirectory() as name:
        shares = {Path(name) / f"{i}": order[i::SIDE_BY_SIDE] for i in range(SIDE_BY_SIDE)}
        running = []
        for path, share in shares.items():
            only = ",".join(str(case.number) for case in share)
            command = [sys.executable, "-m", "tests.faults.chaos", "--seed", f"{seed}", "--minutes", minutes]
            running.append(subprocess.Popen([*command, "--only", only, "--into", str(path)]))
        try:
            for each, path in zip(running, shares):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.wait(max(0.0, end - time.monotonic()) + 60.0)  # what began goes on to its end
                if path.exists():
                    tally.read(path)
                else:
                    tally.breaks(f"cases: a process that tried them ended with {each.poll()}, and told nothing")
        finally:
            for each in running:
                each.kill()
                each.wait(5.0)
    LEFT.parent.mkdir(exist_ok=True)
    LEFT.write_text(json.dumps(tally.cases_left))


if __name__ == "__main__":
    sys.exit(main())
