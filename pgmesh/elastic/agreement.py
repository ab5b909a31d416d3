"""The protocol by which the survivors of a mesh agree on who is lost, and on the mesh that replaces it.

It is straight-line code in the caller's thread over a ``Client``, as the protocol of ``connect`` is, so the same code
runs on the world's store and under a model checker.

A mesh is replaced once. Until then its ranks may try several times. Each attempt has a number and two store keys:

    <mesh>/shrink/<number>/arrivals   a record of each rank that arrived, deleted once they know the decision
    <mesh>/shrink/<number>/decision   the outcome, the same for all ranks. The first rank to write it decides

Attempts are numbered from 0. In one batch a rank reads the decision of an attempt and arrives at it. If that attempt
has failed already, the rank goes on to the next one, or raises the error if the arguments differed. If it has
succeeded, the mesh was replaced without this rank. The first rank that finds each member either arrived or lost decides
on the new mesh. A rank whose deadline passes decides that the attempt failed. There is no fixed window: a member that
lives is waited for, and one whose process has ended is not.

Ranks that stand by arrive too, and leave the decision to those that call ``shrink``. They only look, every few seconds,
whether any member is left that could call it. A member that also stands by cannot.

The decision stays in the store as long as the world, for ranks that were taken for lost and come back.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pgmesh._util.formatting import name_ranks
from pgmesh.elastic.records import Arrival, Outcome, Request
from pgmesh.errors import WorldError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Append, CompareSet, Delete, Read
from pgmesh.rendezvous.protocol import Client, Waiting, pauses
from pgmesh.rendezvous.records import error_text, foreign_value
from pgmesh.rendezvous.statuses import Statuses


def standing_by(label: str) -> str:
    """The activity in the status of a rank that stands by."""
    return f"standing by for {label}"


@dataclass(frozen=True)
class View:
    """What one inspection finds.

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
class Agreement:
    """One rank's part in the agreement on a mesh's survivors.

    Args:
        key: prefix of the store keys of the mesh.
        label: the mesh in messages.
        members: its ranks.
        rank: this rank.
        process: a word that no other process of this rank has.
        request: the arguments of ``shrink``; None for a rank that stands by.
        client: the store and the clock.
        deadline: seconds from the start of the call.
        statuses: the statuses of the other ranks.
        check: returns why there can be no mesh after a decision; "" if there can.
        warn: called with text for the log.
        options: the configured options of the mesh, for the mesh that replaces it.
        lost_after: seconds without a heartbeat after which a rank is lost; None for the default.
        number: number of the current attempt.
        came_late: the mesh was replaced before this call.
        waiting: when this rank acts next.
        outcomes: by decision key, the decisions that this call has acted on.
    """

    key: str
    label: str
    members: Sequence[int]
    rank: int
    process: str
    request: Request | None
    client: Client
    deadline: float
    statuses: Statuses
    check: Callable[[Outcome], str]
    warn: Callable[[str], None] = field(default=lambda text: None)
    options: Sequence[object] = ()
    lost_after: float | None = None
    number: int = 0
    came_late: bool = False
    waiting: Waiting = field(init=False)
    outcomes: dict[str, Outcome] = field(default_factory=dict, init=False)
    _asked_since: float = math.inf  # the first inspection after a rank had called shrink, on the clock of the statuses
    _turn: int = 0  # 0 for the first ranks that arrived, which inspect most often, 1 for the next, and so on

    @property
    def decision_key(self) -> str:
        return f"{self.key}/shrink/{self.number}/decision"

    @property
    def arrivals_key(self) -> str:
        return f"{self.key}/shrink/{self.number}/arrivals"

    def agree(self) -> Outcome:
        """Arrive at the first attempt without a decision, and return its decision.

        If the mesh was replaced before this rank arrived, return that decision. A rank that stands by goes on to the
        next attempt after a failed one, unless no member is left.

        Raises:
            WorldError: the store has failed.
        """
        while True:
            try:
                outcome = self.outcomes[self.decision_key] = self._attempt()
            except WorldError:
                raise
            except BaseException as error:  # the others need not wait for this rank
                with contextlib.suppress(WorldError):
                    self._decide(Outcome(failed=f"rank {self.rank} stopped: {error_text(error)}", error="left"))
                raise
            if not outcome.failed or not self.goes_on_after(outcome):
                return outcome
            self.number += 1

    def goes_on_after(self, outcome: Outcome) -> bool:
        """True if this rank goes on to the next attempt after an error; otherwise its call ends.

        A member goes on after "over" also at its deadline: a rank that stands by took it for lost. "No rank is left" is
        not true then, and in the next attempt this member says what it waited for.
        """
        if self.request is not None and outcome.error == "over":
            return True
        errors = ("left", "missing", "mismatch") if self.request is None else ("left",)
        return outcome.error in errors and self.client.now() < self.deadline

    def missed(self, outcome: Outcome) -> bool:
        """True if this process stands by, and came after this decision or is not the process of its rank in it."""
        survives = self.rank in self.members and self.rank not in outcome.lost
        rank_is_in = survives or self.rank in outcome.replaced.values()
        return self.request is None and self.process not in outcome.processes and (self.came_late or rank_is_in)

    def _attempt(self) -> Outcome:
        """Arrive at the current attempt, or at the next one if it has failed already, and return the decision."""
        while (earlier := self._arrive()) is not None:
            if not earlier.failed:
                self.came_late = True
                return earlier
            if earlier.error == "mismatch" and self.request is not None:
                return earlier  # this rank may be the one whose arguments differ
            if earlier.error not in ("left", "over"):
                self.warn(f"an earlier attempt failed before rank {self.rank} arrived: {earlier.failed}")
            self.number += 1
        first = self.client.now() + timing.TIMING.first_inspection
        self.waiting = Waiting(first, min(self.deadline / 3, timing.TIMING.stragglers))
        for pause in pauses():
            if (outcome := self._look()) is not None:
                return outcome
            # There may be many spares, and they wait for days.
            pause = pause if self.request is not None else timing.TIMING.inspection
            self.client.sleep(min(pause, max(0.0, self.deadline - self.client.now())))
        raise AssertionError("pauses never end")

    def _look(self) -> Outcome | None:
        """Read the decision, and inspect if it is time; None while the attempt is undecided."""
        (text,) = self.client.run(Read(self.decision_key))
        if text is not None:
            return self._learn(text)
        now = self.client.now()
        late = now >= self.deadline
        if not late and now < self.waiting.inspection:
            return None
        if self.request is None:
            outcome = self._look_for_members(late=late)
            self.waiting.inspection = now + timing.TIMING.missed_heartbeats * timing.TIMING.heartbeat
        else:
            outcome = self._inspect(self.request, late=late, warn=self.waiting.warns(now))
            self.waiting.inspection = now + timing.TIMING.inspection * (1 + self._turn)
        return None if outcome is None else self._decide(outcome)

    def _arrive(self) -> Outcome | None:
        """Arrive at the current attempt; return its decision if it has one already."""
        arrival = Arrival(self.rank, self.process, str(self.request or ""))
        earlier, _ = self.client.run(Read(self.decision_key), Append(self.arrivals_key, f"{arrival.pack()}\n"))
        return None if earlier is None else self._learn(earlier)

    def _decide(self, outcome: Outcome) -> Outcome:
        """Publish a decision, or take the one that is already there."""
        (text,) = self.client.run(CompareSet(self.decision_key, outcome.pack()))
        return self._learn(text)

    def _learn(self, text: bytes) -> Outcome:
        """Decode the decision of the current attempt, and delete its arrivals, which are not needed any more."""
        self.client.run(Delete((self.arrivals_key,)))
        return Outcome.unpack(self.decision_key, text)

    def _inspect(self, request: Request, *, late: bool, warn: bool) -> Outcome | None:
        """The decision that follows from the arrivals and the statuses; None if a rank is waited for.

        Args:
            late: the deadline has passed, so a decision is due.
            warn: log what is waited for.
        """
        (text,) = self.client.run(Read(self.arrivals_key))
        arrivals: dict[int, Arrival] = {}  # by rank, of its last process
        for line in (text or b"").splitlines():
            arrival = Arrival.unpack(line)
            if arrival is None:
                return self._failure(f"{foreign_value(self.arrivals_key, line)}.", "mismatch")
            arrivals[arrival.rank] = arrival
        calls = {rank: arrival.call for rank, arrival in arrivals.items() if arrival.call}
        if len({*calls.values()}) > 1:
            lines = "".join(f"\n  {call} on rank {rank}" for rank, call in sorted(calls.items()))
            return self._failure(f"the ranks passed different arguments:{lines}", "mismatch")
        if not calls:  # another rank knows the decision, and has deleted the arrivals
            return self._failure("the arrivals were deleted", "left") if late else None
        absent = [rank for rank in dict.fromkeys((*self.members, *request.spares)) if rank not in arrivals]
        if not self._looks_at(absent, calls) and not late:
            return None
        view = self._view(request, arrivals, calls, self._find_gone(absent, late=late))
        if not view.waiting and (len(view.ready) >= len(view.lost) or late or not view.coming):
            return self._success(request, view)
        return self._wait_on(request, view, late=late, warn=warn)

    def _looks_at(self, absent: Sequence[int], calls: Collection[int]) -> bool:
        """True if this rank looks at the statuses of absent ranks now. Of many, those that called first look first."""
        position = next((i for i, rank in enumerate(calls) if rank == self.rank), 0)
        self._turn = position // timing.LIMITS.statuses
        return len(absent) <= timing.LIMITS.statuses or self.client.now() >= self._turn * timing.TIMING.inspection

    def _find_gone(self, absent: Sequence[int], *, late: bool) -> dict[int, str]:
        """The lost ones among the absent ranks, once a rank has called ``shrink``."""
        self._asked_since = min(self._asked_since, self.statuses.now())
        return self._lost(absent, all_ended=late)

    def _view(
        self, request: Request, arrivals: Mapping[int, Arrival], calls: Collection[int], gone: dict[int, str]
    ) -> View:
        """Who is waited for, who is lost, and which spares there are.

        Args:
            calls: the ranks that have called ``shrink``. The others among the arrivals stand by.
            gone: the absent ranks that are lost.
        """
        members = {*self.members}
        waiting = [rank for rank in self.members if rank not in arrivals and rank not in gone]
        lost = {rank: gone[rank] for rank in self.members if rank in gone}
        # A member that stands by is a new process in the place of the lost one.
        new = [rank for rank in self.members if rank in arrivals and rank not in calls]
        lost |= {rank: f"rank {rank} stands by, as a new process does" for rank in new}
        ready = [rank for rank in request.spares if rank in arrivals and (rank not in members or rank not in calls)]
        while not waiting and (ended := self._lost(ready[: len(lost)], all_ended=True)):  # since they arrived
            gone, ready = gone | ended, [rank for rank in ready if rank not in ended]
        # Without an axis there is no mesh without spares, so new processes in the places of ended ones are waited for.
        coming = [rank for rank in request.spares if (request.axis is None if rank in gone else rank not in arrivals)]
        return View(arrivals, waiting, lost, ready, coming, gone)

    def _wait_on(self, request: Request, view: View, *, late: bool, warn: bool) -> Outcome | None:
        """The failure at the deadline. Before it None, and a warning if one is due."""
        if view.waiting:
            what = f"{name_ranks(view.waiting)} did not call {request}"
        else:
            what = f"no spare came of {name_ranks(view.coming)}"
        missing = (view.waiting or view.coming)[:8]
        details = "".join(f"\n  {self.statuses.describe(rank, self.lost_after)}" for rank in missing)
        details += "".join(f"\n  lost: {why}" for why in view.lost.values())
        if late:
            return self._failure(f"{what} in {self.deadline:g} s.{details}", "missing")
        if warn:
            self.warn(f"{self.label}: {what} so far.{details}")
        return None

    def _look_for_members(self, *, late: bool) -> Outcome | None:
        """The decision that no member is left, on a rank that stands by; None while one of them may call ``shrink``."""
        if late:
            return self._failure(f"no rank called shrink in {self.deadline:g} s", "left")
        others = [rank for rank in self.members if rank != self.rank]
        lost: dict[int, str] = {}
        for first in range(0, len(others), timing.LIMITS.statuses):
            ranks = others[first : first + timing.LIMITS.statuses]
            lost |= self._lost(ranks)
            for status in filter(None, map(self.statuses.get, ranks)):
                if standing_by(self.label) in status.activity:
                    lost.setdefault(status.rank, f"rank {status.rank} stands by too")
            if len(lost) < first + len(ranks):
                return None
        reasons = "".join(f"\n  {why}" for why in lost.values())
        return self._failure(f"no other rank of it is left, so none can call shrink.{reasons}", "over")

    def _lost(self, ranks: Sequence[int], *, all_ended: bool = False) -> dict[int, str]:
        """The lost ones among some ranks, each with the reason.

        A rank that stands by asks no listener of a rank that has sent a heartbeat since its last look.

        Args:
            all_ended: ask all listeners, for a message; otherwise up to the first of a rank that is waited for.
        """
        heard = {**self.statuses.heard}
        self.statuses.read(self.client.run, ranks)
        now = self.statuses.heard
        lives = {rank for rank in ranks if self.request is None and heard.get(rank, now.get(rank)) != now.get(rank)}
        lost = self.statuses.lost(ranks, self.lost_after)
        unknown = [rank for rank in itertools.takewhile(lambda rank: rank not in lives, ranks) if rank not in lost]
        self.statuses.find_ended(self.client.run, unknown, all_of_them=all_ended)
        lost |= self.statuses.lost(unknown, self.lost_after)
        seconds = self.statuses.now() - self._asked_since
        if seconds >= self.statuses.limit(self.lost_after):
            none = [rank for rank in ranks if self.statuses.text(rank) is None]
            lost |= {rank: f"rank {rank} has published no status in {int(seconds)} s" for rank in none}
        return lost

    def _success(self, request: Request, view: View) -> Outcome:
        """The decision on the new mesh, or on a failure if too many ranks are lost."""
        lost = view.lost
        # A new process goes to the place of the old one, and the other spares to the other places in order.
        replaced = {rank: rank for rank in view.ready if rank in lost}
        others = (rank for rank in view.ready if rank not in replaced)
        replaced |= zip((rank for rank in lost if rank not in replaced), others)
        processes = tuple(view.arrivals[rank].process for rank in replaced.values())
        outcome = Outcome(
            lost=lost, replaced=replaced, axis=request.axis, processes=processes, options=tuple(self.options)
        )
        problem = self.check(outcome)
        if len(outcome.pack()) > timing.LIMITS.record_chars:
            problem = f"a decision on {len(lost)} lost ranks and {len(replaced)} spares does not fit into one record"
        reasons = "".join(f"\n  {why}" for why in {**lost, **view.gone}.values())
        return self._failure(f"{problem}{reasons}", "missing") if problem else outcome

    def _failure(self, problem: str, error: str) -> Outcome:
        return Outcome(failed=f"{self.label}: {problem}", error=error)
