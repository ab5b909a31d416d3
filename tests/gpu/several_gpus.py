"""NCCL between ranks with a GPU each: groups in random orders, connect, a killed member, an aborted group.

**Never run**: no machine with two GPUs was available. Skipped with fewer.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from pgmesh import MissingRanksError, PgmeshError, ProcessGroupMesh
from tests.gpu.device import ALONE, COLLECTIVES, DEVICE, DeviceWorld, is_right, number, prepared, run

COUNT = min(4, torch.cuda.device_count()) // 2 * 2 if DEVICE.type == "cuda" else 0
pytestmark = pytest.mark.skipif(COUNT < 2, reason="there are no two GPUs for NCCL")


def on_own_gpu() -> None:
    torch.cuda.set_device(dist.get_rank())


def in_random_orders(seed: int) -> None:
    """Each rank creates its groups in an order of its own. All use them in one order, as NCCL asks."""
    on_own_gpu()
    with ProcessGroupMesh(dp=COUNT // 2, tp=2, name=f"random {seed}") as mesh:
        axes = [axes for n in range(3) for axes in combinations(mesh.axes, n)]
        for each in random.Random(f"{seed} {mesh.rank}").sample(axes, len(axes)):
            mesh.group(*each)
        for each in random.Random(seed).sample(axes, len(axes)):
            for name in COLLECTIVES:
                is_right(name, mesh.group(*each))


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_created_in_random_orders(seed: int):
    run(COUNT, ALONE, in_random_orders, seed)


def connected() -> None:
    on_own_gpu()
    with ProcessGroupMesh(dp=COUNT // 2, tp=2, name="connected") as mesh:
        mesh.connect(timeout=60)
        for axes in (("dp",), ("tp",), ("dp", "tp")):
            is_right("all_reduce", mesh.group(*axes))


def test_connect_warms_every_group():
    run(COUNT, ALONE, connected)


def one_is_killed() -> str:
    on_own_gpu()
    mesh = ProcessGroupMesh(dp=COUNT, name="killed")
    mesh.connect(timeout=60)
    if mesh.rank == COUNT - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.release()
    with pytest.raises(MissingRanksError) as caught:
        mesh.connect(timeout=20)
    mesh.close()
    return str(caught.value)


def test_a_killed_member_is_named():
    world = DeviceWorld(COUNT, ALONE)
    try:
        *others, killed = world.outcomes(prepared, one_is_killed, deadline=120)
    finally:
        world.close()
    assert killed.exitcode == -signal.SIGKILL
    for each in others:
        assert f"rank {COUNT - 1}" in each.result, each.error


def aborted_while_it_blocks() -> float:
    """The last rank stays away from a collective, and the others abort the group while the GPU waits for it."""
    on_own_gpu()
    mesh = ProcessGroupMesh(dp=COUNT, name="blocked")
    mesh.connect(timeout=60)
    if mesh.rank == COUNT - 1:
        mesh.close()
        return 0.0
    group = mesh.group()
    aborter = threading.Timer(3.0, group.abort)
    aborter.start()
    start = time.monotonic()
    try:
        dist.all_reduce(number(1), group=group)
        torch.cuda.synchronize()
    except (PgmeshError, RuntimeError):
        pass  # the collective was aborted before, or while the host waited
    aborter.join()
    mesh.close()
    return time.monotonic() - start


def test_aborting_a_group_ends_its_collectives():
    world = DeviceWorld(COUNT, ALONE)
    try:
        outcomes = world.outcomes(prepared, aborted_while_it_blocks, deadline=120)
    finally:
        world.close()
    for each in outcomes:
        assert not each.error, each.details
        assert each.result < 30  # the timeout of the group is 60 s
