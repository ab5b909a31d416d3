"""The view of a layout from one rank: it returns the same as a mesh on that rank."""

from __future__ import annotations

import copy
import pickle

import pytest

from pgmesh import Layout, ProcessGroupMesh
from tests.support.fake_world import fake_rank
from tests.support.worlds import axis_combinations

BOX = Layout(pp=2, dp=2, tp=2)


@pytest.mark.parametrize("ranks", [range(8), [3, 1, 4, 7, 5, 0, 2, 6]], ids=["in order", "permuted"])
@pytest.mark.parametrize("rank", [0, 5])
def test_rank_view_answers_as_the_mesh(rank, ranks):
    with fake_rank(rank, 8):
        mesh = ProcessGroupMesh(pp=2, dp=2, tp=2, ranks=ranks)
        roads = [
            lambda all: all,
            lambda all: all.along("dp", "tp"),
            lambda all: all["tp", "pp"],
            lambda all: all.view(pp=2, ep=-1),
            lambda all: all.at(pp=0),
            lambda all: all.at({"pp": [1, 0]}, dp=1),
        ]
        for road in roads:
            here, seen = road(mesh), road(mesh.layout.seen_by(rank))
            assert seen.layout == here.layout
            for name in ("rank", "coord", "axes", "shape"):
                assert getattr(seen, name) == getattr(here, name)
            assert ([*seen], len(seen), rank in seen) == ([*here], len(here), rank in here)
            assert (seen.size(), seen.ranks()) == (here.size(), here.ranks())
            assert str(seen) == str(here)
            if rank not in here:
                continue
            assert seen.label() == here.label()
            for axes in axis_combinations(here):
                for name in ("size", "index", "ranks", "partition"):
                    assert getattr(seen, name)(*axes) == getattr(here, name)(*axes)
            for axis in here.axes:
                for step, wrap in [(1, False), (-1, False), (1, True)]:
                    assert seen.neighbor(axis, step, wrap=wrap) == here.neighbor(axis, step, wrap=wrap)


def test_rank_view_is_compared_by_value():
    seen = BOX.seen_by(5)
    assert repr(seen) == "RankView(layout=Layout(pp=2, dp=2, tp=2), rank=5)"
    assert seen == pickle.loads(pickle.dumps(seen)) == copy.deepcopy(seen)
    assert seen != BOX.seen_by(4)
    assert hash(seen) == hash(BOX.seen_by(5))
