"""Regressions on real groups: mistakes that no other test detected."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pgmesh import LifetimeError, MismatchError, ProcessGroupMesh
from tests.support.worlds import check_sums, world

# ---- release ----


def release_and_ask_again() -> None:
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    asked = {"plain": {}, "tagged": {"tag": "gather"}, "other options": {"timeout": timedelta(seconds=50)}}
    kept = mesh.group("dp", tag="gather")
    before = {what: mesh.group("tp", **how) for what, how in asked.items()}
    check_sums({what: (group, mesh.ranks("tp")) for what, group in before.items()})
    dist.barrier()
    mesh.release("tp")
    released = r"^group tp.* of mesh 'actor' was released at test_regressions.py:\d+;"
    for group in before.values():
        with pytest.raises(LifetimeError, match=released):
            dist.all_reduce(torch.ones(1), group=group)
    after = {what: mesh.group("tp", **how) for what, how in asked.items()}
    assert not {*before.values()} & {*after.values()}
    assert not {each.group_name for each in before.values()} & {each.group_name for each in after.values()}
    assert mesh.group("dp", tag="gather") is kept
    check_sums({what: (group, mesh.ranks("tp")) for what, group in after.items()})


def test_release_ends_groups_of_every_tag_and_option():
    world(4).run(release_and_ask_again)


# ---- a first collective ----


def sum_on_different_meshes() -> tuple[str, float]:
    """The error on ranks with different shapes of the same ranks, and the tensor after the failed sum."""
    mesh = ProcessGroupMesh(**({"dp": 2, "tp": 1} if dist.get_rank() == 0 else {"dp": 1, "tp": 2}), name="actor")
    mine = torch.ones(1)
    with pytest.raises(MismatchError) as caught:
        dist.all_reduce(mine, group=mesh.group())
    return str(caught.value), mine.item()


def test_first_collective_of_different_meshes_sums_nothing():
    for text, mine in world(2).run(sum_on_different_meshes):
        assert text.startswith("mesh 'actor' is not the same on all ranks:")
        assert "shape: [2, 1] on rank 0, [1, 2] on rank 1" in text
        assert mine == 1.0
