"""The agreement on lost ranks under a model checker: each law over all interleavings; mutants are caught."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from pgmesh.elastic.records import Request
from pgmesh.layout import Layout
from tests.elastic.model.mutants import MUTANTS
from tests.elastic.model.processes import (
    BEFORE,
    CAME_BACK,
    DROP,
    NEW_AND_AGAIN,
    PAIR,
    SECOND_DIES,
    SPARE,
    SPARE_ONLY,
    Program,
    Programs,
    members,
    with_new,
    with_spare,
)
from tests.elastic.model.space import ShrinkSpace
from tests.support.faults import STATES
from tests.support.model.space import MANY, NO_FAULTS, Faults, Mutant, check


def explore(programs: Programs, faults: Faults = NO_FAULTS, most: int = MANY, **more: Any) -> None:
    """Try everything that can happen, and assert the laws."""
    space = ShrinkSpace(programs, faults, **more)
    check(space.explore(most), space, most)


def walk(programs: Programs, faults: Faults, walks: int, **more: Any) -> None:
    """Take random walks, and assert the laws."""
    space = ShrinkSpace(programs, faults, **more)
    check(space.walk(walks, random.Random(7)), space)


def test_members_agree_after_crash_at_any_step():
    explore(members(3), Faults(crashes=2))


def test_members_agree_if_a_host_is_silent():
    explore(members(2), Faults(crashes=1, listeners=False, long_times=1))
    walk(members(3), Faults(crashes=2, listeners=False, long_times=1), 40)


def test_members_retry_after_deadlines():
    explore(members(2, retries=True), Faults(deadlines=2))


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


@pytest.mark.parametrize("request_", [SPARE, SPARE_ONLY], ids=str)
def test_members_agree_with_a_spare(request_: Request):
    explore(with_spare(request_), Faults(crashes=1), layout=PAIR)


def test_members_agree_when_a_spare_gives_up():
    explore(with_spare(), Faults(crashes=1, deadlines=1), 2 * STATES, layout=PAIR)
    walk(with_spare(retries=True), Faults(crashes=1, deadlines=2), 40, layout=PAIR)


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
