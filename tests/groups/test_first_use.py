"""The first use of groups that all members have made: as with torch's ``new_group``, whatever the others do."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.support.faults import SLACK
from tests.support.first_uses import PROGRAMS, blocks, mesh_groups, torch_groups, use
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
