"""The agreement on lost ranks, in one process that plays all ranks over a store in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from pgmesh._util.listeners import ANSWER_SECONDS
from pgmesh.elastic.agreement import Agreement
from pgmesh.elastic.records import Arrival, Outcome, Request
from pgmesh.elastic.successor import successor
from pgmesh.errors import MismatchError, MissingRanksError, WorldError
from pgmesh.groups.identity import MeshIdentity
from pgmesh.layout import Layout
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Append, CompareSet, Read
from pgmesh.rendezvous.records import pack
from pgmesh.rendezvous.statuses import RankStatus, Statuses, status_key
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


def arrive_at(client: MemoryClient, when: float, *lines: Arrival, number: int = 0) -> Callable[[], None]:
    """Let ranks arrive at an attempt at a time of the client's clock."""
    waiting = [lines]

    def between() -> None:
        if waiting and client.clock >= when:
            key = f"m/shrink/{number}/arrivals"
            client.values[key] = client.values.get(key, b"") + arrivals(*waiting.pop())

    client.between = between
    return between


class Rank:
    """One rank of a mesh dp=``size`` in the agreement.

    Args:
        ended: the ranks whose listener refuses connections.
    """

    def __init__(self, rank: int = 0, request: Request | None = DP, size: int = 2, **more: Any) -> None:
        self.ended: set[int] = more.pop("ended", set())
        self.client = MemoryClient(rank, more.pop("values", None))
        self.warnings: list[str] = []
        self.layout = Layout(dp=size)
        self.agreement = Agreement(
            "m",
            "mesh 'm'",
            range(size),
            rank,
            more.pop("process", f"process {rank}"),
            request,
            self.client,
            more.pop("deadline", 30.0),
            Statuses(5.0, lambda: UPTIME + self.client.clock, lambda status, seconds: self.has_ended(status)),
            check=self._check,
            warn=self.warnings.append,
        )
        assert not more

    def _check(self, outcome: Outcome) -> str:
        try:
            successor(self.layout, outcome.lost, outcome.replaced, outcome.axis)
        except MissingRanksError as error:
            return str(error)
        return ""

    def has_ended(self, status: RankStatus) -> bool:
        return status.rank in self.ended

    def agree(self) -> Outcome:
        return self.agreement.agree()

    def decision(self, number: int = 0) -> Outcome:
        key = f"m/shrink/{number}/decision"
        return Outcome.unpack(key, self.client.values[key])


# -- all arrive -------------------------------------------------------------------------------------------------------


def test_rank_decides_at_once_after_all_arrived():
    one = Rank(values={"m/shrink/0/arrivals": arrivals(arrival(1))})
    outcome = one.agree()
    assert outcome == Outcome(axis="dp") == one.decision()
    assert one.client.clock < 0.05
    assert [type(each) for each in one.client.operations[:2]] == [Read, Append]
    assert not one.warnings


def test_rank_waits_for_a_living_late_rank():
    one = Rank(values=status(1))
    arrive_at(one.client, 3.0, arrival(1))
    one.between = one.client.between

    def between() -> None:
        one.client.values |= status(1, heartbeat=int(one.client.clock))
        one.between()

    one.client.between = between
    assert one.agree() == Outcome(axis="dp")
    assert 3.0 <= one.client.clock < 3.3


def test_decision_of_another_rank_is_taken():
    theirs = Outcome(lost={1: "rank 1 has ended"}, axis="dp")
    one = Rank(values=status(1))
    one.client.between = lambda: one.client.values.update({"m/shrink/0/decision": theirs.pack().encode()})
    assert one.agree() == theirs
    assert not one.agreement.came_late


# -- lost ranks -------------------------------------------------------------------------------------------------------


def test_rank_with_ended_process_is_lost_at_once():
    one = Rank(values=status(1), ended={1})
    assert one.agree().lost == {1: "rank 1 has ended: its listener at host:101 refuses connections"}
    assert one.client.clock < 0.05


