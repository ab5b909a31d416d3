"""Unnamed meshes: their axes, shape and ranks identify them, not the order in which they were made."""

from __future__ import annotations

import gc

import pytest
import torch.distributed as dist

from pgmesh import NameTakenError, ProcessGroupMesh
from tests.support.worlds import check_sums, groups_of, on_ranks


def shapes() -> list[ProcessGroupMesh]:
    """Unnamed meshes with different axes, shapes or ranks. Each rank makes them in another order."""
    calls = [
        lambda: ProcessGroupMesh(dp=2, tp=2),
        lambda: ProcessGroupMesh(dp=4),
        lambda: ProcessGroupMesh(tp=2, dp=2),
        lambda: ProcessGroupMesh(dp=2, tp=2, ranks=[3, 1, 2, 0]),
        lambda: ProcessGroupMesh(2, 2),
    ]
    turn = dist.get_rank() % len(calls)
    made = {number: calls[number]() for number in [*range(turn, len(calls)), *range(turn)]}
    return [made[number] for number in range(len(calls))]


@on_ranks(4)
def test_unnamed_meshes_are_made_in_any_order():
    """And used in any order."""
    meshes = shapes()
    turn = dist.get_rank()
    for mesh in [*meshes[turn:], *meshes[:turn]]:
        mesh.group(*mesh.axes)
    check_sums({f"{number}": (mesh.group(), mesh.ranks()) for number, mesh in enumerate(meshes)})


@pytest.mark.parametrize("name", [None, "actor"])
@on_ranks(2)
def test_mesh_in_reference_cycle_takes_no_name(name: str | None):
    """On rank 0 a mesh that never had a group is kept by a cycle. On rank 1 it is gone."""
    gc.disable()
    try:
        cycle = [ProcessGroupMesh(dp=2, name=name)]
        cycle.append(cycle)
        del cycle
        if dist.get_rank() == 1:
            gc.collect()
        mesh = ProcessGroupMesh(dp=2, name=name)
        check_sums(groups_of(mesh))
        later = ProcessGroupMesh(dp=2, name="later")
        check_sums(groups_of(later))
    finally:
        gc.enable()


@on_ranks(2)
def test_mesh_without_groups_takes_no_name():
    """Also one that the program still refers to."""
    unused = ProcessGroupMesh(dp=2)
    used = ProcessGroupMesh(dp=2)
    check_sums(groups_of(used))
    with pytest.raises(NameTakenError):
        unused.group("dp")
