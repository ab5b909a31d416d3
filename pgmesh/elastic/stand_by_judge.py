"""The decision of the ranks that stand by: only that no member is left that could call ``shrink``.

A member that also stands by cannot call it. A rank that gives up ends the attempt, since the others may have counted
it, and they go on to the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgmesh.elastic.judging import SurvivorJudge
from pgmesh.elastic.records import MeshRound, Outcome


@dataclass
class StandByJudge(SurvivorJudge):
    """Decides for a rank that stands by. There may be many of them, waiting for days."""

    def missed(self, outcome: Outcome) -> bool:
        survives = self.rank in self.generation.layout and self.rank not in outcome.lost
        rank_is_in = survives or self.rank in outcome.replaced.values()
        return self.process not in outcome.processes and (self.came_late or rank_is_in)

    def goes_on_after(self, outcome: Outcome) -> bool:
        """True unless no member is left, before the deadline."""
        return outcome.error != "over" and self.client.now() < self.client.seconds

    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        """The decision that no member is left; None while one of them may call ``shrink``."""
        if late:
            waited = f"rank {self.rank} stood by for {self.client.seconds:g} s, and no mesh was agreed on"
            return self.failure(waited, "stopped")
        arrivals, lost = self.arrivals(each), dict[int, str]()
        for rank in self.generation.layout.ranks():
            if rank in arrivals and not arrivals[rank].asks:
                lost[rank] = f"rank {rank} stands by too"
            else:
                lost |= self.statuses.find_lost(self.client.run, [rank])
            if rank not in lost:
                return None
        reasons = "".join(f"\n  {why}" for rank, why in lost.items() if rank != self.rank)
        return self.failure(f"no other rank of it is left, so none can call shrink.{reasons}", "over")
