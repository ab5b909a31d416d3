"""Ranks on a simulated clock: detection times to the millisecond, independent of the load of this machine.

Each caller runs its rounds in a thread of its own, and only one of them runs at a time. Every store
operation takes ``ANSWER`` seconds, every pause its own time, and each rank sends a heartbeat once a second until it
dies.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pgmesh.connect.group_rounds import ConnectJudge, GroupRound
from pgmesh.connect.rounds import Rounds
from pgmesh.errors import MismatchError, PgmeshError
from pgmesh.groups.naming import Fingerprint
from pgmesh.liveness.operations import Operation, Read, perform
from pgmesh.liveness.statuses import PendingConnect, RankStatus, Statuses, status_key
from tests.support.board import MemoryStore
from tests.support.simulated_clock import SimulatedClock

ANSWER = 0.0005
"""Seconds that a store operation takes."""

HEARTBEAT, H = 1.0, 5.0
"""Seconds between two heartbeats, and of silence until a rank is lost, at a pace of 1."""


class Died(BaseException):
    """The process of a caller is dead."""


@dataclass(eq=False)
class Caller:
    """One process that calls connect once. It is the ``Client`` of its call.

    Args:
        rank: its rank, which another process may have too.
        groups: the ranks of each group that it connects.
        arrives: time of its call. Default: never.
        dies: time of its death.
        phase: time of its first heartbeat after 0.
        silent: it sends no heartbeats.
        variant, mesh: a field of the fingerprints of its groups and of the mesh.
        deadline: timeout of its call.
        process: description of its process.
    """

    rank: int
    groups: Sequence[tuple[int, ...]] = ()
    arrives: float = math.inf
    dies: float = math.inf
    phase: float = 0.0
    silent: bool = False
    variant: Any = 0
    mesh: Any = 0
    deadline: float = 30.0
    process: str = ""
    finished_at: float = math.nan  # end of its call
    outcomes: list[PgmeshError | None] = field(default_factory=list)  # of each of its groups
    warned_at: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    done: list[tuple[float, Operation]] = field(default_factory=list)
    clock: Clock = field(init=False)

    def live(self) -> None:
        with contextlib.suppress(Died):
            self._call()
            self.finished_at = self.clock.now

    def _call(self) -> None:
        """Its call, in the steps of ``connecting.py``."""
        keys = [f"m/group-{'-'.join(map(str, ranks))}" for ranks in self.groups]
        rounds = [
            GroupRound(key, ranks, key, "mesh 'm'", [Fingerprint(self.rank, {"means": self.variant}, key, "Fix it.")])
            for key, ranks in zip(keys, self.groups)
        ]
        judge = ConnectJudge(
            self.rank,
            self,
            call_site="train.py:3",
            process=self.process or f"process {self.rank}/0",
            deadline=self.deadline,
            statuses=Statuses(H * self.clock.pace, self.now),
            mesh=Fingerprint(self.rank, {"shape": self.mesh}, "mesh 'm'", "Fix it."),
            mesh_key="m",
            pace=self.clock.pace,
            warn=self._warn,
        )
        try:
            Rounds(rounds, judge).run()
        except MismatchError as error:
            self.outcomes = [error] * len(rounds)
        else:
            self.outcomes = [each.decision.error() if each.decision else None for each in rounds]

    def _warn(self, text: str) -> None:
        self.warned_at.append(self.clock.now)
        self.warnings.append(text)

    # -- the client -----------------------------------------------------------------------------------------------

    def run(self, *operations: Operation) -> list[Any]:
        answers = []
        for operation in operations:
            self.sleep(ANSWER)
            self.done.append((self.now(), operation))
            answers.append(self.clock.perform(operation))
        return answers

    def now(self) -> float:
        return self.clock.now - self.arrives

    def sleep(self, seconds: float) -> None:
        self.clock.pause(seconds)
        if self.clock.now >= self.dies:
            raise Died

    def set_pending(self, pending: tuple[PendingConnect, ...]) -> None:
        self.clock.values[status_key(self.rank)] = RankStatus(self.rank, pending=pending).pack().encode()


class Clock(SimulatedClock):
    """The time, the store, and all callers."""

    def __init__(self, *callers: Caller, pace: float = 1.0) -> None:
        super().__init__()
        self.callers, self.pace = callers, pace
        self.values = {
            status_key(each.rank): RankStatus(each.rank).pack().encode() for each in callers if not each.silent
        }
        self._store = MemoryStore(self.values)
        for caller in callers:
            caller.clock = self
            if caller.arrives < caller.dies:
                self.start(caller.arrives, caller.live)

    def perform(self, operation: Operation) -> Any:
        return self._read(operation.key) if isinstance(operation, Read) else perform(self._store, operation)

    def _read(self, key: str) -> bytes | None:
        text = self.values.get(key)
        status = RankStatus.unpack(int(key.rpartition("/")[2]), text) if key.startswith("pgmesh/status/") else None
        if status is None:
            return text
        publisher = next(each for each in self.callers if each.rank == status.rank)
        heartbeats = (min(self.now, publisher.dies) / self.pace - publisher.phase) // HEARTBEAT
        return replace(status, heartbeat=max(0, int(heartbeats))).pack().encode()
