"""Microbenchmarks of one rank: all-reduces of a group, links to neighbours, and local computation.

Each repeat times a batch of calls and divides by their number, as NCCL-tests does. The first batch is a warm-up. The
result is the median of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pgmesh.errors import MismatchError, MissingRanksError

SMALL_MESSAGE = 8  # bytes that neighbours exchange to measure latency
LARGE_MESSAGE = 1 << 20  # bytes that they exchange to measure bandwidth
MAX_CALLS = 20  # calls of a batch, if each is short
BATCH_BYTES = 8 << 20  # approximate bytes of a batch, if each call is long
COMPUTE_CALLS = 20  # matrix products of a batch
CPU_ROWS = 384  # rows of each matrix, so that a batch takes about 20 ms
DEVICE_ROWS = 4096  # the same on an accelerator


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

    def all_reduce(self, group: Any, size: int) -> float:
        """Seconds of one all-reduce of ``size`` bytes."""
        zeros = torch.zeros(element_count(size), device=self.device)
        calls = calls_per_batch(size)
        return self._time(lambda: self._wait(dist.all_reduce(zeros, group=group, async_op=True)), calls)

    def exchange(self, group: Any, peer: int, size: int) -> float:
        """Seconds of one exchange of ``size`` bytes with another rank, in both directions at once.

        Args:
            group: a group of both ranks.
            peer: the other rank, as a rank of the world. It must make the same call.
            size: number of bytes in each direction.
        """
        sent, received = (torch.zeros(element_count(size), device=self.device) for _ in range(2))

        def exchange_once() -> None:
            operations = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
            self._wait(*dist.batch_isend_irecv(operations))

        return self._time(exchange_once, calls_per_batch(size))

    def local_compute(self) -> float:
        """Seconds of a fixed computation without communication."""
        rows = CPU_ROWS if self.device.type == "cpu" else DEVICE_ROWS
        left, right = (torch.ones(rows, rows, device=self.device) for _ in range(2))
        result = torch.empty_like(left)

        def compute() -> None:
            torch.mm(left, right, out=result)
            torch.add(left, right, out=result)

        return self._time(compute, COMPUTE_CALLS)

    def check_sum(self, group: Any, ranks: Sequence[int], rank: int, size: int, label: str) -> None:
        """Check every value of an all-reduce.

        Each value has an owner, which is a rank of the world. It adds 1, and the others add 0. Each rank owns at least
        one value, so that no group sums zeros alone.

        Args:
            group: the group.
            ranks: its members.
            rank: this rank.
            size: number of bytes of the tensor, or fewer than it has.
            label: name of the group, for the error.

        Raises:
            MismatchError: a value is wrong, so the sum is not over exactly these ranks, or it was corrupted.
        """
        by_owner = torch.zeros(dist.get_world_size(), device=self.device)
        by_owner[list(ranks)] = 1
        owners = torch.arange(max(element_count(size), len(by_owner)), device=self.device) % len(by_owner)
        values, expected = (owners == rank).float(), by_owner[owners]
        self._wait(dist.all_reduce(values, group=group, async_op=True))
        wrong = (values != expected).nonzero().flatten()
        if len(wrong):
            first = int(wrong[0])
            raise MismatchError(
                f"{label}: a sum of {values.nbytes:,} bytes is wrong in {len(wrong):,} of {len(values):,} values; the "
                f"first is value {first}, {values[first].item():g} in place of {expected[first].item():g}."
            )

    def _time(self, call: Callable[[], None], calls: int) -> float:
        """Seconds of one call, the median of all repeats after a warm-up batch."""
        seconds = []
        for _ in range(1 + self.repeats):
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            seconds.append((time.perf_counter() - start) / calls)
        return median(seconds[1:])

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


def element_count(size: int) -> int:
    """Number of 4-byte elements in ``size`` bytes, a multiple of 4."""
    return size // 4


def ring_links(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The links of a ring over these ranks, in the order in which they are measured: every second one, then the rest.

    Of an even number of links, those of each half share no rank, so they are measured at once. Of an odd number, the
    last link of the first half shares a rank with its first one, and is measured after it.

    >>> ring_links((0, 2, 4, 6)), ring_links((0, 1, 2)), ring_links((1, 5))
    ([(0, 2), (4, 6), (2, 4), (6, 0)], [(0, 1), (2, 0), (1, 2)], [(1, 5)])
    """
    size = len(ranks)
    links = [(ranks[i], ranks[(i + 1) % size]) for i in range(size if size > 2 else size - 1)]
    return links[0::2] + links[1::2]
