"""The end of groups, and of collectives that wait in groups."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from pgmesh import GroupOptions
from pgmesh.groups import teardown
from pgmesh.groups.connections import Endpoints
from pgmesh.groups.group import Group


def test_wake_skips_end_of_a_changed_timeout(monkeypatch: pytest.MonkeyPatch):
    """Gloo connects by the timeout that the group was made with, for five times as long."""
    woken: list[Endpoints] = []
    monkeypatch.setattr(teardown.waking, "wake", woken.extend)
    monkeypatch.setattr(teardown, "busy_since", lambda: {"group": time.monotonic() - 10.0})
    group = Group("group tp", "mesh 'actor'", (0, 1), options=GroupOptions(timeout=2), new_timeout=timedelta(minutes=1))
    group.name = "group"
    group._process_group = object()
    monkeypatch.setattr(group, "endpoints", lambda: Endpoints([], [], [1]))
    teardown.wake([group])
    assert not woken
    group.options = GroupOptions(timeout=20)
    teardown.wake([group])
    assert woken
