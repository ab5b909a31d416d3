"""Tools for tests in which ranks fail: fast heartbeats, waits with a deadline, ranks killed at a chosen moment."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from pgmesh import ProcessGroupMesh, connecting, heart
from pgmesh.launch import Outcome
from pgmesh.polling import perform
from pgmesh.rendezvous import Read, Say, Step, Told, told
from tests.support.torch_tables import pgmesh_store
from tests.support.worlds import STARVED, check_sums, fresh_world, groups_of

BEAT = 1.0 if STARVED else 0.2
H = BEAT * heart.SUSPICION  # seconds of silence after which a rank is suspected
SLACK = 30.0 if STARVED else 1.0  # seconds that a busy machine may add to any bound
LONG_TIMEOUT = timedelta(seconds=60 if STARVED else 12)  # a deadline that nobody should reach
WAIT_TIMEOUT = 120.0 if STARVED else 30.0  # seconds for whatever a test waits for


class Attempt(NamedTuple):
    """What became of a call on this rank, and when."""

    kind: str  # of the error; "" if there was none
    text: str
    start: float
    end: float

    @property
    def took(self) -> float:
        return self.end - self.start


def attempt(act: Callable[[], Any]) -> Attempt:
    start = time.monotonic()
    try:
        act()
    except BaseException as error:
        return Attempt(type(error).__name__, str(error), start, time.monotonic())
    return Attempt("", "", start, time.monotonic())


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition holds."""
    end = time.monotonic() + WAIT_TIMEOUT
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not in {WAIT_TIMEOUT} s"
        time.sleep(0.005)
    return found


def last_status(rank: int) -> Told | None:
    """What a rank last told the others."""
    return Told.unpack(rank, perform(pgmesh_store(), Read(told(rank))))


def wait_until_waiting(*ranks: int) -> None:
    """Wait until these ranks have come to a meeting and tell that they wait."""
    for rank in ranks:
        wait_until(lambda rank=rank: (last := last_status(rank)) and last.waits, f"rank {rank} waits")


def set_flag(folder: Path, name: str) -> None:
    """Let every process on this machine know."""
    (folder / name).touch()


def wait_for_flag(folder: Path, name: str) -> None:
    wait_until((folder / name).exists, f"flag {name}")


def beat_fast() -> None:
    """Beat fast, and give the store little time for its last word."""
    heart.BEAT, connecting.LAST_WORD = BEAT, 0.5
    logging.getLogger("pgmesh").addHandler(logging.NullHandler())  # what a test does not look for is not printed


def connect_and_beat(mesh: ProcessGroupMesh) -> None:
    """It connects, and every rank of it beats for good."""
    mesh.connect(timeout=LONG_TIMEOUT)
    wait_until(lambda: mesh._family.beating().steady, "a connection of its own")
    mesh._family.beating().ask(Say(()), WAIT_TIMEOUT)
    dist.barrier(mesh.group())


def beat_fast_with_bystander(*but: int) -> ProcessGroupMesh:
    """Beat fast, from the first connect on; and a mesh of all but these ranks, which nothing that follows may harm."""
    beat_fast()
    everyone = range(dist.get_world_size())
    connect_and_beat(ProcessGroupMesh(len(everyone), name="beating"))
    bystander = ProcessGroupMesh(-1, ranks=[rank for rank in everyone if rank not in but], name="bystander")
    if bystander.rank in bystander:
        bystander.connect(timeout=LONG_TIMEOUT)
    return bystander


def connect_and_check(mesh: ProcessGroupMesh, *families: Any) -> None:
    """It connects, and every sum is right."""
    mesh.connect(*families, timeout=LONG_TIMEOUT)
    axes = [each if isinstance(each, tuple) else (each,) for each in families or mesh.axes]
    check_sums({f"{each}": (mesh.group(*each), mesh.ranks(*each)) for each in axes})


def kill_self(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def results(outcomes: Sequence[Outcome], *but: int) -> list[Any]:
    """What every rank but these returned."""
    for outcome in outcomes:
        assert outcome.rank in but or not outcome.error, f"rank {outcome.rank} {outcome.error}\n{outcome.details}"
    return [outcome.result for outcome in outcomes if outcome.rank not in but]


ORDERS = ("first", "together", "last")


def die_at(folder: Path, points: Sequence[tuple[int, str]]) -> tuple[Attempt, Attempt]:
    """In each three ranks the middle one dies as it asks the store for the k-th time."""
    me = dist.get_rank()
    beat_fast()
    three, (k, order) = me // 3, points[me // 3]
    first, victim, last = members = range(three * 3, three * 3 + 3)
    connect_and_beat(ProcessGroupMesh(3, ranks=members, name=f"beating {three}"))
    mesh = ProcessGroupMesh(3, ranks=members, name=f"actor {three}")
    asked = iter(range(1, k))

    def die(store: Any, step: Step) -> Any:
        if next(asked, None) is None:
            set_flag(folder, f"dead {three} {k} {order}")
            kill_self()
        return perform(store, step)

    if me == victim and order == "last":
        wait_until_waiting(first, last)
    if me != victim and order == "first":
        dead = folder / f"dead {three} {k} {order}"
        wait_until(
            lambda: dead.exists() or ((told := last_status(victim)) and told.waits), "the victim waits, or is dead"
        )
    with mock.patch.object(heart, "perform", die if me == victim else perform):
        failed = attempt(lambda: mesh.connect(timeout=LONG_TIMEOUT))
    survivors = ProcessGroupMesh(2, ranks=[first, last], name=f"survivors {three}")
    return failed, attempt(lambda: connect_and_check(survivors) if me != victim else check_sums(groups_of(mesh)))


def die_at_each(folder: Path, points: Sequence[tuple[int, str]]) -> list[str]:
    """What became of each crash point, in a word: "" where the victim had done all it had to do."""
    with fresh_world(3 * len(points)) as own:
        outcomes = own.outcomes(die_at, folder, points)
    words = []
    for three, (k, order) in enumerate(points):
        first, victim, last = outcomes[three * 3 : three * 3 + 3]
        seen: list[tuple[Attempt, Attempt]] = results([first, last])
        point = f"operation {k}, {order}: {[failed for failed, _ in seen]}"
        kinds = {failed.kind for failed, _ in seen}
        warming = any("first collective" in failed.text for failed, _ in seen)
        assert len(kinds) == 1 or warming, point  # in the first collective, one may be done as the other is not
        assert kinds <= {"", "MissingRanksError"}, point
        assert all(f"rank {victim.rank}" in failed.text for failed, _ in seen if failed.kind), point
        assert all(failed.took < 2 * (H + BEAT) + SLACK for failed, _ in seen), point
        assert not any(again.kind for _, again in seen), f"{point} {[again for _, again in seen]}"
        if not victim.error:
            results([victim])
            assert kinds == {""}, point
        else:
            assert victim.exitcode == -signal.SIGKILL, victim
        words.append("" if not victim.error else "in the first collective" if warming else f"{kinds.pop() or 'made'}")
    return words
