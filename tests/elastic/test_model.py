"""The agreement on lost ranks under a model checker: each law over all interleavings; mutants are caught."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from pgmesh.elastic.records import Request
from pgmesh.layout import Layout
from tests.elastic.model.mutants import MUTANTS
from tests.elastic.model.processes import Program
from tests.elastic.model.programs import (
    BEFORE,
    CAME_BACK,
    DROP,
    NEW_AND_AGAIN,
    PAIR,
    SECOND_DIES,
    SPARE,
    SPARE_ONLY,
    Programs,
    members,
    random_programs,
    with_new,
    with_spare,
)
from tests.elastic.model.space import ShrinkSpace
from tests.support.faults import RANDOM_PROGRAMS, SEED, STATES
from tests.support.model.space import MANY, NO_FAULTS, Faults, Mutant, check

STOPPED = Faults(silences=1, long_times=1)


def explore(programs: Programs, faults: Faults = NO_FAULTS, most: int = MANY, **more: Any) -> None:
    """Try everything that can happen, and assert the laws."""
    space = ShrinkSpace(programs, faults, **more)
    check(space.explore(most), space, most)


def walk(programs: Programs, faults: Faults, walks: int, **more: Any) -> None:
    """Take random walks, and assert the laws."""
    space = ShrinkSpace(programs, faults, **more)
    check(space.walk(walks, random.Random(7)), space)


def decisions_of(space: ShrinkSpace) -> set[tuple[str, bytes]]:
    """All decisions that were reached, each with its key."""
    values = [item for content in space.stores.known.values() for item in content.values.items()]
    return {(key, value) for key, value in values if key.startswith("m") and key.endswith("/decision")}


# -- members ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_members_agree(ranks: int):
    explore(members(ranks))


@pytest.mark.parametrize("crashes", [1, 2])
def test_members_agree_after_crash_at_any_step(crashes: int):
    explore(members(3), Faults(crashes=crashes))


def test_members_agree_if_a_host_is_silent():
    explore(members(2), Faults(crashes=1, listeners=False, long_times=1))
    walk(members(3), Faults(crashes=1, listeners=False, long_times=1), 40)


@pytest.mark.parametrize("deadlines", [1, 2])
def test_members_retry_after_deadlines(deadlines: int):
    explore(members(2, retries=True), Faults(deadlines=deadlines))


def test_members_agree_after_interrupt_at_any_step():
    explore(members(2), Faults(interrupts=1, crashes=1))
    explore(members(2, retries=True), Faults(interrupts=1))


def test_stopped_rank_returns_and_stands_by():
    explore(members(2, comes_back=True), Faults(silences=1, long_times=1))
    explore(members(2, comes_back=True, retries=True), Faults(silences=1, long_times=1, deadlines=1), 2 * STATES)
    walk(members(3, comes_back=True), Faults(silences=1, long_times=1, crashes=1), 30)


def test_members_agree_with_different_arguments():
    explore((Program(0, (DROP,)), Program(1, (SPARE,)), Program(2, (None,))), layout=PAIR)
    explore((Program(0, (DROP,)), Program(1, (SPARE,)), Program(2, (DROP,))))


# -- spares and new processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [SPARE, SPARE_ONLY], ids=str)
def test_members_agree_with_a_spare(request_: Request):
    explore(with_spare(request_), layout=PAIR)
    explore(with_spare(request_), Faults(crashes=1), layout=PAIR)


def test_members_agree_when_a_spare_calls_shrink():
    explore((*members(2, SPARE), Program(2, (SPARE,))), Faults(crashes=1), layout=PAIR)


@pytest.mark.parametrize("faults", [Faults(deadlines=1), Faults(interrupts=1), Faults(crashes=1, deadlines=1)], ids=str)
def test_members_retry_with_a_spare(faults: Faults):
    explore(with_spare(retries=True), faults, 2 * STATES, layout=PAIR)
    walk(with_spare(retries=True), faults, 20, layout=PAIR)


def test_new_process_replaces_a_lost_rank():
    explore(with_new(), SECOND_DIES, layout=PAIR)
    explore(NEW_AND_AGAIN, SECOND_DIES, layout=PAIR)
    walk(with_new(retries=True), Faults(crashes=1, interrupts=1), 40, layout=PAIR)


def test_new_process_replaces_a_stopped_one():
    """The old one was stopped, and goes on."""
    explore(with_new(), Faults(silences=1, long_times=1), layout=PAIR)


def test_rank_that_missed_a_mesh_stands_by():
    explore(CAME_BACK, SECOND_DIES, layout=Layout(dp=3), before=BEFORE)


@pytest.mark.long
@pytest.mark.parametrize("number", range(RANDOM_PROGRAMS))
def test_random_programs_agree_in_every_order(number: int):
    programs, faults, more = random_programs(random.Random(f"{SEED} {number}"))
    explore(programs, faults, 20_000, **more)
    walk(programs, faults, 30, **more)


# -- the checker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant: Mutant):
    broken = mutant.broken(ShrinkSpace)
    assert broken is not None, f"{mutant.name}: expected it to break the law: {mutant.law}"
    print(broken)
    check_without_mutant(tuple(mutant.programs), mutant.faults, tuple(mutant.more.items()))


@functools.cache
def check_without_mutant(programs: Programs, faults: Faults, more: tuple[tuple[str, Any], ...]) -> None:
    """Assert the laws of programs that reveal a mutant, once for all mutants of the same programs."""
    explore(programs, faults, 1_000, **dict(more))


def test_skipped_orders_reach_the_same_decisions():
    """Steps that commute with those of others are not tried in every order; tried so, they lead to the same."""
    for programs, faults in [(members(2, comes_back=True), STOPPED), (with_new(), SECOND_DIES)]:
        spaces = [ShrinkSpace(programs, faults, every_order=every, layout=PAIR) for every in (False, True)]
        some, every = [space.explore() for space in spaces]
        assert not some.broken + every.broken
        assert some.states < every.states
        assert decisions_of(spaces[0]) == decisions_of(spaces[1])
