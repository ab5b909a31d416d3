"""Resource leaks after each kind of fault that a process survives: none.

Four ranks run into one kind of fault again and again. Early and late, each counts its descriptors, its threads and the
entries of torch's tables, of which none may be more, and its resident memory, which may grow by MOST in TIMES faults:
for each, by less than the 175 KiB of a group. In test_torch_hazards.py, nothing fails.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.groups import backends
from pgmesh.groups.group import find_group
from tests.support.faults import BEAT, LONG_TIMEOUT, beat_fast_with_bystander, wait_until, wait_until_waiting
from tests.support.resource_counts import CAN_COUNT, count_resources, growth, resident_kib
from tests.support.torch_tables import is_connecting
from tests.support.worlds import World, check_sums, on_ranks, world

pytestmark = pytest.mark.skipif(not CAN_COUNT, reason="counts in /proc")

FIRST, TIMES = 2, 6
"""So many faults before the first count, and so many from then to the last."""

MOST = 1024
"""KiB."""

SOON = timedelta(seconds=0.05)
ALL = ("dp", "tp")


# ---- faults, on each rank of a new mesh ----


def fails(kind: str, act: Callable[[], Any]) -> None:
    try:
        act()
    except BaseException as error:
        assert type(error).__name__ in kind.split(" or "), error  # noqa: PT017
    else:
        raise AssertionError(f"no {kind}")


def one_connects_too_late(mesh: ProcessGroupMesh) -> None:
    if mesh.rank < 3:
        fails("MissingRanksError", lambda: mesh.connect(ALL, timeout=SOON))
    dist.barrier()
    mesh.connect(ALL, timeout=LONG_TIMEOUT)  # rank 3 logs the earlier decision
    check_sums({"all": (mesh.group(), mesh.ranks())})


def one_skips_first_collective(mesh: ProcessGroupMesh) -> None:
    if mesh.rank < 3:
        group = mesh.group(timeout=5 * BEAT)
        fails("MissingRanksError", lambda: dist.all_reduce(torch.ones(1), group=group))


def meshes_differ(mesh: ProcessGroupMesh) -> None:
    with ProcessGroupMesh(dp=4 if mesh.rank == 3 else 2, tp=-1, name="another") as wrong:
        fails("MismatchError", lambda: wrong.connect(ALL, timeout=LONG_TIMEOUT))
    with ProcessGroupMesh(dp=2, tp=2, name="another") as right:
        right.connect(ALL, timeout=LONG_TIMEOUT)
        dist.barrier()


def options_of_collective_differ(mesh: ProcessGroupMesh) -> None:
    mesh.configure(*ALL, timeout=BEAT * (3 + (mesh.rank == 3)))
    fails("MismatchError", lambda: dist.all_reduce(torch.ones(1), group=mesh.group()))


def is_released_while_it_waits(mesh: ProcessGroupMesh) -> None:
    if mesh.rank > 0:
        return
    work = dist.all_reduce(torch.ones(1), group=mesh.group(), async_op=True)
    record = find_group(mesh.group().group_name)
    assert record is not None
    assert record.store is not None
    wait_until(lambda: record.store.waiting_since, "it waits for an address")
    mesh.release(*ALL)
    fails("LifetimeError", work.wait)


def cannot_make(mesh: ProcessGroupMesh) -> None:
    if mesh.rank < 3:
        fails("MissingRanksError", lambda: mesh.connect(ALL, timeout=LONG_TIMEOUT))
        return
    wait_until_waiting(0, 1, 2)
    with mock.patch.dict(backends.CONSTRUCTORS, gloo=mock.Mock(side_effect=OSError("Too many open files"))):
        fails("OSError", lambda: mesh.connect(ALL, timeout=LONG_TIMEOUT))


FAULTS: list[Callable[[ProcessGroupMesh], None]] = [
    one_connects_too_late,
    one_skips_first_collective,
    meshes_differ,
    options_of_collective_differ,
    is_released_while_it_waits,
    cannot_make,
]

# ---- nothing waits for the garbage collector ----


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


# ---- the counts ----


def repeat(fault: Callable[[ProcessGroupMesh], None], times: int) -> int:
    """Let a mesh survive a fault, several times; return the memory then, in KiB."""
    for _ in range(times):
        mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
        fault(mesh)
        dist.barrier()
        mesh.close()
        del mesh
    gc.collect()
    memory = resident_kib()
    dist.barrier()
    return memory


def again_and_again(fault: Callable[[ProcessGroupMesh], None]) -> dict[str, int]:
    """What is more than it was, and by how much; of memory, what is more than may be.

    Memory that is allocated once, at whatever time, is no leak: in one of three rounds it may not grow.
    """
    bystander = beat_fast_with_bystander()
    wait_until(lambda: not is_connecting(bystander.group()), "all connections of the bystander")
    memory, rounds, grown = repeat(fault, FIRST), 0, math.inf
    held = count_resources()
    while grown > MOST and rounds < 3:
        dist.barrier()
        before, memory, rounds = memory, repeat(fault, TIMES), rounds + 1
        most = torch.tensor(memory - before)
        dist.all_reduce(most, dist.ReduceOp.MAX)  # all ranks repeat it, or none
        grown = int(most)
    more = growth([held])
    dist.barrier()
    if grown > MOST:
        more["KiB"] = grown
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    mesh.connect(ALL, timeout=LONG_TIMEOUT)
    check_sums({"all": (mesh.group(), mesh.ranks())})
    return more


@pytest.fixture
def four() -> World:
    """The world of this file."""
    # torch's flight record has 2,000 entries by default: while it fills up, it takes more memory than a leak.
    with mock.patch.dict(os.environ, TORCH_FR_BUFFER_SIZE="64"):
        return world(4, "small flight record")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_survived_fault_leaves_nothing_behind(four: World, fault: Callable[[ProcessGroupMesh], None]):
    assert four.run(again_and_again, fault) == [{}] * 4
