"""Mutants of shrink and stand_by: subclasses, boards and statuses, each with the law that it breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pgmesh.connect.rounds import Arrival
from pgmesh.elastic.judging import SurvivorJudge
from pgmesh.elastic.records import MeshRound, Outcome
from pgmesh.elastic.shrink_judge import Findings, ShrinkJudge
from pgmesh.elastic.shrinking import decide
from pgmesh.elastic.stand_by_judge import StandByJudge
from pgmesh.elastic.state import ElasticState
from pgmesh.liveness.operations import Operation, Read
from tests.elastic.model.processes import DROP, PAIR, SECOND_DIES, SPARE, Code, Program, members, with_new, with_spare
from tests.elastic.model.space import ALL_ARRIVED, CAUSE, NOT_IN, ONE_SUCCESSOR, TRUE_LOST
from tests.support.model.boards import AllLost, MutantBoard, NoneLost, Overwriting, Stubborn
from tests.support.model.space import NEVER_CHANGES, NO_ERROR, NO_FAULTS, NO_WAIT, ONE_DECISION, RETRY, Faults, Mutant

TWO, THREE, RETRIES = members(2), members(3), members(2, retries=True)
CRASH, DEADLINE, INTERRUPT = Faults(crashes=1), Faults(deadlines=1), Faults(interrupts=1)
LATE = Faults(crashes=1, deadlines=1)


class WaitsForNone(ShrinkJudge):
    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        return super().look(each, late=late) or self.success(Findings(self.generation.layout, self.request, {}, {}))


class FailsFromOutside(StandByJudge):
    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        return self.failure("no rank called shrink", "missing") if late else super().look(each, late=late)


class LeavesMembers(StandByJudge):
    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        outcome = super().look(each, late=late)
        if late:
            each.decision, outcome = outcome, None  # which the others do not learn
        return outcome


class Blind(StandByJudge):
    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        return None


class LeavesOutAttempts(ShrinkJudge):
    def goes_on_after(self, outcome: Outcome) -> bool:
        again = super().goes_on_after(outcome)
        self.mesh.state_of(ElasticState).rounds[self.generation.key].number += again
        return again


class TakesMesh(StandByJudge):
    def missed(self, outcome: Outcome) -> bool:
        return self.came_late and super().missed(outcome)


class ExpectsTwo(ShrinkJudge):
    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        (text,) = self.client.run(Read(each.arrivals_key))
        text.splitlines()[1]
        return super().look(each, late=late)


def keeps_lost(judge: SurvivorJudge) -> Outcome:
    outcome = decide(judge)
    return outcome if judge.rank else replace(outcome, lost={})


class OneCall(MutantBoard):
    """All ranks seem to have called ``shrink`` with the same arguments."""

    def perform(self, store: Any, operation: Operation) -> Any:
        answer = super().perform(store, operation)
        if not isinstance(operation, Read) or not operation.key.endswith("/arrivals") or not answer:
            return answer
        arrivals = Arrival.unpack_all(answer)
        call = max((each.asks for each in arrivals), key=len)
        return "".join(each._replace(asks=call).pack() for each in arrivals).encode()


DIFFERENT = (Program(0, (DROP,)), Program(1, (SPARE,)))
IN_PAIR = {"layout": PAIR}

MUTANTS = [
    Mutant("no rank is waited for", ALL_ARRIVED, TWO, NO_FAULTS, Code(WaitsForNone)),
    Mutant("different arguments are not compared", ALL_ARRIVED, DIFFERENT, NO_FAULTS, Code(board=OneCall)),
    Mutant("a new process counts as the old one", ALL_ARRIVED, with_new(), SECOND_DIES, Code(board=OneCall), IN_PAIR),
    Mutant("a decision is overwritten", NEVER_CHANGES, TWO, DEADLINE, Code(board=Overwriting)),
    Mutant("an existing decision is ignored", ONE_DECISION, TWO, DEADLINE, Code(board=Stubborn)),
    Mutant("a rank that has not arrived is lost", TRUE_LOST, TWO, NO_FAULTS, Code(statuses=AllLost)),
    Mutant("no rank is lost", NO_WAIT, TWO, CRASH, Code(statuses=NoneLost)),
    Mutant("a spare does not look for members", NO_WAIT, with_spare(), Faults(crashes=2), Code(spare=Blind), IN_PAIR),
    Mutant("a spare fails the members' attempt", CAUSE, with_spare(), DEADLINE, Code(spare=FailsFromOutside), IN_PAIR),
    Mutant("a spare leaves while members decide", ALL_ARRIVED, with_spare(), LATE, Code(spare=LeavesMembers), IN_PAIR),
    Mutant("the others leave out an attempt", RETRY, RETRIES, INTERRUPT, Code(LeavesOutAttempts)),
    Mutant("it takes the other process's mesh", NOT_IN, with_new(), SECOND_DIES, Code(spare=TakesMesh), IN_PAIR),
    Mutant("one rank keeps the lost ranks", ONE_SUCCESSOR, THREE, CRASH, Code(decide=keeps_lost)),
    Mutant("another rank is expected to have arrived", NO_ERROR, TWO, NO_FAULTS, Code(ExpectsTwo)),
]
"""At least one for each law."""
