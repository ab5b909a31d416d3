"""Hazards of torch's own groups and worlds that pgmesh avoids."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import LifetimeError, ProcessGroupMesh
from pgmesh.launch import StoreProcess
from tests.support.faults import CHAOS, LONG_TIMEOUT, beat_fast_with_bystander, wait_until
from tests.support.releases import check_cycles
from tests.support.resource_counts import CAN_COUNT, count_resources, growth
from tests.support.torch_tables import count_new_groups, is_connecting
from tests.support.worlds import check_sums, fresh_world, groups_of, on_ranks

DEADLINE = timedelta(seconds=30)


@on_ranks(4)
def test_close_after_own_part_loses_no_message():
    """What was sent still arrives on members that are slower. In each round another rank is slow."""
    chance, rank = random.Random(5), dist.get_rank()
    for number in range(16):
        delay = chance.choice([0.0, 0.001, 0.004, 0.01])
        mesh = ProcessGroupMesh(4, name="actor")
        value = torch.full((100_000,), float(rank))
        if number % 2:
            dist.barrier(group=mesh.group())
        if rank == number // 2 % 4:
            time.sleep(delay)  # the chance that the test takes
        dist.broadcast(value, 1, group=mesh.group())
        assert (value == 1).all()
        mesh.close()


@pytest.mark.skipif(not CAN_COUNT, reason="counts in /proc")
def test_releasing_often_leaves_nothing_behind():
    check_cycles(500 if CHAOS else 40, connects=CHAOS)


@pytest.mark.skipif(not CAN_COUNT, reason="counts in /proc")
@on_ranks(4, "fast")
def test_close_frees_groups_without_the_garbage_collector():
    bystander = beat_fast_with_bystander()
    wait_until(lambda: not is_connecting(bystander.group()), "all connections of the bystander")
    dist.barrier()  # the other ranks have started their part of them
    seen: list[dict[str, int]] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
            mesh.connect()
            check_sums({"all": (mesh.group(), mesh.ranks())})
            mesh.release("dp")
            dist.barrier()
            mesh.close()
            del mesh
            dist.barrier()
            seen.append(count_resources())
        assert growth(seen[1:-1]) == {}
    finally:
        gc.enable()


def ask_at_once(mesh: ProcessGroupMesh, tag: str) -> None:
    ready = threading.Barrier(8)

    def ask(_: int) -> Any:
        ready.wait(10)
        return mesh.group("tp", tag=tag)

    with ThreadPoolExecutor(8) as pool:
        (asked,) = {*pool.map(ask, range(8))}
    check_sums({tag: (asked, mesh.ranks("tp"))})


@on_ranks(4)
def test_threads_get_the_same_group():
    mesh = ProcessGroupMesh(dp=2, tp=2)
    for tag in ("", *map(str, range(10))):
        assert count_new_groups(lambda tag=tag: ask_at_once(mesh, tag)) == 1
    check_sums(groups_of(mesh))


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
