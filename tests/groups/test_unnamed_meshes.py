"""Unnamed meshes: their axes, shape and ranks identify them, not the order in which they were made."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from tests.support.worlds import check_sums, groups_of, on_ranks


@on_ranks(4)
def test_unnamed_meshes_are_made_in_any_order():
    """And used in another one. Each mesh has groups of its own, also those on the same ranks."""
    calls: list[Callable[[], ProcessGroupMesh]] = [
        lambda: ProcessGroupMesh(dp=2, tp=2, name="actor"),
        lambda: ProcessGroupMesh(dp=2, tp=2, name="critic"),
        lambda: ProcessGroupMesh(dp=2, tp=2),
        lambda: ProcessGroupMesh(tp=2, dp=2),
        lambda: ProcessGroupMesh(a=2, b=2),
        lambda: ProcessGroupMesh(dp=2, tp=2, ranks=[3, 1, 2, 0]),
        lambda: ProcessGroupMesh(4),
    ]
    mine = random.Random(dist.get_rank())
    meshes = {number: calls[number]() for number in mine.sample(range(len(calls)), len(calls))}
    groups = {
        name: group
        for number in mine.sample([*meshes], len(calls))
        for name, group in groups_of(meshes[number]).items()
    }
    assert len({group for group, _ in groups.values()}) == 6 * 3 + 1
    check_sums(groups)
    meshes[0].close()
    check_sums({name: group for name, group in groups.items() if "actor" not in name})


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
