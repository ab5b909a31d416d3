"""The oracle of all tests with real groups, ``check_sums``, sees a wrong sum."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pgmesh.errors import LaunchError
from tests.support.worlds import check_sums, world


def check_whole_world(ranks: tuple[int, ...]) -> None:
    check_sums({"world": (dist.group.WORLD, ranks)})


def test_check_sums_raises_on_a_wrong_sum():
    world(3).run(check_whole_world, (0, 1, 2))
    with pytest.raises(LaunchError, match=r"sums to \[1, 1, 1\], not \[1, 1, 0\]"):
        world(3).run(check_whole_world, (0, 1))
    with pytest.raises(LaunchError, match=r"holds ranks \[0, 1, 2\], not \[0, 2, 1\]"):
        world(3).run(check_whole_world, (0, 2, 1))