def test_rank_that_left_is_lost_at_once():
    one = Rank(values=status(1, exited="it closed its mesh"))
    assert one.agree().lost == {1: "rank 1: it closed its mesh"}


def test_silent_rank_is_lost_after_five_seconds():
    one = Rank(values=status(1))
    assert "has sent no heartbeat for at least 5 s" in one.agree().lost[1]
    assert 5.0 <= one.client.clock < 5.3


def test_process_ended_during_wait_is_lost_soon():
    one = Rank(values=status(1), deadline=4.0)
    one.client.between = lambda: one.ended.update({1} if one.client.clock > 1.0 else ())
    assert [*one.agree().lost] == [1]
    assert one.client.clock < 1.3


def test_slow_store_makes_no_rank_silent():
    one = Rank(values={**status(1), **status(2)}, size=3)
    arrive_at(one.client, 8.0, arrival(1), arrival(2))
    run = one.client.run

    def slow(*operations: Any) -> list[Any]:
        answers = run(*operations)
        if any(operation[0] == status_key(1) for operation in operations) and one.client.clock < 6.0:
            one.client.clock += 6.0
        return answers

    one.client.run = slow  # type: ignore[method-assign]
    assert one.agree() == Outcome(axis="dp")


def test_arrivals_are_deleted_after_the_decision():
    one = Rank(values=status(1), deadline=3.0)
    assert one.agree().failed
    assert [key for key in one.client.values if "/shrink/" in key] == ["m/shrink/0/decision"]
    late = Rank(rank=1, values=one.client.values)
    arrive_at(late.client, 0.0, arrival(0), number=1)
    assert not late.agree().failed
    assert {key for key in late.client.values if "/shrink/" in key} == {"m/shrink/0/decision", "m/shrink/1/decision"}


def test_retry_works_after_too_many_lost_ranks():
    one = Rank(request=spares(7, axis=None), values=status(1), ended={1, 7})
    one.client.values |= status(7)
    outcome = one.agree()
    assert "lost: rank 1. Spares that came: 0." in outcome.failed
    with pytest.raises(MissingRanksError, match="rank 1"):
        outcome.check()
    again = Rank(values=one.client.values, ended={1})
    assert [*again.agree().lost] == [1]
    assert again.agreement.number == 1


def test_4096_lost_ranks_fit_into_one_record():
    size = 4097
    names = range(size, 2 * size - 1)
    values = {k: v for rank in range(1, size) for k, v in status(rank, exited="gone " * 40).items()}
    lines = arrivals(*(arrival(rank, None, f"1234567/{rank:08x}") for rank in names))
    one = Rank(request=spares(*names), size=size, values={**values, "m/shrink/0/arrivals": lines})
    outcome = one.agree()
    assert outcome == one.decision()
    assert outcome.replaced == dict(zip(range(1, size), names))
    assert outcome.processes == tuple(f"1234567/{rank:08x}" for rank in names)


def test_oversized_decision_fails_the_attempt():
    size = 12_000
    one = Rank(size=size, values={k: v for r in range(1, size) for k, v in status(r, exited="gone " * 40).items()})
    problem = "a decision on 11999 lost ranks and 0 spares does not fit into one record"
    with mock.patch.object(timing, "LIMITS", dataclasses.replace(timing.LIMITS, record_chars=1 << 17)):
        assert problem in one.agree().failed
        assert problem in one.decision().failed


def test_reasons_of_many_losses_fit_one_record():
    size = 2000
    one = Rank(size=size, values={k: v for r in range(1, size) for k, v in status(r, exited="gone " * 40).items()})
    assert one.agree().failed == ""
    assert len(one.decision().lost) == size - 1
    few = Rank(size=3, values={k: v for r in (1, 2) for k, v in status(r, exited="gone").items()})
    assert few.agree().lost == {1: "rank 1: gone", 2: "rank 2: gone"} == few.decision().lost


# -- arguments and foreign values -------------------------------------------------------------------------------------


