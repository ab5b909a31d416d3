"""Protocols that are wrong, each with the law that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pgmesh.rendezvous import protocol as real
from pgmesh.rendezvous.protocol import Add, CompareSet, Decision, Delete, RankStatus, Read, SetStatus, Step, status_key
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
    """Steps, without some of them: they are answered as if they had been done on an empty store."""
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


class BelievesTheFirstLook(real.Participant):
    def _find_circle(self, mine: Any) -> Any:
        return (yield from self._first_look(mine))


class LooksTwiceAtWaitsAlone(real.Participant):
    def _find_circle(self, mine: Any) -> Any:
        circle = yield from self._first_look(mine)
        for rank, wait in circle:
            if rank != self.me:
                again = RankStatus.unpack(rank, (yield Read(status_key(rank))))
                if again is None or not any(each[:2] == wait[:2] for each in again.waits):
                    return []
        return circle


class TellsOnlyItself(real.Participant):
    """Lays the circle down where it waits itself, and nowhere else."""

    def _inspect(self) -> Any:
        mine = [meeting.decision_key for meeting in self.meetings]
        yield from _without(super()._inspect(), lambda step: isinstance(step, CompareSet) and step.key not in mine)


class SaysNothing(real.Participant):
    def _inspect(self) -> Any:
        yield from _without(super()._inspect(), lambda step: isinstance(step, SetStatus))


class SuspectsAtOnce(real.Participant):
    def _is_lost(self, rank: int) -> bool:
        return rank in self._told


class NeverSuspects(real.Participant):
    def _is_lost(self, rank: int) -> bool:
        return False


class GivesUpAlone(real.Participant):
    """Takes its arrival back and goes, without a decision."""

    def _give_up(self) -> Any:
        for meeting in self._open():
            yield Delete((f"{meeting.name}/count",))
            meeting.end = Decision("missing")


class GoesSilently(real.Participant):
    """Tells nobody that it was interrupted."""

    def cancel(self, error: BaseException) -> Any:
        yield from self._hush()


class Overwrites(real.ConnectAttempt):
    def decide(self, end: Decision) -> Any:
        yield Overwrite(self.decision_key, end.pack())
        self.end = end


class BelievesItself(real.ConnectAttempt):
    """Lays its decision down where there is none, and does not look what lies there."""

    def decide(self, end: Decision) -> Any:
        yield CompareSet(self.decision_key, end.pack())
        self.end = end


class CountsAlone(real.ConnectAttempt):
    """The last to come goes ahead, and decides nothing."""

    def arrive(self, me: int, line: str, who: str) -> Any:
        yield from _without(super().arrive(me, line, who), lambda step: isinstance(step, CompareSet))


class CallsNoRoll(real.ConnectAttempt):
    """The last to come, by the count, decides without a look at who came and what they mean."""

    def arrive(self, me: int, line: str, who: str) -> Any:
        yield next(iter(super().arrive(me, line, who)))
        if (yield Add(f"{self.name}/count")) == len(self.ranks):
            yield from self.decide(real.MADE)


class LeavesItToTheLast(real.ConnectAttempt):
    """Nobody but the last to come decides that all came."""

    def inspect(self, **more: Any) -> Any:
        yield from _without(
            super().inspect(**more), lambda step: isinstance(step, CompareSet) and '"made"' in step.value
        )
        self.end = None if self.end == real.MADE else self.end


class CountsFirst(real.ConnectAttempt):
    """Is counted before it posts that it came."""

    def arrive(self, me: int, line: str, who: str) -> Any:
        count = yield Add(f"{self.name}/count")
        post = next(iter(super().arrive(me, line, who)))
        yield post
        if count == len(self.ranks):
            yield from self.decide(real.MADE)


class CountsOneTooFew(real.ConnectAttempt):
    def arrive(self, me: int, line: str, who: str) -> Any:
        yield next(iter(super().arrive(me, line, who)))
        if (yield Add(f"{self.name}/count")) >= len(self.ranks) - 1:
            yield from self.decide(real.MADE)


class CountsForEver(real.ConnectAttempt):
    """Arrivals outlive their meeting: those of an earlier attempt count too."""

    def arrive(self, me: int, line: str, who: str) -> Any:
        yield next(iter(super().arrive(me, line, who)))
        if (yield Add(f"{self.name.partition('#')[0]}/count")) >= len(self.ranks):
            yield from self.decide(real.MADE)


class CountsWhatFailedForEver(real.Generations):
    """Members that released do not begin at one count again."""

    def release(self, ranks: Group) -> None:
        self._released[ranks] = self._released.get(ranks, 0) + 1


class Mutant(NamedTuple):
    """A protocol that is wrong, where that shows, and the law that it breaks there."""

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
    let_go = (Program(((a,), Release((a,)), (a,)), after="next", lasting=True),) * 2

    def party(kind: type[real.Participant]) -> Protocol:
        return Protocol(kind.__name__, party=kind, sound=False)

    def meeting(kind: type[real.ConnectAttempt]) -> Protocol:
        return Protocol(kind.__name__, meeting=kind, sound=False)

    return [
        Mutant(party(BelievesTheFirstLook), FALSE_CIRCLE, line),
        Mutant(party(LooksTwiceAtWaitsAlone), FALSE_CIRCLE, line),
        Mutant(party(TellsOnlyItself), MISSED_CIRCLE, knot),
        Mutant(party(SaysNothing), MISSED_CIRCLE, knot),
        Mutant(party(SuspectsAtOnce), NOT_REFUSED, pair),
        Mutant(party(NeverSuspects), LOSS_FOUND, pair, Faults(crashes=1)),
        Mutant(party(GivesUpAlone), ONE_END, pair, late),
        Mutant(party(GoesSilently), LOSS_FOUND, pair, Faults(interrupts=1)),
        Mutant(meeting(Overwrites), NEVER_CHANGES, again, late),
        Mutant(meeting(BelievesItself), ONE_END, again, late),
        Mutant(meeting(CountsAlone), ONE_END, pair),
        Mutant(meeting(CallsNoRoll), ALIKE, (at_once(a), at_once(a, means=1))),
        Mutant(meeting(LeavesItToTheLast), LOSS_FOUND, pair, Faults(crashes=1)),
        Mutant(meeting(CountsFirst), ALL_CAME, pair),
        Mutant(meeting(CountsOneTooFew), ALL_CAME, pair),
        Mutant(meeting(CountsForEver), ALL_CAME, again, late),
        Mutant(
            Protocol("CountsWhatFailedForEver", generations=CountsWhatFailedForEver, sound=False),
            RETRY,
            let_go,
            Faults(losses=1),
        ),
        Mutant(Protocol("UsesANameAgain", numbered=False, sound=False), RETRY, again, late),
    ]


MUTANTS = _mutants()


def caught(mutant: Mutant) -> Broken | None:
    """The law that a mutant was seen to break, if it is the one that it does break."""
    broken = Checker(mutant.protocol).explore(mutant.programs, mutant.faults).broken
    return next((each for each in broken if each.law == mutant.law), None)
