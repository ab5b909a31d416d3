"""The decision of the ranks that stand by: only that no member is left that could call ``shrink``.

They look every few seconds. A member that also stands by cannot call it. A rank that gives up ends the attempt, since
the others may have counted it, and they go on to the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgmesh.elastic.judging import MeshRound, SurvivorJudge
from pgmesh.elastic.records import Outcome
from pgmesh.liveness import timing


@dataclass
class StandByJudge(SurvivorJudge):
    """Decides for a rank that stands by. There may be many of them, waiting for days."""

    @property
    def shortest_pause(self) -> float:  # type: ignore[override]
        return timing.TIMING.inspection * self.pace

    def period(self) -> float:
        return timing.TIMING.missed_heartbeats * timing.TIMING.heartbeat * self.pace

    def missed(self, outcome: Outcome) -> bool:
        survives = self.rank in self.generation.layout and self.rank not in outcome.lost
        rank_is_in = survives or self.rank in outcome.replaced.values()
        return self.process not in outcome.processes and (self.came_late or rank_is_in)

    def goes_on_after(self, outcome: Outcome) -> bool:
        """True unless no member is left, before the deadline."""
        return outcome.error != "over" and self.client.now() < self.deadline

    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        """The decision that no member is left; None while one of them may call ``shrink``."""
        if late:
            waited = f"rank {self.rank} stood by for {self.deadline:g} s, and no mesh was agreed on"
            return self.failure(waited, "stopped")
        others = [rank for rank in self.generation.layout.ranks() if rank != self.rank]
        lost: dict[int, str] = {}
        for first in range(0, len(others), timing.LIMITS.statuses):
            ranks = others[first : first + timing.LIMITS.statuses]
            lost |= self.find_lost(ranks)
            for status in filter(None, [self.statuses.record(rank).status for rank in ranks]):
                if self.generation.standing_by in status.activity:
                    lost.setdefault(status.rank, f"rank {status.rank} stands by too")
            if any(rank not in lost for rank in ranks):
                return None
        reasons = "".join(f"\n  {why}" for why in lost.values())
        return self.failure(f"no other rank of it is left, so none can call shrink.{reasons}", "over")
