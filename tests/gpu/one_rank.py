"""A world of one rank on NCCL: groups, timeouts, NCCL's settings, device meshes, each parallel method at size 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import LifetimeError, ProcessGroupMesh
from tests.gpu.device import ALONE, COLLECTIVES, DEVICE, SHARED, is_right, number, on_device, placed, run
from tests.gpu.methods import CASES, check, check_checkpoint
from tests.support.worlds import axis_combinations, close_worlds

MIXED = f"cpu:gloo,{DEVICE.type}:{ALONE}" if DEVICE.type == "cuda" else SHARED
AXES = {"pp": 1, "dp": 1, "tp": 1}
needs_nccl = pytest.mark.skipif(ALONE != "nccl", reason="the CPU in place of a GPU has no NCCL")


@pytest.fixture(scope="module", autouse=True)
def no_longer_than_here():
    yield
    close_worlds((1, ALONE), (1, MIXED))


def options_of(group: Any) -> Any:
    return group._get_backend(DEVICE).options


# ---- groups ----


def every_collective() -> None:
    with ProcessGroupMesh(**AXES, name="groups") as mesh:
        for axes in axis_combinations(mesh):
            group = mesh.group(*axes)
            assert dist.get_backend(group) == dist.get_backend(), dist.get_backend(group)
            assert dist.get_process_group_ranks(group) == [0]
            for name in COLLECTIVES:
                is_right(name, group)
        assert mesh.group("dp", "tp") is mesh.group("tp", "dp")
        mesh.connect()
        assert "groups" in str(mesh.report())


@pytest.mark.parametrize("backend", [ALONE, MIXED])
def test_collectives_of_groups_that_members_make_are_right(backend: str):
    run(1, backend, every_collective)


@on_device(1, MIXED)
def test_a_group_of_two_backends_serves_both_devices():
    with ProcessGroupMesh(**AXES, name="both") as mesh:
        group, here, there = mesh.group(), number(3), torch.full((1,), 3.0)
        dist.all_reduce(here, group=group)
        dist.all_reduce(there, group=group)
        placed("a sum", [here])
        assert (here.item(), there.item(), there.device.type) == (3.0, 3.0, "cpu")
        assert mesh.device_mesh("dp").device_type == DEVICE.type


@on_device(1, ALONE)
def test_gloo_group_shares_ranks_with_nccl_group():
    """Methods compare numbers of rows over a Gloo group with the same ranks as a group on NCCL."""
    with ProcessGroupMesh(**AXES, name="twin") as mesh:
        group, mine = mesh.group("dp", backend="gloo"), torch.full((1,), 3.0)
        dist.all_reduce(mine, group=group)
        assert (mine.item(), dist.get_backend(group)) == (3.0, "gloo")
        is_right("all_reduce", mesh.group("dp"))


@on_device(1, ALONE)
def test_a_group_that_is_gone_says_so():
    mesh = ProcessGroupMesh(**AXES, name="gone")
    released = mesh.group("tp")  # the group along each axis: they have the same ranks here
    is_right("all_reduce", released)
    mesh.release("tp")
    closed = mesh.group("tp")
    assert closed is not released
    is_right("all_reduce", closed)
    mesh.close()
    for group, end in ((released, "released"), (closed, "closed")):
        for use in (lambda g: dist.all_reduce(number(1), group=g), lambda g: dist.broadcast(number(1), 0, group=g)):
            with pytest.raises(LifetimeError, match=f"of mesh 'gone' was {end} at one_rank.py"):
                use(group)


@on_device(1, ALONE)
def test_groups_can_be_created_and_destroyed_repeatedly():
    for i in range(20):
        with ProcessGroupMesh(**AXES, name="again") as mesh:
            dist.all_reduce(held := number(i), group=mesh.group("dp"))
            assert held.item() == i


def bound() -> None:
    """A world that is bound to its device creates its communicator eagerly, and torch splits groups from it."""
    dist.destroy_process_group()
    device = torch.device(DEVICE.type, 0)
    dist.init_process_group(ALONE, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    with ProcessGroupMesh(**AXES, name="bound") as mesh:
        for name in COLLECTIVES:
            is_right(name, mesh.group("dp", "tp"))
        assert mesh.device_mesh("dp", "tp").device_type == DEVICE.type


@needs_nccl
def test_groups_work_in_a_world_with_device():
    run(1, ALONE, bound)
    close_worlds((1, ALONE))  # the world was replaced


# ---- timeouts and NCCL's settings ----


@on_device(1, ALONE)
def test_timeouts_are_those_that_were_configured_or_set():
    with ProcessGroupMesh(**AXES, name="timeouts") as mesh:
        mesh.configure("dp", "tp", timeout=50)
        short, usual = mesh.group("dp", "tp", tag="short", timeout=10), mesh.group("pp", "dp", "tp", tag="u")
        groups = mesh.group("dp", "tp"), short, usual
        assert [options_of(group)._timeout.total_seconds() for group in groups] == [50, 10, 60]  # the world's is 60
        mesh.set_timeout(timeout=20)
        assert [options_of(group)._timeout.total_seconds() for group in groups] == [20] * 3
        for group in groups:
            is_right("all_reduce", group)


@needs_nccl
@on_device(1, ALONE)
def test_settings_reach_nccl():
    with ProcessGroupMesh(**AXES, name="settings") as mesh:
        mesh.configure("dp", nccl={"max_ctas": 4, "min_ctas": 1, "cga_cluster_size": 2}, high_priority=True)
        found = options_of(group := mesh.group("dp"))
        assert (found.config.max_ctas, found.config.min_ctas, found.config.cga_cluster_size) == (4, 1, 2)
        assert found.is_high_priority_stream is True
        is_right("all_reduce", group)
        other = options_of(mesh.group("pp", tag="other"))
        assert other.config.max_ctas != 4, "a setting came to another group"
        assert other.is_high_priority_stream is False


# ---- methods ----


@pytest.mark.parametrize("name", CASES)
def test_a_method_at_size_1_is_one_process(name: str):
    run(1, ALONE, check, name, True)


def test_a_checkpoint_is_saved_and_loaded(tmp_path):
    pytest.importorskip("numpy", reason="torch sends objects through numpy")
    run(1, ALONE, check_checkpoint, str(tmp_path), True)
