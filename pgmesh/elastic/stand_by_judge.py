"""The decision of the ranks that stand by: only that no member is left that could call ``shrink``.

They look every few seconds. A member that also stands by cannot call it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pgmesh._util.formatting import name_ranks
from pgmesh.elastic.judging import MeshRound, SurvivorJudge, standing_by
from pgmesh.elastic.records import Arrival, Outcome
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Read, Replace


@dataclass
class StandByJudge(SurvivorJudge):
    """Decides for a rank that stands by. There may be many of them, waiting for days."""

    @property
    def shortest_pause(self) -> float:  # type: ignore[override]
        return timing.TIMING.inspection * self.pace

    def period(self) -> float:
        return timing.TIMING.missed_heartbeats * timing.TIMING.heartbeat * self.pace

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
            return self._give_up(each)
        others = [rank for rank in self.layout.ranks() if rank != self.rank]
        heard = {rank: self.statuses.record(rank).heard for rank in others}

        def is_silent(rank: int) -> bool:
            return heard[rank] is None or heard[rank] == self.statuses.record(rank).heard

        lost: dict[int, str] = {}
        for first in range(0, len(others), timing.LIMITS.statuses):
            ranks = others[first : first + timing.LIMITS.statuses]
            lost |= self.find_lost(ranks, asks=is_silent)
            for status in filter(None, [self.statuses.record(rank).status for rank in ranks]):
                if standing_by(self.label) in status.activity:
                    lost.setdefault(status.rank, f"rank {status.rank} stands by too")
            if any(rank not in lost for rank in ranks):
                return None
        reasons = "".join(f"\n  {why}" for why in lost.values())
        return self.failure(f"no other rank of it is left, so none can call shrink.{reasons}", "over")

    def _give_up(self, each: MeshRound) -> Outcome | None:
        """End the wait at the deadline.

        Only a rank that has called ``shrink`` can put this one into the new mesh, and it is among the arrivals:

            the arrivals                              what follows
            are deleted, or lack this rank            the attempt has been decided: read the decision
            have a rank that called ``shrink``        it may decide at any moment: decide that this rank has stopped
            have only ranks that stand by             take this rank's arrival back. The others' attempt goes on
            change while that is done                 read them again
        """
        called: list[int] = []
        for _ in range(timing.LIMITS.statuses):  # others may arrive and give up at the same time
            (text,) = self.client.run(Read(each.arrivals_key))
            lines = [(line, Arrival.unpack(line)) for line in (text or b"").splitlines(keepends=True)]
            called = self.callers(arrival for _, arrival in lines if arrival is not None)
            if text is None or called:
                break
            others = b"".join(line for line, arrival in lines if arrival is None or arrival.process != self.process)
            if others == text:
                break
            (now,) = self.client.run(Replace(each.arrivals_key, text, others))
            if now == others:
                each.decision = self.failure(f"no rank called shrink in {self.deadline:g} s", "withdrawn")
                return None
        who = f"{name_ranks(called)} called shrink, but" if called else "it"
        return self.failure(f"{who} did not agree with the others in {self.deadline:g} s", "stopped")

    def callers(self, arrivals: Iterable[Arrival]) -> list[int]:
        """The ranks that have called ``shrink``, which may decide at any moment, and count this one."""
        return sorted({arrival.rank for arrival in arrivals if arrival.call})
