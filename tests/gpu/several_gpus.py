"""NCCL between ranks with a GPU each: groups in random orders, and connect.

**Never run**: no machine with two GPUs was available. Skipped with fewer.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from tests.gpu.device import ALONE, COLLECTIVES, DEVICE, is_right, on_device
from tests.support.worlds import axis_combinations

COUNT = min(4, torch.cuda.device_count()) // 2 * 2 if DEVICE.type == "cuda" else 0
pytestmark = pytest.mark.skipif(COUNT < 2, reason="there are no two GPUs for NCCL")


def on_own_gpu() -> None:
    torch.cuda.set_device(dist.get_rank())


@pytest.mark.parametrize("seed", range(4))
@on_device(COUNT, ALONE)
def test_groups_are_created_in_random_orders(seed: int):
    """Each rank creates its groups in an order of its own. All use them in one order, as NCCL asks."""
    on_own_gpu()
    with ProcessGroupMesh(dp=COUNT // 2, tp=2, name=f"random {seed}") as mesh:
        axes = axis_combinations(mesh)
        for each in random.Random(f"{seed} {mesh.rank}").sample(axes, len(axes)):
            mesh.group(*each)
        for each in random.Random(seed).sample(axes, len(axes)):
            for name in COLLECTIVES:
                is_right(name, mesh.group(*each))


@on_device(COUNT, ALONE)
def test_connect_warms_every_group():
    on_own_gpu()
    with ProcessGroupMesh(dp=COUNT // 2, tp=2, name="connected") as mesh:
        mesh.connect(timeout=60)
        for axes in (("dp",), ("tp",), ("dp", "tp")):
            is_right("all_reduce", mesh.group(*axes))
