"""The life of a mesh and its groups: retries, release, close, copies. test_exits.py has the end of the process."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pgmesh import LifetimeError, OptionsError, ProcessGroupMesh
from pgmesh.groups import building, ending
from pgmesh.groups.group import Group
from pgmesh.groups.world import current_world
from tests.support.collectives import COLLECTIVES
from tests.support.faults import SLACK, attempt
from tests.support.resource_counts import growth
from tests.support.torch_tables import c10d, record_operations, table_sizes, timeout_of
from tests.support.worlds import STARVED, check_sums, groups_of, on_ranks, world

AT_ONCE = SLACK if STARVED else 0.001  # seconds


def check_lifetime_error(act: Callable[[], Any], text: str) -> None:
    """Assert that a call raises such an error, and at once: the quickest of several, since other processes are busy."""
    seen = [attempt(act) for _ in range(5)]
    assert all(each.kind == "LifetimeError" and text in each.text for each in seen), seen
    assert min(each.took for each in seen) < AT_ONCE, seen


def summed(mesh: ProcessGroupMesh) -> None:
    check_sums(groups_of(mesh))


# ---- release and close ----


ENDS: dict[str, tuple[Callable[[ProcessGroupMesh], None], str]] = {
    "release": (lambda mesh: mesh.release("tp"), "group tp of mesh 'actor' was released at "),
    "close": (lambda mesh: mesh.close(), "group tp of mesh 'actor' was closed at "),
    "destroy": (lambda mesh: dist.destroy_process_group(mesh.group("tp")), "group tp of mesh 'actor' was destroyed"),
}


@pytest.mark.fault("a mesh used after close, or the end of its world")
@pytest.mark.parametrize("end", ENDS)
@on_ranks(4)
def test_collectives_raise_on_an_ended_group(end: str):
    for used in (True, False):
        mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
        old = mesh.group("tp")
        if used:
            summed(mesh)
            dist.barrier()
        finish, text = ENDS[end]
        finish(mesh)
        for collective in COLLECTIVES.values():
            check_lifetime_error(lambda collective=collective, old=old: collective(old), text)
        if end != "close":
            assert mesh.group("tp") is not old
            summed(mesh)
        mesh.close()
        dist.barrier()


@on_ranks(4)
def test_release_ends_groups_of_every_tag_and_option():
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    asked = {"plain": {}, "tagged": {"tag": "gather"}, "other options": {"timeout": timedelta(seconds=50)}}
    kept = mesh.group("dp", tag="gather")
    before = {what: mesh.group("tp", **how) for what, how in asked.items()}
    check_sums({what: (group, mesh.ranks("tp")) for what, group in before.items()})
    dist.barrier()
    mesh.release("tp")
    released = r"^group tp.* of mesh 'actor' was released at test_lifetime.py:\d+;"
    for group in before.values():
        with pytest.raises(LifetimeError, match=released):
            dist.all_reduce(torch.ones(1), group=group)
    after = {what: mesh.group("tp", **how) for what, how in asked.items()}
    assert not {*before.values()} & {*after.values()}
    assert not {each.group_name for each in before.values()} & {each.group_name for each in after.values()}
    assert mesh.group("dp", tag="gather") is kept
    check_sums({what: (group, mesh.ranks("tp")) for what, group in after.items()})


@on_ranks(4)
def test_closed_mesh_refuses_calls_that_need_groups():
    with contextlib.suppress(ZeroDivisionError), ProcessGroupMesh(dp=2, tp=2, name="actor") as mesh:
        summed(mesh)
        stage, moe = mesh.along("tp"), mesh.view(ep=4)
        for part in (stage, moe, mesh.at(tp=0)):
            with pytest.raises(LifetimeError, match="is a view or a slice and shares the groups of"):
                part.close()
        summed(mesh)
        dist.barrier()
        raise ZeroDivisionError("the mesh is closed after an error too")
    asks: list[Callable[[], Any]] = [
        lambda: mesh.group("tp"),
        lambda: mesh.group("tp", tag="other"),
        lambda: mesh.group_of([mesh.rank]),
        lambda: mesh.configure("tp", timeout=5),
        lambda: mesh.release("tp"),
        lambda: mesh.device_mesh(),
        lambda: mesh.locality("tp"),
        lambda: stage.group(),
        lambda: moe.group("ep"),
    ]
    for ask in asks:
        check_lifetime_error(ask, "mesh 'actor' was closed at test_lifetime.py:")
    assert mesh.ranks("tp") == moe.at(ep=stage.ranks()).ranks("ep") == stage.ranks()
    mesh.close()
    mesh.close()
    with ProcessGroupMesh(dp=2, tp=2, name="actor") as again:
        summed(again)


@on_ranks(4)
def test_groups_are_new_after_an_interrupted_release():
    mesh = ProcessGroupMesh(dp=2, tp=2)
    summed(mesh)
    old = mesh.group("dp")
    dist.barrier()
    with mock.patch.object(ending, "leave", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        mesh.release("dp")
    assert mesh.group("dp") is not old
    summed(mesh)


# ---- nothing is left behind ----


def ours() -> int:
    """How many groups and meshes with groups this process keeps."""
    world = current_world()
    return sum(len(mesh.made()) for mesh in world.open_meshes()) + len(world.with_groups)


def tables_and_keys() -> dict[str, int]:
    return {**table_sizes(), "keys": c10d._get_default_store().num_keys()}


def fail(*_: Any, **__: Any) -> None:
    raise ConnectionError("no such network")


FAILURES: list[Callable[[], Any]] = [
    lambda: mock.patch.dict(building.CONSTRUCTORS, gloo=fail),
    lambda: mock.patch.object(c10d, "_register_process_group", fail),
    lambda: mock.patch.object(dist, "PrefixStore", fail),
    lambda: mock.patch.object(dist.ProcessGroup, "_set_group_name", fail),
    lambda: mock.patch.object(Group, "make", fail),
]


@pytest.mark.fault("making a group raises")
@on_ranks(4)
def test_failed_group_creation_leaves_nothing_behind():
    mesh = ProcessGroupMesh(dp=2, tp=2)
    mesh.group("dp")
    before = table_sizes(), ours()
    for failure in FAILURES:
        for _ in range(2):
            with failure(), pytest.raises(ConnectionError, match="no such network"):
                mesh.group("tp")
            assert (table_sizes(), ours()) == before
    summed(mesh)


@on_ranks(4)
def test_close_leaves_nothing_in_torch_or_store():
    before, counts = (table_sizes(), ours()), []
    for name in ("first", "second", None):
        dist.barrier()
        counts.append(tables_and_keys())
        dist.barrier()
        with ProcessGroupMesh(dp=2, tp=2, name=name) as mesh:
            mesh.device_mesh()
            mesh.group("dp", tag="other")
            summed(mesh)
            dist.barrier()
            dist.destroy_process_group(mesh.group("tp"))
            summed(mesh)
            dist.barrier()
        del mesh
        assert (table_sizes(), ours()) == before
    assert not growth(counts, tables_and_keys)


@on_ranks(4)
def test_groups_inherit_the_world_timeout_unless_configured():
    mesh = ProcessGroupMesh(dp=2, tp=2)
    assert timeout_of(mesh.group("dp")) == timeout_of(dist.group.WORLD) == timedelta(seconds=60)
    with pytest.raises(OptionsError, match="too late"):
        mesh.at(tp=mesh.index("tp")).configure("dp", timeout=5)
    mesh.configure("tp", timeout=5)
    assert timeout_of(mesh.group("tp")) == timeout_of(mesh.view(dp=2, ep=2).group("ep")) == timedelta(seconds=5)
    assert timeout_of(mesh.group("tp", timeout=7)) == timedelta(seconds=7)
    assert timeout_of(mesh.group("tp", tag="other")) == timedelta(seconds=60)
    check_sums({"longer": (mesh.group("tp", timeout=7), mesh.ranks("tp"))})
    summed(mesh)
    dist.barrier()
    mesh.release("dp")
    mesh.configure("dp", timeout=5)
    assert timeout_of(mesh.group("dp")) == timedelta(seconds=5)
    summed(mesh)


# ---- copies and pickles ----


class Block(torch.nn.Module):
    """A module that holds its mesh, as parallel layers do."""

    def __init__(self, mesh: ProcessGroupMesh) -> None:
        super().__init__()
        self.mesh, self.weight = mesh, torch.nn.Parameter(torch.ones(2))


def saved_and_loaded(what: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda what: pickle.loads(pickle.dumps(what)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(4)
def test_copied_mesh_shares_groups_with_the_original(way: str):
    mesh = ProcessGroupMesh(pp=2, tp=2, ranks=[3, 1, 2, 0], name="actor")
    group = mesh.group("tp")
    go = WAYS[way]
    for part in (mesh, mesh.at(pp=mesh.index("pp")), mesh.along("tp"), mesh.view(pp=2, cp=1, tp=2), Block(mesh)):
        there = go(part)
        old, new = (part.mesh, there.mesh) if isinstance(part, Block) else (part, there)
        assert (new.shape, new.axes, new.coord, new.ranks()) == (old.shape, old.axes, old.coord, old.ranks())
        assert repr(new) == repr(old)
        assert new.group("tp") is group
        assert new.group() is old.group()
    copied = go(mesh)
    summed(copied)
    copied.close()
    with pytest.raises(LifetimeError, match="was closed"):
        mesh.group("tp")


def packed_parts() -> bytes:
    # Other processes use this mesh on some ranks only, so that these count one more mesh of its name.
    mesh = ProcessGroupMesh(pp=2, tp=2, name="packed")
    mesh.group("tp")
    return pickle.dumps([mesh, mesh.along("tp"), mesh.view(ep=4), Block(mesh)])


def unpack_elsewhere(data: bytes) -> None:
    before = table_sizes()
    with record_operations() as done:
        mesh, stage, moe, block = pickle.loads(data)
    assert (table_sizes(), done) == (before, [])
    assert (mesh.rank in mesh) is (dist.get_rank() < 4)
    if mesh.rank in mesh:
        assert moe.group("ep") is mesh.group() is block.mesh.group()
        summed(mesh)
        summed(block.mesh)
    if mesh.rank in stage:
        assert stage.group("tp") is mesh.group("tp")


@pytest.mark.fault("pickle, deepcopy, torch.save of a mesh")
def test_unpickled_mesh_creates_groups_in_another_process():
    data = world(4).run(packed_parts)
    world(8).run(unpack_elsewhere, data[1])


def test_unpickled_mesh_outside_a_world_keeps_coords():
    data = world(4).run(packed_parts)
    mesh, stage, moe, block = pickle.loads(data[3])
    assert (mesh.shape, mesh.axes, mesh.rank, mesh.coord) == ((2, 2), ("pp", "tp"), 3, (1, 1))
    assert (stage.ranks(), moe.shape, block.mesh.label()) == ((2, 3), (4,), "pp1-tp1")
    asks: list[Callable[[], Any]] = [part.group for part in (mesh, stage, moe, block.mesh)]
    asks += [lambda: mesh.shrink("tp"), mesh.stand_by, lambda: mesh.abort_when_lost(lost_after=3)]
    for ask in asks:
        with pytest.raises(LifetimeError, match="mesh 'packed' was unpickled outside any world"):
            ask()
    assert pickle.loads(pickle.dumps(mesh)).coord == (1, 1)
    mesh.close()
