"""The store operations of one agreement among many ranks: each rank is a thread, on one simulated clock and store."""

from __future__ import annotations

import functools
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from pgmesh.connect.rounds import Rounds
from pgmesh.elastic.judging import MeshRound
from pgmesh.elastic.records import Arrival, Outcome, Request
from pgmesh.elastic.shrink_judge import ShrinkJudge
from pgmesh.elastic.stand_by_judge import StandByJudge
from pgmesh.elastic.state import Generation
from pgmesh.layout import Layout
from pgmesh.liveness.operations import Append, Operation, Read, perform
from pgmesh.liveness.statuses import RankStatus, Statuses, status_key
from tests.support.board import MemoryStore
from tests.support.simulated_clock import SimulatedClock

OPERATION, CONNECTION = 1e-4, 2e-4
"""Seconds that a rank waits for an answer of the store, and for a connection to another rank."""


class Simulation:
    """A mesh along dp, its spares, and the operations of their agreement."""

    def __init__(self, members: int, spares: int, dead: set[int], spread: float, pace: float = 1.0) -> None:
        self.clock, self.values, self.counts = SimulatedClock(), dict[str, bytes](), Counter[str]()
        self.members, self.dead, self.pace = range(members), dead, pace
        self.request = Request("dp", tuple(range(members, members + spares)))
        self.outcomes: dict[int, tuple[Outcome, float]] = {}
        chance = random.Random(3)
        for rank in range(members + spares):
            self.values[status_key(rank)] = RankStatus(rank, 1, endpoint=("host", rank)).pack().encode()
            if rank not in dead:
                client = Client(self, chance.uniform(0.0, spread) if rank < members else 0.0)
                self.clock.start(client.start, functools.partial(self._run, rank, client))
        self.clock.run()

    def _run(self, rank: int, client: Client) -> None:
        common: dict[str, Any] = {
            "label": "mesh 'm'",
            "generation": Generation("m", Layout(dp=len(self.members))),
            "rank": rank,
            "process": f"1234567/{rank:08x}",
            "client": client,
        }
        judge: ShrinkJudge | StandByJudge = StandByJudge(**common)
        if rank in self.members:
            judge = ShrinkJudge(**common, request=self.request)
        each = MeshRound("pgmesh/m/shrink")
        Rounds([each], judge).run()
        assert each.decision is not None
        self.outcomes[rank] = each.decision, self.clock.now


class Client:
    """The store and the clock of one rank."""

    def __init__(self, simulation: Simulation, start: float) -> None:
        self.simulation, self.start, self.seconds = simulation, start, 60.0
        statuses = Statuses(5.0, self.now, self.has_ended)
        self.liveness = SimpleNamespace(statuses=statuses, pace=simulation.pace)

    def now(self) -> float:
        return self.simulation.clock.now - self.start

    def sleep(self, seconds: float) -> None:
        self.simulation.clock.pause(max(seconds, OPERATION))

    def set_pending(self, pending: object) -> None:
        assert not pending, "shrink connects nothing"

    def has_ended(self, status: RankStatus, seconds: float, wait: float) -> bool:
        self.simulation.counts["connections"] += 1
        self.simulation.clock.pause(CONNECTION)
        return status.rank in self.simulation.dead

    def run(self, *operations: Operation) -> list[Any]:
        answers = [self._perform(operation) for operation in operations]
        self.simulation.clock.pause(OPERATION * len(operations))
        return answers

    def _perform(self, operation: Operation) -> Any:
        values, counts = self.simulation.values, self.simulation.counts
        if isinstance(operation, Read):
            what = "statuses" if "/status/" in operation.key else operation.key.rpartition("/")[2]
            counts[f"reads of {what}"] += 1
            counts[f"bytes of {what}"] += len(values.get(operation.key, b""))
        counts["arrivals"] += isinstance(operation, Append)
        return perform(MemoryStore(values), operation)


@pytest.mark.parametrize(
    "dead", [{999}, pytest.param({*range(200, 264)}, marks=pytest.mark.long)], ids=["one is lost", "64 are lost"]
)
def test_shrink_among_1000_ranks_needs_few_operations(monkeypatch: pytest.MonkeyPatch, dead: set[int]):
    """The counts of docs/limits.md. Without limits, there are 470,000 reads of statuses, and as many connections."""
    for record in Arrival, RankStatus:
        monkeypatch.setattr(record, "unpack", functools.lru_cache(maxsize=None)(record.unpack))
    seen = Simulation(1000, 64, dead, spread=0.3)
    times = [when for _, when in seen.outcomes.values()]
    print(f"{max(times):.2f} s", dict(seen.counts))
    assert {(frozenset(outcome.lost), len(outcome.replaced)) for outcome, _ in seen.outcomes.values()} == {
        (frozenset(dead), len(dead))
    }
    assert len(times) == 1064 - len(dead)
    assert max(times) < 1.0
    counts = seen.counts
    assert counts["arrivals"] == len(times)
    assert counts["reads of arrivals"] < 1500
    assert counts["bytes of arrivals"] < 80e6
    assert counts["reads of statuses"] < 60_000
    assert counts["reads of decision"] < 20_000
    assert counts["connections"] < 500 + 128 * len(dead)
    assert [*seen.values.keys() - {status_key(rank) for rank in range(1064)}] == ["pgmesh/m/shrink/0/decision"]


def test_shrink_reads_less_often_in_large_world():
    """The members arrive within a minute."""
    usual, slow = (Simulation(8, 8, {7}, spread=50.0, pace=pace).counts for pace in (1.0, 8.0))
    for what in ("reads of decision", "reads of arrivals"):
        assert slow[what] < usual[what] / 4, what
