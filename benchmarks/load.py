"""Simulation of the store of a large world: the real protocol of connect, on a simulated store with a queue.

    python -m benchmarks.load --ranks 1024 8192 100352

Every rank runs the code of ``mesh.connect`` for six kinds of groups. One server executes operations one after another
at a fixed rate, as TCPStore does. Only the clock, the store and the network are simulated. Operations of the
backend and TCP connections are not included.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.sides import FAMILIES, compared_sizes
from pgmesh import Layout
from pgmesh.rendezvous.polling_store import ABSENT
from pgmesh.rendezvous.protocol import (
    MADE,
    MOST_ASKED,
    Add,
    Append,
    CompareSet,
    ConnectAttempt,
    Fingerprint,
    Participant,
    Pause,
    RankStatus,
    Read,
    Ready,
    SetStatus,
    Step,
    StoreProtocol,
    register_mesh,
    status_key,
)
from pgmesh.rendezvous.store_thread import BEAT, CROWD, SUSPICION

ROUND_TRIP = 200e-6
"""Round-trip time to an idle store in seconds, as in a data centre."""


@dataclass(frozen=True)
class Load:
    """Result of one simulated call of connect on every rank."""

    ranks: int
    seconds: float  # until the last rank was done
    operations: Counter[str]  # in all
    moved: int  # bytes that the store sent and took, without their envelopes
    longest_queue: float  # seconds that an operation waited at most
    most: int  # operations of the rank that did most

    def __str__(self) -> str:
        a_group = self.operations.total() / self.ranks / len(FAMILIES)
        return (
            f"{self.ranks:>9,} ranks: {self.seconds:7.2f} s, {a_group:6.2f} operations a rank and group, "
            f"{self.moved / 2**20:10,.0f} MiB, longest queue {self.longest_queue:6.2f} s"
        )


class Store:
    """A server with a queue: the values of its keys, and the time at which it is free."""

    def __init__(self, rate: float) -> None:
        self.service, self.free = 1 / rate, 0.0
        self.held: dict[str, bytes] = {}
        self.came: defaultdict[str, set[int]] = defaultdict(set)
        self.lengths: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.moved, self.longest = 0, 0.0

    def ask(self, rank: int, step: Step, now: float) -> tuple[float, object]:
        """Time of the answer, and the answer."""
        begins = max(now + ROUND_TRIP / 2, self.free)
        self.longest = max(self.longest, begins - now)
        self.free = begins + self.service
        self.done[type(step).__name__] += 1
        return self.free + ROUND_TRIP / 2, self._do(rank, step)

    def _do(self, rank: int, step: Step) -> object:
        if isinstance(step, Append):
            self.came[step.key].add(rank)
            self.lengths[step.key] += len(step.value)
            self.moved += len(step.value)
            return None
        if isinstance(step, Add):
            self.counts[step.key] += 1
            return self.counts[step.key]
        if isinstance(step, SetStatus):
            value = RankStatus(rank, 0, "", step.waits[:MOST_ASKED]).pack().encode()
            self.held[status_key(rank)] = value
            self.moved += len(value)
            return None
        if isinstance(step, CompareSet):
            self.moved += len(step.value)
            return self.held.setdefault(step.key, step.value.encode())
        if not isinstance(step, Read):
            raise TypeError(f"{step!r} is not simulated")
        if step.key in self.came:
            self.moved += self.lengths[step.key]
            return self.came[step.key]
        if step.key in self.counts:
            return str(self.counts[step.key]).encode()
        found = self.held.get(step.key)
        self.moved += len(found or ABSENT)
        return found


def simulate(ranks: int, rate: float, spread: float, seed: int = 0) -> Load:
    """One call of connect on every rank.

    Args:
        rate: operations per second of the server. The rate of heartbeats, which does not depend on the size of the
            world, is subtracted.
        spread: length of the interval in which the ranks start, in seconds; uniformly distributed.
    """
    layout, rng = Layout(**compared_sizes(ranks)), random.Random(seed)
    pace = max(1.0, ranks / CROWD)
    store = Store(rate - CROWD / BEAT)
    starts = [rng.uniform(0, spread) for _ in range(ranks)]
    events = [(start, rank) for rank, start in enumerate(starts)]
    heapq.heapify(events)
    running: dict[int, StoreProtocol[None]] = {}
    answers: dict[int, object] = {}
    counts: Counter[int] = Counter()
    end = 0.0
    while events:
        now, rank = heapq.heappop(events)
        if rank not in running:
            running[rank] = _connect(layout, rank, pace)
        steps = running[rank]
        try:
            step = steps.send(answers.pop(rank, None))
            while isinstance(step, Ready):
                step = steps.send(None)
        except StopIteration:
            end = max(end, now)
            continue
        if isinstance(step, Pause):
            then = now + step.seconds
            answers[rank] = then - starts[rank]
        else:
            then, answers[rank] = store.ask(rank, step, now)
            counts[rank] += 1
        heapq.heappush(events, (then, rank))
    return Load(ranks, end, store.done, store.moved, store.longest, max(counts.values()))


def _connect(layout: Layout, rank: int, pace: float) -> StoreProtocol[None]:
    """The steps of connect on one rank, without the first collectives."""
    mesh = "pgmesh/simulated"
    card = Fingerprint(rank, dict(zip(map(str, layout.axes), layout.shape)), "mesh 'simulated'", "")
    yield from register_mesh(mesh, card)
    attempts = []
    for axes in FAMILIES:
        ranks = layout.block_of(rank, *axes)
        what = Fingerprint(rank, {"backend": "nccl"}, f"group {', '.join(axes)} of mesh 'simulated'", "")
        name = f"{mesh}/{'-'.join(axes)}.{ranks[0]}/meeting.0"
        attempts.append(_SimulatedAttempt(name, ranks, what, f"{name}/options/refused", f"{mesh}/refused"))
    yield from _participant(rank, attempts, pace).meet()


def _participant(rank: int, attempts: Sequence[ConnectAttempt], pace: float) -> Participant:
    suspicion = SUSPICION * BEAT * pace
    who = f"process {rank + 1000} on host{rank // 8}"
    return Participant(rank, attempts, 1, "train.py:360", who, deadline=3600.0, suspicion=suspicion, pace=pace)


class _SimulatedAttempt(ConnectAttempt):
    """A connect attempt that reads the arrivals from the simulated store, which parses no texts."""

    def _call_roll(self) -> StoreProtocol[None]:
        came: set[int] = yield Read(f"{self.name}/came")
        missing = (rank for rank in self.ranks if rank not in came)
        self.missing = tuple(itertools.islice(missing, MOST_ASKED + 1))
        if not self.missing:
            yield from self.decide(MADE)


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
