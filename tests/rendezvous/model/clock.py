"""Ranks on a clock of their own: how soon each is told what, to the millisecond, whatever this machine is doing.

The protocol has neither clock nor store, so here it is given both. Every access to the store takes ``ANSWER`` seconds,
every pause as long as it asks for, and each rank beats once a second until it dies.
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
"""Seconds for which the store thinks."""

BEAT, H = 1.0, 5.0
"""Seconds between two beats, and of silence until a rank is lost, at a pace of 1."""


@dataclass
class Caller:
    """One process that calls connect once.

    Args:
        rank: the rank that it takes itself for.
        groups: the ranks of each group that it connects.
        comes: when it calls; never, unless given.
        dies: when it dies.
        phase: when it beats first, after 0.
        silent: whether it never beats.
        alone: whether no other thread of its process could still come somewhere.
        means: what it means by its groups, and by the mesh.
        deadline: of its call.
        who: what tells its process from others.
    """

    rank: int
    groups: Sequence[tuple[int, ...]] = ()
    comes: float = math.inf
    dies: float = math.inf
    phase: float = 0.0
    silent: bool = False
    alone: bool = True
    means: Any = 0
    mesh: Any = 0
    deadline: float = 30.0
    who: str = ""
    told_at: float = math.nan  # when its call ended
    outcomes: list[PgmeshError | None] = field(default_factory=list)  # of each of its groups
    warned_at: list[float] = field(default_factory=list)
    done: list[tuple[float, Step]] = field(default_factory=list)

    def steps(self, pace: float, clock: Clock) -> Generator[Step, Any, None]:
        """Its call, as ``connecting.py`` makes it."""
        named = [f"group-{'-'.join(map(str, ranks))}" for ranks in self.groups]
        meetings = [
            ConnectAttempt(
                f"{name}/meeting.0",
                ranks,
                Fingerprint(self.rank, {"means": self.means}, name, "Mend it."),
                mesh="m/refused",
            )
            for name, ranks in zip(named, self.groups)
        ]
        party = Participant(
            self.rank,
            meetings,
            number=1,
            line="train.py:3",
            who=self.who or f"process {self.rank}",
            deadline=self.deadline,
            suspicion=H * pace,
            pace=pace,
            alone=self.alone,
            warn=lambda text: self.warned_at.append(clock.now),
        )
        try:
            yield from register_mesh("m", Fingerprint(self.rank, {"shape": self.mesh}, "mesh 'm'", "Mend it."))
        except MismatchError as error:
            yield from party.cancel(error)
            self.outcomes = [error] * len(meetings)
            return
        yield from party.meet()
        self.outcomes = [meeting.end.error() if meeting.end else None for meeting in meetings]


class Clock:
    """The time, the store, and all who call."""

    def __init__(self, *callers: Caller, pace: float = 1.0) -> None:
        self.now, self.callers, self.pace = 0.0, callers, pace
        self.held: dict[str, bytes] = {}
        self.counts: dict[str, int] = {}
        for caller in callers:
            if not caller.silent:
                self.held[status_key(caller.rank)] = RankStatus(caller.rank).pack().encode()

    def run(self) -> None:
        """Until all who call are told, or dead."""
        count = itertools.count()
        due: list[tuple[float, int, Caller, Generator[Step, Any, None], Step | None]] = []
        for caller in self.callers:
            if caller.comes < caller.dies:
                heapq.heappush(due, (caller.comes, next(count), caller, caller.steps(self.pace, self), None))
        while due:
            self.now, _, caller, steps, step = heapq.heappop(due)
            if self.now >= caller.dies:
                continue
            try:
                step = steps.send(None if step is None else self._perform(caller, step))
                while isinstance(step, Ready):
                    step = steps.send(None)
            except StopIteration:
                caller.told_at = self.now
                continue
            takes = step.seconds if isinstance(step, Pause) else ANSWER
            heapq.heappush(due, (self.now + takes, next(count), caller, steps, step))

    def _perform(self, caller: Caller, step: Step) -> Any:
        caller.done.append((self.now - caller.comes, step))
        if isinstance(step, Pause):
            return self.now - caller.comes
        if isinstance(step, SetStatus):
            self.held[status_key(caller.rank)] = RankStatus(caller.rank, waits=step.waits).pack().encode()
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
        said = RankStatus.unpack(int(key.rpartition("/")[2]), text) if key.startswith("pgmesh/told/") else None
        if said is None:
            return text
        teller = next(each for each in self.callers if each.rank == said.rank)
        beats = (min(self.now, teller.dies) / self.pace - teller.phase) // BEAT
        return replace(said, beat=max(0, int(beats))).pack().encode()
