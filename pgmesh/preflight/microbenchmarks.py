"""What a preflight measures on one rank: collectives of a group, links to neighbours, and work of its own.

Each repeat is a batch of calls, timed as one and divided, as NCCL-tests does it; before the first one a batch is run
that does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pgmesh._util.formatting import format_ranks
from pgmesh.errors import MismatchError, MissingRanksError

SMALL, LARGE = 8, 1 << 20
"""Bytes that neighbours exchange, to see how long a link takes to begin and how much goes over it."""

MOST_CALLS = 20
"""How many calls a batch has, of what is soon done."""

BATCH = 8 << 20
"""About how many bytes a batch moves, of what is not."""

POWERS = 12
"""Ranks put in powers of two; after so many they begin again, so that a sum is exact in 32 bits of a float."""

WORK = {"cpu": 384}
"""How many rows the matrices of a rank's own work have, by device, so that a batch takes some 20 ms; elsewhere
``LARGE_WORK``."""

LARGE_WORK, WORK_CALLS = 4096, 20


def calls_of(size: int) -> int:
    """How many calls a batch has, by the bytes of each.

    >>> calls_of(8), calls_of(1 << 20), calls_of(1 << 24)
    (20, 8, 2)
    """
    return max(2, min(MOST_CALLS, BATCH // size))


class Probe:
    """One rank's measurements, on one device.

    Args:
        device: where groups communicate from.
        repeats: how many batches of each kind are timed.
        seconds: how long any one of them may take.
    """

    def __init__(self, device: torch.device, repeats: int, seconds: float) -> None:
        self.device, self.repeats, self.seconds = device, repeats, seconds

    def all_reduce(self, group: Any, size: int) -> list[float]:
        """Seconds of one all-reduce of so many bytes, for each repeat."""
        zeros = torch.zeros(count(size), device=self.device)
        calls = calls_of(size)
        return self._timed(lambda: self._all(dist.all_reduce(zeros, group=group, async_op=True)), calls)

    def exchange(self, group: Any, peer: int, size: int) -> list[float]:
        """Seconds in which this rank and another send so many bytes to each other, for each repeat.

        Args:
            peer: the other, by its rank in the world; it does the same meanwhile.
        """
        out, into = torch.zeros(count(size), device=self.device), torch.zeros(count(size), device=self.device)

        def both() -> None:
            ways = [dist.P2POp(dist.isend, out, peer, group), dist.P2POp(dist.irecv, into, peer, group)]
            self._all(*dist.batch_isend_irecv(ways))

        return self._timed(both, calls_of(size))

    def own_work(self) -> list[float]:
        """Seconds of a fixed work of this rank alone, that waits for nobody, for each repeat."""
        rows = WORK.get(self.device.type, LARGE_WORK)
        one, other = torch.ones(rows, rows, device=self.device), torch.ones(rows, rows, device=self.device)
        into = torch.empty_like(one)

        def work() -> None:
            torch.mm(one, other, out=into)
            torch.add(one, other, out=into)

        return self._timed(work, WORK_CALLS)

    def check_members(self, group: Any, ranks: Sequence[int], me: int, world: int, words: str) -> None:
        """See that a group sums over these very ranks.

        Raises:
            MismatchError: it sums over others, or over one twice.
        """
        mask = torch.zeros(world, dtype=torch.int32, device=self.device)
        mask[me] = 1
        self._all(dist.all_reduce(mask, group=group, async_op=True))
        seen = mask.cpu()
        there = seen.nonzero().flatten().tolist()
        if there != sorted(ranks) or int(seen.max()) != 1:
            times = ", ".join(f"{rank} ({seen[rank]} times)" if seen[rank] != 1 else f"{rank}" for rank in there[:8])
            raise MismatchError(f"{words} sums over ranks {times or 'none'}, not over {format_ranks(tuple(ranks))}.")

    def check_sum(self, group: Any, place: int, members: int, size: int, words: str) -> None:
        """See that a sum of so many bytes is right in each of its values.

        Args:
            place: this rank's in the group.

        Raises:
            MismatchError: it is not.
        """
        values = torch.full((count(size),), float(2 ** (place % POWERS)), device=self.device)
        self._all(dist.all_reduce(values, group=group, async_op=True))
        right = sum(2 ** (other % POWERS) for other in range(members))
        wrong = (values != right).nonzero().flatten()
        if len(wrong):
            first = int(wrong[0])
            raise MismatchError(
                f"{words}: a sum of {size:,} bytes is wrong in {len(wrong):,} of {len(values):,} values; the first is "
                f"value {first}, {values[first].item():g} in place of {right}."
            )

    def _timed(self, call: Callable[[], None], calls: int) -> list[float]:
        seconds = []
        for i in range(1 + self.repeats):
            start = time.perf_counter()
            for _ in range(calls):
                call()
            self._settle()
            if i:
                seconds.append((time.perf_counter() - start) / calls)
        return seconds

    def _all(self, *works: Any) -> None:
        """See these to their end. A CPU backend keeps the group's timeout; on a device, this loop does."""
        if self.device.type == "cpu":
            for work in works:
                work.wait()
            return
        end = time.monotonic() + self.seconds
        while not all(work.is_completed() for work in works):
            if time.monotonic() >= end:
                raise MissingRanksError(f"a collective was not done in {self.seconds:g} s.")

    def _settle(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def count(size: int) -> int:
    """How many values of 4 bytes make so many bytes; one at least."""
    return max(1, size // 4)


def rounds(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """The links of a ring over these ranks, in rounds in which no rank has more than one.

    >>> list(rounds((0, 2, 4, 6)))
    [[(0, 2), (4, 6)], [(2, 4), (6, 0)]]
    >>> list(rounds((1, 5))), list(rounds((0, 1, 2)))
    ([[(1, 5)]], [[(0, 1)], [(1, 2)], [(2, 0)]])
    """
    size = len(ranks)
    links = [(ranks[i], ranks[(i + 1) % size]) for i in range(size if size > 2 else size - 1)]
    odd = [links.pop()] if size > 2 and size % 2 else []
    for some_of in (links[0::2], links[1::2], odd):
        if some_of:
            yield some_of
