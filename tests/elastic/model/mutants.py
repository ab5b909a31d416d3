"""Mutants of shrink and stand_by: subclasses, boards and statuses, each with the law that it breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pgmesh.elastic.judging import MeshRound, ShrinkJudge, StandByJudge, View
from pgmesh.elastic.records import Arrival, Outcome
from pgmesh.elastic.shrinking import ShrinkCall
from pgmesh.errors import WorldError
from pgmesh.layout import Layout
from pgmesh.rendezvous.operations import Append, Operation, Read
from tests.elastic.model.processes import Code, Program
from tests.elastic.model.programs import DROP, NEW_AND_AGAIN, PAIR, SECOND_DIES, SPARE, members, with_new, with_spare
from tests.elastic.model.space import ALL_ARRIVED, CAUSE, NOT_IN, ONE_SUCCESSOR, TRUE_LOST
from tests.support.model.boards import AllLost, Forgetful, MutantBoard, NoneLost, Overwriting, Stubborn
from tests.support.model.space import (
    NEVER_CHANGES,
    NO_ERROR,
    NO_FAULTS,
    NO_WAIT,
    ONE_DECISION,
    RETRY,
    Faults,
    Mutant,
)

TWO, THREE, RETRIES = members(2), members(3), members(2, retries=True)
CRASH, DEADLINE, INTERRUPT = Faults(crashes=1), Faults(deadlines=1), Faults(interrupts=1)
STOPPED = Faults(silences=1, long_times=1)


# -- judges: what a rank decides from what it reads -------------------------------------------------------------------


class WaitsForNone(ShrinkJudge):
    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        return super().look(each, late=late) or self.success(View())


class QuietInterrupt(ShrinkJudge):
    def stopped(self, each: MeshRound, error: BaseException) -> Outcome:
        raise WorldError("it publishes nothing")


class OnAnotherClock(ShrinkJudge):
    def period(self) -> float:
        return self.statuses.now() + super().period()


class FailsFromOutside(StandByJudge):
    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        return self.failure("no rank called shrink", "missing") if late else super().look(each, late=late)


class OneForAll(StandByJudge):
    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        outcome = super().look(each, late=late)
        if outcome is None and self.lost([rank for rank in self.members if rank != self.rank]):
            return self.failure("no other rank of it is left", "over")
        return outcome


class LooksForNone(StandByJudge):
    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        return None


class EndsWithTheOthers(ShrinkJudge):
    def goes_on_after(self, outcome: Outcome) -> bool:
        return outcome.error != "over" and super().goes_on_after(outcome)


class LeavesOutAttempts(ShrinkJudge):
    def tries_again(self, each: MeshRound) -> bool:
        again = super().tries_again(each)
        each.number += again
        return again


class TakesMeshOfAnother(StandByJudge):
    def missed(self, outcome: Outcome) -> bool:
        return self.came_late and super().missed(outcome)


class ExpectsArrivals(ShrinkJudge):
    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        (text,) = self.client.run(Read(each.arrivals_key))
        text.splitlines()
        return super().look(each, late=late)


class NewForEver(ShrinkCall):
    def is_new(self) -> bool:
        return self.client.thread.store.replaces_process


class ComesBack(ShrinkCall):
    def was_taken_for_lost(self, outcome: Outcome) -> bool:
        return False


class KeepsLost(ShrinkCall):
    def successor(self, layout: Layout, outcome: Outcome) -> Layout:
        return super().successor(layout, outcome if self.mesh.rank else replace(outcome, lost={}))


class OneListOfArrivals(MutantBoard):
    def perform(self, store: Any, operation: Operation) -> Any:
        if isinstance(operation, (Append, Read)) and operation.key.endswith("/arrivals"):
            operation = operation._replace(key="m/shrink/arrivals")
        return super().perform(store, operation)


class OneCall(MutantBoard):
    """All ranks seem to have called ``shrink`` with the same arguments."""

    def perform(self, store: Any, operation: Operation) -> Any:
        answer = super().perform(store, operation)
        if not isinstance(operation, Read) or not operation.key.endswith("/arrivals") or not answer:
            return answer
        arrivals = [*filter(None, map(Arrival.unpack, answer.splitlines()))]
        call = max((each.call for each in arrivals), key=len)
        return "".join(f"{replace(each, call=call).pack()}\n" for each in arrivals).encode()


DIFFERENT = (Program(0, (DROP,)), Program(1, (SPARE,)))
UNSEEN = Faults(crashes=1, listeners=False)


def in_pair(name: str, law: str, programs: tuple[Program, ...], faults: Faults, code: Code) -> Mutant:
    """A mutant that a mesh of two ranks reveals, beside a spare or a new process."""
    return Mutant(name, law, programs, faults, code, {"layout": PAIR})


MUTANTS = [
    Mutant("no rank is waited for", ALL_ARRIVED, TWO, NO_FAULTS, Code(WaitsForNone)),
    Mutant("the arrivals of earlier attempts count", ALL_ARRIVED, TWO, INTERRUPT, Code(board=OneListOfArrivals)),
    Mutant("a rank that is interrupted publishes nothing", ALL_ARRIVED, TWO, INTERRUPT, Code(QuietInterrupt)),
    Mutant("different arguments are not compared", ALL_ARRIVED, DIFFERENT, NO_FAULTS, Code(board=OneCall)),
    in_pair("a new process counts as the old one", ALL_ARRIVED, with_new(), SECOND_DIES, Code(board=OneCall)),
    Mutant("a decision is overwritten", NEVER_CHANGES, TWO, DEADLINE, Code(board=Overwriting)),
    Mutant(
        "an existing decision is ignored by a rank that decides otherwise",
        ONE_DECISION,
        TWO,
        DEADLINE,
        Code(board=Stubborn),
    ),
    Mutant("decisions are not published", ONE_DECISION, TWO, NO_FAULTS, Code(board=Forgetful)),
    Mutant("a rank that has not arrived is lost", TRUE_LOST, TWO, NO_FAULTS, Code(statuses=AllLost)),
    in_pair(
        "a new process that was put into a mesh counts as new there too",
        TRUE_LOST,
        NEW_AND_AGAIN,
        SECOND_DIES,
        Code(call=NewForEver),
    ),
    Mutant("listeners are not asked", NO_WAIT, THREE, CRASH, Code(asks=False)),
    Mutant("silence is no loss", NO_WAIT, TWO, UNSEEN, Code(statuses=NoneLost)),
    Mutant("the next inspection is on the clock of the statuses", NO_WAIT, TWO, CRASH, Code(OnAnotherClock)),
    in_pair(
        "the deadline of a rank that stands by fails the attempt of the members",
        CAUSE,
        with_spare(),
        DEADLINE,
        Code(spare=FailsFromOutside),
    ),
    in_pair(
        "a rank that stands by takes one lost member for all of them", CAUSE, with_spare(), CRASH, Code(spare=OneForAll)
    ),
    in_pair(
        "a rank that stands by does not look for members",
        NO_WAIT,
        with_spare(),
        Faults(crashes=2),
        Code(spare=LooksForNone),
    ),
    in_pair(
        "members end their call if a rank that stands by has found none of them",
        CAUSE,
        with_spare(),
        Faults(crashes=1, silences=1, long_times=1),
        Code(EndsWithTheOthers),
    ),
    Mutant(
        "the others leave out an attempt after one that a rank has left",
        RETRY,
        RETRIES,
        INTERRUPT,
        Code(LeavesOutAttempts),
    ),
    in_pair(
        "a new process takes the mesh whose decision counted the old one",
        NOT_IN,
        with_new(),
        SECOND_DIES,
        Code(spare=TakesMeshOfAnother),
    ),
    in_pair(
        "a rank that was taken for lost takes the mesh of its new process",
        NOT_IN,
        with_new(),
        STOPPED,
        Code(call=ComesBack),
    ),
    Mutant("one rank keeps the lost ranks", ONE_SUCCESSOR, THREE, CRASH, Code(call=KeepsLost)),
    Mutant("the arrivals are expected to be there", NO_ERROR, TWO, NO_FAULTS, Code(ExpectsArrivals)),
]
