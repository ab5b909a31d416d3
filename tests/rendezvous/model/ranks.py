"""One rank of the model: its program run on given answers, and all its states that were reached."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any

from pgmesh.rendezvous import protocol as real
from pgmesh.rendezvous.operations import Append, CompareSet, Operation
from pgmesh.rendezvous.records import Decision, Fingerprint
from pgmesh.rendezvous.statuses import PendingConnect, Statuses
from tests.rendezvous.model.programs import Call, Group, Program
from tests.rendezvous.model.stores import SetPending, Sleep, Step

LONG = 1e6
"""Seconds without a heartbeat after which a rank counts as lost. An inspection takes one second."""

DEADLINE = 1e9
"""Seconds until the deadline of a call."""

MOST_CALLS = 4
"""After as many failed calls, a rank stops to retry."""

BEFORE, AFTER = "interrupted before", "interrupted after"
"""Answers that stand for Ctrl-C before or after a step."""


def spell(group: Group) -> str:
    return "g" + "-".join(map(str, group))


def group_of(name: str) -> Group:
    """The group of an attempt's name, such as "g0-1/2"."""
    return tuple(map(int, name.partition("/")[0][1:].split("-")))


@dataclass(frozen=True)
class Memory:
    """Everything that a rank remembers from one call of connect to the next.

    Args:
        calls, otherwise: the calls that are left.
        count: the number of calls so far.
        numbers: by group, the number of the next attempt.
        outcomes: by name, the decisions of attempts.
        arrived: names of attempts with an arrival of this rank.
        interrupted: names of the attempts of interrupted calls.
    """

    calls: tuple[Call, ...]
    otherwise: tuple[Call, ...]
    count: int = 0
    numbers: tuple[tuple[Group, int], ...] = ()
    outcomes: tuple[tuple[str, str], ...] = ()
    arrived: frozenset[str] = frozenset()
    interrupted: frozenset[str] = frozenset()


class Stopped(BaseException):
    """The answers have been used up."""


