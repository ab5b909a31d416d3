"""One process that takes itself for any rank of a world of any size, over torch's fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from pgmesh.launch import fake_world


@contextmanager
def fake_rank(rank: int, size: int, store: dist.Store | None = None) -> Iterator[None]:
    """This process is rank ``rank`` of ``size``, in which no collective moves anything."""
    fake_world(rank, size)
    try:
        if store is not None:
            dist.destroy_process_group()  # torch knows the backend from here on
            dist.init_process_group("fake", rank=rank, world_size=size, store=store)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