def test_different_arguments_fail_on_all_ranks():
    one = Rank(values={"m/shrink/0/arrivals": arrivals(arrival(1, spares(4)))})
    outcome = one.agree()
    assert outcome.failed == (
        "mesh 'm': the ranks passed different arguments:"
        "\n  shrink('dp') on rank 0\n  shrink('dp', spares=[4]) on rank 1"
    )
    with pytest.raises(MismatchError):
        outcome.check()
    with pytest.raises(MismatchError):
        one.decision().check()


FOREIGN_ARRIVALS = [
    b"import os",
    pack(rank=1, process="p", call=["dp"]).encode(),
    pack(rank=1, process=1, call="").encode(),
    pack(rank="1", process="p", call="").encode(),
]


@pytest.mark.parametrize("line", FOREIGN_ARRIVALS)
def test_foreign_arrival_fails_the_attempt(line: bytes):
    one = Rank(values={"m/shrink/0/arrivals": line + b"\n"})
    outcome = one.agree()
    assert "the store's key m/shrink/0/arrivals holds" in outcome.failed
    with pytest.raises(MismatchError, match="which pgmesh did not write"):
        outcome.check()


def foreign_decision(**more: Any) -> bytes:
    fields = {"failed": "", "error": "missing", "lost": [], "replaced": [], "axis": ["dp"], "processes": [], **more}
    return pack(**fields).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"import os",
        foreign_decision(lost=[1]),
        foreign_decision(lost=[[1, 2]]),
        foreign_decision(lost=[["1", "gone"]]),
        foreign_decision(replaced=[[1]]),
        foreign_decision(replaced=[[1, "4"]]),
        foreign_decision(axis=[]),
        foreign_decision(axis=[["dp"]]),
        foreign_decision(processes=[4]),
    ],
)
def test_foreign_decision_fails_the_attempt(text: bytes):
    one = Rank()
    one.client.between = lambda: one.client.values.update({"m/shrink/0/decision": text})
    with pytest.raises(MismatchError, match=r"key m/shrink/0/decision holds .* which pgmesh did not write"):
        one.agree().check()


def test_foreign_status_does_not_prove_a_loss():
    one = Rank(values={status_key(1): b"import os"}, deadline=7.0)
    assert "rank 1: the store's key" in one.agree().failed


# -- deadlines, Ctrl-C and errors of the store ------------------------------------------------------------------------


def test_deadline_error_names_the_missing_ranks():
    one = Rank(values=status(1), deadline=3.0)
    outcome = one.agree()
    assert outcome.failed.startswith("mesh 'm': rank 1 did not call shrink('dp') in 3 s.\n  rank 1: not in connect")
    assert 3.0 <= one.client.clock < 3.1
    with pytest.raises(MissingRanksError):
        outcome.check()


def test_late_rank_joins_the_next_attempt():
    failed = Outcome(failed="rank 0 did not call").pack().encode()
    one = Rank(values={"m/shrink/0/decision": failed, "m/shrink/1/arrivals": arrivals(arrival(1))})
    assert one.agree() == Outcome(axis="dp")
    assert (one.agreement.number, one.agreement.came_late) == (1, False)
    assert one.warnings == ["an earlier attempt failed before rank 0 arrived: rank 0 did not call"]


def test_rank_counted_as_lost_gets_the_decision():
    theirs = Outcome(lost={0: "silent"}, axis="dp")
    one = Rank(values={"m/shrink/0/decision": theirs.pack().encode()})
    assert one.agree() == theirs
    assert one.agreement.came_late
    assert one.client.clock == 0.0


