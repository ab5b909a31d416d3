"""A group that another thread ends while it connects."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pgmesh import ProcessGroupMesh
from pgmesh.connect import first_collective
from pgmesh.connect.first_collective import FirstCollective
from pgmesh.connect.first_collectives import FirstCollectives
from pgmesh.connect.locking import GroupLocks
from pgmesh.errors import LifetimeError, WorldError
from pgmesh.groups import background, watch
from pgmesh.groups.group import Group, State, find_group
from pgmesh.rendezvous.client import CallClient
from pgmesh.rendezvous.group_rounds import GroupRound
from pgmesh.rendezvous.operations import CompareSet, Read
from pgmesh.rendezvous.records import Decision
from pgmesh.rendezvous.statuses import RankStatus, RunningCollective, Statuses, status_key
from tests.support.fake_world import fake_rank
from tests.support.memory_client import round_of


@pytest.mark.parametrize("connected", [True, False])
def test_connect_leaves_group_that_another_thread_ended(connected: bool):
    group = Group("group tp", "mesh 'actor'", (0, 1))
    group.round = SimpleNamespace(number=0)  # type: ignore[assignment]
    group.make(SimpleNamespace(group_name="pgmesh/actor.0/0-1"), "train.py:7", {})
    group.connect()
    group.end("was released")
    group.end_connect(connected=connected)
    assert group.state is State.ENDED
    with pytest.raises(LifetimeError, match="group tp of mesh 'actor' was released"):
        group.connect()


def test_interrupt_of_connect_keeps_no_lock():
    """Ctrl-C arrives after the lock is taken, and before the call knows of it. A lock of another thread stays."""
    group, other, lock = (
        Group("group tp", "mesh 'actor'", (0, 1)),
        Group("group dp", "mesh 'actor'", (0, 1)),
        threading.RLock(),
    )

    def acquire(timeout: float) -> bool:
        lock.acquire(timeout=timeout)
        raise KeyboardInterrupt

    group.connecting = SimpleNamespace(acquire=acquire, release=lock.release)
    thread = threading.Thread(target=other.connecting.acquire)
    thread.start()
    thread.join()
    with GroupLocks() as locks:
        assert not locks.take(other, 0.0)
        with pytest.raises(KeyboardInterrupt):
            locks.take(group, 1.0)
    with pytest.raises(RuntimeError, match="un-acquired lock"):
        lock.release()


def test_adopted_group_of_another_mesh_keeps_its_label():
    with fake_rank(0, 2):
        owner, other = ProcessGroupMesh(dp=2, name="owner"), ProcessGroupMesh(dp=2, name="other")
        group = owner.group("dp")
        other.adopt("dp", group)
        for _ in range(2):
            found = find_group(group.group_name)
            assert found is not None
            assert found.label == "group dp of mesh 'owner'"
            other.release("dp")


def test_reason_is_found_again_after_a_woken_wait(monkeypatch: pytest.MonkeyPatch):
    collective = RunningCollective("name", "group tp of mesh 'actor'", "all_reduce", 3, 100)
    gloo = SimpleNamespace(unread_addresses=dict)
    group = SimpleNamespace(ranks=(0, 1), label="group tp of mesh 'actor'", gloo=gloo, timeout=0.0, finding=None)
    woken: list[Any] = []
    monkeypatch.setattr(watch, "find_group", lambda name: group)
    monkeypatch.setattr(background, "in_background", lambda wake, groups: woken.extend(groups))
    looks = watch.Watch(Statuses(0.0, lambda: 0.0))
    monkeypatch.setattr(looks.flight_recorder, "stuck", lambda: (collective,))
    for _ in range(2):
        group.finding = None
        looks.find_running(lambda *reads: [None for _ in reads])
        assert group.finding is not None
        assert "did not report all_reduce (collective 3)" in group.finding[1]
    assert woken == [group]


@pytest.mark.parametrize("many", [True, False], ids=["as many as it lists", "fewer"])
def test_rank_in_many_collectives_is_not_named(many: bool):
    """Its status does not list all of them."""
    here = RunningCollective("name", "group tp of mesh 'actor'", "all_reduce", 3, 100)
    listed = tuple(here._replace(name=f"{i}") for i in range(4 if many else 3))
    statuses = Statuses(5.0, lambda: 0.0)
    statuses.read(lambda *reads: [RankStatus(1, 3, running=listed).pack().encode()], [1])
    assert watch.did_not_report(statuses, 1, here) is not many


# ---- its first collective ----


def made_round() -> GroupRound:
    made = round_of()
    made.decision = Decision("made")
    return made


def test_failure_of_ended_group_is_published():
    group = Group("group tp", "mesh 'actor'", (0, 1))
    group.make(SimpleNamespace(group_name="pgmesh/actor.0/0-1"), "train.py:7", {})
    group.end("was released")
    group.take_process_group()
    collective = FirstCollective(group, made_round(), Statuses(5.0, lambda: 0.0))
    collective.fail("was cancelled")
    written: list[Any] = []
    collective.publish(lambda *operations: written.extend(operations) or [])
    (step,) = written
    assert isinstance(step, CompareSet)
    assert step.key == "group/0/broken"


def test_failure_that_the_store_lost_is_published_again():
    group = Group("group tp", "mesh 'actor'", (0, 1))
    written: list[object] = []

    def run(*operations: object, seconds: float) -> list[object]:
        written.append(operations)
        if len(written) == 1:
            raise WorldError("the store did not answer")
        return []

    statuses = Statuses(5.0, lambda: 0.0)
    thread: Any = SimpleNamespace(run=run)
    collectives = FirstCollectives(CallClient(thread, 1.0), statuses, 0)
    collectives.add({made_round(): group})
    with pytest.raises(WorldError):
        collectives.cancel("rank 0 stopped")
    for _ in range(2):
        collectives.cancel("rank 0 stopped")
    assert len(written) == 2


def test_error_of_torch_without_text_fails_collective():
    def fail() -> None:
        raise RuntimeError("")

    group = Group("group tp", "mesh 'actor'", (0, 1))
    collective = FirstCollective(group, made_round(), Statuses(5.0, lambda: 0.0))
    collective.state = first_collective.Progress.RUNNING
    collective._work = SimpleNamespace(is_completed=lambda: True, wait=fail)
    collective.poll()
    collective.time_out(3.0)
    assert "its first collective failed: RuntimeError." in str(collective.error)


def test_group_released_during_its_first_collective_is_named():
    """Another thread releases it after torch has raised an error, of which a lost member could be the cause."""
    group = Group("group tp", "mesh 'actor'", (0, 1))
    thread: Any = SimpleNamespace(run=lambda *operations, seconds: [None] * len(operations), pace=1.0)
    collectives = FirstCollectives(CallClient(thread, 1.0), Statuses(5.0, lambda: 0.0), 0)
    collectives.add({made_round(): group})
    (collective,) = collectives.of_made
    collective.state = first_collective.Progress.RUNNING
    collective._raised = first_collective._Raised(RuntimeError("closed by peer"), 0.0, "")
    group.end("was released at train.py:3.")
    with pytest.raises(LifetimeError, match=r"^group tp of mesh 'actor' was released at train\.py:3\."):
        collectives.finish()


def test_member_far_from_the_front_names_ended_one():
    """It reads the statuses of the first members, and of those after it, whose listeners it asks."""
    status = RankStatus(37, 3, endpoint=("127.0.0.1", 4000)).pack().encode()

    def run(*operations: Any, seconds: float) -> list[Any]:
        return [status if operation == Read(status_key(37)) else None for operation in operations]

    group = Group("group tp", "mesh 'actor'", tuple(range(40)))
    statuses = Statuses(5.0, lambda: 0.0, lambda status, seconds, wait: True)
    thread: Any = SimpleNamespace(run=run, lost_after=0.0, pace=1.0)
    collectives = FirstCollectives(CallClient(thread, 1.0), statuses, 36)
    collectives.add({made_round(): group})
    (collective,) = collectives.of_made
    collective.state, collective._work = first_collective.Progress.RUNNING, SimpleNamespace(is_completed=lambda: False)
    collective._process_group = SimpleNamespace(rank=lambda: 36)
    collectives.finish()
    assert "rank 37 has ended: its listener at 127.0.0.1:4000 refuses connections" in str(collective.error)
