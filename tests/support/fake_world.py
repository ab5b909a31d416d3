"""A fake world: one process acts as any rank of a world of any size, over torch's fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from pgmesh.launch import fake_world


@contextmanager
def fake_rank(rank: int, size: int, store: dist.Store | None = None) -> Iterator[None]:
    """Make this process rank ``rank`` of a fake world of ``size`` ranks. Collectives move no data."""
    fake_world(rank, size)
    try:
        if store is not None:
            dist.destroy_process_group()  # the backend stays registered with torch
            dist.init_process_group("fake", rank=rank, world_size=size, store=store)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
