"""The agreement on lost ranks, in one process that plays all ranks over a store in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pgmesh.connect.rounds import Rounds
from pgmesh.elastic.judging import MeshRound
from pgmesh.elastic.records import Arrival, Outcome, Request
from pgmesh.elastic.shrink_judge import ShrinkJudge
from pgmesh.elastic.stand_by_judge import StandByJudge
from pgmesh.elastic.state import Generation
from pgmesh.errors import MismatchError, WorldError
from pgmesh.layout import Layout
from pgmesh.liveness import timing
from pgmesh.liveness.records import pack
from pgmesh.liveness.statuses import NO_STATUS, RankStatus, Statuses, status_key
from tests.support.memory_client import MemoryClient

DP = Request("dp", ())
UPTIME = 50_000.0
"""Seconds on the clock of the statuses when a call begins."""


def spares(*ranks: int, axis: str | None = "dp") -> Request:
    return Request(axis, ranks)


def arrivals(*lines: Arrival) -> bytes:
    return b"".join(line.pack().encode() + b"\n" for line in lines)


def arrival(rank: int, request: Request | None = DP, process: str = "") -> Arrival:
    return Arrival(rank, process or f"process {rank}", str(request or ""))


def status(rank: int, **more: Any) -> dict[str, bytes]:
    more = {"heartbeat": 1, "endpoint": ("host", 100 + rank), **more}
    return {status_key(rank): RankStatus(rank, **more).pack().encode()}


class Rank:
    """One rank of a mesh dp=``size`` in the agreement.

    Args:
        ended: the ranks whose listener refuses connections.
    """

    def __init__(self, rank: int = 0, request: Request | None = DP, size: int = 2, **more: Any) -> None:
        self.ended: set[int] = more.pop("ended", set())
        self.client, self.warnings = MemoryClient(rank, more.pop("values", None)), list[str]()
        has_ended = lambda status, seconds, wait: status.rank in self.ended  # noqa: E731
        self.statuses = Statuses(5.0, lambda: UPTIME + self.client.clock, has_ended)
        deadline = more.pop("deadline", 30.0)
        generation = Generation("m", Layout(dp=size))
        client: Any = self.client
        client.seconds = deadline
        client.liveness = SimpleNamespace(statuses=self.statuses, pace=1.0)
        common = "mesh 'm'", generation, rank, client, f"process {rank}"
        if request is None:
            self.judge: ShrinkJudge | StandByJudge = StandByJudge(*common, warn=self.warnings.append)
        else:
            self.judge = ShrinkJudge(*common, warn=self.warnings.append, request=request)
        self.round = MeshRound(f"{generation.key}/shrink")
        assert not more

    def agree(self) -> Outcome:
        Rounds([self.round], self.judge).run()
        assert self.round.decision is not None
        return self.round.decision

    def decision(self) -> Outcome:
        return Outcome.unpack("", self.client.values["pgmesh/m/shrink/0/decision"])


# -- lost ranks -------------------------------------------------------------------------------------------------------


def test_rank_that_left_is_lost_at_once():
    one = Rank(values=status(1, exited="it closed its mesh"))
    assert one.agree().lost == {1: "rank 1 it closed its mesh"}


def test_silent_rank_is_lost_after_five_seconds():
    one = Rank(values=status(1))
    assert "has sent no heartbeat for at least 5 s" in one.agree().lost[1]
    assert 5.0 <= one.client.clock < 5.3


def test_process_ended_during_wait_is_lost_soon():
    one = Rank(values=status(1), deadline=4.0)
    one.client.between = lambda: one.ended.update({1} if one.client.clock > 1.0 else ())
    assert [*one.agree().lost] == [1]
    assert one.client.clock < 1.3


def test_4096_lost_ranks_fit_into_one_record():
    size = 4097
    names = range(size, 2 * size - 1)
    values = {k: v for rank in range(1, size) for k, v in status(rank, exited="gone " * 40).items()}
    lines = arrivals(*(arrival(rank, None, f"1234567/{rank:08x}") for rank in names))
    one = Rank(request=spares(*names), size=size, values={**values, "pgmesh/m/shrink/0/arrivals": lines})
    outcome = one.agree()
    assert outcome == one.decision()
    assert outcome.replaced == dict(zip(range(1, size), names))
    assert outcome.processes == tuple(f"1234567/{rank:08x}" for rank in names)


# -- arguments and foreign values -------------------------------------------------------------------------------------


def test_foreign_arrivals_are_ignored():
    foreign = [
        b"import os",
        pack(rank=1, process="p", call=["dp"]).encode(),
        pack(rank="1", process="p", call="").encode(),
    ]
    one = Rank(values={**status(1), "pgmesh/m/shrink/0/arrivals": b"\n".join([*foreign, b""])}, ended={1})
    assert [*one.agree().lost] == [1]


def foreign_decision(**more: Any) -> bytes:
    fields = {"failed": "", "error": "missing", "lost": [], "replaced": [], "axis": ["dp"], "processes": [], **more}
    return pack(**fields).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"import os",
        foreign_decision(lost={}),
        foreign_decision(replaced=1),
        foreign_decision(axis="dp"),
        foreign_decision(processes=None),
    ],
)
def test_foreign_decision_fails_the_attempt(text: bytes):
    one = Rank()
    one.client.between = lambda: one.client.values.update({"pgmesh/m/shrink/0/decision": text})
    with pytest.raises(MismatchError, match=r"key pgmesh/m/shrink/0/decision holds .* which pgmesh did not write"):
        one.agree().check()


# -- deadlines, Ctrl-C and errors of the store ------------------------------------------------------------------------


def test_late_rank_joins_the_next_attempt():
    failed = Outcome(failed="rank 0 did not call").pack().encode()
    one = Rank(values={"pgmesh/m/shrink/0/decision": failed, "pgmesh/m/shrink/1/arrivals": arrivals(arrival(1))})
    assert one.agree() == Outcome(axis="dp")
    assert (one.round.number, one.judge.came_late) == (1, False)
    assert one.warnings == ["an earlier attempt failed before rank 0 arrived: rank 0 did not call"]


def test_store_error_publishes_no_decision():
    def fail() -> None:
        raise WorldError("the store is gone")

    one = Rank()
    one.client.between = fail
    with pytest.raises(WorldError):
        one.agree()
    assert "pgmesh/m/shrink/0/decision" not in one.client.values


def test_rank_warns_once_about_missing_ranks():
    one = Rank(values=status(1), deadline=4.5)
    one.agree()
    assert one.warnings == [f"mesh 'm': rank 1 did not call shrink('dp') so far.\n  rank 1: {RankStatus(1)}"]
    late = Rank(values=status(1), deadline=30.0)
    late.client.between = lambda: late.client.values.update(
        {"pgmesh/m/shrink/0/decision": Outcome().pack().encode()}
        if late.client.clock > timing.TIMING.warn_in_connect / 2
        else {}
    )
    late.agree()
    assert late.warnings == []


def test_rank_warns_once_in_several_attempts():
    stopped = Outcome(failed="rank 1 stopped", error="stopped").pack().encode()
    one = Rank(values=status(1), deadline=9.0)
    one.client.between = lambda: one.client.values.update(
        {"pgmesh/m/shrink/0/decision": stopped} if one.client.clock > 4.0 else {}
    )
    one.agree()
    assert (one.round.number, len(one.warnings)) == (1, 1)


# -- spares and new processes -----------------------------------------------------------------------------------------


def test_spares_replace_lost_ranks_in_order():
    there = arrivals(arrival(5, None), arrival(4, None), arrival(6, None))
    one = Rank(request=spares(6, 4, 5), size=3, values={**status(1), **status(2)}, ended={1, 2})
    one.client.values["pgmesh/m/shrink/0/arrivals"] = there
    outcome = one.agree()
    assert outcome.replaced == {1: 6, 2: 4}
    assert outcome.processes == ("process 6", "process 4")


def test_missing_spare_drops_axis_at_deadline():
    one = Rank(request=spares(4), values=status(1), ended={1}, deadline=3.0)
    outcome = one.agree()
    assert (outcome.failed, [*outcome.lost], outcome.replaced) == ("", [1], {})
    assert 3.0 <= one.client.clock < 3.1
    assert one.warnings == [
        "mesh 'm': no spare came of rank 4 so far."
        f"\n  rank 4: {NO_STATUS}"
        "\n  lost: rank 1 has ended: its listener at host:101 refuses connections"
    ]


def test_spares_are_not_awaited_without_a_loss():
    one = Rank(request=spares(4), values={**status(4), "pgmesh/m/shrink/0/arrivals": arrivals(arrival(1, spares(4)))})
    assert one.agree() == Outcome(axis="dp")
    assert one.client.clock < 0.05


def test_new_process_takes_only_one_place():
    lines = arrivals(arrival(1, None, "another"), arrival(4, None))
    one = Rank(request=spares(1, 4), size=3, values={**status(2), "pgmesh/m/shrink/0/arrivals": lines}, ended={2})
    assert one.agree().replaced == {1: 1, 2: 4}


@pytest.mark.parametrize("listed", [(4, 2), (2, 4)])
def test_living_spare_comes_before_an_ended_new_process(listed: tuple[int, int]):
    request = spares(*listed)
    lines = arrivals(arrival(1, request), arrival(2, None, "another"), arrival(4, None))
    there = {**status(2), **status(4), "pgmesh/m/shrink/0/arrivals": lines}
    outcome = Rank(request=request, size=3, values=there, ended={2}).agree()
    assert outcome.replaced == {2: 4}
    assert "rank 2 has ended: its listener" in outcome.lost[2]


def test_rank_with_unlisted_new_process_is_lost():
    one = Rank(values={"pgmesh/m/shrink/0/arrivals": arrivals(arrival(1, None))})
    outcome = one.agree()
    assert ([*outcome.lost], outcome.replaced) == ([1], {})


def test_old_process_decides_despite_new_one():
    """Of a rank, the last arrival counts: that of the new process, which stands by. The other member has ended."""
    one = Rank(request=spares(0), values={**status(0), **status(1)}, ended={1})
    both = arrivals(arrival(0, spares(0)), arrival(0, None, "another"))
    one.client.between = lambda: one.client.values.update({"pgmesh/m/shrink/0/arrivals": both})
    outcome = one.agree()
    assert ([*outcome.lost], outcome.replaced) == ([1, 0], {0: 0})
    assert one.client.clock < 1.0


def test_ended_spares_replace_no_lost_rank():
    before = {**status(1), **status(4), "pgmesh/m/shrink/0/arrivals": arrivals(arrival(4, None))}
    one = Rank(request=spares(4), values={**before}, ended={1, 4})
    assert (one.agree().replaced, one.client.clock < 0.1) == ({}, True)
    forever = Rank(request=spares(4, axis=None), values=before, ended={1, 4}, deadline=3.0)
    assert "rank 4 has ended: its listener" in forever.agree().failed


# -- no member is left ------------------------------------------------------------------------------------------------


def test_spare_awaits_ranks_without_a_status():
    spare = Rank(rank=4, request=None, values=status(0, exited="has left the world"), deadline=20.0)
    assert "rank 4 stood by for 20 s, and no mesh was agreed on" in spare.agree().failed


def test_spare_that_gives_up_ends_the_attempt():
    """The others may have counted it. They go on to the next attempt."""
    there = {**status(0), "pgmesh/m/shrink/0/arrivals": arrivals(arrival(5, None))}
    spare = Rank(rank=4, request=None, values=there, deadline=2.0)
    text = spare.agree().failed
    assert text == "mesh 'm': rank 4 stood by for 2 s, and no mesh was agreed on"
    assert (spare.decision().failed, spare.decision().error) == (text, "stopped")
    other = Rank(rank=5, request=None, values=spare.client.values, deadline=2.0)
    assert "rank 5 stood by for 2 s" in other.agree().failed
    assert other.round.number == 1


# -- attempts and records ---------------------------------------------------------------------------------------------


def test_rank_without_status_is_lost_in_time():
    one = Rank()
    assert one.agree().lost == {1: f"rank 1 has published no status in {one.client.clock:.0f} s"}
    assert one.statuses.lost_after <= one.client.clock < one.statuses.lost_after + 0.5


def test_spare_that_never_published_a_status_is_lost():
    lines = arrivals(arrival(2, None), arrival(3, None))
    ended = status(1, exited="it closed its mesh")
    one = Rank(request=spares(2, 3), values={**ended, "pgmesh/m/shrink/0/arrivals": lines})
    one.judge._start -= 5.0  # so long ago, and rank 3 has published one since
    one.client.values.update(status(3))
    assert one.agree().replaced == {1: 3}
