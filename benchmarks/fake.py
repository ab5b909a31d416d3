"""One rank of a world of any size, in one process, on torch's fake backend, which sends nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def world(ranks: int) -> Iterator[None]:
    """A world with ``ranks`` ranks, in which this process is one in the middle."""
    if dist.is_initialized():
        dist.destroy_process_group()
    hook = sys.excepthook  # torch wraps it again in every world
    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2 + 1, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
