"""One process of the model: its program run on given answers, and all its states that were reached."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Union

from pgmesh.elastic.records import Outcome, Request
from pgmesh.errors import MembershipError, MismatchError, MissingRanksError
from pgmesh.groups.identity import MeshIdentity
from pgmesh.layout import Layout
from pgmesh.rendezvous.operations import Operation, Read
from pgmesh.rendezvous.statuses import Statuses
from tests.elastic.model.code import Code
from tests.rendezvous.model.ranks import AFTER, BEFORE, DEADLINE, LONG, MOST_CALLS, Stopped
from tests.rendezvous.model.stores import Sleep

SINCE_BOOT = 1e12
"""Seconds on the clock of the statuses when a call begins, whose own clock is at 0."""

PAUSE = 10.0
"""Length of a pause, in seconds: after each, a process inspects."""

Call = Union[Request, None]
"""The arguments of ``shrink``; None for ``stand_by``."""


class Start(NamedTuple):
    """The begin of a process that replaces another one."""


class Ended(NamedTuple):
    """A connection to the listener of a process, which shows whether it has ended."""

    process: int


Step = Union[Operation, Start, Ended, Sleep]


@dataclass(frozen=True)
class Program:
    """The program of one process.

    Args:
        rank: its rank.
        calls: its calls, each on the mesh that the one before has returned.
        retries: it repeats a failed or interrupted call.
        comes_back: it stands by if it was taken for lost.
        replaces: the process with the same rank whose place it takes; None for none.
        layout, generation: the mesh of the first call, if shrink has replaced the first mesh already.
    """

    rank: int
    calls: tuple[Call, ...]
    retries: bool = False
    comes_back: bool = False
    replaces: int | None = None
    layout: Layout | None = None
    generation: int = 0


class Result(NamedTuple):
    """A mesh that a call has returned.

    Args:
        attempt: key of the decision.
        mesh: key of the mesh that was replaced.
        ranks: those of the new mesh.
    """

    attempt: str
    mesh: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Memory:
    """Everything that a process remembers from one call to the next.

    Args:
        calls: the calls that are left.
        generation, layout: the mesh of the next call.
        count: the number of calls so far.
        outcomes: by key, the decisions that it learnt.
        results: the meshes that it was given.
        left: the decision keys of attempts at which its call ended with an error.
    """

    calls: tuple[Call, ...]
    layout: Layout
    generation: int = 0
    count: int = 0
    outcomes: frozenset[tuple[str, str]] = frozenset()
    results: tuple[Result, ...] = ()
    left: frozenset[str] = frozenset()


class Life:
    """One call of shrink or stand_by, run on given answers. It is the ``Client`` of that call.

    Afterwards, ``step`` is the first step without an answer, or ``after`` is the memory after the call.
    """

    def __init__(self, code: Code, process: int, program: Program, memory: Memory, answers: Sequence[Any]) -> None:
        self.code, self.process, self.program, self.memory, self.answers = code, process, program, memory, answers
        self.step: Step | None = None
        self.state: object = None  # at a pause, everything on which further steps depend
        self.after: Memory | None = None
        self.time = self.clock = 0.0  # a deadline comes without a silence of the others
        self.looked = b""  # the arrivals when they were last read
        self.interrupted = False  # at some step of this call
        self.outcomes = set(memory.outcomes)
        self.agreement: Any = None  # the last one of this call
        self.thread = SimpleNamespace(
            replaces_process=program.replaces is not None,
            has_ended=lambda status: self._answer(Ended(status.endpoint[1])),
        )
        self._position = 0
        with contextlib.suppress(Stopped):
            self.after = self._finish()

    def _finish(self) -> Memory:
        memory = replace(self.memory, count=self.memory.count + 1)
        call, *others = memory.calls
        if self.program.replaces is not None and not self.memory.count:
            self._answer(Start())
        try:
            mesh = self._call(call)
        except (KeyboardInterrupt, MissingRanksError, MismatchError) as error:
            if isinstance(error, KeyboardInterrupt) and not self.interrupted:
                raise AssertionError("nobody pressed Ctrl-C") from error
            again = memory.calls if self.program.retries and memory.count < MOST_CALLS else ()
            left = memory.left | ({self.agreement.decision_key} if self.agreement else set())
            return replace(memory, calls=again, left=left, outcomes=frozenset(self.outcomes))
        except MembershipError:
            again = (None, *others) if self.program.comes_back else ()
            return replace(memory, calls=again, outcomes=frozenset(self.outcomes))
        ranks = mesh.layout.ranks()
        result = Result(self.agreement.decision_key, self.agreement.key, ranks)
        calls = tuple(others) if self.program.rank in ranks else (None,) * len(others)
        return replace(
            memory,
            calls=calls,
            layout=mesh.layout,
            generation=mesh.identity.generation,
            outcomes=frozenset(self.outcomes),
            results=(*memory.results, result),
        )

    def _call(self, request: Call) -> Any:
        """The call, in the steps of ``shrinking.py`` after the mesh was aborted."""
        life, shrinking = self, self.code.shrinking

        class Watched(self.code.agreement.Agreement):  # type: ignore[misc, name-defined]
            def __init__(self, *arguments: Any, **more: Any) -> None:
                super().__init__(*arguments, **more)
                life.agreement = self

            def _attempt(self) -> Any:
                outcome = super()._attempt()
                life.outcomes.add((self.decision_key, plain(outcome)))
                return outcome

        shrinking.Agreement = Watched
        shrinking.process_id = lambda: f"process {self.process}"
        shrinking.GroupCache = lambda name, layout, identity: SimpleNamespace(
            layout=layout, identity=identity, configure_all=lambda options: None
        )
        return shrinking._agree_and_replace(self._cache(), request, self, DEADLINE)

    def _cache(self) -> Any:
        """The mesh of this call."""
        layout, generation = self.memory.layout, self.memory.generation
        identity: Any = MeshIdentity("m", layout, None, self.program.rank, 9)
        identity.prefix, identity.shared_number, identity.generation = "m", 0, generation
        identity.rejoined = self.program.replaces is not None and generation == 0
        identity.register = lambda *arguments, **more: None
        nothing = lambda *arguments: None  # noqa: E731
        return SimpleNamespace(
            identity=identity,
            layout=layout,
            registry=None,
            rank=self.program.rank,
            name="m",
            label="mesh 'm'",
            statuses=Statuses(LONG, lambda: self.time + SINCE_BOOT),
            shrink_attempts={},
            aborts_when_lost=False,
            shrunk=None if generation == 0 else "by an earlier call",
            configured_options=list,
            forget_store=nothing,
            end_aborted=nothing,
        )

    # -- the client -----------------------------------------------------------------------------------------------

    def run(self, *operations: Operation) -> list[Any]:
        return [self._answer(operation) for operation in operations]

    def now(self) -> float:
        return self.clock

    def timeout(self) -> float:
        return 1.0

    def sleep(self, seconds: float) -> None:
        choice, beats = self._answer(Sleep(), sys._getframe(1).f_locals)
        self.time = beats * LONG + self.time % LONG + PAUSE
        self.clock = DEADLINE if choice == "deadline" else self.time

    def _answer(self, step: Step, locals_: dict[str, Any] | None = None) -> Any:
        if self._position == len(self.answers):
            if self.step is None:
                self.step = step
                self.state = None if locals_ is None else self._state(locals_)
            raise Stopped  # at every later step too, because agree() tries to publish each error
        answer = self.answers[self._position]
        self._position += 1
        if answer in (BEFORE, AFTER):
            self.interrupted = True
            raise KeyboardInterrupt
        if isinstance(step, Read) and step.key.endswith("/arrivals"):
            self.looked = answer or b""
        if isinstance(step, Read) and "/status/" in step.key:
            beats, answer = answer
            self.time = max(self.time, beats * LONG + self.time % LONG)
        return answer

    def _state(self, locals_: dict[str, Any]) -> object:
        """Everything on which the steps after a pause depend. A new local or field is a part of it by default."""
        constants = {"self", "now", "inspection", "warning", "pause", "__class__"}
        names = {"key", "members", "request", "number", "came_late"}
        fields = {name: value for name, value in vars(self.agreement).items() if name in names}
        heard = self.agreement.statuses.heard
        return (
            self.memory,
            frozenset(self.outcomes),
            repr([(name, value) for name, value in locals_.items() if name not in constants]),
            repr(fields),
            tuple(sorted((rank, beat, (at - SINCE_BOOT) // LONG) for rank, (beat, at) in heard.items())),
        )


def plain(outcome: Any) -> str:
    """An outcome without its texts, which have no effect."""
    if outcome.failed:
        return Outcome(failed="failed", error=outcome.error).pack()
    lost = dict.fromkeys(outcome.lost, "lost")
    return Outcome("", outcome.error, lost, dict(outcome.replaced), outcome.axis, tuple(outcome.processes)).pack()


class Node:
    """One state of one process. It is done if ``step`` is None."""

    __slots__ = (
        "after",
        "answers",
        "dead",
        "interrupted",
        "late",
        "layout",
        "left",
        "looked",
        "memory",
        "mesh",
        "number",
        "outcomes",
        "process",
        "rank",
        "request",
        "results",
        "step",
    )

    def __init__(self, process: int, rank: int, memory: Memory, life: Life | None, answers: tuple[Any, ...]) -> None:
        self.process, self.rank, self.memory, self.answers = process, rank, memory, answers
        self.step = life.step if life else None
        agreement = life.agreement if life else None
        self.mesh = agreement.key if agreement else ""
        self.number = agreement.number if agreement else 0
        self.layout = agreement.members if agreement else ()
        self.request = agreement.request if agreement else None
        self.outcomes = frozenset(life.outcomes) if life else memory.outcomes
        self.looked = life.looked if life else b""
        self.late = life is not None and life.clock == DEADLINE
        self.interrupted = life is not None and life.interrupted
        self.results, self.left = memory.results, memory.left
        self.after: dict[Any, Node] = {}
        self.dead = False

    @property
    def attempt(self) -> str:
        """Prefix of the store keys of its attempt."""
        return f"{self.mesh}/shrink/{self.number}"


class Process:
    """All states of one process that were reached so far."""

    def __init__(self, code: Code, process: int, program: Program, layout: Layout) -> None:
        self.code, self.process, self.program = code, process, program
        self._known: dict[object, Node] = {}
        self.start = self._run(Memory(program.calls, program.layout or layout, program.generation), (), "start")

    def _run(self, memory: Memory, answers: tuple[Any, ...], key: object) -> Node:
        life = None
        while memory.calls:
            life = Life(self.code, self.process, self.program, memory, answers)
            if life.after is None:
                break
            memory, answers, life = life.after, (), None
        if life is None:
            key = replace(memory, count=0)
        elif life.state is not None:
            key = life.state
        if key not in self._known:
            self._known[key] = Node(self.process, self.program.rank, memory, life, answers)
        return self._known[key]

    def next(self, node: Node, answer: Any) -> Node:
        """The state after an answer."""
        if answer not in node.after:
            node.after[answer] = self._run(node.memory, (*node.answers, answer), (id(node), answer))
        return node.after[answer]

    def die(self, node: Node) -> Node:
        """The state after the death of the process."""
        key = ("dead", node.outcomes, node.results)
        if key not in self._known:
            self._known[key] = dead = Node(self.process, self.program.rank, node.memory, None, ())
            dead.outcomes, dead.dead = node.outcomes, True
        return self._known[key]
