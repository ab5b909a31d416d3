"""One process of a model: its calls run on given answers, and all its states that were reached."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from pgmesh.liveness.operations import Operation
from tests.support.board import Board, Fault, FaultyBoard

LONG = 1e6
"""Seconds without a heartbeat after which a rank counts as lost. An inspection takes a few seconds."""

DEADLINE = 1e9
"""Seconds until the deadline of a call."""

MOST_CALLS = 4
"""After as many failed calls, a process stops to retry."""

BEFORE, AFTER = "interrupted before", "interrupted after"
"""Answers that stand for Ctrl-C before or after a step."""


def interrupt() -> None:
    raise KeyboardInterrupt  # another one each time: the traceback of one would keep all frames


def as_it_is(board: Board) -> Board:
    """The board of code that is no mutant."""
    return board


class Sleep(NamedTuple):
    """A pause. Its answer is the choice, and what the process can know afterwards: heartbeats, and arrivals."""


class Stopped(BaseException):
    """The answers have been used up."""


class Answers(Board):
    """A board that gives the answers of one path, and stops at the first step without an answer.

    Args:
        done: called with each step that was done, also if it was interrupted after.
        received: called with each other step and its answer; returns the answer for the code.
    """

    def __init__(
        self, answers: Sequence[Any], done: Callable[[Any], None], received: Callable[[Any, Any], Any]
    ) -> None:
        self._left, self._done, self._received = iter(answers), done, received
        self.step: Any = None

    def perform(self, store: Any, operation: Any) -> Any:
        for answer in self._left:
            self._done(operation)
            return answer if answer == AFTER else self._received(operation, answer)
        if self.step is None:
            self.step = operation
        raise Stopped  # at every later step too, because a call tries to publish each error


class Call:
    """One call of a protocol, run on given answers. It is the ``Client`` of that call.

    Afterwards, ``step`` is the first step without an answer, or ``after`` is the memory after the call.

    Args:
        memory: what the process remembers from its calls before.
        answers: those of the board to the steps of this call; BEFORE or AFTER for an interrupt.
        board: the board of a mutant, around the one with the answers.
    """

    seconds, pace = DEADLINE, 1.0

    def __init__(self, memory: Any, answers: Sequence[Any], board: Callable[[Board], Board]) -> None:
        self.memory = memory
        self.after: Any = None
        self.state: object = None  # at a pause, everything on which further steps depend
        self.clock = 0.0
        self.beats = 0  # heartbeats that each rank had sent at the last pause
        self.seen: frozenset[tuple[str, int]] = frozenset()  # arrivals at the attempts of this call at the last pause
        given = [answer for answer in answers if answer != BEFORE]
        stops = {i: answer for i, answer in enumerate(answers) if answer in (BEFORE, AFTER)}
        self.interrupted = bool(stops)
        faults = [
            Fault(**{"before" if answer == BEFORE else "after": interrupt}, skip=i, times=1)
            for i, answer in stops.items()
        ]
        self._answers = Answers(given, self.done, self.received)
        self._board = board(FaultyBoard(*faults, board=self._answers) if faults else self._answers)
        with contextlib.suppress(Stopped):
            self.after = self.finish()

    @property
    def step(self) -> Any:
        return self._answers.step

    def finish(self) -> Any:
        """Run the call to its end; return the memory after it."""
        raise NotImplementedError

    def explicit_state(self) -> object:
        """Everything on which the steps after a pause depend."""
        raise NotImplementedError

    def wake(self, choice: str) -> None:
        """Set the clock after a pause."""
        raise NotImplementedError

    def done(self, step: Any) -> None:
        """Note a step that was done."""

    def received(self, step: Any, answer: Any) -> Any:
        """The answer of a step as the code gets it."""
        return answer

    # -- the client -----------------------------------------------------------------------------------------------

    def ask(self, step: Any) -> Any:
        return self._board.perform(None, step)

    def run(self, *operations: Operation) -> list[Any]:
        return [self.ask(operation) for operation in operations]

    def now(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        try:
            choice, self.beats, self.seen = self.ask(Sleep())
        except Stopped:
            self.state = self.explicit_state()
            raise
        self.wake(choice)


class Node:
    """One state of one process. It is done if ``step`` is None.

    Subclasses copy what the laws are about from the call. A dead process keeps the attributes in ``kept``.
    """

    kept: ClassVar[tuple[str, ...]] = ("outcomes",)

    def __init__(self, memory: Any, call: Any, answers: tuple[Any, ...] = ()) -> None:
        self.memory, self.answers = memory, answers
        self.step: Any = call.step if call else None
        self.late = call is not None and call.clock == DEADLINE
        self.seen: frozenset[tuple[str, int]] = call.seen if call else frozenset()
        self.outcomes: frozenset[tuple[str, str]] = frozenset()  # the decisions that it knows, by attempt
        self.after: dict[Any, Any] = {}
        self.dead = False


@dataclass
class Process:
    """All states of one process that were reached so far.

    Args:
        call: runs a call on a memory and answers.
        node: makes a state from a memory, a call and its answers.
        memory: that before the first call. It has ``calls``, those that are left, and their ``count`` so far.
    """

    call: Callable[[Any, tuple[Any, ...]], Call]
    node: Callable[..., Any]
    memory: Any

    def __post_init__(self) -> None:
        self._known: dict[object, Any] = {}
        self.start = self._run(self.memory, (), "start")

    def _run(self, memory: Any, answers: tuple[Any, ...], key: object) -> Any:
        call = None
        while memory.calls:
            call = self.call(memory, answers)
            if call.after is None:
                break
            memory, answers, call = call.after, (), None
        if call is None:
            key = replace(memory, count=0)
        elif call.state is not None:
            key = call.state
        if key not in self._known:
            self._known[key] = self.node(memory, call, answers)
        return self._known[key]

    def next(self, node: Any, answer: Any) -> Any:
        """The state after an answer."""
        if answer not in node.after:
            node.after[answer] = self._run(node.memory, (*node.answers, answer), (id(node), answer))
        return node.after[answer]

    def die(self, node: Any) -> Any:
        """The state after the death of the process."""
        kept = {name: getattr(node, name) for name in node.kept}
        key = ("dead", *kept.values())
        if key not in self._known:
            self._known[key] = dead = self.node(node.memory, None)
            vars(dead).update(kept, dead=True)
        return self._known[key]
