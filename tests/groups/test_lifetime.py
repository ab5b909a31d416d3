"""From the first use of a mesh to its end: missing members, release, close and pickle. test_exits.py has its end."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pgmesh import (
    LifetimeError,
    MismatchError,
    MissingRanksError,
    OptionsError,
    ProcessGroupMesh,
)
from pgmesh.groups import building, ending
from pgmesh.groups.connecting import LEFT_KEY
from pgmesh.groups.group import Group
from pgmesh.groups.world import current_world
from tests.support.collectives import COLLECTIVES
from tests.support.resource_counts import growth
from tests.support.torch_tables import c10d, record_operations, table_sizes, timeout_of
from tests.support.worlds import check_sums, groups_of, on_ranks, world

SOON = 2.0  # seconds: at once, on a machine that is busy with something else; no timeout is as short


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < SOON, f"took {took:.3f} s"


def summed(mesh: ProcessGroupMesh) -> None:
    check_sums(groups_of(mesh))


# ---- missing members ----


@on_ranks(4)
def test_missing_members_are_named_at_the_timeout():
    """Rank 3 waits in three groups at once, and ranks 0 and 1 with it in the last. Rank 2 makes none."""
    mesh = ProcessGroupMesh(dp=2, tp=2, ranks=[3, 1, 2, 0], name="actor")
    for axes in [("tp",), ("dp",), ()]:
        mesh.configure(*axes, timeout=1)
    if mesh.rank != 2:
        start = time.monotonic()
        asked = [("tp",), ("dp",), ()] if mesh.rank == 3 else [()]
        under_way = [dist.all_reduce(torch.ones(1), group=mesh.group(*axes), async_op=True) for axes in asked]
        errors = []
        for work in under_way:
            with pytest.raises(MissingRanksError) as caught:
                work.wait()
            first_line, *_ = str(caught.value).splitlines()  # then where the missing ranks wait, if they have said so
            errors.append(first_line)
        assert 1 <= time.monotonic() - start < 3
        lines = [
            "group tp of mesh 'actor': rank 1 did not make this group in 1 s. Its ranks are 3, 1.",
            "group dp of mesh 'actor': rank 2 did not make this group in 1 s. Its ranks are 3, 2.",
            "group dp, tp of mesh 'actor': rank 2 did not make this group in 1 s. Its ranks are 3, 1, 2, 0.",
        ]
        assert errors == lines[-len(errors) :]
    dist.barrier()
    for axes in [("tp",), ("dp",), ()]:
        mesh.release(*axes)
        mesh.configure(*axes, timeout=30)
    summed(mesh)


@on_ranks(2)
def test_retry_after_missing_ranks_waits_again():
    mesh = ProcessGroupMesh(dp=2, name="actor")
    mesh.configure("dp", timeout=1)
    if mesh.rank == 0:
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(MissingRanksError, match="rank 1 did not make this group in 1 s"):
                dist.all_reduce(torch.ones(1), group=mesh.group("dp"))
            assert 1 <= time.monotonic() - start < 1 + SOON
    dist.barrier()
    summed(mesh)


# ---- release and close ----


@pytest.mark.parametrize("how", ["release", "close"])
@on_ranks(4)
def test_release_or_close_ends_pending_collectives(how: str):
    mesh = ProcessGroupMesh(tp=4, name="actor")
    if mesh.rank == 0:
        work = dist.all_reduce(torch.ones(1), group=mesh.group("tp"), async_op=True)
        with at_once():
            mesh.release("tp") if how == "release" else mesh.close()
        with at_once(), pytest.raises(LifetimeError, match=f"group tp of mesh 'actor' was {how.rstrip('e')}ed"):
            work.wait()
        del work
    elif how == "release":
        mesh.release("tp")
    dist.barrier()
    if how == "release":
        summed(mesh)


ENDS: dict[str, tuple[Callable[[ProcessGroupMesh], None], str]] = {
    "release": (lambda mesh: mesh.release("tp"), "group tp of mesh 'actor' was released at "),
    "close": (lambda mesh: mesh.close(), "group tp of mesh 'actor' was closed at "),
    "destroy": (lambda mesh: dist.destroy_process_group(mesh.group("tp")), "group tp of mesh 'actor' was destroyed"),
}


@pytest.mark.fault("a group is used after `release` or `close`")
@pytest.mark.parametrize("used", [True, False], ids=["used", "never used"])
@pytest.mark.parametrize("end", ENDS)
@on_ranks(4)
def test_collectives_raise_on_an_ended_group(end: str, used: bool):
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    old = mesh.group("tp")
    if used:
        summed(mesh)
        dist.barrier()
    finish, text = ENDS[end]
    finish(mesh)
    for name, collective in COLLECTIVES.items():
        with at_once():
            try:
                collective(old)
            except Exception as error:
                assert text in str(error), f"{name} says {error!r}"  # noqa: PT017
            else:
                raise AssertionError(f"{name} worked")
    if end != "close":
        assert mesh.group("tp") is not old
        summed(mesh)


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
        with at_once(), pytest.raises(LifetimeError, match=r"mesh 'actor' was closed at test_lifetime\.py:"):
            ask()
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


@on_ranks(2)
def test_adopt_fails_on_a_mesh_closed_meanwhile():
    """Another thread is in ``adopt``, and waits for the lock of the mesh while this one closes it."""
    before, other = ours(), dist.new_group([0, 1])
    mesh, entered, ranks_of = ProcessGroupMesh(dp=2, name="actor"), threading.Event(), dist.get_process_group_ranks

    def ranks_in_order(group: Any) -> list[int]:
        entered.set()
        return ranks_of(group)

    with ThreadPoolExecutor(1) as thread, mock.patch.object(dist, "get_process_group_ranks", ranks_in_order):
        with mesh._mesh_groups.lock:
            adopting = thread.submit(mesh.adopt, "dp", other)
            assert entered.wait(30.0)
            mesh.close()
        with pytest.raises(LifetimeError, match="mesh 'actor' was closed at"):
            adopting.result(30.0)
    assert ours() == before
    dist.destroy_process_group(other)


@on_ranks(4)
def test_group_destroyed_by_torch_is_created_again():
    """torch's own destroy, many times: nothing of a group stays."""
    mesh, counts = ProcessGroupMesh(dp=2, tp=2), []
    summed(mesh)
    for _ in range(5):
        dist.destroy_process_group(mesh.group("tp"))
        summed(mesh)
        dist.barrier()
        counts.append(tables_and_keys())
        dist.barrier()
    assert not growth(counts[:-1], tables_and_keys)
    dist.barrier()


