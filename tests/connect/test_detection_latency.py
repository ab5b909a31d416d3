"""Detection times of docs/faults.md, asserted exactly on a simulated clock.

test_faults.py shows with real processes that each fault is reported, and tolerates the delays of a busy machine.
"""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import assume, given, settings, strategies as st

from pgmesh.errors import MismatchError, MissingRanksError
from pgmesh.liveness.operations import Read
from pgmesh.liveness.statuses import READ_SECONDS, status_key
from pgmesh.liveness.timing import TIMING
from tests.connect.model.clock import Caller, Clock, H

POLL = 0.3
ALL = (0, 1, 2, 3)
moments = st.floats(0.0, 3.0)
paces = st.sampled_from([1.0, 1.0, 8.0])


@pytest.mark.fault("shape, axes, rank order, options differ between ranks")
@settings(max_examples=60)
@given(
    st.tuples(moments, moments, moments, moments),
    st.sampled_from(ALL),
    st.sets(st.sampled_from(ALL), min_size=2),
    st.sampled_from(["group", "mesh", "order", "process"]),
)
def test_mismatch_is_raised_within_a_tenth_second(arrivals, odd, arriving, what):
    """On each rank that arrived, after the last two of those that differ, whichever others arrive."""
    assume(odd in arriving)
    callers = [Caller(rank, [ALL], arrivals[rank] if rank in arriving else math.inf, deadline=4.0) for rank in ALL]
    if what == "group":
        callers[odd].variant = 1
    elif what in ("mesh", "order"):
        callers[odd].mesh = 1
        callers[odd].groups = [ALL if what == "mesh" else ALL[::-1]]
    else:  # another process with the same rank
        other = next(rank for rank in sorted(arriving) if rank != odd)
        callers[odd].rank, callers[odd].process = other, "a second process/7"
    Clock(*callers).run()
    known = max(arrivals[odd], min(arrivals[rank] for rank in arriving if rank != odd))
    if what == "process":
        known = max(arrivals[odd], arrivals[other])
    for rank in arriving:
        caller = callers[rank]
        if what == "process" and caller.arrives > known and not isinstance(caller.outcomes[0], MismatchError):
            # The second process may have ended. So a rank that arrives later logs the decision, and tries again.
            assert "a second process" in caller.warnings[0]
            assert caller.warned_at[0] - caller.arrives < 0.1
            continue
        assert [type(each) for each in caller.outcomes] == [MismatchError], caller
        assert caller.finished_at - max(known, caller.arrives) < 0.1


@pytest.mark.fault("a member dies before arriving (L)")
@settings(max_examples=20)
@given(st.tuples(moments, moments, moments), st.floats(0.0, 0.999), st.integers(1, 4), st.floats(0.001, 0.999), paces)
def test_silent_member_is_named_soon_after_h(arrivals, phase, heartbeats, after, pace):
    last = phase + heartbeats
    dies = last + after
    callers = [*(Caller(rank, [ALL], arrivals[rank] * pace, deadline=300.0) for rank in range(3))]
    callers.append(Caller(3, dies=dies * pace, phase=phase))
    Clock(*callers, pace=pace).run()
    first = min(arrivals) * pace
    for caller in callers[:3]:
        assert [type(each) for each in caller.outcomes] == [MissingRanksError], caller
        assert "rank 3 has sent no heartbeat for" in str(caller.outcomes[0])
        assert caller.finished_at - max(dies * pace, first, caller.arrives - H * pace) < (H + POLL) * pace
    before = max(last * pace, first) + H * pace - READ_SECONDS
    assert min(caller.finished_at for caller in callers[:3]) >= before


@pytest.mark.fault("a living member never comes to `connect`")
@settings(max_examples=10)
@given(st.tuples(moments, moments, moments, moments), paces)
def test_living_member_is_awaited_until_the_deadline(arrivals, pace):
    deadline = 9.0
    callers = [Caller(rank, [ALL], arrivals[rank], deadline=deadline * pace) for rank in range(3)]
    callers.append(Caller(3, silent=arrivals[3] > 1.5))
    Clock(*callers, pace=pace).run()
    first = min(arrivals[:3])
    for caller in callers[:3]:
        assert [type(each) for each in caller.outcomes] == [MissingRanksError], caller
        assert (
            deadline * pace <= caller.finished_at - first < (deadline + POLL) * pace + max(0.0, caller.arrives - first)
        )
        warned_after = min(deadline * pace / 3, TIMING.warn_in_connect)
        assert len(caller.warned_at) == 1
        assert warned_after <= caller.warned_at[0] - caller.arrives < warned_after + POLL * pace
        assert "\n  rank 3: " in caller.warnings[0]


@settings(max_examples=10)
@given(st.integers(3, 9), st.data())
def test_circle_is_warned_about_and_then_raised(ranks, data):
    callers = []
    for rank in range(ranks):
        pair = tuple(sorted((rank, (rank + 1) % ranks)))
        callers.append(Caller(rank, [pair], data.draw(st.floats(0.0, 1.0)), deadline=9.0))
    Clock(*callers).run()
    for caller in callers:
        assert [type(each) for each in caller.outcomes] == [MissingRanksError], caller
        after = (caller.rank + 1) % ranks
        for text in (caller.warnings[0], str(caller.outcomes[0])):
            waits = (
                rf"\n  rank {after}: .*connecting m/group-.* at train.py:3, waiting for rank {(after + 1) % ranks}\n"
            )
            assert re.search(waits, text)
        assert caller.finished_at - caller.arrives < 9.0 + POLL
        assert TIMING.warn_in_connect <= caller.warned_at[0] - caller.arrives < TIMING.warn_in_connect + POLL


@pytest.mark.parametrize("pace", [1.0, 8.0, 64.0])
def test_ranks_of_larger_worlds_inspect_less_often(pace):
    callers = [Caller(rank, [(0, 1)], float(rank), deadline=30.0 * pace) for rank in range(2)]
    callers[1].arrives = 3.0 * pace
    Clock(*callers, pace=pace).run()
    reads = [(at, operation.key) for at, operation in callers[0].done if isinstance(operation, Read)]
    statuses = [at for at, key in reads if key == status_key(1)]
    counts = [at for at, key in reads if key.endswith("/count")]
    assert TIMING.first_inspection * pace <= counts[0] <= statuses[0] < (TIMING.first_inspection + 0.05) * pace
    assert callers[0].outcomes == callers[1].outcomes == [None]
    assert len(reads) < 250  # as many in three seconds as in three minutes
