"""A mesh in one process, as any rank of worlds up to 64, over the fake backend."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import pgmesh
from pgmesh import GroupOptions, Layout, ProcessGroupMesh, torch_private
from pgmesh.elastic import shrinking
from pgmesh.groups.default_world import default_device, device_of
from tests.support.fake_world import fake_rank
from tests.support.worlds import axis_combinations


@pytest.fixture
def mesh():
    """The running example, seen from rank 5."""
    with fake_rank(5, 8):
        yield ProcessGroupMesh(pp=2, dp=2, tp=2)


def test_bool_is_no_step_and_no_member(mesh):
    assert mesh.neighbor("tp", -1) == 4
    assert mesh.neighbor("pp", 1) is None  # and is remembered
    for ask in (lambda: mesh.neighbor("pp", True), lambda: mesh.group_of([5, True])):
        with pytest.raises(TypeError, match="True is no number"):
            ask()
    assert True not in mesh


@pytest.mark.parametrize(("here", "device"), [(False, "cpu"), (True, "cuda")], ids=["no driver", "a driver"])
def test_accelerator_is_used_only_if_present(mesh, monkeypatch, here, device):
    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return torch.device("cuda") if here or not check_available else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert default_device() == device_of(mesh.group("tp")).type == device


def test_group_names_ignore_the_order_of_creation():
    def names(seed: int) -> dict[object, str]:
        with fake_rank(5, 8):
            mesh = ProcessGroupMesh(pp=2, dp=2, tp=2)
            asks = [(combo, tag) for combo in axis_combinations(mesh)[1:] for tag in ("", "second")]
            random.Random(seed).shuffle(asks)
            return {ask: mesh.group(*ask[0], tag=ask[1]).group_name for ask in asks}

    assert all(names(seed) == names(0) for seed in range(1, 6))


def test_released_group_gets_a_new_name():
    """The same on a rank that has not made the group before."""
    names = []
    for makes_it_first in (False, True):
        with fake_rank(5, 8):
            mesh = ProcessGroupMesh(pp=2, dp=2, tp=2)
            old = mesh.group("tp").group_name if makes_it_first else ""
            mesh.release("tp")
            names.append(mesh.group("tp").group_name)
    assert names[0] == names[1], "the two ranks would never meet"
    assert old not in names


def test_group_may_be_configured_after_another_variant(mesh):
    variant = mesh.group("dp", timeout=9)
    mesh.configure("dp", timeout=5)
    assert mesh.group("dp", timeout=5) is mesh.group("dp")
    assert mesh.group("dp", timeout=9) is variant


def test_rank_outside_knows_layout_and_creates_nothing():
    with fake_rank(6, 8):
        mesh = ProcessGroupMesh(dp=2, tp=2, ranks=range(4))
        assert mesh.rank not in mesh
        assert mesh.coord is None
        assert mesh.ranks() == (0, 1, 2, 3)
        assert mesh.size("dp") == 2
        assert list(mesh.partition("tp")) == [(0, 1), (2, 3)]
        mesh.configure("dp", timeout=timedelta(minutes=1))
        for ask in (mesh.group, mesh.index, mesh.label, mesh.device_mesh, mesh.along, lambda: mesh.ranks("dp")):
            with pytest.raises(pgmesh.MembershipError):
                ask()
        assert len(c10d._world.pg_map) == 1, "nothing but the world"


def test_shrink_takes_positions_and_any_iterable(mesh, monkeypatch):
    shrink = mock.Mock(side_effect=pgmesh.LifetimeError("not in this test"))
    monkeypatch.setattr(shrinking, "shrink", shrink)
    for axis, spares in ((1, [6, 7]), (-2, np.array([6, 7])), ("dp", torch.tensor([6, 7])), ("dp", [])):
        with pytest.raises(pgmesh.LifetimeError):
            mesh.shrink(axis, spares=spares)
    requests = [call.args[1] for call in shrink.call_args_list]
    assert [(each.axis, each.spares) for each in requests] == [("dp", (6, 7))] * 3 + [("dp", ())]
    for spares, error in ((np.array(6), TypeError), ([4, 9], pgmesh.RankError)):
        with pytest.raises(error):
            mesh.shrink("dp", spares=spares)


def test_str_marks_this_rank(mesh):
    assert "[5]" in str(mesh)
    assert "[" not in str(mesh.at(pp=0))


def test_names_of_torch_groups_ignore_our_groups(mesh):
    before = c10d._hash_ranks_to_str([0, 1])
    for combo in axis_combinations(mesh):
        mesh.group(*combo)
    assert c10d._hash_ranks_to_str([0, 1]) == before
    assert all(group in c10d._world.pg_names for group in c10d._world.pg_map)
    assert c10d._world.pg_config_info, "torch's own look at its tables still works"


@contextlib.contextmanager
def often_switching():
    """Let threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_threads_that_unpickle_a_mesh_get_one():
    start = threading.Barrier(4)

    def load() -> ProcessGroupMesh:
        start.wait(10)
        return pickle.loads(sent)

    with fake_rank(5, 8), often_switching(), ThreadPoolExecutor(4) as pool:
        sent = pickle.dumps(ProcessGroupMesh(pp=2, dp=4, name="train"))
        gc.collect()
        for _ in range(20):
            loaded = [future.result() for future in [pool.submit(load) for _ in range(4)]]
            assert len({each.group("dp").group_name for each in loaded}) == 1
            loaded[0].close()