# ---- what ranks do not describe alike ----


def fields(error: pytest.ExceptionInfo[MismatchError]) -> list[str]:
    return [line.strip() for line in str(error.value).splitlines() if line.startswith("  ") and ": " in line]


@pytest.mark.fault("shape, axes, order of ranks or options differ")
@pytest.mark.parametrize(
    ("theirs", "axes", "differ"),
    [
        ({"tp": 2, "dp": 2}, (), ["axes: ['dp', 'tp'] on ranks 0, 1, 2, ['tp', 'dp'] on rank 3"]),
        (
            {"dp": 1, "tp": 2, "ranks": [2, 3]},
            ("tp",),
            ["ranks: (0, 1, 2, 3) on rank 2, (2, 3) on rank 3", "shape: [2, 2] on rank 2, [1, 2] on rank 3"],
        ),
    ],
    ids=["axes", "ranks"],
)
@on_ranks(4)
def test_different_meshes_fail_at_first_use(theirs: dict[str, Any], axes: tuple[str, ...], differ: list[str]):
    """Rank 3 describes a mesh differently, and makes its group after the others."""
    good = ProcessGroupMesh(dp=2, tp=2, name="good")
    mesh = ProcessGroupMesh(**(theirs if good.rank == 3 else {"dp": 2, "tp": 2}), name="actor")
    members, mine, works = good.ranks(*axes), torch.ones(1), []
    for last in (False, True):
        if (good.rank == 3) is last:
            works.append(dist.all_reduce(mine, group=mesh.group(*axes), async_op=True))
        dist.barrier()
    if 3 in members:
        with at_once(), pytest.raises(MismatchError, match="'actor' is not the same on all ranks") as caught:
            works[0].wait()
        assert fields(caught) == differ
        assert mine == 1.0
    dist.barrier()
    summed(good)
    mesh.close()
    again = ProcessGroupMesh(dp=2, tp=2, name="actor")
    summed(again)


