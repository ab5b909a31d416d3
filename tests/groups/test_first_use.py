"""The first use of groups that all members have made: as with torch's ``new_group``, whatever the others do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.faults import SLACK, WAIT_TIMEOUT, attempt, read_result, write_result
from tests.support.first_uses import PROGRAMS, Block, blocks, mesh_groups, torch_groups, use
from tests.support.programs import run_ranks
from tests.support.rank_processes import RankProcesses, join_world
from tests.support.worlds import STARVED, check_sums, world

TIMES = 4  # in groups of six kinds
AT_ONCE = 0.5  # seconds
DEADLINE = 200.0 if STARVED else 30.0  # seconds; shorter than the timeout of the groups


def compare(name: str) -> None:
    """Run a program in groups of torch and in groups of meshes, and compare its results and the times of its calls."""
    run, table = PROGRAMS[name], blocks(name)
    of_torch = use(run, torch_groups, table, 1)
    ours = use(run, mesh_groups, table, TIMES)
    expected = {each.block: each for each in of_torch}
    for each in ours:
        right = expected[each.block]
        assert each.result == right.result, f"{each.block}: {each.result}, not {right.result}"
        for call, seconds in each.seconds.items():
            limit = right.seconds[call] + AT_ONCE + SLACK
            assert seconds < limit, f"{each.block}: {call} took {seconds:.2f} s, in torch {right.seconds[call]:.2f} s"
    if not run.breaks:
        groups = [(each, group) for each in ours for group in each.groups]
        check_sums({f"{number} of {each.block}": (group, each.ranks) for number, (each, group) in enumerate(groups)})
    dist.barrier()
    for each in of_torch:
        for group in each.groups:
            dist.destroy_process_group(group)


@pytest.mark.parametrize("name", PROGRAMS)
def test_first_use_is_that_of_new_group(name: str):
    """Which side of a pair is passive depends on ports, so each program runs in 24 groups."""
    world(4).run(compare, name, deadline=DEADLINE)


def use_groups_of_torch(rank: int, port: int, folder: Path, number: int) -> None:
    """Join as one of two replicas, and use groups of ``new_group`` as two pipeline stages do."""
    join_world(rank, port, replicas=2)
    run = PROGRAMS["pipeline_with_a_group_for_each_direction"]._replace(timeout=DEADLINE / 10)
    table = {"the world": Block([range(2)], mesh_groups)}
    write_result(folder, f"{rank}", attempt(lambda: use(run, torch_groups, table, 20)).text)
    read_result(folder, f"{1 - rank}")


def test_new_group_of_replicas_connects_at_once(tmp_path: Path):
    """``join`` lets the default group connect at its first use, and only that one."""
    with RankProcesses(use_groups_of_torch, tmp_path) as processes:
        for rank in range(2):
            processes.start(rank, 0)
        assert [read_result(tmp_path, f"{rank}") for rank in range(2)] == [[""]] * 2
        processes.join(WAIT_TIMEOUT)


TWO_DEVICES = """
import os
os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo"
import torch
import torch.distributed as dist
from pgmesh import ProcessGroupMesh, launch

launch.join("gloo")
mesh = ProcessGroupMesh(dp=2)
for i in range(12):  # which side is passive depends on ports
    group, value, (first, second) = mesh.group("dp", tag=f"{i}", timeout=20), torch.zeros(1), (i % 2, 1 - i % 2)
    if mesh.rank == 0:
        work = dist.irecv(value, 1, group=group, tag=first)  # the other rank sends this after it has the next message
        dist.send(torch.ones(1), 1, group=group, tag=second)
        work.wait()
    else:
        dist.recv(value, 0, group=group, tag=second)
        dist.send(torch.ones(1), 0, group=group, tag=first)
    print(int(value))
"""


def test_pairs_of_every_device_are_started(tmp_path: Path):
    """Gloo takes the device of a message by its tag, and each device has pairs of its own."""
    assert run_ranks(tmp_path, TWO_DEVICES, 2).split() == ["1"] * 24
