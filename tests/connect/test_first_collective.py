"""A first collective whose group another thread has ended."""

from __future__ import annotations

from types import SimpleNamespace

from pgmesh.connect.first_collective import FirstCollective
from pgmesh.groups.group import Group
from pgmesh.rendezvous.operations import CompareSet
from pgmesh.rendezvous.statuses import Statuses


def test_failure_of_ended_group_is_published():
    group = Group("group tp", "mesh 'actor'", (0, 1))
    group.make(SimpleNamespace(group_name="pgmesh/actor.0/0-1"), "train.py:7", {})
    group.end("was released")
    group.take_process_group()
    collective = FirstCollective(group, "group/0/broken", Statuses(5.0, lambda: 0.0))
    collective.fail("was cancelled")
    (step,) = collective.publish_failure()
    assert isinstance(step, CompareSet)
    assert step.key == "group/0/broken"