@on_ranks(4)
def test_different_options_fail_on_both_ranks():
    """Other groups work, and so does this one once the options are corrected."""
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    if mesh.index("tp") == 1:
        mesh.configure("tp", timeout=timedelta(seconds=50))
    with (
        at_once(),
        pytest.raises(MismatchError, match="group tp of mesh 'actor' is not the same on all ranks") as caught,
    ):
        dist.all_reduce(torch.ones(1), group=mesh.group("tp"))
    first, second = mesh.ranks("tp")
    assert sorted(re.findall(r"([\d.]+) on rank (\d)", fields(caught)[0])) == [
        ("50.0", f"{second}"),
        ("60.0", f"{first}"),
    ]
    summed(ProcessGroupMesh(dp=2, tp=2, name="good"))
    check_sums({"dp": (mesh.group("dp"), mesh.ranks("dp"))})
    dist.barrier()
    mesh.release("tp")
    mesh.configure("tp", timeout=20)
    summed(mesh)


# ---- nothing is left behind ----


def ours() -> int:
    """How many groups and meshes with groups this process keeps."""
    world = current_world()
    return sum(len(mesh.made()) for mesh in world.open_meshes()) + len(world.with_groups)


def tables_and_keys() -> dict[str, int]:
    """The sizes of torch's tables, and the number of keys but for the one that says that some members have left."""
    store = c10d._get_default_store()
    return {**table_sizes(), "keys": store.num_keys() - store.check([LEFT_KEY])}


def fail(*_: Any, **__: Any) -> None:
    raise ConnectionError("no such network")


FAILURES: dict[str, Any] = {
    "no backend": lambda: mock.patch.dict(building.CONSTRUCTORS, gloo=fail),
    "no registration": lambda: mock.patch.object(c10d, "_register_process_group", fail),
    "no store": lambda: mock.patch.object(dist, "PrefixStore", fail),
    "no name": lambda: mock.patch.object(dist.ProcessGroup, "_set_group_name", fail),
    "registered": lambda: mock.patch.object(Group, "make", fail),
}


@pytest.mark.fault("creating a group raises an error")
@pytest.mark.parametrize("failure", FAILURES)
@on_ranks(4)
def test_failed_group_creation_leaves_nothing_behind(failure: str):
    mesh = ProcessGroupMesh(dp=2, tp=2)
    mesh.group("dp")
    before = table_sizes(), ours()
    for _ in range(2):
        with FAILURES[failure](), pytest.raises(ConnectionError, match="no such network"):
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
        del mesh
        assert (table_sizes(), ours()) == before
    assert not growth(counts, tables_and_keys)


# ---- names, configuration ----


@on_ranks(4)
def test_equal_unnamed_meshes_work_one_after_another():
    """Each is gone when the next is created, closed or not."""
    for _ in range(3):
        with ProcessGroupMesh(dp=2, tp=2) as mesh:
            summed(mesh)
        ProcessGroupMesh(dp=2, tp=2)  # never used
    summed(ProcessGroupMesh(dp=2, tp=2))


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


@pytest.mark.fault("a mesh is pickled, copied or saved")
def test_unpickled_mesh_creates_groups_in_another_process():
    data = world(4).run(packed_parts)
    world(8).run(unpack_elsewhere, data[1])


def test_unpickled_mesh_outside_a_world_keeps_coords():
    data = world(4).run(packed_parts)
    mesh, stage, moe, block = pickle.loads(data[3])
    assert (mesh.shape, mesh.axes, mesh.rank, mesh.coord) == ((2, 2), ("pp", "tp"), 3, (1, 1))
    assert (stage.ranks(), moe.shape, block.mesh.label()) == ((2, 3), (4,), "pp1-tp1")
    asks: list[Callable[[], Any]] = [part.group for part in (mesh, stage, moe, block.mesh)]
    asks += [lambda: mesh.shrink("tp", lost_after=3), mesh.stand_by, lambda: mesh.abort_when_lost(lost_after=3)]
    for ask in asks:
        with pytest.raises(LifetimeError, match="mesh 'packed' was unpickled outside any world"):
            ask()
    assert pickle.loads(pickle.dumps(mesh)).coord == (1, 1)
    mesh.close()