def test_interrupt_fails_attempt_and_others_retry():
    def interrupt() -> None:
        raise KeyboardInterrupt

    one = Rank(values=status(1))
    one.client.between = interrupt
    with pytest.raises(KeyboardInterrupt):
        one.agree()
    assert one.decision().error == "left"
    assert one.decision().failed == "rank 0 stopped: KeyboardInterrupt"

    other = Rank(rank=1, values={})
    other.client.between = lambda: other.client.values.update(
        {"m/shrink/0/decision": one.decision().pack().encode(), "m/shrink/1/arrivals": arrivals(arrival(0), arrival(1))}
    )
    assert other.agree() == Outcome(axis="dp")
    assert other.agreement.number == 1


def test_retry_after_interrupt_takes_the_success():
    one = Rank(values={"m/shrink/0/decision": Outcome(axis="dp").pack().encode()})
    assert one.agree() == Outcome(axis="dp")


def test_store_error_publishes_no_decision():
    def fail() -> None:
        raise WorldError("the store is gone")

    one = Rank()
    one.client.between = fail
    with pytest.raises(WorldError):
        one.agree()
    assert "m/shrink/0/decision" not in one.client.values


def test_store_error_does_not_hide_an_interrupt():
    one = Rank()

    def interrupt() -> None:
        one.client.run = fail  # type: ignore[method-assign]
        raise KeyboardInterrupt

    def fail(*operations: Any) -> list[Any]:
        raise WorldError("the store is gone")

    one.client.between = interrupt
    with pytest.raises(KeyboardInterrupt):
        one.agree()


def test_rank_warns_once_about_missing_ranks():
    one = Rank(values=status(1), deadline=4.5)
    one.agree()
    assert one.warnings == ["mesh 'm': rank 1 did not call shrink('dp') so far.\n  rank 1: not in connect"]
    late = Rank(values=status(1), deadline=30.0)
    late.client.between = lambda: late.client.values.update(
        {"m/shrink/0/decision": Outcome().pack().encode()} if late.client.clock > timing.TIMING.stragglers / 2 else {}
    )
    late.agree()
    assert late.warnings == []


# -- spares and new processes -----------------------------------------------------------------------------------------


def test_spares_replace_lost_ranks_in_order():
    there = arrivals(arrival(5, None), arrival(4, None), arrival(6, None))
    one = Rank(request=spares(6, 4, 5), size=3, values={**status(1), **status(2)}, ended={1, 2})
    one.client.values["m/shrink/0/arrivals"] = there
    outcome = one.agree()
    assert outcome.replaced == {1: 6, 2: 4}
    assert outcome.processes == ("process 6", "process 4")


def test_slow_listener_check_ends_further_checks():
    rank = Rank(size=4, values=status(1) | status(2) | status(3))
    asked = []

    def has_ended(status: RankStatus) -> bool:
        asked.append(status.rank)
        rank.client.clock += ANSWER_SECONDS + 0.01
        return False

    rank.has_ended = has_ended
    assert {*rank.agree().lost} == {1, 2, 3}
    assert {*asked} == {1}


def test_deadline_checks_listeners_of_all_ranks():
    rank = Rank(size=5, values=status(1) | status(2) | status(3) | status(4), ended={1, 4}, deadline=3.0)
    asked = []

    def has_ended(status: RankStatus) -> bool:
        asked.append(status.rank)
        return status.rank in rank.ended

    rank.has_ended = has_ended
    failed = rank.agree().failed
    assert "ranks 2, 3 did not call shrink('dp')" in failed
    assert "lost: rank 4 has ended" in failed
    assert asked[:4] == [1, 2, 2, 2]
    assert asked[-3:] == [2, 3, 4]


def test_first_arrived_ranks_read_statuses_earlier():
    """A rank that arrived later does so a little later, in case that those have ended."""
    size, first = 120, range(1, 1 + timing.LIMITS.statuses)
    values = {k: v for rank in range(1, size) for k, v in status(rank).items()}
    there = {"m/shrink/0/arrivals": arrivals(*(arrival(rank) for rank in first))}
    looks: list[list[float]] = []
    for rank in (Rank(size=size, values={**values, **there}), Rank(size=size, values=values)):
        rank.agreement.deadline = 1.0
        looks.append([])
        read = rank.agreement.statuses.read
        rank.agreement.statuses.read = lambda *a, read=read, rank=rank: (looks[-1].append(rank.client.clock), read(*a))
        rank.agree()
    later, early = looks
    assert later[0] >= timing.TIMING.inspection > early[0]
    assert 2 * timing.TIMING.inspection <= later[1] - later[0] < 0.5
    assert len(early) > len(later) > 1


