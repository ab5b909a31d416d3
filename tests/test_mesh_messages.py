"""Errors of a mesh whose suggested calls are run, and errors that torch raises when it is given a mesh."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

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


def test_configure_after_creation_suggests_calls(mesh):
    for tag, options in (("", {"timeout": timedelta(hours=1)}), ("own", {"backend": "gloo", "timeout": 5})):
        mesh.group("dp", tag=tag)
        with pytest.raises(pgmesh.OptionsError) as info:
            mesh.configure("dp", tag=tag, **options)
        release, configure = suggested(info.value)
        exec(release, {"mesh": mesh})
        exec(configure, {"mesh": mesh})
    assert configure == "mesh.configure('dp', tag='own', backend='gloo', timeout=5.0)"


@pytest.mark.parametrize("tag", [0, False, 1])
def test_tag_is_a_string(mesh, tag):
    for ask in (mesh.group, mesh.configure, mesh.connect, lambda tag: mesh.group_of([mesh.rank], tag=tag)):
        with pytest.raises(pgmesh.OptionsError, match=f"a tag is a string, such as tag='all-gather', not {tag!r}"):
            ask(tag=tag)


def test_later_options_for_equal_ranks_count(mesh):
    mesh = mesh.view(dp=8, cp=1)
    mesh.configure("dp", timeout=60, high_priority=False)
    mesh.configure("dp", "cp", timeout=120)
    mesh.group("dp")
    (made,) = mesh._mesh_groups.made()
    assert "timeout=datetime.timedelta(seconds=120), high_priority=False" in repr(made.options)


def test_taken_name_suggests_existing_mesh():
    group = ProcessGroupMesh(dp=8, name="actor").group()  # no variable holds the mesh, as after a cell of a notebook
    ProcessGroupMesh(tp=8).group()
    assert [*pgmesh.meshes()] == ["actor", "ProcessGroupMesh(tp=8)"]
    with pytest.raises(pgmesh.NameTakenError) as info:
        ProcessGroupMesh(tp=8, name="actor")
    use, close = suggested(info.value)
    same: dict[str, pgmesh.ProcessGroupMesh] = {}
    exec(use, {"pgmesh": pgmesh}, same)
    assert same["mesh"].group() is group
    exec(close, {"pgmesh": pgmesh})
    assert [*pgmesh.meshes()] == ["ProcessGroupMesh(tp=8)"]
    with pytest.raises(pgmesh.LifetimeError):
        same["mesh"].group()
    assert ProcessGroupMesh(tp=8, name="actor").group().size() == 8


@pytest.mark.parametrize("used", [0, 1])
def test_equal_unnamed_meshes_suggest_names(used):
    meshes = ProcessGroupMesh(dp=8), ProcessGroupMesh(dp=8)
    first, second = meshes[used], meshes[1 - used]
    first.group("dp")
    with pytest.raises(pgmesh.NameTakenError) as info:
        second.group("dp")
    close, name = suggested(info.value)
    assert close == "pgmesh.meshes()['ProcessGroupMesh(dp=8)'].close()"
    assert [*pgmesh.meshes()] == ["ProcessGroupMesh(dp=8)"]
    assert eval(name).group("dp").size() == 8
    exec(close, {"pgmesh": pgmesh})
    assert second.group("dp").size() == 8
    with pytest.raises(pgmesh.LifetimeError):
        first.group("dp")


def test_mesh_without_a_world_is_refused():
    dist.destroy_process_group()
    with pytest.raises(pgmesh.WorldError) as info:
        ProcessGroupMesh(dp=2)
    assert str(info.value) == (
        "torch.distributed is not initialised, so there are no ranks to arrange.\n\n"
        "  pgmesh.launch.join()                     # in a script that torchrun starts\n"
        "  pgmesh.Layout(dp=2, tp=2)                # to plan a mesh without processes"
    )


def test_group_without_axes_is_named_by_rank(mesh):
    part = mesh.at(pp=1, dp=0, tp=1)
    part.group()
    (held,) = part.held()
    assert held.label == "group of rank 5 of ProcessGroupMesh(pp=2, dp=2, tp=2)"


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
    for part, call in ((mesh["dp", "tp"], "mesh.group('dp', 'tp')"), (mesh, "mesh.group('pp', 'dp', 'tp')")):
        with pytest.raises(pgmesh.OptionsError) as info:
            use(part)
        assert str(info.value) == f"torch takes a process group here, not {part!r}.\n\n  {call}"
        assert eval(call, {"mesh": mesh}) is part.group()
