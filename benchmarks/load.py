"""Simulation of the store of a large world: the real protocol of connect, on a simulated store with a queue.

    python -m benchmarks.load --ranks 1024 8192

Every rank runs the code of ``mesh.connect`` for six kinds of groups, in a thread of its own; one thread runs at a time.
One server executes operations one after another at a fixed rate, as TCPStore does. Only the clock, the store and the
network are simulated. Operations of the backend and TCP connections are not included.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import math
import random
import threading
from collections import deque
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.sides import FAMILIES, compared_sizes
from pgmesh import Layout
from pgmesh.connect.group_rounds import ConnectJudge, GroupRound
from pgmesh.connect.rounds import Arrival, Rounds
from pgmesh.groups.naming import Fingerprint
from pgmesh.groups.world import FULL_RATE_RANKS, pace
from pgmesh.liveness.operations import Operation, Set, perform
from pgmesh.liveness.statuses import RankStatus, Statuses, status_key
from pgmesh.liveness.timing import HEARTBEAT

ROUND_TRIP = 200e-6
"""Round-trip time to an idle store in seconds, as in a data centre."""
MESH = "mesh 'simulated'"


class Load(NamedTuple):
    """Result of one simulated call of connect on every rank."""

    ranks: int
    seconds: float  # until the last rank was done
    operations: int  # in all
    moved: int  # bytes of values that the store sent and received
    longest_queue: float  # the longest time that an operation waited, in seconds

    def __str__(self) -> str:
        return (
            f"{self.ranks:>9,} ranks: {self.seconds:7.2f} s, "
            f"{self.operations / self.ranks / len(FAMILIES):6.2f} operations a rank and group, "
            f"{self.moved / 2**20:10,.0f} MiB, longest queue {self.longest_queue:6.2f} s"
        )


class Store:
    """A server with a queue. It has the methods of torch's store that ``perform`` calls, on a dictionary."""

    def __init__(self, rate: float) -> None:
        self.service, self.free_at = 1 / rate, 0.0
        self.values: dict[str, bytes] = {}
        self.operations, self.moved, self.longest_queue = 0, 0, 0.0

    def answer(self, operation: Operation, now: float) -> tuple[float, Any]:
        """The time of the answer to an operation that a rank sends now, and the answer."""
        begin = max(now + ROUND_TRIP / 2, self.free_at)
        self.free_at = begin + self.service
        self.longest_queue = max(self.longest_queue, begin - now)
        self.operations += 1
        return self.free_at + ROUND_TRIP / 2, perform(self, operation)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()
        self.moved += len(value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if not expected:
            self.values.setdefault(key, desired.encode())
            self.moved += len(desired)
        value = self.values.get(key, desired.encode())
        self.moved += len(value)
        return value

    def append(self, key: str, value: str) -> None:
        self.values[key] = self.values.get(key, b"") + value.encode()
        self.moved += len(value)

    def add(self, key: str, amount: int) -> int:
        count = int(self.values.get(key, b"0")) + amount
        self.values[key] = b"%d" % count
        return count


class Rank:
    """One rank, which calls connect in a thread of its own. It is also the ``Client`` of that call.

    The thread runs only while the main thread is in ``step``.
    """

    def __init__(self, rank: int, layout: Layout, start: float, pace: float) -> None:
        self.rank, self.start, self.time = rank, start, start
        self.seconds, self.pace = 3600.0, pace
        self.waiting: deque[Operation] = deque()  # operations without an answer
        self.answers: list[Any] = []
        self.pending: dict[str, str] = {}
        self.done = False
        rounds = [group_round(layout, rank, axes) for axes in FAMILIES]
        who = f"process {rank + 1000} on host{rank // 8}"
        statuses = Statuses(math.inf, self.now)
        mesh = Fingerprint(rank, {"axes": layout.axes, "shape": layout.shape, "ranks": "all"}, MESH, "")
        judge = ConnectJudge(rank, self, "train.py:360", statuses, who, mesh, MESH)
        self.rounds = Rounds(rounds, judge)
        self._thread = threading.Thread(target=self._connect, daemon=True)
        self._resume, self._stopped = threading.Semaphore(0), threading.Semaphore(0)

    def step(self) -> None:
        """Let the call continue until it needs an answer, pauses, or ends."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._resume.release()
        self._stopped.acquire()

    def _connect(self) -> None:
        try:
            self.rounds.run()
        finally:
            self.done = True
            self._stopped.release()

    def _wait(self) -> None:
        self._stopped.release()
        self._resume.acquire()

    def run(self, *operations: Operation) -> list[Any]:
        self.waiting.extend(operations)
        self.answers = []
        self._wait()
        return self.answers

    def now(self) -> float:
        return self.time - self.start

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self._wait()

    def set_pending(self, pending: dict[str, str]) -> None:
        if pending and pending != self.pending:
            self.run(Set(status_key(self.rank), RankStatus(pending=pending).pack()))
        self.pending = pending


def group_round(layout: Layout, rank: int, axes: tuple[str, ...]) -> GroupRound:
    """The round of a rank and its group along these axes."""
    ranks, group = layout.block_of(rank, *axes), f"group {', '.join(axes)}"
    key, label = f"{MESH}/{'-'.join(axes)}.{ranks[0]}", f"{group} of {MESH}"
    fields: dict[str, Any] = {"backend": "nccl", "timeout": 600.0}
    return GroupRound(key, ranks, group, MESH, Fingerprint(rank, fields, label, ""))


def simulate(size: int, rate: float, spread: float, seed: int = 0) -> Load:
    """One call of connect on every rank.

    Args:
        size: number of ranks.
        rate: operations per second of the server. The rate of heartbeats, which does not depend on the size of the
            world, is subtracted.
        spread: length of the interval in which the ranks start, in seconds; uniformly distributed.
    """
    layout, rng = Layout(**compared_sizes(size)), random.Random(seed)
    store = Store(rate - FULL_RATE_RANKS / HEARTBEAT)
    ranks = [Rank(rank, layout, rng.uniform(0, spread), pace(size)) for rank in range(size)]
    events = [(rank.start, rank.rank) for rank in ranks]
    heapq.heapify(events)
    cached = functools.cache(Arrival.unpack)  # otherwise most of the time is spent on the same arrivals
    with mock.patch.object(Arrival, "unpack", cached):
        while events:
            time, number = heapq.heappop(events)
            rank = ranks[number]
            if rank.waiting:
                rank.time, answer = store.answer(rank.waiting.popleft(), time)
                rank.answers.append(answer)
            else:
                rank.step()
            if not rank.done:
                heapq.heappush(events, (rank.time, number))
    if not all(each.is_made() for rank in ranks for each in rank.rounds.rounds):
        raise RuntimeError("a simulated group was not connected")
    return Load(size, max(rank.time for rank in ranks), store.operations, store.moved, store.longest_queue)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1_024, 8_192], metavar="N", help="multiples of 64")
    parser.add_argument("--rate", type=float, default=100_000, help="operations a second that the server does (100000)")
    parser.add_argument("--spread", type=float, default=1.0, help="seconds within which the ranks come (1)")
    args = parser.parse_args()
    print(f"one server of {args.rate:,.0f} operations a second, ranks that come within {args.spread:g} s")
    for ranks in args.ranks:
        print(simulate(ranks, args.rate, args.spread), flush=True)


if __name__ == "__main__":
    main()
