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

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pgmesh._util.formatting import name_ranks
from pgmesh.elastic.records import Arrival, Outcome, Request
from pgmesh.elastic.successor import successor
from pgmesh.errors import MissingRanksError
from pgmesh.layout import Layout
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Append, Delete, Read, Run
from pgmesh.rendezvous.records import error_text, foreign_value
from pgmesh.rendezvous.rounds import Client, Judge, Round
from pgmesh.rendezvous.statuses import Statuses

MeshRound = Round[Outcome]


def standing_by(label: str) -> str:
    """The activity in the status of a rank that stands by."""
    return f"standing by for {label}"


def find_lost(
    run: Run,
    statuses: Statuses,
    ranks: Sequence[int],
    lost_after: float | None,
    *,
    since: float = math.inf,
    asks: Callable[[int], bool] = lambda rank: True,
    all_ended: bool = False,
) -> dict[int, str]:
    """Read the statuses of some ranks, and ask the listeners of those that are not lost by their status.

    Args:
        run: performs operations on the store.
        since: the first such call, on the clock of the statuses. A rank that publishes no status is lost after the same
            time as a silent one. Default: it is not.
        asks: called with each rank once its status is read. The first False ends the asking.
        all_ended: ask all listeners, for a message; otherwise stop at the first process that still runs.

    Returns:
        The ranks that are lost, each with the reason.
    """
    statuses.read(run, ranks)
    lost = statuses.lost(ranks, lost_after)
    unknown = [rank for rank in itertools.takewhile(asks, ranks) if rank not in lost]
    statuses.find_ended(run, unknown, all_of_them=all_ended)
    lost |= statuses.lost(unknown, lost_after)
    seconds = statuses.now() - since
    if seconds >= statuses.limit(lost_after):
        without = [rank for rank in ranks if statuses.text(rank) is None]
        lost |= {rank: f"rank {rank} has published no status in {int(seconds)} s" for rank in without}
    return lost


