"""Mutants of the agreement: edits of its source, each with the law that it breaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.elastic.model.code import Code, Edits
from tests.elastic.model.processes import Program
from tests.elastic.model.programs import (
    DROP,
    NEW_AND_AGAIN,
    PAIR,
    SECOND_DIES,
    SPARE,
    Programs,
    members,
    with_new,
    with_spare,
)
from tests.elastic.model.space import (
    ALL_ARRIVED,
    CAUSE,
    NEVER_CHANGES,
    NO_ERROR,
    NO_FAULTS,
    NO_WAIT,
    NOT_IN,
    ONE_DECISION,
    ONE_SUCCESSOR,
    RETRY,
    TRUE_LOST,
    Faults,
    Space,
)
from tests.rendezvous.model.space import Broken

TWO, THREE, RETRIES = members(2), members(3), members(2, retries=True)
CRASH, DEADLINE, INTERRUPT = Faults(crashes=1), Faults(deadlines=1), Faults(interrupts=1)
STOPPED = Faults(silences=1, long_times=1)


@dataclass(frozen=True)
class Mutant:
    """A mutant, the law that it breaks, and the programs that reveal it.

    Args:
        edits: pairs of a text that occurs once in the sources, and its replacement.
        more: the other arguments of the space.
    """

    name: str
    law: str
    programs: Programs
    faults: Faults
    edits: Edits
    more: dict[str, Any] = field(default_factory=dict)

    def broken(self) -> Broken | None:
        """The law that the mutant breaks, if it is the expected one."""
        broken = Space(self.programs, self.faults, Code(self.edits), **self.more).explore(300_000).broken
        return next((each for each in broken if each.law == self.law), None)


PUBLISH = "(text,) = self.client.run(CompareSet(self.decision_key, outcome.pack()))"
LOST = "lost = self.statuses.lost(ranks)\n        asks"
LEFT = 'self._decide(Outcome(failed=f"rank {self.rank} stopped: {error_text(error)}", error="left"))'

MUTANTS = [
    Mutant(
        "no rank is waited for",
        ALL_ARRIVED,
        TWO,
        NO_FAULTS,
        (("if not waiting and (len(ready)", "if (len(ready)"),),
    ),
    Mutant(
        "the arrivals of earlier attempts count",
        ALL_ARRIVED,
        TWO,
        INTERRUPT,
        (('f"{self.key}/shrink/{self.number}/arrivals"', 'f"{self.key}/shrink/arrivals"'),),
    ),
    Mutant("a rank that is interrupted publishes nothing", ALL_ARRIVED, TWO, INTERRUPT, ((LEFT, "pass"),)),
    Mutant(
        "different arguments are not compared",
        ALL_ARRIVED,
        (Program(0, (DROP,)), Program(1, (SPARE,))),
        NO_FAULTS,
        (("if len({*calls.values()}) > 1:", "if False:"),),
    ),
    Mutant(
        "a new process counts as the old one",
        ALL_ARRIVED,
        with_new(),
        SECOND_DIES,
        (('lost |= {rank: f"rank {rank} stands by, as a new process does" for rank in new}', "pass"),),
        {"layout": PAIR},
    ),
    Mutant(
        "a decision is overwritten",
        NEVER_CHANGES,
        TWO,
        DEADLINE,
        (
            (
                PUBLISH,
                "text = outcome.pack().encode(); self.client.run(Raw('set', (self.decision_key, outcome.pack())))",
            ),
            ("import math\n", "import math\nfrom pgmesh.rendezvous.operations import Raw\n"),
        ),
    ),
    Mutant(
        "an existing decision is ignored by a rank that decides otherwise",
        ONE_DECISION,
        TWO,
        DEADLINE,
        (
            (
                "return self._learn(text)\n\n    def _learn",
                "return outcome\n\n    def _learn",
            ),
        ),
    ),
    Mutant("decisions are not published", ONE_DECISION, TWO, NO_FAULTS, ((PUBLISH, "text = outcome.pack().encode()"),)),
    Mutant(
        "a rank that has not arrived is lost",
        TRUE_LOST,
        TWO,
        NO_FAULTS,
        ((LOST, f"{LOST[:7]}dict.fromkeys(ranks, '')\n        asks"),),
    ),
    Mutant(
        "a new process that was put into a mesh counts as new there too",
        TRUE_LOST,
        NEW_AND_AGAIN,
        SECOND_DIES,
        (("if cache.identity.rejoined:", "if client.thread.replaces_process:"),),
        {"layout": PAIR},
    ),
    Mutant("listeners are not asked", NO_WAIT, THREE, CRASH, (("and self.has_ended(status)", "and False"),)),
    Mutant(
        "silence is no loss", NO_WAIT, TWO, Faults(crashes=1, listeners=False), ((LOST, "lost = {}\n        asks"),)
    ),
    Mutant(
        "the next inspection is on the clock of the statuses",
        NO_WAIT,
        TWO,
        CRASH,
        (
            (
                "inspection = now + timing.TIMING.inspection * (1 + self._turn)",
                "inspection = self.statuses.now() + timing.TIMING.inspection",
            ),
        ),
    ),
    Mutant(
        "the deadline of a rank that stands by fails the attempt of the members",
        CAUSE,
        with_spare(),
        DEADLINE,
        (('f"no rank called shrink in {self.deadline:g} s", "left"', 'f"no rank called shrink", "missing"'),),
        {"layout": PAIR},
    ),
    Mutant(
        "a rank that stands by takes one lost member for all of them",
        CAUSE,
        with_spare(),
        CRASH,
        (("if len(lost) < first + len(ranks):", "if not lost:"),),
        {"layout": PAIR},
    ),
    Mutant(
        "a rank that stands by does not look for members",
        NO_WAIT,
        with_spare(),
        Faults(crashes=2),
        (("outcome = self._look_for_members(late=late)", "outcome = None"),),
        {"layout": PAIR},
    ),
    Mutant(
        "members end their call if a rank that stands by has found none of them",
        CAUSE,
        with_spare(),
        Faults(crashes=1, silences=1, long_times=1),
        (('else ("left", "over")', 'else ("left",)'),),
        {"layout": PAIR},
    ),
    Mutant(
        "the others leave out an attempt after one that a rank has left",
        RETRY,
        RETRIES,
        INTERRUPT,
        (("return outcome\n            self.number += 1", "return outcome\n            self.number += 2"),),
    ),
    Mutant(
        "a new process takes the mesh whose decision counted the old one",
        NOT_IN,
        with_new(),
        SECOND_DIES,
        (("and (self.came_late or rank_is_in)", "and self.came_late"),),
        {"layout": PAIR},
    ),
    Mutant(
        "a rank that was taken for lost takes the mesh of its new process",
        NOT_IN,
        with_new(),
        STOPPED,
        (("if request is not None and cache.rank in outcome.lost:", "if False:"),),
        {"layout": PAIR},
    ),
    Mutant(
        "one rank keeps the lost ranks",
        ONE_SUCCESSOR,
        THREE,
        CRASH,
        (
            (
                "layout = successor(before, outcome.lost,",
                "layout = successor(before, outcome.lost if cache.rank else {},",
            ),
        ),
    ),
    Mutant(
        "the arrivals are expected to be there",
        NO_ERROR,
        TWO,
        NO_FAULTS,
        (('in (text or b"").splitlines()', "in text.splitlines()"),),
    ),
]
