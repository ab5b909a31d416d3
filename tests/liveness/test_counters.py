"""How many operations this process has entered in each group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.liveness.counters import GroupCounter, own_counters, pack_counters, unpack_counters
from tests.support.worlds import on_ranks


def test_packed_counters_are_read_unchanged():
    counters = (GroupCounter("train.0/dp", "group dp of mesh 'train'", [0, 1], 17),)
    assert unpack_counters(pack_counters(counters).encode()) == counters


@pytest.mark.parametrize("text", [None, b"", b"nonsense", b'{"v": 5}'])
def test_foreign_value_has_no_counters(text: bytes | None):
    assert unpack_counters(text) == ()


@on_ranks(2)
def test_operations_are_counted_in_each_group():
    mesh = ProcessGroupMesh(dp=2, name="train")
    before = {each.name: each for each in own_counters()}
    assert mesh.group("dp").group_name not in before
    first = counted(mesh)
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=mesh.group("dp"))
    last = counted(mesh)
    assert last.operations - first.operations in (3, 4)  # the connections may be started meanwhile
    assert (last.label, [*last.ranks]) == ("group dp of mesh 'train'", [0, 1])


def counted(mesh: ProcessGroupMesh) -> GroupCounter:
    name = mesh.group("dp").group_name
    return next(each for each in own_counters() if each.name == name)
