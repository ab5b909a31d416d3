"""A group that another thread ends while it connects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pgmesh.connect.first_collective import FirstCollective
from pgmesh.connect.first_collectives import FirstCollectives
from pgmesh.errors import LifetimeError, WorldError
from pgmesh.groups.group import Group, State
from pgmesh.rendezvous.operations import CompareSet
from pgmesh.rendezvous.statuses import Statuses


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


# ---- its first collective ----


def test_failure_of_ended_group_is_published():
    group = Group("group tp", "mesh 'actor'", (0, 1))
    group.make(SimpleNamespace(group_name="pgmesh/actor.0/0-1"), "train.py:7", {})
    group.end("was released")
    group.take_process_group()
    collective = FirstCollective(group, "group/0/broken", Statuses(5.0, lambda: 0.0))
    collective.fail("was cancelled")
    step = collective.failure()
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
    collectives = FirstCollectives(thread, 1.0, statuses, 0)
    collectives.all.append(FirstCollective(group, "group/0/broken", statuses))
    with pytest.raises(WorldError):
        collectives.cancel("rank 0 stopped", {})
    for _ in range(2):
        collectives.cancel("rank 0 stopped", {})
    assert len(written) == 2
