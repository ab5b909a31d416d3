"""Eight processes that share one GPU through Gloo: each method's tensors are on it, and equal those of one process.

Gloo runs some collectives on CPU tensors alone. Each that a method needs is tried first on two ranks, without pgmesh;
where torch cannot run it, the method's test is skipped and says why.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from tests.gpu.device import COLLECTIVES, SHARED, is_right, lacks, run
from tests.gpu.methods import CASES, CUT, SHARDED, check, check_checkpoint
from tests.support.worlds import axis_combinations, close_worlds

DOCUMENTED = ("all_reduce", "broadcast")
"""Source: https://docs.pytorch.org/docs/2.13/distributed.html#backends"""


@pytest.fixture(scope="module", autouse=True)
def no_longer_than_here():
    yield
    close_worlds((2, SHARED), (8, SHARED))


def skip_without(needed: Iterable[str]) -> None:
    """Skip if Gloo cannot run a collective on the device. Collectives that it documents for GPUs have to run."""
    for name in needed:
        if reason := lacks(name):
            assert name not in DOCUMENTED, reason
            pytest.skip(f"Gloo has no {name} on this device: {reason}")


def right_in_every_group(name: str) -> None:
    with ProcessGroupMesh(pp=2, dp=2, tp=2, name="groups") as mesh:
        for axes in axis_combinations(mesh):
            group = mesh.group(*axes)
            assert dist.get_process_group_ranks(group) == list(mesh.ranks(*(axes or mesh.axes)))
            is_right(name, group)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_groups_that_members_make_are_right(name: str):
    skip_without([name])
    run(8, SHARED, right_in_every_group, name)


def connected() -> None:
    with ProcessGroupMesh(pp=2, dp=2, tp=2, name="connected") as mesh:
        mesh.connect()
        is_right("all_reduce", mesh.group("dp", "tp"))


def test_connect_reaches_all_members():
    skip_without(["all_reduce"])
    run(8, SHARED, connected)


@pytest.mark.parametrize("name", CASES)
def test_method_stays_on_device_and_equals_one_process(name: str):
    skip_without(CASES[name].needs)
    run(8, SHARED, check, name, False)


def test_checkpoint_is_loaded_on_another_mesh(tmp_path):
    pytest.importorskip("numpy", reason="torch sends objects through numpy")
    skip_without((*SHARDED, *CUT))
    run(8, SHARED, check_checkpoint, str(tmp_path), False)
