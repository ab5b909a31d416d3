"""Detection times of docs/faults.md, asserted exactly on a simulated clock.

test_faults.py shows with real processes that each fault is reported, and tolerates the delays of a busy machine.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings, strategies as st

from pgmesh.errors import CircleError, MismatchError, MissingRanksError
from pgmesh.rendezvous.protocol import Read, SetStatus
from pgmesh.rendezvous.timing import TIMING
from tests.rendezvous.model.clock import Caller, Clock, H

POLL = 0.3
ALL = (0, 1, 2, 3)
moments = st.floats(0.0, 3.0)
paces = st.sampled_from([1.0, 1.0, 8.0])


@settings(max_examples=120)
@given(
    st.tuples(moments, moments, moments, moments),
    st.sampled_from(ALL),
    st.sets(st.sampled_from(ALL), min_size=2),
    st.sampled_from(["group", "mesh", "process"]),
)
def test_what_differs_is_told_within_a_tenth_of_a_second(comes, odd, came, what):
    """To each that came: after the last two of those that differ, whoever else comes or does not."""
    assume(odd in came)
    callers = [Caller(rank, [ALL], comes[rank] if rank in came else math.inf) for rank in ALL]
    if what == "group":
        callers[odd].variant = 1
    elif what == "mesh":
        callers[odd].mesh = 1
    else:  # it takes itself for another, and is another process
        other = next(rank for rank in sorted(came) if rank != odd)
        callers[odd].rank, callers[odd].process = other, "a second process"
    Clock(*callers).run()
    known = max(comes[odd], min(comes[rank] for rank in came if rank != odd))
    if what == "process":
        known = max(comes[odd], comes[other])
    for rank in came:
        caller = callers[rank]
        assert [type(each) for each in caller.outcomes] == [MismatchError], caller
        assert caller.finished_at - max(known, caller.arrives) < 0.1


@settings(max_examples=120)
@given(st.tuples(moments, moments, moments), st.floats(0.0, 0.999), st.integers(1, 4), st.floats(0.001, 0.999), paces)
def test_a_member_that_falls_silent_is_named_a_poll_after_h(comes, phase, beats, after, pace):
    beat = phase + beats  # its last
    dies = beat + after
    callers = [*(Caller(rank, [ALL], comes[rank] * pace, deadline=300.0) for rank in range(3))]
    callers.append(Caller(3, dies=dies * pace, phase=phase))
    Clock(*callers, pace=pace).run()
    first = min(comes) * pace
    for caller in callers[:3]:
        assert [type(each) for each in caller.outcomes] == [MissingRanksError], caller
        assert "rank 3 has sent no heartbeat for" in str(caller.outcomes[0])
        assert caller.finished_at - max(dies * pace, first, caller.arrives - H * pace) < (H + POLL) * pace
    assert min(caller.finished_at for caller in callers[:3]) >= max(beat * pace, first) + H * pace  # and not before


@settings(max_examples=60)
@given(st.tuples(moments, moments, moments, moments), paces)
def test_a_living_member_is_waited_for_and_no_longer_than_promised(comes, pace):
    deadline = 9.0
    callers = [Caller(rank, [ALL], comes[rank], deadline=deadline * pace) for rank in range(3)]
    callers.append(Caller(3, silent=comes[3] > 1.5))
    Clock(*callers, pace=pace).run()
    first = min(comes[:3])
    for caller in callers[:3]:
        assert [type(each) for each in caller.outcomes] == [MissingRanksError], caller
        assert (
            deadline * pace <= caller.finished_at - first < (deadline + POLL) * pace + max(0.0, caller.arrives - first)
        )
        for at in caller.warned_at:
            assert deadline * pace / 3 <= at - caller.arrives < (deadline / 3 + POLL) * pace
    assert len(min(callers[:3], key=lambda caller: caller.arrives).warned_at) == 1


@settings(max_examples=40)
@given(st.integers(3, 9), st.data())
def test_a_circle_is_told_within_a_second_of_the_last_that_came(ranks, data):
    callers = []
    for rank in range(ranks):
        pair = tuple(sorted((rank, (rank + 1) % ranks)))
        callers.append(Caller(rank, [pair], data.draw(moments)))
    Clock(*callers).run()
    last = max(caller.arrives for caller in callers)
    for caller in callers:
        assert [type(each) for each in caller.outcomes] == [CircleError], caller
        assert caller.finished_at - last < 1.0


def test_what_a_thread_waits_for_is_no_part_of_a_circle():
    """A thread of rank 0 waits for rank 1, which waits for rank 0, and the main thread of rank 0 comes to it later."""
    thread, main = Caller(0, [(0, 1)], 0.0, single_threaded=False), Caller(0, [ALL[:3]], 5.0)
    others = [Caller(rank, [ALL[:3]], 0.0) for rank in (1, 2)]
    Clock(thread, main, *others).run()
    assert [caller.outcomes for caller in (main, *others)] == [[None]] * 3


@pytest.mark.parametrize("pace", [1.0, 8.0, 64.0])
def test_in_a_larger_world_ranks_ask_why_so_much_later(pace):
    callers = [Caller(rank, [(0, 1)], float(rank), deadline=30.0 * pace) for rank in range(2)]
    callers[1].arrives = 3.0 * pace
    Clock(*callers, pace=pace).run()
    asked = [at for at, step in callers[0].done if isinstance(step, SetStatus)]
    rolls = [at for at, step in callers[0].done if isinstance(step, Read) and step.key.endswith("/count")]
    assert TIMING.first_inspection * pace <= rolls[0] <= asked[0] < (TIMING.first_inspection + 0.05) * pace
    assert callers[0].outcomes == callers[1].outcomes == [None]
    looks = [step for _, step in callers[0].done if isinstance(step, Read)]
    assert len(looks) < 200  # as many in three seconds as in three minutes


def test_the_promises_hold_for_the_pauses_that_there_are():
    assert TIMING.first_inspection + TIMING.longest_pause < 0.1
    assert TIMING.inspection + 2 * TIMING.longest_pause < POLL + 0.001