def test_only_living_spares_are_awaited():
    values = {**status(1), **status(4), **status(5)}
    one = Rank(request=spares(4, 5), values=values, ended={1, 4})
    arrive_at(one.client, 1.0, arrival(5, None))
    assert one.agree().replaced == {1: 5}
    assert 1.0 <= one.client.clock < 1.3

    none = Rank(request=spares(4), values={**status(1), **status(4)}, ended={1, 4})
    assert (none.agree().replaced, none.agree().lost.keys()) == ({}, {1})
    assert none.client.clock < 0.1


def test_missing_spare_drops_axis_at_deadline():
    one = Rank(request=spares(4), values=status(1), ended={1}, deadline=3.0)
    outcome = one.agree()
    assert (outcome.failed, [*outcome.lost], outcome.replaced) == ("", [1], {})
    assert 3.0 <= one.client.clock < 3.1
    assert one.warnings == [
        "mesh 'm': no spare came of rank 4 so far."
        "\n  rank 4: no status: it has not called connect yet, or cannot reach the store"
        "\n  lost: rank 1 has ended: its listener at host:101 refuses connections"
    ]


def test_spares_are_not_awaited_without_a_loss():
    one = Rank(request=spares(4), values={**status(4), "m/shrink/0/arrivals": arrivals(arrival(1, spares(4)))})
    assert one.agree() == Outcome(axis="dp")
    assert one.client.clock < 0.05


def test_new_process_replaces_its_own_rank():
    lines = arrivals(arrival(1, spares(4, 1)), arrival(1, None, "another"), arrival(4, None))
    one = Rank(request=spares(4, 1), values={"m/shrink/0/arrivals": lines})
    outcome = one.agree()
    assert outcome.lost == {1: "rank 1 stands by, as a new process does"}
    assert (outcome.replaced, outcome.processes) == ({1: 1}, ("another",))


def test_new_process_takes_only_one_place():
    lines = arrivals(arrival(1, None, "another"), arrival(4, None))
    one = Rank(request=spares(1, 4), size=3, values={**status(2), "m/shrink/0/arrivals": lines}, ended={2})
    assert one.agree().replaced == {1: 1, 2: 4}


def test_rank_with_unlisted_new_process_is_lost():
    one = Rank(values={"m/shrink/0/arrivals": arrivals(arrival(1, None))})
    outcome = one.agree()
    assert ([*outcome.lost], outcome.replaced) == ([1], {})


def test_new_process_is_awaited_without_an_axis():
    one = Rank(request=spares(1, axis=None), values=status(1), ended={1})
    arrive = arrive_at(one.client, 2.0, arrival(1, None))

    def between() -> None:
        arrive()
        if one.client.clock >= 2.0:  # its status, with another listener, is there before it arrives
            one.client.values |= status(1, endpoint=("host", 201))
            one.ended.clear()

    one.client.between = between
    assert one.agree().replaced == {1: 1}
    assert 2.0 <= one.client.clock < 2.3


@pytest.mark.parametrize("axis", ["dp", None])
def test_spare_ended_while_waiting_is_passed_over(axis: str | None):
    there = arrivals(arrival(5, None), arrival(4, None), arrival(6, None), arrival(2, spares(4, 5, 6, axis=axis)))
    values = {**status(1), **status(4), **status(5), **status(6), "m/shrink/0/arrivals": there}
    one = Rank(request=spares(4, 5, 6, axis=axis), size=3, values=values, ended={1, 4, 5})
    outcome = one.agree()
    assert (outcome.replaced, [*outcome.lost]) == ({1: 6}, [1])
    assert one.client.clock < 0.1


