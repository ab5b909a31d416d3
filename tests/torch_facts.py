"""What torch's own groups do, which pgmesh does otherwise: ``python -m tests.torch_facts`` prints a row for each fact.

Once a fact is no longer true, torch has changed, and what pgmesh does about it may go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support.resource_counts import count_resources
from tests.support.torch_tables import c10d
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


def torch_make_use_and_destroy(times: int) -> None:
    everyone = range(dist.get_world_size())
    for cycle in range(times):
        if cycle and dist.get_rank() == cycle % 2:
            time.sleep(0.05)  # one is slower: the other takes its old address, and by chance is the one to connect
        group = dist.new_group(everyone, use_local_synchronization=True, timeout=LONG)
        check_sums({"all": (group, everyone)})
        dist.destroy_process_group(group)
        del group


def circle(n: int) -> list[tuple[int, int]]:
    """This rank's groups of two, the one with the next rank first: all begin at another, and all wait for the next."""
    me = dist.get_rank()
    return [(me, (me + 1) % n), ((me - 1) % n, me)]


def torch_make_in_order(in_a_circle: bool) -> None:
    """Names of their own, and gloo as torch makes it: each connects as it is made, and so waits for its members."""
    me, store = dist.get_rank(), c10d._get_default_store()
    pairs = map(sorted, circle(3) if in_a_circle else sorted(circle(3), key=sorted))
    groups = [dist.ProcessGroupGloo(dist.PrefixStore(f"{pair}/", store), pair.index(me), 2, LONG) for pair in pairs]
    dist.barrier()  # a group that goes while another still connects would end that with an error
    del groups


def torch_go_on_while_one_waits(one_waits: bool) -> None:
    """The same with threads: torch makes a group by waiting, in the client of the store that all groups share."""
    me = dist.get_rank()
    if me == 0 and one_waits:
        absent = {"ranks": [0, 1], "use_local_synchronization": True, "timeout": LONG}
        threading.Thread(target=dist.new_group, kwargs=absent, daemon=True).start()
        time.sleep(0.5)  # until the thread waits, which nothing tells
    if me in (0, 2):
        group = dist.new_group([0, 2], use_local_synchronization=True, timeout=LONG)
        check_sums({"pair": (group, [0, 2])})


def torch_cycles(times: int) -> None:
    """Use a group and destroy it, as often; assert that after the fifth time nothing is left behind."""
    seen: list[dict[str, int]] = []
    kept = []
    for cycle in range(times + 1):
        if cycle in (5, times):
            dist.barrier()
            seen.append({**count_resources(), "keys": c10d._get_default_store().num_keys()})
            dist.barrier()
        kept.append(dist.new_group(timeout=LONG))
        check_sums({"all": (kept[-1], range(dist.get_world_size()))})
        dist.destroy_process_group(kept[-1])
    assert all(seen[-1][what] < seen[0][what] + 10 for what in ("descriptors", "threads", "keys"))


def torch_in_threads(alike: bool) -> None:
    """Two threads on both ranks make a group each, and on rank 1 the second thread happens to be the first."""
    numbers = [1, 1000] if alike or dist.get_rank() == 0 else [1000, 1]
    one_is_made = threading.Event()

    def use(number: int) -> int:
        assert number == numbers[0] or one_is_made.wait(10)
        group, total = dist.new_group(timeout=LONG), torch.tensor([number])
        one_is_made.set()
        dist.all_reduce(total, group=group)
        return int(total)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(use, [1, 1000])) == [2, 2000]


def torch_permuted(ranks: list[int]) -> None:
    assert dist.get_process_group_ranks(dist.new_group(ranks)) == ranks


FACTS: list[tuple[str, Callable[..., object], tuple[Any, ...], tuple[Any, ...]]] = [
    ("`new_group` needs every rank of the world", torch_members_make, (4, 0), (2, NO_RANK)),
    ("ranks that hold different numbers of groups do not connect", torch_uneven, (2, 0), (2, NO_RANK)),
    ("a group finds the addresses of a destroyed one", torch_make_use_and_destroy, (2, 20), (2, 1)),
    ("overlapping groups that are created in a circle never connect", torch_make_in_order, (3, True), (3, False)),
    ("one group that waits blocks all others", torch_go_on_while_one_waits, (3, True), (3, False)),
    ("destroyed groups leave descriptors, threads and keys", torch_cycles, (2, 15), (2, 5)),
    ("groups that threads create are exchanged", torch_in_threads, (2, False), (2, True)),
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
