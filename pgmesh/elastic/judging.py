"""The decisions of ``shrink`` and ``stand_by``: who is lost, and the mesh that replaces the one that lost them.

The ranks of a mesh decide in a round, as described in ``rendezvous/rounds.py``. A mesh is replaced once; until then its
ranks may try several times. If an attempt has failed before a rank arrives, the rank goes on to the next one, or raises
the error if the arguments differed. If it has succeeded, the mesh was replaced without this rank. The first rank that
finds each member either arrived or lost decides on the new mesh. A rank whose deadline passes decides that the attempt
failed. There is no fixed window: a member that lives is waited for, and one whose process has ended is not.

Ranks that stand by arrive too, and leave the decision to those that call ``shrink``. They only look, every few seconds,
whether any member is left that could call it. A member that also stands by cannot.

Arrivals are deleted once a rank knows the decision. That stays in the store as long as the world, for ranks that were
taken for lost and come back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pgmesh._util.formatting import name_ranks
from pgmesh.elastic.records import Arrival, Outcome, Request
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Append, Delete, Read
from pgmesh.rendezvous.records import error_text, foreign_value
from pgmesh.rendezvous.rounds import Client, Judge, Round
from pgmesh.rendezvous.statuses import Statuses

MeshRound = Round[Outcome]


def standing_by(label: str) -> str:
    """The activity in the status of a rank that stands by."""
    return f"standing by for {label}"


@dataclass(frozen=True)
class View:
    """What one look finds.

    Args:
        arrivals: by rank, the last one.
        waiting: the members that have neither called ``shrink`` nor are lost.
        lost: the members that are lost, each with the reason.
        ready: the spares that have arrived, in the order of the request.
        coming: the spares that may still arrive.
        gone: the lost members and spares, each with the reason.
    """

    arrivals: Mapping[int, Arrival] = field(default_factory=dict)
    waiting: Sequence[int] = ()
    lost: dict[int, str] = field(default_factory=dict)
    ready: Sequence[int] = ()
    coming: Sequence[int] = ()
    gone: Mapping[int, str] = field(default_factory=dict)


@dataclass
class SurvivorJudge(Judge[MeshRound, Outcome]):
    """One rank's part in the decision on a mesh's survivors. Subclasses decide for a member and for a spare.

    Args:
        label: the mesh in messages.
        members: its ranks.
        rank: this rank.
        process: a word that no other process of this rank has.
        client: the store and the clock.
        deadline: seconds from the start of the call.
        statuses: the statuses of the other ranks.
        lost_after: seconds without a heartbeat after which a rank is lost; None for the default.
        warn: called with text for the log.
        came_late: the mesh was replaced before this call.
    """

    label: str
    members: Sequence[int]
    rank: int
    process: str
    client: Client
    deadline: float
    statuses: Statuses
    lost_after: float | None = None
    warn: Callable[[str], None] = field(default=lambda text: None)
    came_late: bool = field(default=False, init=False)

    call = ""
    """The call of ``shrink`` with its arguments, as text; "" for a rank that stands by."""

    def missed(self, outcome: Outcome) -> bool:
        """True if this process stands by and came too late, or if another process of its rank was counted."""
        return False

    def goes_on_after(self, outcome: Outcome) -> bool:
        """True if this rank goes on to the next attempt after an error; otherwise its call ends."""
        raise NotImplementedError

    # -- the round ------------------------------------------------------------------------------------------------

    def arrival(self, each: MeshRound) -> tuple[Append]:
        arrival = Arrival(self.rank, self.process, self.call)
        return (Append(each.arrivals_key, f"{arrival.pack()}\n"),)

    def learn(self, each: MeshRound, text: bytes) -> Outcome:
        self.client.run(Delete((each.arrivals_key,)))  # which are not needed any more
        return Outcome.unpack(each.decision_key, text)

    def skips(self, each: MeshRound, outcome: Outcome, *, sent_before: bool) -> bool:
        self.came_late = not outcome.failed
        if self.came_late or (outcome.error == "mismatch" and self.call):
            return False  # of a mismatch, this rank may be the one whose arguments differ
        if outcome.error not in ("left", "over"):
            self.warn(f"an earlier attempt failed before rank {self.rank} arrived: {outcome.failed}")
        return True

    def tries_again(self, each: MeshRound) -> bool:
        outcome = each.decision
        return outcome is not None and bool(outcome.failed) and self.goes_on_after(outcome)

    def stopped(self, each: MeshRound, error: BaseException) -> Outcome:
        return Outcome(failed=f"rank {self.rank} stopped: {error_text(error)}", error="left")

    def judge(self, rounds: Sequence[MeshRound], *, late: bool) -> Iterator[tuple[MeshRound, Outcome]]:
        for each in rounds:
            outcome = self.look(each, late=late)
            if outcome is not None:
                yield each, outcome

    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        """The decision that follows from the arrivals and the statuses; None if a rank is waited for.

        Args:
            late: the deadline has passed, so a decision is due.
        """
        raise NotImplementedError

    def failure(self, problem: str, error: str) -> Outcome:
        """The decision that the attempt failed."""
        return Outcome(failed=f"{self.label}: {problem}", error=error)

    # -- other ranks ----------------------------------------------------------------------------------------------

    def lost(self, ranks: Sequence[int], *, all_ended: bool = False) -> dict[int, str]:
        """The lost ones among some ranks, each with the reason.

        Args:
            all_ended: ask all listeners, for a message; otherwise stop at the first process that still runs.
        """
        heard = {**self.statuses.heard}
        self.statuses.read(self.client.run, ranks)
        lost = self.statuses.lost(ranks, self.lost_after)
        unknown = [rank for rank in itertools.takewhile(lambda rank: self.asks(rank, heard), ranks) if rank not in lost]
        self.statuses.find_ended(self.client.run, unknown, all_of_them=all_ended)
        return lost | self.statuses.lost(unknown, self.lost_after)

    def asks(self, rank: int, heard: Mapping[int, object]) -> bool:
        """True to ask the listener of a rank whether its process has ended.

        Args:
            heard: by rank, its heartbeat before this look.
        """
        return True


@dataclass
class ShrinkJudge(SurvivorJudge):
    """Decides for a rank that calls ``shrink``.

    Args:
        request: the arguments of ``shrink``.
        check: returns why there can be no mesh after a decision; "" if there can.
        options: the configured options of the mesh, for the mesh that replaces it.
    """

    request: Request = field(kw_only=True)
    check: Callable[[Outcome], str] = field(kw_only=True)
    options: Sequence[object] = field(default=(), kw_only=True)
    _asked_since: float = field(default=math.inf, init=False)  # the first look, on the clock of the statuses
    _turn: int = field(default=0, init=False)  # 0 for the first ranks that arrived, which look most often, then 1, ...
    _waits_for: str = field(default="", init=False)

    @property
    def call(self) -> str:  # type: ignore[override]
        return str(self.request)

    def goes_on_after(self, outcome: Outcome) -> bool:
        """True after "left", before the deadline, and after "over" also at the deadline.

        A rank that stands by took this one for lost then. "No rank is left" is not true, and in the next attempt this
        member says what it waited for.
        """
        return outcome.error == "over" or (outcome.error == "left" and self.client.now() < self.deadline)

    def period(self) -> float:
        return timing.TIMING.inspection * (1 + self._turn)

    def waits_for(self, rounds: Sequence[MeshRound]) -> str:
        return self._waits_for

    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        self._waits_for = ""
        (text,) = self.client.run(Read(each.arrivals_key))
        arrivals: dict[int, Arrival] = {}  # by rank, of its last process
        for line in (text or b"").splitlines():
            arrival = Arrival.unpack(line)
            if arrival is None:
                return self.failure(f"{foreign_value(each.arrivals_key, line)}.", "mismatch")
            arrivals[arrival.rank] = arrival
        calls = {rank: arrival.call for rank, arrival in arrivals.items() if arrival.call}
        if len({*calls.values()}) > 1:
            lines = "".join(f"\n  {call} on rank {rank}" for rank, call in sorted(calls.items()))
            return self.failure(f"the ranks passed different arguments:{lines}", "mismatch")
        if not calls:  # another rank knows the decision, and has deleted the arrivals
            return self.failure("the arrivals were deleted", "left") if late else None
        absent = [rank for rank in dict.fromkeys((*self.members, *self.request.spares)) if rank not in arrivals]
        if not self._looks_at(absent, calls) and not late:
            return None
        self._asked_since = min(self._asked_since, self.statuses.now())
        view = self._view(arrivals, calls, self.lost(absent, all_ended=late))
        if not view.waiting and (len(view.ready) >= len(view.lost) or late or not view.coming):
            return self.success(view)
        return self._wait_on(view, late=late)

    def _looks_at(self, absent: Sequence[int], calls: Collection[int]) -> bool:
        """True if this rank looks at the statuses of absent ranks now. If they are many, ranks take turns."""
        position = next((i for i, rank in enumerate(calls) if rank == self.rank), 0)
        self._turn = position // timing.LIMITS.statuses
        return len(absent) <= timing.LIMITS.statuses or self.client.now() >= self._turn * timing.TIMING.inspection

    def _view(self, arrivals: Mapping[int, Arrival], calls: Collection[int], gone: dict[int, str]) -> View:
        """Who is waited for, who is lost, and which spares there are.

        Args:
            calls: the ranks that have called ``shrink``. The others among the arrivals stand by.
            gone: the absent ranks that are lost.
        """
        members, spares = {*self.members}, self.request.spares
        waiting = [rank for rank in self.members if rank not in arrivals and rank not in gone]
        lost = {rank: gone[rank] for rank in self.members if rank in gone}
        # A member that stands by is a new process in the place of the lost one.
        new = [rank for rank in self.members if rank in arrivals and rank not in calls]
        lost |= {rank: f"rank {rank} stands by, as a new process does" for rank in new}
        ready = [rank for rank in spares if rank in arrivals and (rank not in members or rank not in calls)]
        while not waiting and (ended := self.lost(ready[: len(lost)], all_ended=True)):  # since they arrived
            gone, ready = gone | ended, [rank for rank in ready if rank not in ended]
        # Without an axis there is no mesh without spares, so new processes in the places of ended ones are waited for.
        coming = [rank for rank in spares if (self.request.axis is None if rank in gone else rank not in arrivals)]
        return View(arrivals, waiting, lost, ready, coming, gone)

    def _wait_on(self, view: View, *, late: bool) -> Outcome | None:
        """The failure at the deadline; before it None, and a text for the log."""
        if view.waiting:
            what = f"{name_ranks(view.waiting)} did not call {self.request}"
        else:
            what = f"no spare came of {name_ranks(view.coming)}"
        missing = (view.waiting or view.coming)[:8]
        details = "".join(f"\n  {self.statuses.describe(rank, self.lost_after)}" for rank in missing)
        details += "".join(f"\n  lost: {why}" for why in view.lost.values())
        if late:
            return self.failure(f"{what} in {self.deadline:g} s.{details}", "missing")
        self._waits_for = f"{self.label}: {what} so far.{details}"
        return None

    def lost(self, ranks: Sequence[int], *, all_ended: bool = False) -> dict[int, str]:
        """As for others, and ranks that have published no status for as long as a silent one is waited for."""
        lost = super().lost(ranks, all_ended=all_ended)
        seconds = self.statuses.now() - self._asked_since
        if seconds >= self.statuses.limit(self.lost_after):
            none = [rank for rank in ranks if self.statuses.text(rank) is None]
            lost |= {rank: f"rank {rank} has published no status in {int(seconds)} s" for rank in none}
        return lost

    def success(self, view: View) -> Outcome:
        """The decision on the new mesh, or on a failure if too many ranks are lost."""
        lost = view.lost
        # A new process goes to the place of the old one, and the other spares to the other places in order.
        replaced = {rank: rank for rank in view.ready if rank in lost}
        others = (rank for rank in view.ready if rank not in replaced)
        replaced |= zip((rank for rank in lost if rank not in replaced), others)
        processes = tuple(view.arrivals[rank].process for rank in replaced.values())
        outcome = Outcome(
            lost=lost, replaced=replaced, axis=self.request.axis, processes=processes, options=tuple(self.options)
        )
        problem = self.check(outcome)
        if len(outcome.pack()) > timing.LIMITS.record_chars:
            problem = f"a decision on {len(lost)} lost ranks and {len(replaced)} spares does not fit into one record"
        reasons = "".join(f"\n  {why}" for why in {**lost, **view.gone}.values())
        return self.failure(f"{problem}{reasons}", "missing") if problem else outcome


@dataclass
class StandByJudge(SurvivorJudge):
    """Decides for a rank that stands by: only that no member is left. There may be many spares, waiting for days."""

    @property
    def shortest_pause(self) -> float:  # type: ignore[override]
        return timing.TIMING.inspection

    def period(self) -> float:
        return timing.TIMING.missed_heartbeats * timing.TIMING.heartbeat

    def missed(self, outcome: Outcome) -> bool:
        survives = self.rank in self.members and self.rank not in outcome.lost
        rank_is_in = survives or self.rank in outcome.replaced.values()
        return self.process not in outcome.processes and (self.came_late or rank_is_in)

    def goes_on_after(self, outcome: Outcome) -> bool:
        """True unless no member is left, before the deadline."""
        return outcome.error != "over" and self.client.now() < self.deadline

    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        """The decision that no member is left; None while one of them may call ``shrink``."""
        if late:
            return self.failure(f"no rank called shrink in {self.deadline:g} s", "left")
        others = [rank for rank in self.members if rank != self.rank]
        lost: dict[int, str] = {}
        for first in range(0, len(others), timing.LIMITS.statuses):
            ranks = others[first : first + timing.LIMITS.statuses]
            lost |= self.lost(ranks)
            for status in filter(None, map(self.statuses.get, ranks)):
                if standing_by(self.label) in status.activity:
                    lost.setdefault(status.rank, f"rank {status.rank} stands by too")
            if len(lost) < first + len(ranks):
                return None
        reasons = "".join(f"\n  {why}" for why in lost.values())
        return self.failure(f"no other rank of it is left, so none can call shrink.{reasons}", "over")

    def asks(self, rank: int, heard: Mapping[int, object]) -> bool:
        """True unless the rank has sent a heartbeat since the last look."""
        now = self.statuses.heard.get(rank)
        return heard.get(rank, now) == now
