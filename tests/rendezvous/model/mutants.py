"""Mutants of the protocol: edits of its source, each with the law that it breaks."""

from __future__ import annotations

import inspect
import types
from typing import NamedTuple

from pgmesh.rendezvous import protocol as real
from tests.rendezvous.model.programs import PAIRS_AND_TRIPLE, Program, at_once, one_after_another
from tests.rendezvous.model.space import (
    ALL_ARRIVED,
    CIRCLE_STATED,
    EQUAL,
    LOSS_FOUND,
    MISMATCH_FOUND,
    NEVER_CHANGES,
    NO_FAILURE,
    NO_FAULTS,
    NO_WAIT,
    ONE_DECISION,
    RETRY,
    TRUE_CIRCLE,
    TRUE_MISSING,
    Broken,
    Faults,
    Space,
)

AB, AC, BC, ABC = PAIRS_AND_TRIPLE
PAIR = (at_once(AB), at_once(AB))
DIFFERENT = (at_once(AB), at_once(AB, variant=1))
RETRIES = (at_once(AB, after="retry"),) * 2
KNOT = (one_after_another(AB, AC), one_after_another(BC, AB), one_after_another(AC, BC))
DEADLINE, CRASH = Faults(deadlines=1), Faults(crashes=1)


class Mutant(NamedTuple):
    """A mutant, the law that it breaks, and the programs that reveal it.

    Args:
        edits: pairs of a text that occurs once in the source of the protocol, and its replacement.
    """

    name: str
    law: str
    programs: tuple[Program, ...]
    faults: Faults
    edits: tuple[tuple[str, str], ...]

    def protocol(self) -> types.ModuleType:
        source = inspect.getsource(real)
        for old, new in self.edits:
            if source.count(old) != 1:
                raise ValueError(f"{self.name}: the protocol contains {old!r} {source.count(old)} times. Change it.")
            source = source.replace(old, new)
        module = types.ModuleType(real.__name__)  # dataclasses look up this name
        exec(compile(source, f"<{self.name}>", "exec"), module.__dict__)
        return module

    def broken(self) -> Broken | None:
        """The law that the mutant breaks, if it is the expected one."""
        broken = Space(self.programs, self.faults, self.protocol()).explore(1_000_000).broken
        return next((each for each in broken if each.law == self.law), None)


PUBLISH = "(text,) = self.client.run(CompareSet(attempt.decision_key, decision.pack()))"
TAKE = "self._take(attempt, Decision.unpack(attempt.decision_key, text))\n\n    def _take"
LATE_DECISION = (
    'self._decide(attempt, Decision("missing", self._describe_missing(attempt, f" in {self.deadline:g} s")))'
)

