"""Groups that end while messages are on their way: what still arrives, and how long the end takes."""

from __future__ import annotations

import gc
import random
import time

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from tests.support.faults import attempt, beat_fast_with_bystander
from tests.support.resource_counts import CAN_COUNT, count_resources, growth
from tests.support.worlds import check_sums, groups_of, on_ranks

# ---- close at once ----


def expect(tensor: torch.Tensor, value: float) -> None:
    assert (tensor == value).all(), f"{tensor.unique()} is not {value}"


def broadcast(group: dist.ProcessGroup, rank: int) -> None:
    value = torch.full((100_000,), float(rank))
    dist.broadcast(value, 1, group=group)
    expect(value, 1)


def gather(group: dist.ProcessGroup, rank: int) -> None:
    parts = [torch.zeros(3000) for _ in range(4)] if rank == 3 else None
    dist.gather(torch.full((3000,), float(rank)), parts, dst=3, group=group)
    for i, part in enumerate(parts or ()):
        expect(part, i)


def send_and_receive(group: dist.ProcessGroup, rank: int) -> None:
    value = torch.full((200_000,), float(rank))
    if rank < 2:
        dist.send(value, rank + 2, group=group)
    else:
        dist.recv(value, rank - 2, group=group)
        expect(value, rank - 2)


CHECKED_COLLECTIVES = [broadcast, gather, send_and_receive]


@pytest.mark.skipif(not CAN_COUNT, reason="counts in /proc")
@on_ranks(4, "fast")
def test_close_after_own_part_loses_no_message():
    """What was sent still arrives on the members that are slower. In each round another rank is slow."""
    bystander = beat_fast_with_bystander()
    chance, rank, lost = random.Random(5), dist.get_rank(), []
    for number in range(24):
        collective, slow = CHECKED_COLLECTIVES[number % len(CHECKED_COLLECTIVES)], chance.randrange(4)
        delay, is_first = chance.choice([0.0, 0.001, 0.004, 0.01]), chance.random() < 0.5
        mesh = ProcessGroupMesh(4, name="actor")
        group = mesh.group()
        if not is_first:
            dist.barrier(group=group)
        if rank == slow:
            time.sleep(delay)  # the chance that the test takes
        failed = attempt(lambda collective=collective, group=group: collective(group, rank))
        if failed.kind:
            lost.append(f"{number} {collective.__name__}, rank {slow} slow by {delay} s, first {is_first}: {failed}")
        if rank == slow:
            time.sleep(delay)
        mesh.close()
        del group
        if number == 4 * len(CHECKED_COLLECTIVES) - 1:
            gc.collect()
            early = count_resources()
    gc.collect()
    more = growth([early])
    check_sums(groups_of(bystander))
    assert (lost, more) == ([], {})
