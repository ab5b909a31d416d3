"""A mesh that was unpickled outside any world."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable

import pytest

from pgmesh import LifetimeError, ProcessGroupMesh
from tests.support.fake_world import fake_rank


@pytest.mark.parametrize(
    "call",
    [
        lambda mesh: mesh.shrink("dp", lost_after=3),
        lambda mesh: mesh.stand_by(lost_after=3),
        lambda mesh: mesh.abort_when_lost(lost_after=3),
    ],
    ids=["shrink", "stand_by", "abort_when_lost"],
)
def test_elastic_calls_on_unpickled_mesh_raise(call: Callable[[ProcessGroupMesh], object]):
    with fake_rank(1, 4), ProcessGroupMesh(dp=2, tp=2, name="train") as mesh:
        text = pickle.dumps(mesh)
    with pytest.raises(LifetimeError, match="mesh 'train' was unpickled outside any world"):
        call(pickle.loads(text))


def test_wrong_lost_after_starts_no_thread():
    with fake_rank(1, 4), ProcessGroupMesh(dp=2, tp=2, name="train") as mesh:
        with pytest.raises(ValueError, match=r"lost_after=1 s is less than three heartbeats, which take 3 s here"):
            mesh.shrink("dp", lost_after=1)
        assert "pgmesh-store" not in [thread.name for thread in threading.enumerate()]
