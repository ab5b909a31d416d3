"""Errors of a mesh whose suggested calls are run, and errors that torch raises when it is given a mesh."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import pgmesh
from pgmesh import ProcessGroupMesh
from tests.support.fake_world import fake_rank


@pytest.fixture(autouse=True)
def world():
    with fake_rank(5, 8):
        yield


@pytest.fixture
def mesh(world):
    return ProcessGroupMesh(pp=2, dp=2, tp=2)


def suggested(error: Exception) -> list[str]:
    """The calls in a message, without their comments."""
    return [line.partition("   # ")[0].strip() for line in str(error).splitlines()[2:]]


@pytest.mark.parametrize("verb", ["group", "along", "index", "size", "ranks", "partition", "neighbor", "device_mesh"])
@pytest.mark.parametrize("several", [["dp", "tp"], ("dp", "tp")], ids=["list", "tuple"])
def test_axes_in_a_list_suggest_separate_arguments(mesh, verb, several):
    kind, words = type(several).__name__, "'dp', 'tp'"
    with pytest.raises(pgmesh.AxisError) as info:
        getattr(mesh, verb)(several)
    assert str(info.value) == f"axes are separate arguments, such as {words}, and not one {kind} {several!r}."
    eval("mesh.neighbor('dp')" if verb == "neighbor" else f"mesh.{verb}({words})", {"mesh": mesh})


def test_configure_after_creation_suggests_calls(mesh):
    mesh.group("dp")
    with pytest.raises(pgmesh.OptionsError) as info:
        mesh.configure("dp", timeout=timedelta(hours=1))
    (release,) = suggested(info.value)
    exec(release, {"mesh": mesh})
    mesh.group("dp", tag="own")
    with pytest.raises(pgmesh.OptionsError) as info:
        mesh.configure("dp", tag="own", backend="gloo", timeout=5)
    (release,) = suggested(info.value)
    assert release.endswith("; mesh.configure('dp', tag='own', backend='gloo', timeout=5.0)")
    exec(release, {"mesh": mesh})


def test_later_options_for_equal_ranks_count(mesh):
    mesh = mesh.view(dp=8, cp=1)
    mesh.configure("dp", timeout=60, high_priority=False)
    mesh.configure("dp", "cp", timeout=120)
    (held,) = [mesh.group("dp"), mesh.held()][1]
    assert "timeout=datetime.timedelta(seconds=120), high_priority=False" in held.options


def test_taken_name_suggests_existing_mesh():
    mesh = ProcessGroupMesh(dp=8, name="actor")
    mesh.group()
    with pytest.raises(pgmesh.NameTakenError) as info:
        ProcessGroupMesh(tp=8, name="actor")
    use, close = suggested(info.value)
    same: dict[str, pgmesh.ProcessGroupMesh] = {}
    exec(use, {"pgmesh": pgmesh}, same)
    assert same["mesh"].group() is mesh.group()
    exec(close, {"pgmesh": pgmesh})
    with pytest.raises(pgmesh.LifetimeError):
        mesh.group()
    assert ProcessGroupMesh(tp=8, name="actor").group().size() == 8


@pytest.mark.parametrize(("used", "key"), [(0, "ProcessGroupMesh(dp=8)"), (1, "ProcessGroupMesh(dp=8) (2)")])
def test_equal_unnamed_meshes_suggest_names(used, key):
    meshes = ProcessGroupMesh(dp=8), ProcessGroupMesh(dp=8)
    first, second = meshes[used], meshes[1 - used]
    first.group("dp")
    with pytest.raises(pgmesh.NameTakenError) as info:
        second.group("dp")
    close, name = str(info.value).splitlines()[2:]
    assert close == f"  pgmesh.meshes()[{key!r}].close()   # close the other, if it is no longer used"
    assert [*pgmesh.meshes()] == ["ProcessGroupMesh(dp=8)", "ProcessGroupMesh(dp=8) (2)"]
    assert name == "  ProcessGroupMesh(dp=8, name='actor')   # or name this one"
    assert eval(name).group("dp").size() == 8
    exec(close.strip(), {"pgmesh": pgmesh})
    assert second.group("dp").size() == 8
    with pytest.raises(pgmesh.LifetimeError):
        first.group("dp")


def test_notebook_cell_finds_and_closes_its_mesh():
    """A mesh that no variable holds any more is found by its name, and closed."""
    ProcessGroupMesh(dp=8, name="actor").group("dp")
    ProcessGroupMesh(tp=8).group("tp")
    assert [*pgmesh.meshes()] == ["actor", "ProcessGroupMesh(tp=8)"]
    for mesh in pgmesh.meshes().values():
        assert mesh.group().size() == 8
        mesh.close()
    assert pgmesh.meshes() == {}
    assert ProcessGroupMesh(dp=8, name="actor").group("dp").size() == 8


def test_mesh_without_a_world_is_refused():
    dist.destroy_process_group()
    try:
        with pytest.raises(pgmesh.WorldError) as info:
            ProcessGroupMesh(dp=2)
        assert str(info.value) == (
            "torch.distributed is not initialised, so there are no ranks to arrange.\n\n"
            "  pgmesh.launch.join()                     # in a script that torchrun starts\n"
            "  pgmesh.Layout(dp=2, tp=2)                # to plan a mesh without processes"
        )
    finally:
        dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())


def test_group_without_axes_is_named_by_rank(mesh):
    part = mesh.at(pp=1, dp=0, tp=1)
    part.group()
    (held,) = part.held()
    assert str(held).startswith("group of rank 5 of ProcessGroupMesh(pp=2, dp=2, tp=2): ranks 5; created at ")


# ---- a mesh in the place of torch's objects ----


FOR_DEVICE_MESHES = {
    "fully_shard": lambda mesh: fully_shard(torch.nn.Linear(8, 8), mesh=mesh),
    "DDP": lambda mesh: DistributedDataParallel(torch.nn.Linear(8, 8), device_mesh=mesh),
    "parallelize_module": lambda mesh: parallelize_module(torch.nn.Linear(8, 8), mesh, ColwiseParallel()),
    "from_local": lambda mesh: DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False),
    "distribute_tensor": lambda mesh: distribute_tensor(torch.ones(4), mesh, [Shard(0)]),
}


@pytest.mark.parametrize("use", FOR_DEVICE_MESHES.values(), ids=FOR_DEVICE_MESHES)
def test_torch_given_a_slice_shows_its_device_mesh(mesh, use):
    for part, call in (
        (mesh["tp"], "mesh.device_mesh('tp')"),
        (mesh.at(pp=1)["dp"], "mesh.at(pp=1).device_mesh('dp')"),
        (mesh.view(pp=2, edp=1, ep=4)["ep"], "mesh.view(pp=2, edp=1, ep=4).device_mesh('ep')"),
    ):
        with pytest.raises(AttributeError) as info:
            use(part)
        assert str(info.value) == f"torch takes a DeviceMesh here, not {part!r}.\n\n  {call}"
        meant = eval(call, {"mesh": mesh})
        assert isinstance(meant, DeviceMesh)
        assert meant.get_group() is part.group()
        use(meant)


def test_torch_given_a_mesh_shows_device_meshes(mesh):
    with pytest.raises(AttributeError) as info:
        fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
    assert str(info.value) == (
        "torch takes a DeviceMesh here, not ProcessGroupMesh(pp=2, dp=2, tp=2).\n\n"
        "  mesh.device_mesh('dp')               # along one axis: name the one that you mean\n"
        "  mesh.device_mesh('pp', 'dp', 'tp')   # a dimension for each axis; fully_shard takes one or two"
    )
    along_one, whole = (eval(call, {"mesh": mesh}) for call in suggested(info.value))
    fully_shard(torch.nn.Linear(8, 8), mesh=along_one)
    distribute_tensor(torch.ones(4), whole, [Shard(0), Replicate(), Replicate()])
    long = mesh.view(dp=2, cp=2, tp=2)
    with pytest.raises(AttributeError) as info:
        fully_shard(torch.nn.Linear(8, 8), mesh=long)
    assert suggested(info.value)[1] == "mesh.view(dp=2, cp=2, tp=2).device_mesh(fsdp=('dp', 'cp'))"  # not with tp or pp
    fully_shard(torch.nn.Linear(8, 8), mesh=eval(suggested(info.value)[1], {"mesh": mesh}))
    numbered = ProcessGroupMesh(8, name="numbered")
    with pytest.raises(AttributeError) as info:
        distribute_tensor(torch.ones(8), numbered, [Shard(0)])
    assert suggested(info.value) == ["mesh.device_mesh(0)"]


FOR_GROUPS = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(4), group=group),
    "all_gather_object": lambda group: dist.all_gather_object([None] * group.size(), 1, group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "get_rank": lambda group: dist.get_rank(group),
    "get_world_size": lambda group: dist.get_world_size(group),
    "get_backend": lambda group: dist.get_backend(group),
}


@pytest.mark.parametrize("use", FOR_GROUPS.values(), ids=FOR_GROUPS)
def test_torch_given_a_mesh_shows_its_group(mesh, use):
    for part, call in (
        (mesh["tp"], "mesh.group('tp')"),
        (mesh["dp", "tp"], "mesh.group('dp', 'tp')"),
        (mesh, "mesh.group('pp', 'dp', 'tp')"),
        (mesh.view(pp=2, edp=1, ep=4)["ep"], "mesh.view(pp=2, edp=1, ep=4).group('ep')"),
    ):
        with pytest.raises(pgmesh.OptionsError) as info:
            use(part)
        assert str(info.value) == f"torch takes a process group here, not {part!r}.\n\n  {call}"
        meant = eval(call, {"mesh": mesh})
        assert meant is part.group()
        use(meant)


# ---- calls of DeviceMesh ----
