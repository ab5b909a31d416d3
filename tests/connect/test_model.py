"""The connect protocol under a model checker: each law over all interleavings of small programs; mutants are caught."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.connect.model.mutants import KNOT, MUTANTS
from tests.connect.model.ranks import PAIRS_AND_TRIPLE, Program, at_once, one_after_another
from tests.connect.model.space import ConnectSpace
from tests.support.faults import STATES
from tests.support.model.space import MANY, NO_FAULTS, Faults, Mutant, check

AB, AC, BC, ABC = PAIRS_AND_TRIPLE
IN_ANY_ORDER = at_once(AB, AC), at_once(BC, AB), one_after_another(AC, BC)


def explore(programs: Sequence[Program], faults: Faults = NO_FAULTS, most: int = MANY) -> None:
    """Try everything that can happen, and assert the laws."""
    space = ConnectSpace(programs, faults)
    check(space.explore(most), space, most)


@pytest.mark.parametrize("programs", [(one_after_another(AB, AB),) * 2, (at_once(ABC),) * 3, IN_ANY_ORDER])
def test_calls_connect_groups_in_any_order(programs):
    explore(programs)


def test_different_groups_are_never_connected():
    explore((at_once(AB), at_once(AB, variant=1)), Faults(deadlines=1))
    explore((at_once(ABC), at_once(ABC, variant=1), at_once(ABC)))


def test_ranks_connect_in_one_call_after_a_circle():
    groups = [tuple(group for call in each.calls for group in call) for each in KNOT]
    programs = [Program(each.calls, otherwise=(mine,)) for each, mine in zip(KNOT, groups)]
    explore(programs)
    explore(programs, Faults(deadlines=1), 40_000)
    explore(KNOT, Faults(warns=True))


@pytest.mark.fault("a member dies before arriving in `connect` (L)")
def test_rank_may_die_at_any_step():
    explore((at_once(AB), at_once(AB)), Faults(crashes=1, long_times=2))


def test_remaining_ranks_connect_without_the_lost_one():
    programs = (at_once(ABC, otherwise=((AB,),)), at_once(ABC, otherwise=((AB,),)), at_once(ABC))
    explore(programs, Faults(crashes=1, mortal=frozenset([2])))


def test_rank_without_status_is_awaited_until_deadline():
    """It may have died, or not have begun."""
    explore((at_once(AB), at_once(AB)), Faults(crashes=1, deadlines=1, heard=False, warns=True))


@pytest.mark.fault("one member would time out as another succeeds")
def test_ranks_retry_after_deadlines():
    """One rank may reach its deadline as another succeeds: the outcome is the same, and a retry works."""
    explore((at_once(AB, after="retry"), at_once(AB, after="retry")), Faults(deadlines=2))
    explore((at_once(ABC),) * 3, Faults(deadlines=1), 3 * STATES)


@pytest.mark.parametrize("faults", [Faults(deadlines=1), Faults(interrupts=1)])
@pytest.mark.parametrize("programs", ["one group", "two groups"])
def test_three_ranks_retry_the_groups_that_failed(programs, faults):
    groups = [(ABC,)] * 3 if programs == "one group" else [(AB,), (AB, BC), (BC,)]
    retries = [at_once(*mine, after="retry") for mine in groups]
    explore(retries, faults, 4 * STATES)
    space = ConnectSpace(retries, faults)
    check(space.walk(20, random.Random(3)), space)


@pytest.mark.parametrize("faults", [Faults(interrupts=1), Faults(silences=1, long_times=2)], ids=str)
def test_interrupted_or_stopped_rank_retries(faults: Faults):
    """A stopped rank may count as lost. Then both ranks get this outcome, and a retry works."""
    explore((at_once(AB, after="retry"),) * 2, faults)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant: Mutant):
    broken = mutant.broken(ConnectSpace)
    assert broken is not None, f"{mutant.name}: expected it to break the law: {mutant.law}"
    print(broken)
