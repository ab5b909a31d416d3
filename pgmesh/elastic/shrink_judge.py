"""The decision of the ranks that call ``shrink``: who is lost, and the mesh that replaces the one that lost them.

The first rank that finds each member either arrived or lost decides on the new mesh. A rank whose deadline passes
decides that the attempt failed. There is no fixed window: a member that lives is waited for, and one whose process has
ended is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pgmesh._util.formatting import name_ranks
from pgmesh.connect.rounds import Arrival
from pgmesh.elastic.judging import SurvivorJudge
from pgmesh.elastic.records import MeshRound, Outcome, Request
from pgmesh.errors import MissingRanksError
from pgmesh.layout import Layout
from pgmesh.liveness import timing


@dataclass(frozen=True)
class Findings:
    """The members and spares, as one look finds them.

    For example, rank 0 of ranks 0 to 3 calls ``shrink("dp", spares=[4, 5])``, and rank 1 has not done so yet. Rank 2
    has ended. A new process of rank 3 stands by, and so does rank 4:

        arrivals         of ranks 0, 3 and 4
        dead_or_silent   rank 2
        waiting          rank 1
        lost             ranks 2 and 3
        ready            rank 4
        coming           rank 5

    Args:
        layout: the layout of the mesh.
        request: the arguments of ``shrink``.
        arrivals: by rank, that of its last process.
        dead_or_silent: the members and spares that have ended or left, or send no heartbeat, each with the reason.
    """

    layout: Layout
    request: Request
    arrivals: Mapping[int, Arrival]
    dead_or_silent: dict[int, str]

    @property
    def waiting(self) -> list[int]:
        """The members that have neither arrived nor are lost."""
        known = {*self.arrivals, *self.dead_or_silent}
        return [rank for rank in self.layout.ranks() if rank not in known]

    @property
    def lost(self) -> dict[int, str]:
        """The members that are lost or have a new process, each with the reason."""
        ranks, there = self.layout.ranks(), self.arrivals
        lost = {rank: self.dead_or_silent[rank] for rank in ranks if rank in self.dead_or_silent}
        # A member that stands by is a new process in the place of the lost one.
        new = [rank for rank in ranks if rank not in lost and rank in there and not there[rank].asks]
        return lost | {rank: f"rank {rank} stands by, as a new process does" for rank in new}

    @property
    def ready(self) -> dict[int, str]:
        """By spare that can take a place, its process: first those that take their own, each in the order given."""
        there = [rank for rank in self.request.spares if rank in self.arrivals and rank not in self.dead_or_silent]
        lost = self.lost
        new, others = [rank for rank in there if rank in lost], [rank for rank in there if rank not in self.layout]
        return {rank: self.arrivals[rank].process for rank in (*new, *others)}

    @property
    def coming(self) -> list[int]:
        """The spares that may still arrive.

        Without an axis there is no mesh without spares, so new processes in the places of ended ones are waited for.
        """
        dead, spares = self.dead_or_silent, self.request.spares
        if self.request.axis is None:
            return [rank for rank in spares if rank in dead or rank not in self.arrivals]
        return [rank for rank in spares if rank not in dead and rank not in self.arrivals]

    @property
    def decides(self) -> bool:
        """True if no member is waited for, and no spare that would be needed."""
        return not self.waiting and (len(self.ready) >= len(self.lost) or not self.coming)


@dataclass
class ShrinkJudge(SurvivorJudge):
    """Decides for a rank that calls ``shrink``.

    Args:
        request: the arguments of ``shrink``.
    """

    request: Request = field(kw_only=True)
    _follows: bool = field(default=False, init=False)  # this rank leaves the looks to others, to spare the store

    def __post_init__(self) -> None:
        super().__post_init__()
        self.call = str(self.request)
        self._start = self.statuses.now()

    def goes_on_after(self, outcome: Outcome) -> bool:
        """True after "stopped" until the deadline, and after "over" always.

        "over" says that no member is left, and comes from a rank that took this one for lost. So this member tries
        again, and says in the next attempt what it waited for.
        """
        return outcome.error == "over" or (outcome.error == "stopped" and self.client.now() < self.client.seconds)

    def period(self) -> float:
        return self.client.seconds if self._follows else super().period()

    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        arrivals = self.arrivals(each)
        calls = {rank: arrival.asks for rank, arrival in arrivals.items() if arrival.asks}
        if len({*calls.values()}) > 1:
            lines = "".join(f"\n  {call} on rank {rank}" for rank, call in sorted(calls.items()))
            return self.failure(f"the ranks passed different arguments:{lines}", "mismatch")
        self._follows = not late and self.rank in [*calls][timing.MOST_STATUSES :]
        if self._follows:
            return None
        found = self._find(arrivals)
        while found.decides and (ended := self._find_ended(found)):
            found.dead_or_silent.update(ended)
        if not found.waiting and (found.decides or late):
            return self.success(found)
        return self.failure(self._describe(found), "missing") if late else None

    def _find(self, arrivals: Mapping[int, Arrival]) -> Findings:
        """Find out which absent ranks are lost, and which spares were lost after they had arrived."""
        layout, spares = self.generation.layout, self.request.spares
        absent = [rank for rank in dict.fromkeys((*layout.ranks(), *spares)) if rank not in arrivals]
        found = Findings(layout, self.request, arrivals, self._find_lost(absent))
        while not found.waiting and (ended := self._find_lost([*found.ready][: len(found.lost)])):
            found.dead_or_silent.update(ended)
        return found

    def _find_lost(self, ranks: Sequence[int]) -> dict[int, str]:
        """The ranks that are lost. One without a status is, after the time of a silent one."""
        lost = self.statuses.find_lost(self.client.run, ranks)
        seconds = self.statuses.now() - self._start
        if seconds >= self.statuses.lost_after:
            without = [rank for rank in ranks if self.statuses.record(rank).status is None]
            lost |= {rank: f"rank {rank} has published no status in {int(seconds)} s" for rank in without}
        return lost

    def _find_ended(self, found: Findings) -> dict[int, str]:
        """The members whose process has ended since it called ``shrink``, or is no longer the newest of its rank.

        It may have waited for a spare for long.
        """
        there, lost = found.arrivals, found.lost
        called = [rank for rank in found.layout.ranks() if rank in there and rank not in lost and rank != self.rank]
        ended = self.statuses.find_lost(self.client.run, called[: timing.MOST_STATUSES])
        records = {rank: self.statuses.record(rank) for rank in called}
        new = [rank for rank, each in records.items() if each.status and each.status.process != there[rank].process]
        ended |= {rank: f"rank {rank} has a new process" for rank in new}
        return {rank: why for rank, why in ended.items() if rank in new or records[rank].has_ended}

    def _describe(self, found: Findings) -> str:
        """The ranks that are waited for, and the reason for each lost one."""
        waiting = found.waiting
        missing = [self.statuses.describe(rank) for rank in waiting[: timing.MOST_NAMED]]
        lines = [*missing, *(f"lost: {why}" for why in found.lost.values())]
        return "\n  ".join([f"{name_ranks(waiting)} did not call {self.request} in {self.client.seconds:g} s.", *lines])

    def success(self, found: Findings) -> Outcome:
        """The decision on the new mesh, or on a failure if too many ranks are lost."""
        lost, ready = found.lost, found.ready
        replaced = {rank: rank for rank in ready if rank in lost}  # by a new process
        places = [rank for rank in lost if rank not in replaced]
        others = [rank for rank in ready if rank not in replaced]
        replaced |= zip(places, others)
        processes = tuple(ready[rank] for rank in replaced.values())
        outcome = Outcome(lost=lost, replaced=replaced, axis=self.request.axis, processes=processes)
        try:
            outcome.successor(self.generation.layout)
        except MissingRanksError as error:
            reasons = "".join(f"\n  {why}" for why in {**lost, **found.dead_or_silent}.values())
            return self.failure(f"{error}{reasons}", "missing")
        return outcome
