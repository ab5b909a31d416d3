"""A world in which one process acts as any rank of any number of ranks, on the fake backend of torch."""

from __future__ import annotations

import operator

import torch.distributed as dist

from pgmesh.errors import RankError, WorldError
from pgmesh.launch.joining import World


def fake_world(rank: int, size: int, /) -> World:
    """Initialize a world of any size in this process alone, on the fake backend of torch.

    It needs no launcher, no store and no other process. Meshes and groups work as usual. A collective returns
    immediately and does not change its tensors. In a ``with`` statement, the world is destroyed at the end of the
    block; the call by itself initializes it until the process ends.

    Args:
        rank: the rank of this process.
        size: number of ranks of the world.

    Raises:
        RankError: a world of this size does not have the rank.
        WorldError: torch.distributed is already initialized.

    >>> dist.destroy_process_group()                           # leave the world of the running mesh
    >>> with fake_world(5, 64):
    ...     mesh = ProcessGroupMesh(pp=4, dp=-1, tp=4)
    ...     mesh.label(), mesh.ranks("tp"), mesh.group("tp").size()
    ('pp0-dp1-tp1', (4, 5, 6, 7), 4)
    """
    rank, size = operator.index(rank), operator.index(size)
    if not 0 <= rank < size:
        near = min(max(rank, 0), max(size, 1) - 1)
        raise RankError(
            f"a world of {size} has no rank {rank}; ranks count from 0.\n\n  launch.fake_world({near}, {max(size, 1)})"
        )
    if dist.is_initialized():
        raise WorldError(
            f"fake_world({rank}, {size}): this process is rank {dist.get_rank()} of a world of {dist.get_world_size()} "
            "already.\n\n  torch.distributed.destroy_process_group()   # leave that world first"
        )
    dist.init_process_group("fake", rank=rank, world_size=size)
    return World(own=True)
