"""Ranks on a simulated clock: detection times to the millisecond, independent of the load of this machine.

The protocol has neither a clock nor a store, so this file provides both. Every store operation takes ``ANSWER``
seconds, every pause its own time, and each rank sends a heartbeat once a second until it dies.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pgmesh.errors import MismatchError, PgmeshError
from pgmesh.rendezvous.protocol import (
    Add,
    Append,
    CompareSet,
    ConnectAttempt,
    Delete,
    Fingerprint,
    Participant,
    Pause,
    RankStatus,
    Read,
    Ready,
    SetStatus,
    Step,
    register_mesh,
    status_key,
)

ANSWER = 0.0005
"""Seconds that a store operation takes."""

BEAT, H = 1.0, 5.0
"""Seconds between two heartbeats, and of silence until a rank is lost, at a pace of 1."""


@dataclass
class Caller:
    """One process that calls connect once.

    Args:
        rank: its rank, which another process may have too.
        groups: the ranks of each group that it connects.
        arrives: time of its call. Default: never.
        dies: time of its death.
        phase: time of its first heartbeat after 0.
        silent: it sends no heartbeats.
        single_threaded: no other thread of its process can connect a group.
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
    single_threaded: bool = True
    variant: Any = 0
    mesh: Any = 0
    deadline: float = 30.0
    process: str = ""
    finished_at: float = math.nan  # end of its call
    outcomes: list[PgmeshError | None] = field(default_factory=list)  # of each of its groups
    warned_at: list[float] = field(default_factory=list)
    done: list[tuple[float, Step]] = field(default_factory=list)

    def steps(self, pace: float, clock: Clock) -> Generator[Step, Any, None]:
        """Its call, in the steps of ``connecting.py``."""
        named = [f"group-{'-'.join(map(str, ranks))}" for ranks in self.groups]
        attempts = [
            ConnectAttempt(
                f"{name}/attempt.0",
                ranks,
                Fingerprint(self.rank, {"means": self.variant}, name, "Fix it."),
                mesh_mismatch_key="m/mismatch",
            )
            for name, ranks in zip(named, self.groups)
        ]
        participant = Participant(
            self.rank,
            attempts,
            number=1,
            call_site="train.py:3",
            process=self.process or f"process {self.rank}",
            deadline=self.deadline,
            lost_after=H * pace,
            pace=pace,
            single_threaded=self.single_threaded,
            warn=lambda text: self.warned_at.append(clock.now),
        )
        try:
            yield from register_mesh("m", Fingerprint(self.rank, {"shape": self.mesh}, "mesh 'm'", "Fix it."))
        except MismatchError as error:
            yield from participant.cancel(error)
            self.outcomes = [error] * len(attempts)
            return
        yield from participant.connect()
        self.outcomes = [attempt.decision.error() if attempt.decision else None for attempt in attempts]


class Clock:
    """The time, the store, and all callers."""

    def __init__(self, *callers: Caller, pace: float = 1.0) -> None:
        self.now, self.callers, self.pace = 0.0, callers, pace
        self.held: dict[str, bytes] = {}
        self.counts: dict[str, int] = {}
        for caller in callers:
            if not caller.silent:
                self.held[status_key(caller.rank)] = RankStatus(caller.rank).pack().encode()

    def run(self) -> None:
        """Run until all callers are done or dead."""
        count = itertools.count()
        due: list[tuple[float, int, Caller, Generator[Step, Any, None], Step | None]] = []
        for caller in self.callers:
            if caller.arrives < caller.dies:
                heapq.heappush(due, (caller.arrives, next(count), caller, caller.steps(self.pace, self), None))
        while due:
            self.now, _, caller, steps, step = heapq.heappop(due)
            if self.now >= caller.dies:
                continue
            try:
                step = steps.send(None if step is None else self._perform(caller, step))
                while isinstance(step, Ready):
                    step = steps.send(None)
            except StopIteration:
                caller.finished_at = self.now
                continue
            takes = step.seconds if isinstance(step, Pause) else ANSWER
            heapq.heappush(due, (self.now + takes, next(count), caller, steps, step))

    def _perform(self, caller: Caller, step: Step) -> Any:
        caller.done.append((self.now - caller.arrives, step))
        if isinstance(step, Pause):
            return self.now - caller.arrives
        if isinstance(step, SetStatus):
            self.held[status_key(caller.rank)] = RankStatus(caller.rank, pending=step.pending).pack().encode()
        elif isinstance(step, Append):
            self.held[step.key] = self.held.get(step.key, b"") + step.value.encode()
        elif isinstance(step, Add):
            self.counts[step.key] = self.counts.get(step.key, 0) + 1
            self.held[step.key] = b"%d" % self.counts[step.key]
            return self.counts[step.key]
        elif isinstance(step, CompareSet):
            return self.held.setdefault(step.key, step.value.encode())
        elif isinstance(step, Read):
            return self._read(step.key)
        elif isinstance(step, Delete):
            raise AssertionError("nothing is deleted here")
        return None

    def _read(self, key: str) -> bytes | None:
        text = self.held.get(key)
        status = RankStatus.unpack(int(key.rpartition("/")[2]), text) if key.startswith("pgmesh/status/") else None
        if status is None:
            return text
        publisher = next(each for each in self.callers if each.rank == status.rank)
        beats = (min(self.now, publisher.dies) / self.pace - publisher.phase) // BEAT
        return replace(status, heartbeat=max(0, int(beats))).pack().encode()
