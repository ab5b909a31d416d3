"""A world of one process that takes itself for any rank of any size."""

from __future__ import annotations

import operator
from typing import Any

import torch.distributed as dist

from pgmesh.errors import PlaceError, WorldError


class FakeWorld:
    """What ``fake_world`` returns: in a ``with`` statement, the world ends with the block."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        dist.init_process_group("fake", rank=rank, world_size=size)
        self._world: Any = dist.group.WORLD

    def __enter__(self) -> FakeWorld:
        return self

    def __exit__(self, *_: object) -> None:
        if dist.is_initialized() and dist.group.WORLD is self._world:
            dist.destroy_process_group()


def fake_world(rank: int, size: int, /) -> FakeWorld:
    """A dry run: this process is one rank of a world of any size, alone, on torch's fake backend.

    It takes effect at once, and needs no launcher, no store and no other process. Meshes know every place; groups are
    made, and a collective returns at once and leaves its tensors as they are. In a ``with`` statement the world is
    destroyed with the block.

    Args:
        rank: which rank this process is.
        size: how many ranks the world has.

    Raises:
        PlaceError: no such rank in a world of this size.
        WorldError: torch.distributed is initialised already.

    >>> dist.destroy_process_group()                           # leave the world of the running mesh
    >>> with fake_world(5, 64):
    ...     mesh = ProcessGroupMesh(pp=4, dp=-1, tp=4)
    ...     mesh.label(), mesh.ranks("tp"), mesh.group("tp").size()
    ('pp0-dp1-tp1', (4, 5, 6, 7), 4)
    """
    try:
        rank, size = operator.index(rank), operator.index(size)
    except TypeError:
        raise PlaceError(
            f"fake_world takes two whole numbers, such as launch.fake_world(5, 64), not {rank!r} and {size!r}."
        ) from None
    call = f"fake_world({rank}, {size})"
    if size < 1:
        raise PlaceError(f"{call}: a world has 1 rank or more.\n\n  launch.fake_world(0, 1)")
    if not 0 <= rank < size:
        near = min(max(rank, 0), size - 1)
        raise PlaceError(
            f"{call}: the ranks of a world of {size} are 0 to {size - 1}.\n\n  launch.fake_world({near}, {size})"
        )
    if dist.is_initialized():
        raise WorldError(
            f"{call}: this process is rank {dist.get_rank()} of a world of {dist.get_world_size()} already.\n\n"
            f"  torch.distributed.destroy_process_group()   # leave that world first"
        )
    return FakeWorld(rank, size)