def test_ended_spares_replace_no_lost_rank():
    before = {**status(1), **status(4), "m/shrink/0/arrivals": arrivals(arrival(4, None))}
    one = Rank(request=spares(4), values={**before}, ended={1, 4})
    assert (one.agree().replaced, one.client.clock < 0.1) == ({}, True)
    forever = Rank(request=spares(4, axis=None), values=before, ended={1, 4}, deadline=3.0)
    assert "rank 4 has ended: its listener" in forever.agree().failed


def test_droppable_axis_awaits_no_ended_spare():
    one = Rank(request=spares(1), values=status(1), ended={1})
    assert ([*one.agree().lost], one.agree().replaced) == ([1], {})
    assert one.client.clock < 0.1


def test_new_process_ignores_decision_about_old_process():
    """The decision was made while the new process arrived."""
    new = Rank(rank=1, request=None, process="another")
    new.client.between = lambda: new.client.values.update({"m/shrink/0/decision": Outcome().pack().encode()})
    assert new.agreement.missed(new.agree())

    spare = Rank(rank=4, request=None)
    theirs = Outcome(lost={1: "gone"}, replaced={1: 4}, processes=("process 4",))
    spare.client.between = lambda: spare.client.values.update({"m/shrink/0/decision": theirs.pack().encode()})
    outcome = spare.agree()
    assert not spare.agreement.missed(outcome)


def test_spare_times_out_without_a_member_call():
    spare = Rank(rank=4, request=None, deadline=9.0)
    assert "no rank called shrink in 9 s" in spare.agree().failed
    assert spare.decision().error == "left"


def test_deadline_of_spare_fails_no_member():
    values = {"m/shrink/0/arrivals": arrivals(arrival(0)), **status(1)}
    spare = Rank(rank=4, request=None, values=values, deadline=3.0)
    spare.agree()
    assert spare.decision().error == "left"

    member = Rank(values={})
    decision = {"m/shrink/0/decision": spare.decision().pack().encode()}
    member.client.between = lambda: member.client.values.update(
        {**decision, "m/shrink/1/arrivals": arrivals(arrival(0), arrival(1))}
    )
    assert member.agree() == Outcome(axis="dp")


# -- no member is left ------------------------------------------------------------------------------------------------


def test_spare_fails_after_all_members_left():
    values = status(0, exited="has left the world") | status(1, exited="its process has exited")
    spare = Rank(rank=4, request=None, values=values)
    with pytest.raises(MissingRanksError) as raised:
        spare.agree().check()
    assert str(raised.value) == (
        "mesh 'm': no other rank of it is left, so none can call shrink."
        "\n  rank 0: has left the world\n  rank 1: its process has exited"
    )
    assert spare.client.clock < 0.3
    assert spare.decision().error == "over"


@pytest.mark.parametrize("members", [2, 100])
@pytest.mark.parametrize("when", [0.0, 1.0])
def test_spare_checks_members_without_heartbeats(members: int, when: float):
    ranks = range(members)
    values = {k: v for rank in ranks for k, v in status(rank).items()}
    spare = Rank(rank=members, request=None, size=members, values=values, ended={*ranks} if when == 0.0 else set())
    spare.client.between = lambda: spare.ended.update(ranks if spare.client.clock >= when else ())
    failed = spare.agree().failed
    assert f"rank {members - 1} has" in failed or members == 100
    assert ("rank 1 has ended: its listener at host:101 refuses connections" in failed) == (when == 0.0)
    assert ("rank 1 has sent no heartbeat for at least 5 s" in failed) == (when > 0.0)
    assert spare.client.clock < (0.3 if when == 0.0 else 5.5)


