"""Connections of groups: what fails on them, what shuts them down, and what then still works."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from pgmesh.groups.group import find_group
from tests.support.faults import (
    LONG_TIMEOUT,
    SLACK,
    WAIT_TIMEOUT,
    Attempt,
    attempt,
    beat_fast,
    beat_fast_with_bystander,
    connect_and_check,
    fast_world,
    kill_self,
    last_status,
    meanwhile,
    results,
    set_flag,
    wait_for_flag,
    wait_for_flags,
    wait_until,
)
from tests.support.resource_counts import CAN_COUNT, count_resources, growth
from tests.support.worlds import STARVED, check_sums, fresh_world, groups_of, on_ranks

SHORT = 10.0 if STARVED else 0.6  # seconds; the timeout of a group in which a collective fails


# ---- an old failure explains no later error ----


def wrong_shapes(group: dist.ProcessGroup) -> None:
    dist.all_gather([torch.ones(2)], torch.ones(3), group=group)


@on_ranks(3, "fast")
def test_failed_receive_explains_no_later_error():
    """Rank 0 waits in vain for rank 2. Then it receives from rank 1, and makes mistakes of other kinds."""
    bystander = beat_fast_with_bystander()
    mesh = ProcessGroupMesh(3, name="actor")
    mesh.configure(0, timeout=timedelta(seconds=SHORT))
    group, value = mesh.group(), torch.full((1,), float(dist.get_rank()))
    failed = attempt(lambda: dist.recv(value, src=2, group=group) if mesh.rank == 0 else None)
    dist.barrier()
    if mesh.rank == 0:
        dist.recv(value, src=1, group=group)
    elif mesh.rank == 1:
        dist.send(value, dst=0, group=group)
    mistake = attempt(lambda: wrong_shapes(group))
    dist.barrier()
    if mesh.rank == 0:
        late = attempt(lambda: dist.recv(value, src=1, group=group))
    check_sums(groups_of(bystander))
    assert mistake.kind == "RuntimeError"
    assert "invalid output tensor list" in mistake.text
    if mesh.rank == 0:
        assert failed.kind == "MissingRanksError"
        assert "did not reach the first collective" in failed.text
        assert value.item() == 1.0
        assert late.kind == "RuntimeError"
        assert "Timed out waiting" in late.text


@on_ranks(2, "fast")
def test_reason_of_slow_collective_explains_no_later_error(tmp_path: Path):
    """Rank 0 finds out why its first collective does not end. It ends, and rank 0 makes a mistake at once."""
    beat_fast()
    mesh = ProcessGroupMesh(2, name="actor")
    group = mesh.group()
    record = find_group(group.group_name)
    assert record is not None

    def watch() -> None:
        wait_until(lambda: record.finding[1], "the reason why the collective does not end")
        set_flag(tmp_path, "found")

    if mesh.rank == 0:
        threading.Thread(target=watch, daemon=True).start()
    else:
        wait_for_flag(tmp_path, "found")
    dist.all_reduce(torch.ones(1), group=group)
    mistake = attempt(lambda: wrong_shapes(group))
    check_sums(groups_of(mesh))
    assert mesh.rank or "rank 1 did not reach the first collective" in record.finding[1]
    assert mistake.kind == "RuntimeError"
    assert "invalid output tensor list" in mistake.text


# ---- release and close ----


def connections() -> set[tuple[int, int]]:
    """Both ports of each TCP connection of this process."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as each:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                found.add((each.getsockname()[1], each.getpeername()[1]))
    return found


def one_lets_go(folder: Path) -> tuple[Attempt, float]:
    """Rank 2 does not enter a collective. Rank 1 waits for it, and rank 0 for rank 1. A thread of rank 1 lets go."""
    bystander = beat_fast_with_bystander()
    mesh = ProcessGroupMesh(3, name="actor")
    before = connections()
    mesh.connect(timeout=LONG_TIMEOUT)
    group = mesh.group()
    record = find_group(group.group_name)
    assert record is not None
    (listener,) = record.endpoints().own
    check_sums(groups_of(mesh))
    of_the_group = connections() - before
    assert len(of_the_group) >= 2
    let_go = [0.0]

    def act() -> None:
        wait_until(lambda: mesh.report().running, "the collective")
        set_flag(folder, f"in {mesh.rank}")
        if mesh.rank == 1:
            wait_for_flag(folder, "in 0")
            let_go[0] = time.monotonic()
            mesh.release()

    actor = threading.Thread(target=act, daemon=True)
    if mesh.rank < 2:
        actor.start()
        failed = attempt(lambda: dist.all_reduce(torch.ones(1), group=group))
        actor.join(WAIT_TIMEOUT)
    else:
        failed = attempt(lambda: None)
    set_flag(folder, f"out {mesh.rank}")
    wait_for_flags(folder, "out", range(2))
    check_sums(groups_of(bystander))
    if mesh.rank != 1:
        mesh.release()
    wait_until(
        lambda: not connections() & of_the_group, "the end of the group's connections, although the group is held"
    )
    socket.create_connection(listener, WAIT_TIMEOUT).close()
    assert group.rank() == mesh.rank
    dist.barrier(bystander.group())
    connect_and_check(mesh, 0)
    check_sums(groups_of(bystander))
    return failed, let_go[0]


