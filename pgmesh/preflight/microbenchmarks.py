"""Microbenchmarks of one rank: all-reduces of a group, links to neighbours, and local computation.

Each repeat times a batch of calls and divides by their number, as NCCL-tests does. The first batch is a warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pgmesh._util.formatting import format_ranks
from pgmesh.errors import MismatchError, MissingRanksError

SMALL_MESSAGE = 8  # bytes that neighbours exchange to measure latency
LARGE_MESSAGE = 1 << 20  # bytes that they exchange to measure bandwidth
MAX_CALLS = 20  # calls of a batch, if each is short
BATCH_BYTES = 8 << 20  # approximate bytes of a batch, if each call is long
COMPUTE_CALLS = 20  # matrix products of a batch
CPU_ROWS = 384  # rows of each matrix, so that a batch takes about 20 ms
DEVICE_ROWS = 4096  # the same on an accelerator

DISTINCT_VALUES = 12
"""Powers of two that ranks contribute to a checked sum. Few enough for an exact sum in a 32-bit float."""


def calls_per_batch(size: int) -> int:
    """Number of calls of a batch, for calls of ``size`` bytes.

    >>> calls_per_batch(8), calls_per_batch(1 << 20), calls_per_batch(1 << 24)
    (20, 8, 2)
    """
    return max(2, min(MAX_CALLS, BATCH_BYTES // size))


class Microbenchmarks:
    """The microbenchmarks of one rank, on one device.

    Args:
        device: device of the tensors.
        repeats: number of timed batches of each kind.
        seconds: timeout of each collective on an accelerator. On the CPU the group's timeout applies.
    """

    def __init__(self, device: torch.device, repeats: int, seconds: float) -> None:
        self.device, self.repeats, self.seconds = device, repeats, seconds

    def all_reduce(self, group: Any, size: int) -> list[float]:
        """Seconds of one all-reduce of ``size`` bytes, for each repeat."""
        zeros = torch.zeros(element_count(size), device=self.device)
        calls = calls_per_batch(size)
        return self._time_batches(lambda: self._wait(dist.all_reduce(zeros, group=group, async_op=True)), calls)

    def exchange(self, group: Any, peer: int, size: int) -> list[float]:
        """Seconds of one exchange of ``size`` bytes with another rank, in both directions at once, for each repeat.

        Args:
            group: a group of both ranks.
            peer: the other rank, as a rank of the world. It must make the same call.
            size: number of bytes in each direction.
        """
        sent, received = (torch.zeros(element_count(size), device=self.device) for _ in range(2))

        def exchange_once() -> None:
            operations = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
            self._wait(*dist.batch_isend_irecv(operations))

        return self._time_batches(exchange_once, calls_per_batch(size))

    def local_compute(self) -> list[float]:
        """Seconds of a fixed computation without communication, for each repeat."""
        rows = CPU_ROWS if self.device.type == "cpu" else DEVICE_ROWS
        left, right = (torch.ones(rows, rows, device=self.device) for _ in range(2))
        result = torch.empty_like(left)

        def compute() -> None:
            torch.mm(left, right, out=result)
            torch.add(left, right, out=result)

        return self._time_batches(compute, COMPUTE_CALLS)

    def check_members(self, group: Any, ranks: Sequence[int], rank: int, world_size: int, label: str) -> None:
        """Check that an all-reduce of a group sums over exactly these ranks.

        Raises:
            MismatchError: it sums over other ranks, or over a rank twice.
        """
        mask = torch.zeros(world_size, dtype=torch.int32, device=self.device)
        mask[rank] = 1
        self._wait(dist.all_reduce(mask, group=group, async_op=True))
        seen = mask.cpu()
        members = seen.nonzero().flatten().tolist()
        if members != sorted(ranks) or int(seen.max()) != 1:
            times = ", ".join(f"{rank} ({seen[rank]} times)" if seen[rank] != 1 else f"{rank}" for rank in members[:8])
            raise MismatchError(f"{label} sums over ranks {times or 'none'}, not over {format_ranks(tuple(ranks))}.")

    def check_sum(self, group: Any, index: int, members: int, size: int, label: str) -> None:
        """Check every value of an all-reduce.

        Args:
            group: the group.
            index: index of this rank in the group.
            members: number of ranks of the group.
            size: number of bytes of the tensor.
            label: name of the group, for the error.

        Raises:
            MismatchError: a value is wrong.
        """
        values = torch.full((element_count(size),), float(2 ** (index % DISTINCT_VALUES)), device=self.device)
        self._wait(dist.all_reduce(values, group=group, async_op=True))
        expected = sum(2 ** (other % DISTINCT_VALUES) for other in range(members))
        wrong = (values != expected).nonzero().flatten()
        if len(wrong):
            first = int(wrong[0])
            raise MismatchError(
                f"{label}: a sum of {size:,} bytes is wrong in {len(wrong):,} of {len(values):,} values; the first is "
                f"value {first}, {values[first].item():g} in place of {expected}."
            )

    def _time_batches(self, call: Callable[[], None], calls: int) -> list[float]:
        """Seconds of one call, for each repeat, after a warm-up batch."""
        seconds = []
        for i in range(1 + self.repeats):
            start = time.perf_counter()
            for _ in range(calls):
                call()
            self._synchronize()
            if i:
                seconds.append((time.perf_counter() - start) / calls)
        return seconds

    def _wait(self, *works: Any) -> None:
        """Wait for works. The timeout is the group's on the CPU, and ``seconds`` on a device."""
        if self.device.type == "cpu":
            for work in works:
                work.wait()
            return
        end = time.monotonic() + self.seconds
        while not all(work.is_completed() for work in works):
            if time.monotonic() >= end:
                raise MissingRanksError(f"a collective was not done in {self.seconds:g} s.")

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def element_count(size: int) -> int:
    """Number of 4-byte elements in ``size`` bytes, at least 1."""
    return max(1, size // 4)


def link_rounds(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """The links of a ring over these ranks, in rounds. In each round a rank uses at most one link.

    >>> list(link_rounds((0, 2, 4, 6)))
    [[(0, 2), (4, 6)], [(2, 4), (6, 0)]]
    >>> list(link_rounds((1, 5))), list(link_rounds((0, 1, 2)))
    ([[(1, 5)]], [[(0, 1)], [(1, 2)], [(2, 0)]])
    """
    size = len(ranks)
    links = [(ranks[i], ranks[(i + 1) % size]) for i in range(size if size > 2 else size - 1)]
    odd = [links.pop()] if size > 2 and size % 2 else []
    for links_of_round in (links[0::2], links[1::2], odd):
        if links_of_round:
            yield links_of_round