def test_meshes_are_listed_while_another_thread_creates_some():
    """torch's hooks list them, in any thread."""

    def create() -> None:
        for step in range(3):
            kept = [ProcessGroupMesh(dp=8, name=f"mesh {step} {i}") for i in range(1000)]
            kept.clear()

    with fake_rank(5, 8), often_switching(), ThreadPoolExecutor(1) as pool:
        created = pool.submit(create)
        while not created.done():
            pgmesh.meshes()
            for hook in torch_private.on_destroy:
                hook(object())
        created.result()


def test_destroyed_group_does_not_rename_tagged_one(mesh):
    before = mesh.group("dp", tag="second").group_name
    mesh.close()
    again = ProcessGroupMesh(pp=2, dp=2, tp=2)
    dist.destroy_process_group(again.group("dp"))  # on this rank before the tagged group is created, on others after it
    assert again.group("dp", tag="second").group_name.split("/")[-1] == before.split("/")[-1]


def test_configured_group_gets_new_name_after_failure(mesh):
    names = []
    for seconds in (10, 20, 30):
        mesh.configure("dp", timeout=timedelta(seconds=seconds))
        names.append(mesh.group("dp").group_name)
        dist.destroy_process_group(mesh.group("dp"))  # as far as the others know, it failed
    assert len({*names}) == 3, names


def test_configured_options_change_no_group_name(mesh):
    before = mesh.group("dp").group_name
    mesh.close()
    again = ProcessGroupMesh(pp=2, dp=2, tp=2)
    again.configure("dp", timeout=20)
    assert again.group("dp").group_name.split("/")[-1] == before.split("/")[-1]


def test_unpickling_in_a_smaller_world_is_refused():
    with fake_rank(0, 8):
        sent = pickle.dumps(ProcessGroupMesh(dp=8))
    with (
        fake_rank(0, 4),
        pytest.raises(pgmesh.RankError, match="was unpickled with rank 7, but the world's ranks are 0 to 3"),
    ):
        pickle.loads(sent)


def test_options_are_copied():
    given = {"max_ctas": 8}
    options = GroupOptions(backend="NCCL", nccl=given)
    assert options == GroupOptions(backend="nccl", nccl={"max_ctas": 8})
    given["max_ctas"] = 16
    assert options.nccl == {"max_ctas": 8}


def test_at_caches_exactly_equal_arguments():
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(at=2, pp=2, tp=2)
        asked = [0, 1, [0, 1], (0, 1), [1, 0], slice(0, 1), slice(0, 2), slice(None, None, 2), [0], -1, [-1]]
        for first in asked:
            for axis in ("at", "tp"):
                assert mesh.at(**{axis: first}) is mesh.at(**{axis: first})
                assert mesh.at(**{axis: first}).layout == mesh.layout.at(**{axis: first})
        assert mesh.along("at", 2).layout == mesh.layout.along(5, "at", "tp")
        assert mesh.along("at", "tp", 1).layout == mesh.layout  # not at(tp=1)
        assert mesh.at(tp=1).ranks() == (1, 3, 5, 7)
        for no_index in (1.0, "1", [1.0], slice(0.0, 1.0)):
            with pytest.raises(TypeError):
                mesh.at(tp=no_index)


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
    box = Layout(pp=2, dp=2, tp=2)
    seen = box.seen_by(5)
    assert repr(seen) == "RankView(layout=Layout(pp=2, dp=2, tp=2), rank=5)"
    assert seen == pickle.loads(pickle.dumps(seen)) == copy.deepcopy(seen)
    assert seen != box.seen_by(4)
    assert hash(seen) == hash(box.seen_by(5))