@pytest.mark.skipif(not CAN_COUNT, reason="reads /proc")
def test_release_ends_blocked_collectives_on_all_members(tmp_path: Path):
    seen = results(fast_world(3).outcomes(one_lets_go, tmp_path))
    (theirs, _), (mine, when), _ = seen
    print(mine, mine.end - when, theirs, theirs.end - when)
    assert mine.kind == "LifetimeError"
    assert "group 0 of mesh 'actor' was released at test_connections.py:" in mine.text
    assert theirs.kind == "RuntimeError"
    assert "Connection closed by peer" in theirs.text
    assert max(mine.end, theirs.end) - when < 1.0 + SLACK


@pytest.mark.parametrize(("waits", "absent"), [(0, 2), (2, 3), (3, 0)])
@on_ranks(4, "fast")
def test_release_ends_wait_without_connection(waits: int, absent: int):
    """A rank waits for another one, to which it may have no connection. A thread of it releases the group."""
    beat_fast()
    mesh = ProcessGroupMesh(4, name=f"{waits} waits for {absent}")
    mesh.configure(timeout=3 * SLACK)
    mesh.connect(timeout=LONG_TIMEOUT)
    group, released = mesh.group(), [0.0]
    dist.barrier()

    def act() -> None:
        wait_until(lambda: (last := last_status(mesh.rank)) and last.running, "a heartbeat in the collective")
        released[0] = time.monotonic()
        mesh.release()

    if mesh.rank == waits:
        with meanwhile(act):
            failed = attempt(lambda: dist.broadcast(torch.ones(1), src=absent, group=group))
        assert failed.kind == "LifetimeError", failed
        assert failed.end - released[0] < 1.0 + SLACK
    dist.barrier()


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


# ---- groups with half a message in their connections ----


def exchange_for_ever(group: dist.ProcessGroup, mine: torch.Tensor) -> None:
    while True:
        works = [dist.all_to_all_single(torch.empty_like(mine), mine, group=group, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()


def one_dies_in_large_collectives() -> tuple[str, float]:
    """Rank 3 is killed while all-to-alls run. Ranks 0 and 2 destroy their group, and rank 1 closes its mesh.

    Returns the type of the error, and the seconds until the group was gone.
    """
    mesh = ProcessGroupMesh(4, name="actor")
    mesh.configure(0, timeout=timedelta(seconds=10.0 if STARVED else 3.0))
    group = mesh.group()
    mine = torch.ones(1 << 23)  # so large that rank 3 dies in the middle of a message
    dist.all_to_all_single(torch.empty_like(mine), mine, group=group)
    dist.barrier()
    if mesh.rank == 3:
        threading.Timer(0.03, kill_self).start()
    failed = attempt(functools.partial(exchange_for_ever, group, mine))
    start = time.monotonic()
    if mesh.rank != 1:
        dist.destroy_process_group(group)
    mesh.close()
    del mesh, group
    gc.collect()
    return failed.kind, time.monotonic() - start


@pytest.mark.fault("a group is destroyed after a member died in the middle of a message")
def test_group_with_half_a_message_is_destroyed():
    """Gloo's event loop gets an event for unread data again and again. A loop without a pause never ends."""
    with fresh_world(4) as own:
        for kind, seconds in results(own.outcomes(one_dies_in_large_collectives), 3):
            assert kind
            assert seconds < (10.0 if STARVED else 3.0) + SLACK


# ---- the methods of a group that is gone ----


def own_methods(group: Any, peer: int) -> dict[str, Callable[[], Any]]:
    value = torch.ones(2)
    return {
        "allreduce": lambda: group.allreduce([value]).wait(),
        "broadcast": lambda: group.broadcast(value, 0).wait(),
        "barrier": lambda: group.barrier().wait(),
        "allgather": lambda: group.allgather([[torch.ones(2)] * group.size()], [value]).wait(),
        "send": lambda: group.send([value], peer, 0).wait(),
        "recv": lambda: group.recv([value], peer, 0).wait(),
    }


@pytest.mark.parametrize("axis", ["one", "two"])
@on_ranks(2)
def test_methods_of_a_released_group_raise(axis: str):
    mesh = ProcessGroupMesh(one=1, two=2, name="actor")
    group = mesh.group(axis)
    check_sums(groups_of(mesh))
    mesh.release(axis)
    seen = {name: attempt(call) for name, call in own_methods(group, 1 - mesh.rank if axis == "two" else 0).items()}
    dist.barrier()
    check_sums(groups_of(mesh))
    for name, failed in seen.items():
        assert failed.kind, name
        assert failed.took < SLACK, name
    assert seen["allreduce"].kind == "LifetimeError"
    assert f"group {axis} of mesh 'actor' was released at test_connections.py:" in seen["allreduce"].text