@dataclass
class SurvivorJudge(Judge[MeshRound, Outcome]):
    """One rank's part in the decision on a mesh's survivors. Subclasses decide for a member and for a spare.

    Args:
        label: the mesh in messages.
        layout: its layout.
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
    layout: Layout
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

    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        """The decision that follows from the arrivals and the statuses; None if a rank is waited for.

        Args:
            late: the deadline has passed, so a decision is due.
        """
        raise NotImplementedError

    def failure(self, problem: str, error: str) -> Outcome:
        """The decision that the attempt failed."""
        return Outcome(failed=f"{self.label}: {problem}", error=error)

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


@dataclass(frozen=True)
class View:
    """The members and spares, as one look finds them.

    Args:
        gone: those that are lost, each with the reason.
        waiting: the members that have neither arrived nor are lost.
        lost: the members that are lost or have a new process, each with the reason.
        ready: by spare that has arrived, its process; in the order of the request.
        coming: the spares that may still arrive.
    """

    gone: dict[int, str]
    waiting: list[int]
    lost: dict[int, str]
    ready: dict[int, str]
    coming: list[int]


@dataclass
class ShrinkJudge(SurvivorJudge):
    """Decides for a rank that calls ``shrink``.

    Args:
        request: the arguments of ``shrink``.
        options: the configured options of the mesh, for the mesh that replaces it.
    """

    request: Request = field(kw_only=True)
    options: Sequence[object] = field(default=(), kw_only=True)
    _view: View | None = field(default=None, init=False)  # what the last look found
    _turn: int = field(default=0, init=False)  # 0 for the first ranks that arrived, which look most often, then 1, ...
    _asked_since: float = field(default=math.inf, init=False)  # the first look, on the clock of the statuses

    def __post_init__(self) -> None:
        self.call = str(self.request)

    def goes_on_after(self, outcome: Outcome) -> bool:
        """True after "left", before the deadline, and after "over" also at the deadline.

        A rank that stands by took this one for lost then. "No rank is left" is not true, and in the next attempt this
        member says what it waited for.
        """
        return outcome.error == "over" or (outcome.error == "left" and self.client.now() < self.deadline)

    def period(self) -> float:
        return timing.TIMING.inspection * (1 + self._turn)

    def waits_for(self, rounds: Sequence[MeshRound]) -> str:
        return "" if self._view is None else f"{self.label}: {self._describe(self._view, 'so far')}"

    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        self._view = None
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
        if self.rank not in arrivals:  # another rank knows the decision, and has deleted them
            return self.failure("the arrivals were deleted", "left") if late else None
        ranks = dict.fromkeys((*self.layout.ranks(), *self.request.spares))
        absent = [rank for rank in ranks if rank not in arrivals]
        self._turn = [*calls, self.rank].index(self.rank) // timing.LIMITS.statuses
        is_early = self.client.now() < self._turn * timing.TIMING.inspection
        if is_early and len(absent) > timing.LIMITS.statuses and not late:
            return None
        view = self._view = self._find_view(arrivals, absent, late=late)
        enough = len(view.ready) >= len(view.lost) or not view.coming
        if not view.waiting and (enough or late):
            return self.success(view)
        return self.failure(self._describe(view, f"in {self.deadline:g} s"), "missing") if late else None

    def _find_view(self, arrivals: Mapping[int, Arrival], absent: Sequence[int], *, late: bool) -> View:
        """Find out which absent ranks are lost, and which spares were lost after they had arrived."""
        self._asked_since = since = min(self._asked_since, self.statuses.now())
        find = functools.partial(find_lost, self.client.run, self.statuses, lost_after=self.lost_after, since=since)
        view = self._view_of(arrivals, find(absent, all_ended=late))
        while not view.waiting and (ended := find([*view.ready][: len(view.lost)], all_ended=True)):
            view = self._view_of(arrivals, view.gone | ended)
        return view

    def _view_of(self, arrivals: Mapping[int, Arrival], gone: dict[int, str]) -> View:
        """Who is waited for, who is lost, and which spares there are."""
        members, spares = self.layout.ranks(), self.request.spares
        absent = [rank for rank in members if rank not in arrivals]
        lost = {rank: gone[rank] for rank in absent if rank in gone}
        # A member that stands by is a new process in the place of the lost one.
        new = [rank for rank in members if rank in arrivals and not arrivals[rank].call]
        lost |= {rank: f"rank {rank} stands by, as a new process does" for rank in new}
        there = [rank for rank in spares if rank in arrivals and rank not in gone]
        # Without an axis there is no mesh without spares, so new processes in the places of ended ones are waited for.
        may_restart = self.request.axis is None
        return View(
            gone,
            waiting=[rank for rank in absent if rank not in gone],
            lost=lost,
            ready={rank: arrivals[rank].process for rank in there if rank in lost or rank not in self.layout},
            coming=[rank for rank in spares if (may_restart if rank in gone else rank not in arrivals)],
        )

    def _describe(self, view: View, when: str) -> str:
        """The ranks that are waited for, and the reason for each lost one."""
        if view.waiting:
            what = f"{name_ranks(view.waiting)} did not call {self.request}"
        else:
            what = f"no spare came of {name_ranks(view.coming)}"
        missing = [self.statuses.describe(rank, self.lost_after) for rank in (view.waiting or view.coming)[:8]]
        lines = [*missing, *(f"lost: {why}" for why in view.lost.values())]
        return "\n  ".join([f"{what} {when}.", *lines])

    def success(self, view: View) -> Outcome:
        """The decision on the new mesh, or on a failure if too many ranks are lost."""
        lost = view.lost
        # A new process goes to the place of the old one, and the other spares to the other places in order.
        replaced = {rank: rank for rank in view.ready if rank in lost}
        others = (rank for rank in view.ready if rank not in replaced)
        replaced |= zip((rank for rank in lost if rank not in replaced), others)
        processes = tuple(view.ready[rank] for rank in replaced.values())
        outcome = Outcome(
            lost=lost, replaced=replaced, axis=self.request.axis, processes=processes, options=tuple(self.options)
        )
        try:
            if len(outcome.pack()) > timing.LIMITS.record_chars:
                sizes = f"{len(lost)} lost ranks and {len(replaced)} spares"
                raise MissingRanksError(f"a decision on {sizes} does not fit into one record")
            successor(self.layout, outcome)
        except MissingRanksError as error:
            reasons = "".join(f"\n  {why}" for why in {**lost, **view.gone}.values())
            return self.failure(f"{error}{reasons}", "missing")
        return outcome


@dataclass
class StandByJudge(SurvivorJudge):
    """Decides for a rank that stands by: only that no member is left. There may be many spares, waiting for days."""

    @property
    def shortest_pause(self) -> float:  # type: ignore[override]
        return timing.TIMING.inspection

    def period(self) -> float:
        return timing.TIMING.missed_heartbeats * timing.TIMING.heartbeat

    def missed(self, outcome: Outcome) -> bool:
        survives = self.rank in self.layout and self.rank not in outcome.lost
        rank_is_in = survives or self.rank in outcome.replaced.values()
        return self.process not in outcome.processes and (self.came_late or rank_is_in)

    def goes_on_after(self, outcome: Outcome) -> bool:
        """True unless no member is left, before the deadline."""
        return outcome.error != "over" and self.client.now() < self.deadline

    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        """The decision that no member is left; None while one of them may call ``shrink``."""
        if late:
            return self.failure(f"no rank called shrink in {self.deadline:g} s", "left")
        others = [rank for rank in self.layout.ranks() if rank != self.rank]
        statuses, heard = self.statuses, {**self.statuses.heard}
        lost: dict[int, str] = {}
        for first in range(0, len(others), timing.LIMITS.statuses):
            ranks = others[first : first + timing.LIMITS.statuses]
            lost |= find_lost(
                self.client.run,
                statuses,
                ranks,
                self.lost_after,
                asks=lambda rank: heard.get(rank) in (None, statuses.heard.get(rank)),  # no new heartbeat
            )
            for status in filter(None, map(statuses.get, ranks)):
                if standing_by(self.label) in status.activity:
                    lost.setdefault(status.rank, f"rank {status.rank} stands by too")
            if any(rank not in lost for rank in ranks):
                return None
        reasons = "".join(f"\n  {why}" for why in lost.values())
        return self.failure(f"no other rank of it is left, so none can call shrink.{reasons}", "over")