MUTANTS = [
    Mutant(
        "the first member to read the arrivals decides that the group is made",
        ALL_ARRIVED,
        PAIR,
        NO_FAULTS,
        (
            (
                "        if attempt.missing:\n            return None",
                "        if attempt.missing:\n            return Decision('made')",
            ),
        ),
    ),
    Mutant(
        "the arrivals of earlier attempts count",
        ALL_ARRIVED,
        RETRIES,
        DEADLINE,
        (
            ('Append(f"{name}/arrivals"', 'Append(f"{attempt.key}/arrivals"'),
            ('(Read(f"{attempt.name}/arrivals") for', '(Read(f"{attempt.key}/arrivals") for'),
        ),
    ),
    Mutant(
        "fingerprints are not compared",
        EQUAL,
        DIFFERENT,
        NO_FAULTS,
        (('        if mismatch is not None:\n            return Decision("mismatch", mismatch)\n', ""),),
    ),
    Mutant(
        "a mismatch is tried again",
        MISMATCH_FOUND,
        (at_once(ABC), at_once(ABC, variant=1), at_once(ABC)),
        NO_FAULTS,
        (("decision.is_permanent or not self.skip_decided", "not self.skip_decided"),),
    ),
    Mutant(
        "a decision is overwritten",
        NEVER_CHANGES,
        RETRIES,
        DEADLINE,
        (
            (
                PUBLISH,
                "text = decision.pack().encode(); self.client.run(Raw('set', (attempt.decision_key, decision.pack())))",
            ),
            (
                "import contextlib\n",
                "import contextlib\nfrom pgmesh.rendezvous.operations import Raw\n",
            ),
        ),
    ),
    Mutant(
        "an existing decision is ignored by a rank that decides otherwise",
        ONE_DECISION,
        PAIR,
        DEADLINE,
        ((TAKE, "self._take(attempt, decision)\n\n    def _take"),),
    ),
    Mutant(
        "a rank at its deadline publishes no decision",
        ONE_DECISION,
        PAIR,
        DEADLINE,
        ((LATE_DECISION, "attempt.decision = Decision('missing')"),),
    ),
    Mutant(
        "decisions are not published",
        ONE_DECISION,
        PAIR,
        NO_FAULTS,
        ((PUBLISH, "text = decision.pack().encode()"),),
    ),
    Mutant(
        "only the last member to arrive reads the arrivals",
        LOSS_FOUND,
        PAIR,
        CRASH,
        (("elif count != attempt.count_seen:", "elif count is None:"),),
    ),
    Mutant(
        "the arrivals are not read again",
        NO_WAIT,
        PAIR,
        Faults(crashes=1, heard=False),
        (("elif count != attempt.count_seen:", 'elif attempt.count_seen == b"":'),),
    ),
    Mutant(
        "a rank counts as lost without a second look at the arrivals",
        TRUE_MISSING,
        PAIR,
        Faults(silences=1, long_times=1),
        (("        self._read_arrivals(with_lost)", "        #"),),
    ),
    Mutant(
        "a rank at its deadline reads no arrivals",
        TRUE_MISSING,
        (at_once(ABC),) * 3,
        DEADLINE,
        (
            (
                "        self._read_arrivals(self._undecided())\n        self._read_statuses()\n",
                "        self._read_statuses()\n",
            ),
        ),
    ),
    Mutant(
        "each rank counts as lost",
        NO_FAILURE,
        PAIR,
        NO_FAULTS,
        (
            ("self._undecided() if self.statuses.lost(self._watched(attempt))]", "self._undecided()]"),
            (
                "if attempt.decision is None and self.statuses.lost(self._watched(attempt)):",
                "if attempt.decision is None:",
            ),
        ),
    ),
    Mutant(
        "no rank counts as lost",
        LOSS_FOUND,
        PAIR,
        CRASH,
        (("self._undecided() if self.statuses.lost(self._watched(attempt))]", "self._undecided() if False]"),),
    ),
    Mutant(
        "an interrupted rank publishes no decision",
        LOSS_FOUND,
        PAIR,
        Faults(interrupts=1),
        (("                self.cancel(error)", "                pass"),),
    ),
    Mutant(
        "a circle of statuses is believed",
        TRUE_CIRCLE,
        (one_after_another(AB, AC), one_after_another(AB, BC), one_after_another(BC, AC)),
        DEADLINE,
        (("if decision is not None or following in arrived:", "if False:"),),
    ),
    Mutant(
        "a circle is checked by its decisions, and not by the arrivals",
        TRUE_CIRCLE,
        (at_once(ABC), at_once(AB, ABC), at_once(BC, ABC)),
        DEADLINE,
        (("if decision is not None or following in arrived:", "if decision is not None:"),),
    ),
    Mutant(
        "a circle is published for one rank of it",
        CIRCLE_STATED,
        KNOT,
        NO_FAULTS,
        (("for _, wait in circle))\n        for", "for _, wait in circle[:1]))\n        for"),),
    ),
    Mutant(
        "no status is published",
        CIRCLE_STATED,
        KNOT,
        NO_FAULTS,
        (("        self.client.set_pending(self._pending())\n", ""),),
    ),
    Mutant(
        "a retry begins at the number of the failed attempt",
        RETRY,
        RETRIES,
        DEADLINE,
        (
            ('return f"{self.key}/{self.number}"', 'return f"{self.key}/0"'),
            (
                'elif decision.is_permanent or not self.skip_decided or (arrived_again and decision.kind == "made"):',
                "elif True:",
            ),
        ),
    ),
    Mutant(
        "a late rank leaves out an attempt",
        RETRY,
        RETRIES,
        DEADLINE,
        (("attempt.number += 1", "attempt.number += 2"),),
    ),
]
