"""Rounds of groups, in one process that plays all ranks over a store in memory."""

from __future__ import annotations

from typing import Any

import pytest

from pgmesh import MismatchError, MissingRanksError, WorldError
from pgmesh.connect.decisions import Decision
from pgmesh.groups.naming import Fingerprint
from pgmesh.liveness.operations import Operation
from pgmesh.liveness.statuses import RankStatus, status_key
from tests.support.memory_client import MADE, MemoryClient, arrival, judge_of, round_of, rounds_of


def test_error_does_not_reach_a_later_attempt():
    """The others have given up attempt 0, of which this rank knows nothing, and wait at attempt 1 until D."""
    failed = Decision("missing", "rank 0 did not arrive").pack().encode()
    client = MemoryClient(values={"group/0/decision": failed, "group/1/arrivals": arrival(1)})
    rounds_of(client, round_of()).cancel(OSError("no descriptor is left"))
    assert client.values == {"group/0/decision": failed, "group/1/arrivals": arrival(1)}


def test_made_attempt_deletes_keys_of_the_one_before():
    failed = Decision("missing", "rank 0 did not arrive").pack().encode()
    values = {"group/0/count": b"1", "group/0/broken": b"1", "group/0/decision": failed, "group/0/arrivals": arrival(1)}
    values |= {"group/1/arrivals": arrival(1), "group/1/count": b"1"}
    client, each = MemoryClient(values=values), round_of()
    rounds_of(client, each).run()
    assert each.is_made()
    assert {key for key in client.values if key.startswith("group/")} == {
        f"group/1/{kind}" for kind in ("arrivals", "count", "decision")
    }


@pytest.mark.fault("a member dies before arriving (L)")
@pytest.mark.parametrize("late", [range(2, 4), range(2, 60)])
def test_member_that_dies_after_it_arrived_is_named(late: range):
    """A rank that has not begun is waited for. The one that died is named before the many that are late."""
    values = {
        "group/0/arrivals": arrival(1),
        status_key(1): RankStatus(pending={"m": "waiting"}).pack().encode(),
        status_key(late[-1]): RankStatus(exited="its process has exited").pack().encode(),
    }
    if len(late) == 2:
        del values[status_key(late[-1])]
    client, each = MemoryClient(values=values), round_of(ranks=(0, 1, *late))
    rounds_of(client, each, deadline=30.0).run()
    assert each.decision is not None
    assert isinstance(each.decision.error(), MissingRanksError)
    assert client.clock < 5.3
    first, lost, *_ = each.decision.text.splitlines()
    assert first.endswith("did not arrive, and rank 1 was lost after it had arrived."), first
    assert lost == "  rank 1 has sent no heartbeat for at least 5 s; its last status: waiting"


def test_retry_takes_success_of_its_earlier_attempt():
    """The store failed as this rank arrived. The others connected, so it must not arrive at a later attempt."""

    def run(*operations: Operation) -> list[Any]:
        MemoryClient.run(client, *operations)
        raise WorldError("the store did not answer")

    client, each = MemoryClient(), round_of()
    client.run = run  # type: ignore[method-assign]
    with pytest.raises(WorldError):
        rounds_of(client, each).run()
    rounds_of(MemoryClient(values={**client.values, "group/0/decision": MADE.pack().encode()}), each).run()
    assert (each.number, each.decision) == (0, MADE)


@pytest.mark.parametrize("error", [MismatchError("two processes"), KeyboardInterrupt()])
def test_cancelled_attempt_may_be_tried_again(error: BaseException):
    assert Decision.of(error, "it was cancelled").kind not in ("mismatch", "mesh")


def test_second_process_of_rank_learns_the_first():
    """The first one has connected the group, and goes on undisturbed."""
    values = {"group/0/decision": MADE.pack().encode(), "group/0/arrivals": arrival(0, process="process 7 on h/a")}
    client, each = MemoryClient(values=values), round_of()
    rounds_of(client, each, process="process 8 on h/b").run()
    assert each.decision is not None
    assert each.decision.kind == "duplicate"
    assert "both process 7 on h and process 8 on h connect as rank 0." in each.decision.text
    assert client.values["group/0/decision"] == MADE.pack().encode()
    assert "group/0/broken" not in client.values


MINE, OTHER = (Fingerprint(rank, {"shape": shape}, "mesh 'a'", "Fix it.") for rank, shape in ((0, [2]), (1, [1, 2])))


def test_mismatch_of_mesh_fails_all_its_rounds():
    """Rank 1 waits in another group of the mesh, under another key. Its round gets the decision too."""
    values = {
        "m/other/0/arrivals": arrival(1, mesh=OTHER.encoded.decode()),
        status_key(1): RankStatus(pending={"m/other/0": "waits"}).pack().encode(),
    }
    client, rounds = MemoryClient(values=values), [round_of(key="m/one"), round_of(key="m/two", ranks=(0, 2))]
    with pytest.raises(MismatchError, match=r"shape: \[2\] on rank 0, \[1, 2\] on rank 1"):
        rounds_of(client, *rounds, mesh=MINE, mesh_key="m").run()
    assert client.clock < 0.1
    texts = {key: Decision.unpack(client.values[f"m/{key}/0/decision"]) for key in ("one", "two", "other")}
    assert len({*texts.values()}) == 1
    assert texts["one"].kind == "mesh"


@pytest.mark.fault("a living member never comes to `connect`")
def test_missing_member_is_warned_about_and_then_raised():
    """After 2 s of a long deadline. test_faults.py has the third of a short one."""
    seen: list[tuple[float, str]] = []
    client, each = MemoryClient(values={status_key(1): RankStatus().pack().encode()}), round_of()
    beats = iter(range(10_000))
    client.between = lambda: client.values.update({status_key(1): RankStatus(sent=float(next(beats))).pack().encode()})
    rounds_of(client, each, deadline=30.0, warn=lambda text: seen.append((client.clock, text))).run()
    ((at, text),) = seen
    assert 2.0 <= at < 2.3
    assert "\n  rank 1: " in text
    assert each.decision is not None
    assert "rank 1 did not arrive in 30 s." in each.decision.text
    assert 30.0 <= client.clock < 30.3


def test_member_asks_up_to_the_next_arrived():
    """Of six members, 0, 3 and 4 have arrived."""
    each = round_of(ranks=range(6))
    each.missing = (1, 2, 5)
    asked = {rank: judge_of(MemoryClient(rank), rank)._watched([each]) for rank in (0, 3, 4)}
    assert asked == {0: [1, 2, 3], 3: [4], 4: [5, 0]}
