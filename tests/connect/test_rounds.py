"""Rounds of groups and their first collectives, in one process that plays all ranks over a store in memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from pgmesh import LifetimeError, MismatchError, MissingRanksError, PgmeshError, ProcessGroupMesh, WorldError
from pgmesh.connect.decisions import Decision
from pgmesh.connect.first_collective import FirstCollectives
from pgmesh.connect.group_rounds import GroupRound
from pgmesh.groups.group import Group
from pgmesh.groups.naming import Fingerprint
from pgmesh.liveness.operations import Operation, Read
from pgmesh.liveness.statuses import RankStatus, Statuses, status_key
from tests.support.fake_world import fake_rank
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


@pytest.mark.fault("a member dies before arriving in `connect` (L)")
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


def no_answers(*operations: Operation) -> list[Any]:
    return [None] * len(operations)


def client_of(run: Callable[..., list[Any]] = no_answers) -> Any:
    """A client with a deadline in a second."""
    start = time.monotonic()
    return SimpleNamespace(run=run, seconds=1.0, pace=1.0, now=lambda: time.monotonic() - start, sleep=time.sleep)


def made_round() -> GroupRound:
    made = round_of()
    made.decision = MADE
    return made


@contextlib.contextmanager
def mesh_and_group(rank: int = 0, size: int = 2) -> Iterator[tuple[ProcessGroupMesh, Group]]:
    with fake_rank(rank, size):
        mesh = ProcessGroupMesh(tp=size, name="actor")
        mesh.group()
        (group,) = mesh._mesh_groups.made()
        yield mesh, group


@contextlib.contextmanager
def work_of_torch(error: Exception | None) -> Iterator[None]:
    """Let an all-reduce fail with an error, or never end."""
    work = SimpleNamespace(is_completed=lambda: error is not None, wait=mock.Mock(side_effect=error))
    with mock.patch.object(dist, "all_reduce", return_value=work):
        yield


def test_group_released_during_its_first_collective_is_named():
    """Another thread releases it after torch has raised an error, of which a lost member could be the cause."""
    with mesh_and_group() as (mesh, group), work_of_torch(RuntimeError("closed by peer")):
        collectives = FirstCollectives(mesh._mesh_groups, client_of(), Statuses(5.0, lambda: 0.0))
        made = made_round()
        collectives.add({made: group})
        collectives.by_round[made].start()
        mesh.release()
        with pytest.raises(LifetimeError, match=r"^group tp of mesh 'actor' was released at test_rounds\.py:"):
            collectives.finish()


def error_of_endless(rank: int, size: int, client: Any, statuses: Statuses) -> PgmeshError:
    with mesh_and_group(rank, size) as (mesh, group), work_of_torch(None):
        collectives = FirstCollectives(mesh._mesh_groups, client, statuses)
        collectives.add({made_round(): group})
        collectives.finish()
    (collective,) = collectives.of_made
    assert isinstance(collective.error, MissingRanksError)
    return collective.error


def test_endless_first_collective_fails_at_the_deadline():
    assert str(error_of_endless(0, 2, client_of(), Statuses(0.1, lambda: 0.0))) == (
        "group tp of mesh 'actor': its first collective did not finish in time: the deadline was 1 s. "
        "Its members are ranks 0, 1."
    )


def test_member_far_from_the_front_names_ended_one():
    """It reads the statuses of those after it, whose listeners it asks."""
    status = RankStatus(endpoint=("127.0.0.1", 4000)).pack().encode()

    def run(*operations: Operation) -> list[Any]:
        return [status if operation == Read(status_key(37)) else None for operation in operations]

    statuses = Statuses(5.0, lambda: 0.0, lambda status, seconds, wait: True)
    error = error_of_endless(36, 40, client_of(run), statuses)
    assert "rank 37 has ended: its listener at 127.0.0.1:4000 refuses connections" in str(error)
