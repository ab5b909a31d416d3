"""What torch's own groups do, which pgmesh does otherwise: ``python -m tests.torch_facts`` prints a row for each fact.

Once a fact is no longer true, torch has changed, and what pgmesh does about it may go.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support.worlds import check_sums, fresh_world

TIMEOUT = 2.0  # seconds; a tenth of a second is enough for what works
LONG = timedelta(seconds=20)
NO_RANK = -1


def torch_members_make(odd: int) -> None:
    """torch names a group by how often its process called new_group, and one rank has called it once more."""
    if dist.get_rank() == odd:
        dist.new_group([0])
    block = [[0, 1], [2, 3]][dist.get_rank() // 2]
    check_sums({"tp": (dist.new_group(block, timeout=LONG), block)})


def torch_uneven(odd: int) -> None:
    """One rank alone has a group more: of itself, which needs nobody."""
    if dist.get_rank() == odd:
        dist.new_group([0], use_local_synchronization=True)
    everyone = range(dist.get_world_size())
    check_sums({"all": (dist.new_group(everyone, use_local_synchronization=True, timeout=LONG), everyone)})


def torch_permuted(ranks: list[int]) -> None:
    assert dist.get_process_group_ranks(dist.new_group(ranks)) == ranks


FACTS: list[tuple[str, Callable[..., object], tuple[Any, ...], tuple[Any, ...]]] = [
    ("`new_group` needs every rank of the world", torch_members_make, (4, 0), (2, NO_RANK)),
    ("ranks that hold different numbers of groups do not connect", torch_uneven, (2, 0), (2, NO_RANK)),
    ("ranks of a group are sorted", torch_permuted, (4, [3, 1, 2, 0]), (4, [0, 1, 2, 3])),
]
"""Each fact, what shows it, and the sizes of the worlds and the arguments with which that fails and works."""


def fails(fn: Callable[..., object], size: int, *args: Any) -> bool:
    """True if a rank hangs, raises, or has a wrong sum."""
    with fresh_world(size) as own:
        own.run(dist.get_rank)
        return any(outcome.error for outcome in own.outcomes(fn, *args, deadline=TIMEOUT))


def main() -> None:
    print(f"| torch alone | {torch.__version__} |\n|---|---|")
    for text, fn, wrong, right in FACTS:
        found = "fails always" if fails(fn, *right) else "yes" if fails(fn, *wrong) else "no"
        print(f"| {text} | {found} |", flush=True)


if __name__ == "__main__":
    main()
