"""The agreement on lost ranks, in one process that plays all ranks over a store in memory."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from pgmesh.connect.rounds import Arrival, Rounds
from pgmesh.elastic.records import MeshRound, Outcome, Request
from pgmesh.elastic.shrink_judge import ShrinkJudge
from pgmesh.elastic.stand_by_judge import StandByJudge
from pgmesh.elastic.state import ElasticState, Generation
from pgmesh.layout import Layout
from pgmesh.liveness.operations import Read
from pgmesh.liveness.statuses import RankStatus, Statuses, status_key
from tests.support.memory_client import MemoryClient

DP = Request("dp", ())
ROUND = "pgmesh/m/shrink/0/arrivals"
UPTIME = 50_000.0
"""Seconds on the clock of the statuses when a call begins."""


def spares(*ranks: int, axis: str | None = "dp") -> Request:
    return Request(axis, ranks)


def arrivals(*lines: Arrival) -> bytes:
    return b"".join(line.pack().encode() for line in lines)


def arrival(rank: int, request: Request | None = DP, process: str = "") -> Arrival:
    return Arrival(rank, process or f"process {rank}", str(request or ""))


def status(rank: int, **more: Any) -> dict[str, bytes]:
    more = {"endpoint": ("host", 100 + rank), "process": f"process {rank}", **more}
    return {status_key(rank): RankStatus(**more).pack().encode()}


class Rank:
    """One rank of a mesh dp=``size`` in the agreement.

    Args:
        ended: the ranks whose listener refuses connections.
    """

    def __init__(self, rank: int = 0, request: Request | None = DP, size: int = 2, **more: Any) -> None:
        self.ended: set[int] = more.pop("ended", set())
        self.client = MemoryClient(rank, more.pop("values", None))
        has_ended = lambda status, seconds, wait: status.endpoint[1] - 100 in self.ended  # noqa: E731
        self.statuses = Statuses(5.0, lambda: UPTIME + self.client.clock, has_ended)
        generation = Generation("m", Layout(dp=size))
        client: Any = self.client
        client.seconds = more.pop("deadline", 30.0)
        client.liveness = SimpleNamespace(statuses=self.statuses)
        state_of = lambda kind: ElasticState()  # noqa: E731
        self.mesh: Any = SimpleNamespace(label="mesh 'm'", rank=rank, ended=None, state_of=state_of)
        common = self.mesh, generation, client, f"process {rank}"
        if request is None:
            self.judge: ShrinkJudge | StandByJudge = StandByJudge(*common)
        else:
            self.judge = ShrinkJudge(*common, request=request)
        self.round = MeshRound(f"{generation.key}/shrink")
        assert not more

    def agree(self) -> Outcome:
        Rounds([self.round], self.judge).run()
        assert self.round.decision is not None
        return self.round.decision

    def decision(self) -> Outcome:
        return Outcome.unpack(self.client.values["pgmesh/m/shrink/0/decision"])


def test_silent_rank_is_lost_after_five_seconds():
    one = Rank(values=status(1))
    assert "has sent no heartbeat for at least 5 s" in one.agree().lost[1]
    assert 5.0 <= one.client.clock < 5.3


def test_process_ended_during_wait_is_lost_soon():
    one = Rank(values=status(1), deadline=4.0)
    one.client.between = lambda: one.ended.update({1} if one.client.clock > 1.0 else ())
    assert [*one.agree().lost] == [1]
    assert one.client.clock < 1.3


def test_2048_lost_ranks_fit_into_one_record():
    size = 2049
    names = range(size, 2 * size - 1)
    values = {k: v for rank in range(1, size) for k, v in status(rank, exited="gone " * 40).items()}
    processes = [f"process 1234567 on {'h' * 40}/{rank:08x}" for rank in names]
    lines = arrivals(*map(arrival, names, itertools.repeat(None), processes))
    one = Rank(request=spares(*names), size=size, values={**values, ROUND: lines})
    outcome = one.agree()
    assert outcome == one.decision()
    assert outcome.replaced == dict(zip(range(1, size), names))
    assert [*outcome.processes] == processes


def test_different_arguments_fail_the_attempt():
    one = Rank(values={ROUND: arrivals(arrival(1, Request("tp", ())))})
    outcome = one.agree()
    assert outcome.error == "mismatch"
    assert outcome.failed == (
        "mesh 'm': the ranks passed different arguments:\n  shrink('dp') on rank 0\n  shrink('tp') on rank 1"
    )


def test_late_rank_joins_the_next_attempt():
    failed = Outcome(failed="rank 0 did not call").pack().encode()
    one = Rank(values={"pgmesh/m/shrink/0/decision": failed, "pgmesh/m/shrink/1/arrivals": arrivals(arrival(1))})
    assert one.agree() == Outcome(axis="dp")
    assert (one.round.number, one.judge.came_late) == (1, False)


def test_spares_replace_lost_ranks_in_order():
    there = arrivals(arrival(5, None), arrival(4, None), arrival(6, None))
    one = Rank(request=spares(6, 4, 5), size=3, values={**status(1), **status(2)}, ended={1, 2})
    one.client.values[ROUND] = there
    outcome = one.agree()
    assert outcome.replaced == {1: 6, 2: 4}
    assert outcome.processes == ("process 6", "process 4")


def test_missing_spare_drops_axis_at_deadline():
    one = Rank(request=spares(4), values=status(1), ended={1}, deadline=3.0)
    outcome = one.agree()
    assert (outcome.failed, [*outcome.lost], outcome.replaced) == ("", [1], {})
    assert 3.0 <= one.client.clock < 3.1


def test_new_process_takes_only_one_place():
    lines = arrivals(arrival(1, None, "another"), arrival(4, None))
    one = Rank(request=spares(1, 4), size=3, values={**status(2), ROUND: lines}, ended={2})
    assert one.agree().replaced == {1: 1, 2: 4}


@pytest.mark.parametrize("listed", [(4, 2), (2, 4)])
def test_living_spare_comes_before_an_ended_new_process(listed: tuple[int, int]):
    request = spares(*listed)
    lines = arrivals(arrival(1, request), arrival(2, None, "another"), arrival(4, None))
    there = {**status(2), **status(4), ROUND: lines}
    outcome = Rank(request=request, size=3, values=there, ended={2}).agree()
    assert outcome.replaced == {2: 4}
    assert "rank 2 has ended: its listener" in outcome.lost[2]


def test_old_process_decides_despite_new_one():
    """Of a rank, the last arrival counts: that of the new process, which stands by. The other member has ended."""
    one = Rank(request=spares(0), values={**status(0), **status(1)}, ended={1})
    both = arrivals(arrival(0, spares(0)), arrival(0, None, "another"))
    one.client.between = lambda: one.client.values.update({ROUND: both})
    outcome = one.agree()
    assert ([*outcome.lost], outcome.replaced) == ([1, 0], {0: 0})
    assert one.client.clock < 1.0


def test_ended_spares_replace_no_lost_rank():
    before = {**status(1), **status(4), ROUND: arrivals(arrival(4, None))}
    one = Rank(request=spares(4), values={**before}, ended={1, 4})
    assert (one.agree().replaced, one.client.clock < 0.1) == ({}, True)
    forever = Rank(request=spares(4, axis=None), values=before, ended={1, 4}, deadline=3.0)
    assert "rank 4 has ended: its listener" in forever.agree().failed


@pytest.mark.parametrize("is_new", [False, True])
def test_member_ending_before_the_decision_is_lost(is_new: bool):
    """Rank 1 called shrink, and ended; or its new process has a status already. It arrives after that of rank 2."""
    request, back = spares(1, 2, axis=None), {"endpoint": ("host", 300), "sent": 1.0, "process": "another"}
    there = [arrival(0, request), arrival(1, request), arrival(2, None, "another"), arrival(1, None, "another")]
    one = Rank(request=request, size=3, values={**status(1), **status(2)}, ended={2})

    def happen() -> None:
        seconds = int(one.client.clock)
        one.client.values.update({ROUND: arrivals(*there[: 2 + seconds])})
        for rank in {0: (), 1: (2, 1)[: 1 + is_new]}.get(seconds, (2, 1)):
            one.client.values.update(status(rank, **back))
        one.ended.update({1} if seconds else ())

    one.client.between = happen
    outcome = one.agree()
    assert ({*outcome.lost}, outcome.replaced) == ({1, 2}, {1: 1, 2: 2})
    assert 2.0 < one.client.clock < 2.5


def test_spare_awaits_ranks_without_a_status():
    spare = Rank(rank=4, request=None, values=status(0, exited="has left the world"), deadline=20.0)
    assert "rank 4 stood by for 20 s, and no mesh was agreed on" in spare.agree().failed


def test_rank_without_status_is_lost_in_time():
    one = Rank()
    assert one.agree().lost == {1: f"rank 1 has published no status in {one.client.clock:.0f} s"}
    assert one.statuses.lost_after <= one.client.clock < one.statuses.lost_after + 0.5


def test_rank_after_many_arrivals_leaves_looks():
    lines = arrivals(*map(arrival, [*range(1, 40), 0]))
    late = Rank(size=41, values={**status(40), ROUND: lines}, deadline=3.0)
    assert "rank 40 did not call shrink('dp') in 3 s." in late.agree().failed
    reads = [each for each in late.client.operations if each == Read(status_key(40))]
    assert len(reads) == 1