def test_spare_waits_while_a_member_lives():
    """It reads few statuses, asks no listener of a rank that sends heartbeats, and reads no arrivals."""
    ranks = range(100)
    values = {k: v for rank in ranks for k, v in status(rank).items()}
    spare = Rank(rank=200, request=None, size=100, values=values, ended={*ranks} - {1}, deadline=60.0)
    asked = set[int]()

    def has_ended(status: RankStatus) -> bool:
        asked.add(status.rank if spare.client.clock > 1.0 else 0)  # the first look asks, as no status was read before
        return status.rank in spare.ended

    spare.has_ended = has_ended
    spare.client.between = lambda: spare.client.values.update(status(1, heartbeat=int(spare.client.clock)))
    assert spare.agree().failed == "mesh 'm': no rank called shrink in 60 s"
    assert 1 not in asked
    reads = [operation.key for operation in spare.client.operations if isinstance(operation, Read)]
    statuses = [key for key in reads if "/status/" in key]
    assert len(statuses) <= timing.LIMITS.statuses * (1 + 60.0 // 5.0)
    assert 0 < len(reads) - len(statuses) <= 60.0 / timing.TIMING.inspection + 3
    assert not [key for key in reads if key.endswith("/arrivals")]


def test_spare_awaits_ranks_without_a_status():
    spare = Rank(rank=4, request=None, values=status(0, exited="has left the world"), deadline=20.0)
    assert "no rank called shrink in 20 s" in spare.agree().failed


def test_member_ignores_spare_that_counted_all_lost():
    over = Outcome(failed="no member is left", error="over").pack().encode()
    member = Rank()
    arrive_at(member.client, 0.0, arrival(1), number=1)
    there = member.client.between

    def between() -> None:
        member.client.values["m/shrink/0/decision"] = over
        there()

    member.client.between = between
    assert member.agree() == Outcome(axis="dp")
    assert member.agreement.number == 1
    other_spare = Rank(rank=5, request=None)
    other_spare.client.between = lambda: other_spare.client.values.update({"m/shrink/0/decision": over})
    with pytest.raises(MissingRanksError, match="no member is left"):
        other_spare.agree().check()


# -- attempts and records ---------------------------------------------------------------------------------------------


def test_spare_joins_next_attempt_after_a_failure():
    spare = Rank(rank=4, request=None)
    failed = Outcome(failed="rank 1 did not call").pack().encode()
    made = Outcome(lost={1: "gone"}, replaced={1: 4}, processes=("process 4",))

    def between() -> None:
        spare.client.values["m/shrink/0/decision"] = failed
        if "m/shrink/1/arrivals" in spare.client.values:
            spare.client.values["m/shrink/1/decision"] = made.pack().encode()

    spare.client.between = between
    assert spare.agree() == made
    assert spare.agreement.number == 1


def test_successor_mesh_has_its_own_store_keys():
    """A rank that missed it stands by under them."""
    identity = MeshIdentity("train", Layout(dp=2), None, 0, 2)
    identity.shared_number = 3
    after = identity.successor(Layout(dp=1))
    assert after.key == f"{identity.key}~1" == "pgmesh/train.3~1"
    assert after.successor(Layout(dp=1)).key == f"{identity.key}~2"


def test_packed_records_unpack_to_equal_ones():
    assert str(spares(*range(100, 200))) == "shrink('dp', spares=range(100, 200))"
    for line in (arrival(3), arrival(3, None), arrival(3, spares(1, 2, axis=None))):
        assert Arrival.unpack(line.pack().encode()) == line
    outcome = Outcome(lost={1: "gone"}, replaced={1: 4}, axis="dp", processes=("process 4",))
    for each in (outcome, Outcome(), dataclasses.replace(outcome, failed="late", error="left")):
        assert Outcome.unpack("", each.pack().encode()) == each
    assert CompareSet("key", outcome.pack()).value == outcome.pack()


def test_rank_without_status_is_lost_in_time():
    one = Rank()
    assert one.agree().lost == {1: f"rank 1 has published no status in {one.client.clock:.0f} s"}
    assert one.agreement.statuses.lost_after <= one.client.clock < one.agreement.statuses.lost_after + 0.5
