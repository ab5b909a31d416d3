"""Every fault of a rank or the store at every moment of `connect`: `python -m pytest -n 3 tests/faults/chaos.py`.

Real processes, and what docs/faults.md promises has to hold each time. PGMESH_SEED decides the victims and the order of
arrival. With PGMESH_STARVED=N, while N processes keep the cores busy, `-k starved` runs the cases in which nothing but
time is lost, and so nothing may be reported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.launch import StoreProcess
from pgmesh.launch.spawning import Outcome
from pgmesh.liveness.operations import Add, Operation
from tests.support.board import Fault, at_all_reduce, faults as faults_at
from tests.support.faults import (
    BEAT,
    LONG_TIMEOUT,
    SEED,
    SLACK,
    Attempt,
    H,
    attempt,
    beat_fast,
    connect_and_beat,
    connect_and_check,
    meanwhile,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    wait_until_waiting,
)
from tests.support.releases import check_cycles
from tests.support.worlds import check_sums, fresh_world, groups_of

D = 4 * H  # seconds: the deadline of the calls that faults fall into
N = 4

PHASES = ("before arriving", "after arriving", "after the decision", "in the first collective", "after it")
UNDECIDED = PHASES[:2]
DEADLY = ("SIGKILL", "SIGTERM", "SIGSEGV")
HARMLESS = ("nothing", "slow", "SIGSTOP, short", "GIL held, short")
FAULTS = (*DEADLY, "SIGSTOP", "SIGSTOP, short", "exception", "GIL held", "GIL held, short", "slow")
STORE_FAULTS = ("SIGKILL", "SIGSTOP, short")
SHORT, LONGER = 0.4 * H, 2.5 * H

KINDS = [("nothing", PHASES[0], "none")]
KINDS += [(fault, phase, "member") for fault in FAULTS for phase in PHASES]
KINDS += [(fault, phase, "store") for fault in STORE_FAULTS for phase in PHASES]


@dataclass(frozen=True)
class Case:
    """One fault, at one moment, to one victim.

    Args:
        victim: "member", "store" or "none".
        rank: the rank at whose moment the fault comes.
        others_wait: the fault waits until the others wait.
    """

    fault: str
    phase: str
    victim: str
    rank: int
    others_wait: bool

    @property
    def dies(self) -> bool:
        return self.fault in DEADLY and self.victim != "store"

    @property
    def harmless(self) -> bool:
        """True if every member that lives gets its group."""
        return self.fault in HARMLESS or self.phase == "after it"

    @property
    def alive(self) -> list[int]:
        """The ranks that live in the end."""
        return [rank for rank in range(N) if not (self.dies and rank == self.rank)]


# ---- inside a rank ----


class Chaos(Exception):
    """An exception in the middle of things."""


def suffer(case: Case, folder: Path) -> None:
    """The moment has come: what the victim does to itself. What is done to it, and to the store, comes from outside."""
    set_flag(folder, "now")
    if case.victim == "store" or case.fault.startswith("SIG"):
        wait_for_flag(folder, "struck")
        return
    set_flag(folder, "struck")
    if case.fault == "exception":
        raise Chaos("by design")
    if case.fault.startswith("GIL"):
        seconds = SHORT if "short" in case.fault else LONGER
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # no thread of this process runs Python meanwhile
    if case.fault == "slow":
        time.sleep(LONGER)


@contextlib.contextmanager
def at_its_phase(case: Case, folder: Path) -> Iterator[None]:
    """Have the fault strike at its moment, once."""
    once = iter([True])

    def strike_in(phase: str) -> None:
        if case.phase == phase and next(once, False):
            suffer(case, folder)

    def counts(operation: Operation) -> bool:
        return isinstance(operation, Add) and operation.key.endswith("/count")

    arriving = Fault(counts, after=lambda: strike_in("after arriving"))
    before, after = "after the decision", "in the first collective"
    with faults_at(arriving), at_all_reduce(lambda: strike_in(before), lambda: strike_in(after)):
        yield


@dataclass
class Seen:
    """What one rank has seen: the call that the fault falls into, its older groups, and a retry."""

    failed: Attempt
    sums: str
    retry: Attempt


def live_through(case: Case, folder: Path) -> Seen:
    me = dist.get_rank()
    beat_fast()
    connect_and_beat(beating := ProcessGroupMesh(N, name="beating"))
    bystander = ProcessGroupMesh(-1, ranks=case.alive, name="bystander")
    if me in case.alive:
        connect_and_check(bystander)
    mesh = ProcessGroupMesh(N, name="actor")

    def call() -> None:
        if me != case.rank or case.fault == "nothing":
            mesh.connect(timeout=timedelta(seconds=D))
            return
        if case.others_wait and case.phase in UNDECIDED:
            wait_until_waiting(*(rank for rank in range(N) if rank != me))
        if case.phase == "before arriving":
            suffer(case, folder)
        with at_its_phase(case, folder):
            mesh.connect(timeout=timedelta(seconds=D))
        if case.phase == "after it":
            suffer(case, folder)

    dist.barrier(beating.group())  # a rank that is D late, where no core is free, is not the fault that is tried
    failed = attempt(call)
    set_flag(folder, f"done {me}")
    sums = attempt(lambda: check_sums(groups_of(bystander))).text
    if case.harmless and not case.dies and not sums:
        sums = attempt(lambda: check_sums(groups_of(mesh))).text
    wait_for_flag(folder, "over")
    again = ProcessGroupMesh(-1, ranks=case.alive, name="again")
    retry = attempt(lambda: connect_and_check(again))
    return Seen(failed, sums, retry)


# ---- outside ----


def send_signals(case: Case, folder: Path, pids: Sequence[int], store: int) -> None:
    """Strike from outside, and make up for it once all others are done."""
    if case.fault.startswith("SIG"):
        wait_for_flag(folder, "now")
        pid = store if case.victim == "store" else pids[case.rank]
        number = getattr(signal, case.fault.partition(",")[0])
        try:
            os.kill(pid, number)
            set_flag(folder, "struck")
            if case.fault == "SIGSTOP, short":
                time.sleep(SHORT)
            elif case.fault == "SIGSTOP":
                wait_for_flags(folder, "done", [rank for rank in range(N) if rank != case.rank])
        finally:
            if number == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
    wait_for_flags(folder, "done", case.alive)
    set_flag(folder, "over")


def run(case: Case, folder: Path) -> list[Outcome]:
    with StoreProcess() as store, fresh_world(N, store) as own:
        own.run(dist.get_rank)
        struck: list[Attempt] = []

        def act() -> None:
            struck.append(attempt(lambda: send_signals(case, folder, own.pids, store.process.pid or 0)))

        with meanwhile(act):
            outcomes = own.outcomes(live_through, case, folder, deadline=150.0)
    assert [each.kind for each in struck] == [""], struck
    return outcomes


def limit_of(case: Case) -> float:
    """The seconds in which the call of each peer ends."""
    if case.victim != "member":
        return 2 * D + SLACK + LONGER
    if case.fault in DEADLY:
        return 2 * (H + BEAT) + SLACK + 1.0
    if case.fault == "exception" and case.phase == "after arriving" and not case.others_wait:
        return D + 2 * SLACK  # a rank that arrives after the exception is in the next attempt, until its D
    if case.fault == "exception" and case.phase != "before arriving":
        return 0.2 + 2 * SLACK
    return 2 * D + SLACK + LONGER


def name_of(kind: tuple[str, str, str]) -> str:
    fault = kind[0]
    return ", ".join(kind) + (", starved" if fault in HARMLESS else "")


@pytest.mark.fault("one member would time out as another succeeds")
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_fault_at_its_moment_breaks_no_promise(kind: tuple[str, str, str], tmp_path: Path):
    chance = random.Random(f"{SEED} {kind}")
    case = Case(*kind, rank=chance.randrange(N), others_wait=chance.random() < 0.7)
    print(f"PGMESH_SEED={SEED}: {case}")
    outcomes = run(case, tmp_path)
    seen: dict[int, Seen] = {}
    for outcome in outcomes:
        if outcome.rank in case.alive:
            assert not outcome.error, f"rank {outcome.rank} {outcome.error} {outcome.details}"
            seen[outcome.rank] = outcome.result
        else:
            assert outcome.exitcode == -getattr(signal, case.fault)
    check_peers(case, {rank: each.failed for rank, each in seen.items() if rank != case.rank})
    is_gone = case.victim == "store" and case.fault == "SIGKILL"
    for rank, each in seen.items():
        assert not each.sums, f"an older group on rank {rank}"
        assert each.retry.kind == ("WorldError" if is_gone else ""), f"the retry on rank {rank}: {each.retry}"
        assert each.retry.took < (1.0 + SLACK if is_gone else LONG_TIMEOUT.total_seconds())


def check_peers(case: Case, peers: dict[int, Attempt]) -> None:
    """Assert the errors of the members other than the victim, and their times."""
    kinds = {failed.kind for failed in peers.values()}
    texts = "\n".join(f"rank {rank}: {failed}, {failed.took:.2f} s" for rank, failed in peers.items())
    print(texts)
    assert max(failed.took for failed in peers.values()) < limit_of(case)
    assert kinds <= {"", "MissingRanksError"} | ({"WorldError"} if case.victim == "store" else set())
    if case.fault == "exception" and case.victim == "member" and case.phase == "after arriving":
        cancelled = [failed.took for failed in peers.values() if "was cancelled because" in failed.text]
        assert cancelled or not case.others_wait, "no rank reports the exception"
        assert max(cancelled, default=0.0) < 0.2 + 2 * SLACK
    if case.harmless:
        assert kinds == {""}, "a false report"
    elif case.phase in UNDECIDED and case.victim == "member":
        assert len(kinds) == 1, "not one outcome for all"
        assert all(f"rank {case.rank}" in failed.text for failed in peers.values() if failed.kind)


def test_releasing_500_times_leaves_nothing_behind():
    check_cycles(500, connects=True)
