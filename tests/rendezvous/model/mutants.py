"""Mutants of the protocol, each with the law that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pgmesh.rendezvous import protocol as real
from pgmesh.rendezvous.protocol import (
    Add,
    CompareSet,
    Decision,
    Delete,
    RankStatus,
    Read,
    SetStatus,
    Step,
    status_key,
)
from tests.rendezvous.model.programs import (
    PAIRS_AND_TRIPLE,
    Group,
    Program,
    Protocol,
    Release,
    at_once,
    one_after_another,
)
from tests.rendezvous.model.space import (
    ALIKE,
    ALL_CAME,
    FALSE_CIRCLE,
    LOSS_FOUND,
    MISSED_CIRCLE,
    NEVER_CHANGES,
    NO_FAULTS,
    NOT_REFUSED,
    ONE_END,
    RETRY,
    Broken,
    Checker,
    Faults,
)
from tests.rendezvous.model.stores import Overwrite


def _without(steps: Any, unwanted: Callable[[Step], bool]) -> Any:
    """A protocol without some of its steps. They get the answers of an empty store."""
    answer: Any = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        if unwanted(step):
            answer = step.value.encode() if isinstance(step, CompareSet) else None
        else:
            answer = yield step


class ReadsCirclesOnce(real.Participant):
    def _find_circle(self, mine: Any) -> Any:
        return (yield from self._search_circle(mine))


class ReadsOnlyStatusesTwice(real.Participant):
    def _find_circle(self, mine: Any) -> Any:
        circle = yield from self._search_circle(mine)
        for rank, wait in circle:
            if rank != self.rank:
                status = RankStatus.unpack(rank, (yield Read(status_key(rank))))
                if status is None or not any(each[:2] == wait[:2] for each in status.pending):
                    return []
        return circle


class PublishesOnlyItsOwnAttempts(real.Participant):
    """Publishes a circle only for its own attempts."""

    def _inspect(self) -> Any:
        mine = [attempt.decision_key for attempt in self.attempts]
        yield from _without(super()._inspect(), lambda step: isinstance(step, CompareSet) and step.key not in mine)


class PublishesNoStatus(real.Participant):
    def _inspect(self) -> Any:
        yield from _without(super()._inspect(), lambda step: isinstance(step, SetStatus))


class SuspectsAtOnce(real.Participant):
    def _is_lost(self, rank: int) -> bool:
        return rank in self._statuses


class NeverSuspects(real.Participant):
    def _is_lost(self, rank: int) -> bool:
        return False


class TimesOutWithoutDecision(real.Participant):
    """Deletes its arrival and returns without a decision."""

    def _time_out(self) -> Any:
        for attempt in self._undecided():
            yield Delete((f"{attempt.name}/count",))
            attempt.decision = Decision("missing")


class PublishesNoInterrupt(real.Participant):
    """Publishes no decision when it is interrupted."""

    def cancel(self, error: BaseException) -> Any:
        yield from self._clear_status()


class Overwrites(real.ConnectAttempt):
    def decide(self, decision: Decision) -> Any:
        yield Overwrite(self.decision_key, decision.pack())
        self.decision = decision


class IgnoresExistingDecisions(real.ConnectAttempt):
    """Publishes its decision, and ignores an existing one."""

    def decide(self, decision: Decision) -> Any:
        yield CompareSet(self.decision_key, decision.pack())
        self.decision = decision


class OnlyCounts(real.ConnectAttempt):
    """The last member to arrive publishes no decision."""

    def arrive(self, rank: int, call_site: str, process: str) -> Any:
        yield from _without(super().arrive(rank, call_site, process), lambda step: isinstance(step, CompareSet))


class ReadsNoArrivals(real.ConnectAttempt):
    """The last member by the count decides without reading the arrivals."""

    def arrive(self, rank: int, call_site: str, process: str) -> Any:
        yield next(iter(super().arrive(rank, call_site, process)))
        if (yield Add(f"{self.name}/count")) == len(self.ranks):
            yield from self.decide(real.MADE)


class OnlyTheLastDecides(real.ConnectAttempt):
    """Only the last member to arrive can decide that the group is made."""

    def inspect(self, **more: Any) -> Any:
        yield from _without(
            super().inspect(**more), lambda step: isinstance(step, CompareSet) and '"made"' in step.value
        )
        self.decision = None if self.decision == real.MADE else self.decision


class CountsFirst(real.ConnectAttempt):
    """Adds to the count before it appends its arrival."""

    def arrive(self, rank: int, call_site: str, process: str) -> Any:
        count = yield Add(f"{self.name}/count")
        post = next(iter(super().arrive(rank, call_site, process)))
        yield post
        if count == len(self.ranks):
            yield from self.decide(real.MADE)


class CountsOneTooFew(real.ConnectAttempt):
    def arrive(self, rank: int, call_site: str, process: str) -> Any:
        yield next(iter(super().arrive(rank, call_site, process)))
        if (yield Add(f"{self.name}/count")) >= len(self.ranks) - 1:
            yield from self.decide(real.MADE)


class CountsEarlierAttempts(real.ConnectAttempt):
    """Counts the arrivals of earlier attempts too."""

    def arrive(self, rank: int, call_site: str, process: str) -> Any:
        yield next(iter(super().arrive(rank, call_site, process)))
        if (yield Add(f"{self.name.partition('#')[0]}/count")) >= len(self.ranks):
            yield from self.decide(real.MADE)


class NeverResetsFailures(real.Generations):
    """Does not reset the count of failures at a release."""

    def release(self, ranks: Group) -> None:
        self._released[ranks] = self._released.get(ranks, 0) + 1


class Mutant(NamedTuple):
    """A mutant, the programs that reveal it, and the law that it breaks."""

    protocol: Protocol
    law: str
    programs: tuple[Program, ...]
    faults: Faults = NO_FAULTS


def _mutants() -> list[Mutant]:
    a, b, c, _ = PAIRS_AND_TRIPLE
    pair = (at_once(a), at_once(a))
    again = (at_once(a, after="retry"), at_once(a, after="retry"))
    knot = (one_after_another(a, b), one_after_another(c, a), one_after_another(b, c))
    line = (one_after_another(a, b), one_after_another(a, c), one_after_another(b, c))
    late = Faults(deadlines=1)
    released = (Program(((a,), Release((a,)), (a,)), after="next", lasting=True),) * 2

    def participant(kind: type[real.Participant]) -> Protocol:
        return Protocol(kind.__name__, participant=kind, sound=False)

    def attempt(kind: type[real.ConnectAttempt]) -> Protocol:
        return Protocol(kind.__name__, attempt=kind, sound=False)

    return [
        Mutant(participant(ReadsCirclesOnce), FALSE_CIRCLE, line),
        Mutant(participant(ReadsOnlyStatusesTwice), FALSE_CIRCLE, line),
        Mutant(participant(PublishesOnlyItsOwnAttempts), MISSED_CIRCLE, knot),
        Mutant(participant(PublishesNoStatus), MISSED_CIRCLE, knot),
        Mutant(participant(SuspectsAtOnce), NOT_REFUSED, pair),
        Mutant(participant(NeverSuspects), LOSS_FOUND, pair, Faults(crashes=1)),
        Mutant(participant(TimesOutWithoutDecision), ONE_END, pair, late),
        Mutant(participant(PublishesNoInterrupt), LOSS_FOUND, pair, Faults(interrupts=1)),
        Mutant(attempt(Overwrites), NEVER_CHANGES, again, late),
        Mutant(attempt(IgnoresExistingDecisions), ONE_END, again, late),
        Mutant(attempt(OnlyCounts), ONE_END, pair),
        Mutant(attempt(ReadsNoArrivals), ALIKE, (at_once(a), at_once(a, variant=1))),
        Mutant(attempt(OnlyTheLastDecides), LOSS_FOUND, pair, Faults(crashes=1)),
        Mutant(attempt(CountsFirst), ALL_CAME, pair),
        Mutant(attempt(CountsOneTooFew), ALL_CAME, pair),
        Mutant(attempt(CountsEarlierAttempts), ALL_CAME, again, late),
        Mutant(
            Protocol("NeverResetsFailures", generations=NeverResetsFailures, sound=False),
            RETRY,
            released,
            Faults(losses=1),
        ),
        Mutant(Protocol("ReusesNames", numbered=False, sound=False), RETRY, again, late),
    ]


MUTANTS = _mutants()


def caught(mutant: Mutant) -> Broken | None:
    """The law that a mutant was seen to break, if it is the one that it does break."""
    broken = Checker(mutant.protocol).explore(mutant.programs, mutant.faults).broken
    return next((each for each in broken if each.law == mutant.law), None)
