"""The connect protocol under a model checker: each law over all interleavings of small programs; mutants are caught."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from pgmesh.rendezvous.timing import LIMITS
from tests.rendezvous.model.__main__ import main
from tests.rendezvous.model.ideal import Ideal
from tests.rendezvous.model.mutants import MUTANTS, Mutant, caught
from tests.rendezvous.model.programs import (
    PAIRS_AND_TRIPLE,
    Program,
    Protocol,
    Release,
    at_once,
    but_for_names,
    drawn,
    one_after_another,
    two_each,
    up_to_two_each,
)
from tests.rendezvous.model.space import NO_FAULTS, Checker, Faults, Seen

AB, AC, BC, ABC = PAIRS_AND_TRIPLE


def try_all(
    programs: Sequence[Program], faults: Faults = NO_FAULTS, *, checker: Checker | None = None, **more: Any
) -> Seen:
    checker = checker or Checker()
    seen = checker.wander(programs, faults, **more) if "walks" in more else checker.explore(programs, faults, **more)
    assert not seen.broken, f"{programs}, {faults}\n{seen.broken[0]}"
    return seen


# -- nothing fails ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_circles_are_found_where_they_are_and_nowhere_else():
    """Three ranks that connect two groups each, one after another: 216 programs, or 38 but for the ranks' names.

    Of the larger spaces, a part is tried here, and then ways through it drawn by chance; ``make chaos`` tries all.
    """
    total, checker, chance = Seen(), Checker(), random.Random(7)
    for programs, alike in but_for_names(two_each()):
        seen = try_all(programs, checker=checker, most=70_000)
        if seen.cut_short:
            seen.add(try_all(programs, checker=checker, walks=30, chance=chance))
        assert bool(seen.circles) == Ideal.of(programs).has_circle(), programs
        circles = alike * bool(seen.circles)
        total.add(Seen(programs=alike, states=seen.states, circles=circles, cut_short=alike * seen.cut_short))
    print(total)
    assert total.programs == 216
    assert total.cut_short < 60
    assert total.circles == sum(Ideal.of(programs).has_circle() for programs in two_each())


def test_shorter_programs_too():
    """Up to one group each, and one group twice."""
    checker = Checker()
    for programs, _ in but_for_names(up_to_two_each()):
        if sum(len(program.calls) for program in programs) <= 3:
            seen = try_all(programs, checker=checker)
            assert bool(seen.circles) == Ideal.of(programs).has_circle(), programs


def test_groups_of_one_call_come_in_any_order():
    try_all((at_once(AB, AC), at_once(BC, AB), one_after_another(AC, BC)))


@pytest.mark.parametrize("ranks", [4, 5])
def test_more_ranks_by_chance(ranks):
    seed = 11
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(8):
        programs = drawn(chance, ranks)
        seen = try_all(programs, walks=15, chance=chance)
        assert bool(seen.circles) == Ideal.of(programs).has_circle(), programs


@pytest.mark.parametrize("ranks", [8, LIMITS.statuses, LIMITS.statuses + 8])
def test_a_long_circle_is_found(ranks):
    """Each rank connects to the next, and then to the one before: all wait for each other."""
    programs = []
    for rank in range(ranks):
        pairs = [tuple(sorted((rank, (rank + step) % ranks))) for step in (1, -1)]
        programs.append(one_after_another(*pairs))
    seen = try_all(programs, walks=1, chance=random.Random(5))
    assert seen.circles


# -- something fails --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("long_times", [0, 2])
def test_a_rank_may_die_at_any_step(long_times):
    seen = try_all((at_once(AB), at_once(AB)), Faults(crashes=1, long_times=long_times))
    assert seen.crashes > 100


def test_one_of_three_may_die_at_any_step():
    seen = try_all((at_once(ABC),) * 3, Faults(crashes=1))
    assert seen.crashes > 1000


def test_those_that_are_left_connect_without_the_lost():
    programs = (at_once(ABC, otherwise=((AB,),)), at_once(ABC, otherwise=((AB,),)), at_once(ABC))
    try_all(programs, Faults(crashes=1, mortal=frozenset([2])))


def test_whoever_was_never_heard_from_is_waited_for():
    """It may have died, or not have begun; with deadlines, all end."""
    try_all((at_once(AB), at_once(AB)), Faults(crashes=1, deadlines=1, heard=False))


@pytest.mark.parametrize("deadlines", [1, 2, 3])
def test_one_would_time_out_as_another_succeeds(deadlines):
    """One outcome for both; and trying again works."""
    try_all((at_once(AB, after="retry"), at_once(AB, after="retry")), Faults(deadlines=deadlines))


def test_two_groups_at_once_and_a_retry_of_what_was_not_made():
    programs = (at_once(AB, after="retry"), at_once(AB, BC, after="retry"), at_once(BC, after="retry"))
    seen = try_all(programs, Faults(deadlines=1), walks=200, chance=random.Random(3))
    assert seen.states > 1000


@pytest.mark.parametrize("programs", [(at_once(AB),) * 2, (one_after_another(AB, AB),) * 2])
def test_ctrl_c_before_and_after_any_step(programs):
    try_all(programs, Faults(interrupts=1))


def test_a_rank_that_is_stopped_and_goes_on():
    """It may be taken for lost; and then it learns of that, and both have one outcome."""
    try_all((at_once(AB, after="retry"), at_once(AB, after="retry")), Faults(silences=1, long_times=2))


def test_ranks_that_mean_different_groups():
    """No such group is ever made."""
    try_all((at_once(AB), at_once(AB, variant=1)))
    try_all((at_once(AB), at_once(AB, variant=1)), Faults(deadlines=1))


@pytest.mark.parametrize("losses", [1, 2])
def test_members_that_release_a_group_meet_again_whatever_failed_on_whom(losses):
    """The first collective is done on one, and lost on the other."""
    calls = ((AB,), Release((AB,)), (AB,), Release((AB,)), (AB,))
    seen = try_all((Program(calls[: 1 + 2 * losses], after="next", lasting=True),) * 2, Faults(losses=losses))
    assert seen.states > 100


@pytest.mark.parametrize("ranks", [4, 5])
def test_more_ranks_and_faults_by_chance(ranks):
    seed = 13
    print(f"seed {seed}")
    chance = random.Random(seed)
    faults = Faults(crashes=1, deadlines=1, long_times=1)
    for _ in range(7):
        try_all(drawn(chance, ranks), faults, walks=15, chance=chance)


# -- the checker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.protocol.name)
def test_mutants_are_caught(mutant: Mutant):
    broken = caught(mutant)
    assert broken is not None, f"{mutant.protocol.name} was to break: {mutant.law}"
    print(broken)
    control = Checker().explore(mutant.programs, mutant.faults)
    assert not control.broken, "and nothing else does"


def test_what_is_left_out_changes_nothing():
    """Reads of what never changes are not tried in every order; tried so, they lead to the same."""
    fast, slow = Checker(), Checker(Protocol(sound=False))
    for programs in [(at_once(AB),) * 2, (one_after_another(AB, AC), one_after_another(BC, AB), at_once(AC))]:
        some, every = fast.explore(programs), slow.explore(programs)
        assert (some.broken, some.circles) == (every.broken, every.circles)
        assert some.states < every.states


def test_the_long_version_prints_a_table(capsys):
    main(["--minutes", "0"])
    assert f"mutants caught: {len(MUTANTS)} of {len(MUTANTS)}" in capsys.readouterr().out
