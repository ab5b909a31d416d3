"""Mutants of the protocol: subclasses and boards, each with the law that it breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pgmesh.connect.decisions import Decision
from pgmesh.connect.group_rounds import ConnectJudge, GroupRound
from pgmesh.connect.rounds import Arrival
from pgmesh.liveness.operations import Operation, Read
from tests.connect.model.ranks import PAIRS_AND_TRIPLE, Code, at_once, one_after_another
from tests.connect.model.space import ALL_ARRIVED, EQUAL, LOSS_FOUND, MISMATCH_FOUND, NO_FAILURE, TRUE_MISSING
from tests.support.board import Board
from tests.support.model.boards import AllLost, MutantBoard, NoneLost, Overwriting, Stubborn
from tests.support.model.space import NEVER_CHANGES, NO_FAULTS, NO_WAIT, ONE_DECISION, RETRY, Faults, Mutant

AB, AC, BC, ABC = PAIRS_AND_TRIPLE
PAIR = (at_once(AB), at_once(AB))
DIFFERENT = (at_once(AB), at_once(AB, variant=1))
RETRIES = (at_once(AB, after="retry"),) * 2
KNOT = (one_after_another(AB, AC), one_after_another(BC, AB), one_after_another(AC, BC))
DEADLINE, CRASH = Faults(deadlines=1), Faults(crashes=1)


Decisions = Iterator[tuple[GroupRound, Decision]]


class MadeByTheFirst(ConnectJudge):
    def decision_from_arrivals(self, each: GroupRound, arrivals: Sequence[Arrival]) -> Decision | None:
        return super().decision_from_arrivals(each, arrivals) or Decision("made")


class Uncompared(ConnectJudge):
    def decision_from_arrivals(self, each: GroupRound, arrivals: Sequence[Arrival]) -> Decision | None:
        decision = super().decision_from_arrivals(each, arrivals)
        if decision is None or decision.kind != "mismatch":
            return decision
        return None if each.missing else Decision("made")


class BlindAtDeadline(ConnectJudge):
    """It reads no arrivals at its deadline."""

    blind = False

    def read_arrivals(self, rounds: Sequence[GroupRound]) -> Decisions:
        return iter(()) if self.blind else super().read_arrivals(rounds)

    def give_up(self, rounds: Sequence[GroupRound]) -> Decisions:
        self.blind = True
        return super().give_up(rounds)


class LeavesOutAttempts(GroupRound):
    def __setattr__(self, name: str, value: Any) -> None:
        skips = name == "number" and vars(self).get("number") == value - 1
        super().__setattr__(name, value + 1 if skips else value)


class DeletesOwnAttempt(GroupRound):
    """It deletes the keys of the attempt that was made, too."""

    def keys_before(self) -> tuple[str, ...]:
        self.number += 1
        keys = super().keys_before()
        self.number -= 1
        return keys


class RetriesMismatch(MutantBoard):
    """A rank that arrives late takes a mismatch for another failure."""

    def perform(self, store: Any, operation: Operation) -> Any:
        answer = super().perform(store, operation)
        arrives = isinstance(operation, Read) and self.performed.count(operation) == 1
        return answer.replace(b"mismatch", b"missing") if arrives and isinstance(answer, bytes) else answer


class FirstCounts(MutantBoard):
    def __init__(self, board: Board) -> None:
        super().__init__(board)
        self._first: dict[str, Any] = {}

    def perform(self, store: Any, operation: Operation) -> Any:
        answer = super().perform(store, operation)
        counts = isinstance(operation, Read) and operation.key.endswith("/count")
        return self._first.setdefault(operation.key, answer) if counts else answer


TRIPLE = (at_once(ABC),) * 3
TRIPLE_DIFFERS = (at_once(ABC), at_once(ABC, variant=1), at_once(ABC))

MUTANTS = [
    Mutant("the first member to read the arrivals decides alone", ALL_ARRIVED, PAIR, NO_FAULTS, Code(MadeByTheFirst)),
    Mutant("fingerprints are not compared", EQUAL, DIFFERENT, NO_FAULTS, Code(Uncompared)),
    Mutant("a mismatch is tried again", MISMATCH_FOUND, TRIPLE_DIFFERS, NO_FAULTS, Code(board=RetriesMismatch)),
    Mutant("a decision is overwritten", NEVER_CHANGES, RETRIES, DEADLINE, Code(board=Overwriting)),
    Mutant("an existing decision is ignored", ONE_DECISION, PAIR, DEADLINE, Code(board=Stubborn)),
    Mutant("the arrivals are not read again", NO_WAIT, PAIR, Faults(crashes=1, heard=False), Code(board=FirstCounts)),
    Mutant("a rank at its deadline reads no arrivals", TRUE_MISSING, TRIPLE, DEADLINE, Code(BlindAtDeadline)),
    Mutant("each rank counts as lost", NO_FAILURE, PAIR, NO_FAULTS, Code(statuses=AllLost)),
    Mutant("no rank counts as lost", LOSS_FOUND, PAIR, CRASH, Code(statuses=NoneLost)),
    Mutant("a late rank leaves out an attempt", RETRY, RETRIES, DEADLINE, Code(round=LeavesOutAttempts)),
    Mutant("the keys of a made attempt are deleted", NO_WAIT, RETRIES, DEADLINE, Code(round=DeletesOwnAttempt)),
]
"""One for each law."""
