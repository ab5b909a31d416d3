"""Worlds one after another in the same processes: what a world that ended leaves behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from pgmesh import LifetimeError, ProcessGroupMesh
from pgmesh.launch import StoreProcess
from tests.support.faults import LONG_TIMEOUT, wait_until
from tests.support.resource_counts import CAN_COUNT, count_resources, growth
from tests.support.worlds import check_sums, fresh_world, groups_of

DEADLINE = timedelta(seconds=30)


def wait_for_both(store: dist.Store, key: str) -> None:
    """Wait until two ranks have called this, outside any world."""
    store.add(key, 1)
    wait_until(lambda: store.add(key, 0) == 2, f"the other rank comes to {key}")


@contextmanager
def left_for_others() -> Iterator[int]:
    """This rank leaves the tests' world for worlds of its own, and returns to one at the end, as the tests need."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # else torch's own world would find its old addresses on a used store
    try:
        yield rank
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def live_in(worlds: int, port: int) -> list[dict[str, int]]:
    """Live in so many worlds, closing the mesh in every other one; what each leaves behind."""
    left, kept, early = [], [], dict[str, int]()
    with left_for_others() as rank:
        tcp = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=DEADLINE)
        for number in range(worlds):
            store = dist.PrefixStore(f"world {number}", tcp)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=DEADLINE)
            mesh = ProcessGroupMesh(dp=2, tp=1, name="actor")
            mesh.connect(timeout=LONG_TIMEOUT)
            check_sums(groups_of(mesh))
            group = mesh.group("dp")
            dist.barrier()
            if number % 2:
                mesh.close()
            dist.destroy_process_group()
            with pytest.raises(LifetimeError, match="closed" if number % 2 else "ended when torch.distributed"):
                mesh.group("dp")
            mesh.close()
            kept.append(mesh)  # a mesh that outlives its world holds no connection
            del group
            wait_for_both(tcp, f"left {number}")
            gc.collect()
            left.append(growth([early]))
            if number == 1:
                early = count_resources()
            wait_for_both(tcp, f"counted {number}")
    return left


@pytest.mark.skipif(not CAN_COUNT, reason="needs /proc")
def test_ended_world_leaves_nothing_behind():
    with StoreProcess() as server, fresh_world(2) as own:
        assert own.run(live_in, 12, server.port) == [[{}] * 12] * 2
