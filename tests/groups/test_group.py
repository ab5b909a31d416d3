"""A group that another thread ends while it connects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pgmesh.errors import LifetimeError
from pgmesh.groups.group import Group, State


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