@dataclass
class Life:
    """One call of connect, run on given answers. It is the ``Client`` of that call.

    Afterwards, ``step`` is the first step without an answer, or ``after`` is the memory after the call.
    """

    protocol: Any
    rank: int
    program: Program
    memory: Memory
    answers: tuple[Any, ...]
    step: Step | None = None
    after: Memory | None = None
    state: object = None  # at a pause, everything on which further steps depend
    clock: float = 0.0
    beats: int = 0  # heartbeats that each rank had sent at the last pause
    seen: frozenset[tuple[str, int]] = frozenset()  # arrivals at the attempts of this call at the last pause
    published: bool = False  # whether the status has groups of this call
    circle: tuple[tuple[int, str], ...] = ()  # the last circle that was found: rank and attempt
    arrived: set[str] = field(default_factory=set)
    _position: int = 0

    def __post_init__(self) -> None:
        numbers = dict(self.memory.numbers)
        attempts = [self._attempt(group, numbers.get(group, 0)) for group in self.memory.calls[0]]
        self.participant = real_subclass(self.protocol)(
            self.rank,
            attempts,
            self,
            call_site="train.py:1",
            process=f"process {self.rank}",
            deadline=DEADLINE,
            statuses=Statuses(LONG, self.now),
        )
        interrupted = False
        try:
            self.participant.connect()
        except Stopped:
            return
        except KeyboardInterrupt:
            interrupted = True
        self.after = self._remember(interrupted)

    def _attempt(self, group: Group, number: int) -> real.ConnectAttempt:
        name = spell(group)
        fingerprint = Fingerprint(self.rank, {"means": self.program.variant}, name, "Fix it.")
        attempt: real.ConnectAttempt = self.protocol.ConnectAttempt(name, group, fingerprint, name, "mesh 'm'", number)
        return attempt

    def outcomes(self) -> dict[str, str]:
        decided = {each.name: each.decision.kind for each in self.participant.attempts if each.decision}
        return {**dict(self.memory.outcomes), **decided}

    def _remember(self, interrupted: bool) -> Memory:
        calls, otherwise = self.memory.calls, self.memory.otherwise
        failed = tuple(tuple(each.ranks) for each in self.participant.attempts if not each.is_made())
        if not failed or self.program.after == "next":
            calls = calls[1:]
        elif self.program.after == "retry":
            calls = (failed, *calls[1:])
        else:
            calls, otherwise = otherwise, ()
        numbers = {tuple(each.ranks): each.number + 1 for each in self.participant.attempts}
        names = {each.name for each in self.participant.attempts} if interrupted else set()
        return Memory(
            calls if self.memory.count < MOST_CALLS else (),
            otherwise,
            self.memory.count + 1,
            tuple(sorted({**dict(self.memory.numbers), **numbers}.items())),
            tuple(sorted(self.outcomes().items())),
            self.memory.arrived | self.arrived,
            self.memory.interrupted | names,
        )

    # -- the client -----------------------------------------------------------------------------------------------

    def run(self, *operations: Operation) -> list[Any]:
        return [self._answer(operation) for operation in operations]

    def now(self) -> float:
        return self.clock

    def set_pending(self, pending: tuple[PendingConnect, ...]) -> None:
        if pending or self.published:
            self._answer(SetPending(pending))
            self.published = True

    def sleep(self, seconds: float) -> None:
        locals_ = sys._getframe(1).f_locals
        choice, self.beats, self.seen = self._answer(Sleep(), locals_)
        ticks = self.clock % LONG + (choice == "inspect")
        self.clock = DEADLINE if choice == "deadline" else self.beats * LONG + ticks

    def _answer(self, step: Step, locals_: dict[str, Any] | None = None) -> Any:
        if self._position == len(self.answers):
            if self.step is None:
                self.step = step
                self.state = None if locals_ is None else self._state(locals_)
            raise Stopped  # at every later step too, because connect() tries to publish each error
        answer = self.answers[self._position]
        self._position += 1
        if answer == BEFORE:
            raise KeyboardInterrupt
        if isinstance(step, Append):
            self.arrived |= {each.name for each in self.participant.attempts if step.key.startswith(f"{each.key}/")}
        if answer == AFTER:
            raise KeyboardInterrupt
        return answer

    def _state(self, locals_: dict[str, Any]) -> object:
        """Everything on which the steps after a pause depend. A new local or field is a part of it by default."""
        constants = {"self", "now", "slow", "inspection", "pause"}  # and the times, relative to now
        fields = {name: value for name, value in vars(self.participant).items() if name[0] == "_"}
        heartbeats = self.participant.statuses.heard  # the statuses themselves are read again after a pause
        attempts = []
        for attempt in self.participant.attempts:
            unused = {"ranks", "fingerprint", "group", "mesh"} | (
                {"missing", "count_seen"} if attempt.decision else set()
            )
            attempts.append({name: value for name, value in vars(attempt).items() if name not in unused})
        return (
            self.memory,
            frozenset(self.arrived),
            self.published,
            repr([(name, value) for name, value in locals_.items() if name not in constants]),
            repr((fields, attempts)),
            tuple(sorted((rank, beat, at // LONG) for rank, (beat, at) in heartbeats.items())),
        )

    def claim(self) -> tuple[str, Any] | None:
        """The reason of the decision that is about to be published: "missing" ranks, or a "circle"."""
        if not isinstance(self.step, CompareSet):
            return None
        decision = Decision.unpack("", self.step.value.encode())
        if decision.kind == "circle":
            return "circle", self.circle
        missing = [each.missing for each in self.participant.attempts if each.decision_key == self.step.key]
        return ("missing", missing[0]) if "did not arrive" in decision.text else None


def real_subclass(protocol: Any) -> type[real.Participant]:
    """The participant of a protocol. It tells its life of the circles that it finds."""

    class Watched(protocol.Participant):  # type: ignore[misc]
        def _find_circle(self) -> Any:
            circle = super()._find_circle()
            self.client.circle = tuple((rank, wait.name) for rank, wait in circle)
            return circle

    return Watched


class Node:
    """One state of one rank. It is done if ``step`` is None."""

    __slots__ = (
        "after",
        "answers",
        "arrived",
        "claim",
        "interrupted",
        "late",
        "lost",
        "memory",
        "open",
        "outcomes",
        "rank",
        "seen",
        "step",
    )

    def __init__(self, rank: int, memory: Memory, life: Life | None, answers: tuple[Any, ...] = ()) -> None:
        self.rank, self.memory, self.answers = rank, memory, answers
        self.step = life.step if life else None
        self.outcomes = life.outcomes() if life else dict(memory.outcomes)
        self.arrived = memory.arrived | (life.arrived if life else set())
        attempts = life.participant.attempts if life else ()
        self.open = tuple(each.name for each in attempts if each.decision is None)
        self.claim = life.claim() if life else None
        self.seen = life.seen if life else frozenset()
        self.late = life is not None and life.clock == DEADLINE
        self.interrupted = memory.interrupted
        self.after: dict[Any, Node] = {}
        self.lost = False


class Rank:
    """All states of one rank that were reached so far."""

    def __init__(self, protocol: Any, rank: int, program: Program) -> None:
        self.protocol, self.rank, self.program = protocol, rank, program
        self._known: dict[object, Node] = {}
        self.start = self._run(Memory(program.calls, program.otherwise), (), "start")

    def _run(self, memory: Memory, answers: tuple[Any, ...], key: object) -> Node:
        life = None
        while memory.calls:
            life = Life(self.protocol, self.rank, self.program, memory, answers)
            if life.after is None:
                break
            memory, answers, life = life.after, (), None
        if life is None:
            key = replace(memory, count=0)
        elif life.state is not None:
            key = life.state
        if key not in self._known:
            self._known[key] = Node(self.rank, memory, life, answers)
        return self._known[key]

    def next(self, node: Node, answer: Any) -> Node:
        """The state after an answer."""
        if answer not in node.after:
            node.after[answer] = self._run(node.memory, (*node.answers, answer), (id(node), answer))
        return node.after[answer]

    def lose(self, node: Node) -> Node:
        """The state after the rank's death."""
        key = ("lost", frozenset(node.outcomes.items()), frozenset(node.arrived))
        if key not in self._known:
            self._known[key] = lost = Node(self.rank, node.memory, None)
            lost.outcomes, lost.arrived, lost.lost = node.outcomes, node.arrived, True
        return self._known[key]
