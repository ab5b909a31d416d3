"""A process in its world: what it does at each heartbeat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.groups import world as world_module
from tests.support.fake_world import fake_rank


def test_slow_looks_take_turns_at_the_heartbeats(monkeypatch: pytest.MonkeyPatch):
    """As with many meshes and ``abort_when_lost``: each look waits half a second for a host that does not answer."""
    clock, looked = [0.0], list[int]()
    monkeypatch.setattr(world_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def look(number: int) -> bool:
        looked.append(number)
        clock[0] += 0.5
        return number != 3  # which ends its looks

    def nothing(*operations: Any) -> list[None]:
        return [None] * len(operations)

    with fake_rank(0, 2, dist.HashStore()):
        world = ProcessGroupMesh(2)._mesh_groups.world
        world.at_heartbeat += [lambda run, number=number: look(number) for number in range(12)]
        for _ in range(5):
            before = clock[0]
            world._look(nothing)
            assert clock[0] - before < 2.0  # so that the heartbeats come
    assert looked == [*range(12), 0, 1, 2]
