"""The sides that the benchmarks compare. Their figures are printed by ``make bench``, and are no tests."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks import stores
from benchmarks.report import OURS
from benchmarks.sides import FAMILIES, FLOOR, NEEDS, SIDES, Bare, compared_sizes
from tests.support.worlds import on_ranks


@pytest.mark.long
@on_ranks(8)
def test_each_side_makes_uses_and_closes_groups():
    for name, side in {**SIDES, FLOOR: Bare}.items():
        if name in NEEDS:  # Megatron-Core takes seconds to import
            continue
        made = side(f"tried {name}", compared_sizes(8))
        assert len(made.groups) == len(FAMILIES)
        for group in made.groups:
            ones = torch.ones(1)
            dist.all_reduce(ones, group=group)
            assert int(ones) == group.size(), name
        dist.barrier()
        made.close()
        dist.barrier()


@pytest.mark.long
@on_ranks(4)
def test_operations_of_each_side_are_counted():
    counts = stores.count(compared_sizes(4))
    assert counts[OURS, "make"] / len(FAMILIES) <= 1
    assert 0 < counts[OURS, "connect"] / len(FAMILIES) <= 6
