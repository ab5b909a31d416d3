"""One process that takes itself for any rank of a world of any size, over torch's fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def dry_world(rank: int, size: int, store: dist.Store | None = None) -> Iterator[None]:
    """This process is rank ``rank`` of ``size``, in which no collective moves anything."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=store or FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
