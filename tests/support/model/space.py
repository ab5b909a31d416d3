"""All processes together: everything that can happen. The laws are in the subclasses of ``Space``."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from pgmesh.liveness.operations import Append, CompareSet, Delete, Read, Set
from tests.support.model.processes import AFTER, BEFORE, MOST_CALLS, Process, Sleep
from tests.support.model.stores import Content, Stores, decision_in

NEVER_CHANGES = "a decision never changes"
ONE_DECISION = "one decision for all"
NO_WAIT = "no wait once all arrived"
RETRY = "a retry works"
NO_ERROR = "nothing else is raised"

FREE, CRASH, DEADLINE, INTERRUPT, SILENCE = 0, 1, 10, 100, 1000
"""The amounts that a step subtracts from the faults that are left."""


@dataclass(frozen=True)
class Faults:
    """The faults that may happen, with their numbers.

    Args:
        crashes: processes that die, at any step.
        deadlines: calls whose deadline comes, at any pause.
        interrupts: Ctrl-C, before or after any step.
        silences: how often a living process sends no heartbeat in a long time.
        long_times: how often a time passes after which a silent rank counts as lost.
        mortal: the processes that may die; None for all.
        listeners: a dead process's listener refuses connections. Otherwise its host does not answer.
        heard: all ranks have published a status before.
        warns: each rank logs what it waits for at its first inspection.
    """

    crashes: int = 0
    deadlines: int = 0
    interrupts: int = 0
    silences: int = 0
    long_times: int = 0
    mortal: frozenset[int] | None = None
    listeners: bool = True
    heard: bool = True
    warns: bool = False

    def left(self) -> int:
        """Number of each fault that may still happen, one digit for each."""
        return CRASH * self.crashes + DEADLINE * self.deadlines + INTERRUPT * self.interrupts + SILENCE * self.silences


NO_FAULTS = Faults()


class Broken(NamedTuple):
    """A law that was broken, and the path there."""

    law: str
    text: str
    trace: Sequence[str]

    def __str__(self) -> str:
        return "\n  ".join([f"{self.law}: {self.text}", *self.trace])


class Violation(Exception):
    """A law is broken: its name, and the details."""


@dataclass
class Seen:
    """Counts of the results."""

    states: int = 0
    cut_short: int = 0
    broken: list[Broken] = field(default_factory=list)


class Move(NamedTuple):
    """A step of one process: its price, a description, and the process and the store after it."""

    price: int
    text: str
    node: Any
    content: Content


class State(NamedTuple):
    """The processes, the content of the store, the faults that are left, and the processes that were ever silent."""

    nodes: tuple[Any, ...]
    content: Content
    left: int
    silent: frozenset[int] = frozenset()

    def affords(self, price: int) -> bool:
        return not price or self.left // price % 10 > 0


class Space:
    """Everything that can happen to some programs under a protocol.

    Args:
        stores: the contents of the store.
    """

    processes: Sequence[Process]
    start: State
    name: ClassVar[str] = "process"
    uninterrupted: ClassVar[tuple[type, ...]] = ()  # steps before which Ctrl-C does not come

    def __init__(self, programs: Sequence[Any], faults: Faults, stores: Stores) -> None:
        self.programs, self.faults, self.stores = programs, faults, stores
        self.out = Seen()
        self._before: dict[State, State | None] = {}
        self._finished: set[State] = set()
        self._moves: dict[object, list[Move]] = {}

    def explore(self, most: int = 10_000_000) -> Seen:
        """Try everything that can happen; stop at the first law that is broken.

        Args:
            most: states; a larger space is cut short, and that is counted.
        """
        self._before[self.start] = None
        row, state = [self.start], self.start
        with self.running():
            try:
                while row and len(self._before) <= most:
                    next_row: list[State] = []
                    for state in row:
                        self._finish(state)
                        for _, _, new in self._steps(state):
                            if new not in self._before:
                                self._before[new] = state
                                next_row.append(new)
                    row = next_row
            except Violation as broken:
                law, text, *more = broken.args
                self.out.broken.append(Broken(law, text, [*self._trace(state), *more]))
        self.out.cut_short = int(bool(row) and not self.out.broken)
        self.out.states = len(self._before)
        return self.out

    def walk(self, walks: int, chance: random.Random) -> Seen:
        """Take random walks through a space that is too large to explore; then let the processes take turns."""
        trace: list[str] = []
        with self.running():
            try:
                for _ in range(walks):
                    state, trace = self.start, []
                    eager = [*(chance.choice((1.0, 1.0, 4.0, 16.0)) for _ in self.processes), 0.05]
                    hurry, stops = chance.choice((0.01, 0.03, 0.2)), chance.choice((0.0, 0.0, 0.01))
                    while len(trace) < 3000 and (steps := [*self._steps(state)]) and chance.random() >= stops:
                        weights = [hurry if new.left < state.left else eager[i] for i, _, new in steps]
                        _, text, state = chance.choices(steps, weights)[0]
                        trace.append(text)
                    self._finish(state, at_rest=False)
                    self.out.states += len(trace)
            except Violation as broken:
                law, text, *more = broken.args
                self.out.broken.append(Broken(law, text, ["...", *trace[-60:], *more]))
        return self.out

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Disable the garbage collector, which takes long with a million states and finds nothing."""
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    def _trace(self, state: State) -> list[str]:
        """The path to a state, as text."""
        trace: list[str] = []
        while (before := self._before[state]) is not None:
            trace.append(next(text for _, text, new in self._steps(before) if new == state))
            state = before
        return trace[::-1]

    # -- what can happen next -------------------------------------------------------------------------------------

    def _steps(self, state: State) -> Iterator[tuple[int, str, State]]:
        """Everything that can happen next: the process, or -1, a description, and the new state."""
        everyone = range(len(state.nodes))
        settled = next((i for i in everyone if self.is_settled(i, state)), None)
        for i in everyone if settled is None else (settled,):
            for move in self.moves_of(i, state):
                if state.affords(move.price):
                    yield i, move.text, self.go(state, i, move)
        if settled is None and state.content.beats < self.faults.long_times:
            yield -1, "a long time passes", self.long_time(state)
            for i in everyone if state.affords(SILENCE) and self.faults.silences else ():
                if not state.nodes[i].dead:
                    yield -1, f"a long time passes, in which {self.name} {i} is stopped", self.long_time(state, i)

    def is_settled(self, i: int, state: State) -> bool:
        """True if the next step of a process commutes with all steps of others: no other need be tried first."""
        raise NotImplementedError

    def rank_of(self, i: int) -> int:
        """The rank of a process."""
        return i

    def sends_heartbeats(self, i: int, state: State) -> bool:
        """True if a process sends heartbeats with its status."""
        return not state.nodes[i].dead

    def long_time(self, state: State, stopped: int | None = None) -> State:
        """A long time passes, in which all living processes but one send heartbeats."""
        everyone = range(len(state.nodes))
        alive = [self.rank_of(i) for i in everyone if i != stopped and self.sends_heartbeats(i, state)]
        content = self.stores.long_time(state.content, alive)
        if stopped is None:
            return state._replace(content=content)
        return State(state.nodes, content, state.left - SILENCE, state.silent | {stopped})

    def moves_of(self, i: int, state: State) -> list[Move]:
        key = state.nodes[i], state.content, self.fact(i, state)
        if key not in self._moves:
            self._moves[key] = [*self._find_moves(i, *key)]
        return self._moves[key]

    def fact(self, i: int, state: State) -> bool | None:
        """What the next step of a process depends on besides the store; None if it cannot be done yet."""
        return False

    def _find_moves(self, i: int, node: Any, content: Content, fact: bool | None) -> Iterator[Move]:
        """The next steps of one process. The last one without a fault is an inspection, if it has the choice."""
        process, step = self.processes[i], node.step
        if step is None or fact is None:
            return
        if not isinstance(step, Sleep):
            yield self._perform(i, node, content, fact)
        else:
            for choice in self.choices(node):
                yield self.wake(i, node, content, choice)
            if self.faults.deadlines:
                yield self.wake(i, node, content, "deadline")._replace(price=DEADLINE)
        if self.faults.interrupts and not isinstance(step, self.uninterrupted):
            yield Move(INTERRUPT, f"{self.name} {i} is interrupted", process.next(node, BEFORE), content)
            if not isinstance(step, Sleep):
                _, new = self.answer(i, node, content, fact)
                text = f"{self.name} {i} {self.describe(step)}, is interrupted"
                yield Move(INTERRUPT, text, process.next(node, AFTER), new)
        if self.faults.crashes and (self.faults.mortal is None or i in self.faults.mortal):
            yield Move(CRASH, f"{self.name} {i} dies", process.die(node), content)

    def choices(self, node: Any) -> Sequence[str]:
        """What a process may do after a pause without a fault."""
        return ("inspect",)

    def wake(self, i: int, node: Any, content: Content, choice: str) -> Move:
        """A process ends its pause, and does the next step."""
        awake = self.processes[i].next(node, (choice, content.beats, self.arrivals_seen(node, content, choice)))
        if awake.step is None or isinstance(awake.step, Sleep):
            return Move(FREE, f"{self.name} {i} wakes ({choice})", awake, content)
        move = self._perform(i, awake, content, False)
        return move._replace(text=f"{move.text} ({choice})")

    def arrivals_seen(self, node: Any, content: Content, choice: str) -> frozenset[tuple[str, int]]:
        """The arrivals that a process can know after a pause, if a law depends on them."""
        return frozenset()

    def _perform(self, i: int, node: Any, content: Content, fact: bool) -> Move:
        answer, new = self.answer(i, node, content, fact)
        text = f"{self.name} {i} {self.describe(node.step)}"
        try:
            return Move(FREE, text, self.processes[i].next(node, answer), new)
        except Exception as error:
            raise Violation(NO_ERROR, f"{text}: {error!r}") from error

    def answer(self, i: int, node: Any, content: Content, fact: bool) -> tuple[Any, Content]:
        """The answer to the next step of a process, and the store afterwards."""
        return self.stores.perform(node.step, content)

    # -- laws -----------------------------------------------------------------------------------------------------

    def go(self, state: State, i: int, move: Move) -> State:
        """Take a step, and check the laws if a decision was published or read."""
        nodes = (*state.nodes[:i], move.node, *state.nodes[i + 1 :])
        new = State(nodes, move.content, state.left - move.price, state.silent)
        before, after, node = state.content.values, move.content.values, state.nodes[i]
        if before is not after:
            for key, value in after.items():
                if key.endswith("/decision") and before.get(key) != value:
                    if (was := state.content.ever(key)) is not None:
                        raise Violation(NEVER_CHANGES, f"{move.text}: it was {was.decode()}")
                    self.check_decision(state, i, key, value, move.text)
        if move.node.outcomes != node.outcomes:
            for key, outcome in move.node.outcomes:
                if move.content.ever(key) != outcome.encode():
                    was = (move.content.ever(key) or b"nothing").decode()
                    raise Violation(ONE_DECISION, f"{key} is {outcome} on {i}, and {was} in the store", move.text)
        self.check_step(state, i, new, move.text)
        return new

    def check_decision(self, state: State, i: int, key: str, value: bytes, text: str) -> None:
        """Check the laws for a decision that a process is about to publish."""
        raise NotImplementedError

    def check_step(self, state: State, i: int, new: State, text: str) -> None:
        """Check the other laws for a step."""

    def check_end(self, state: State) -> tuple[str, State]:
        """Check the laws where nothing happens any more without a deadline; return what happens then, if anything."""
        raise NotImplementedError

    # -- from here on, processes take turns -----------------------------------------------------------------------

    def _finish(self, state: State, *, at_rest: bool = True) -> None:
        """Check that from this state on, if processes take turns and nothing more fails, all of them end well.

        Args:
            at_rest: only if all processes are at a pause or at their end.
        """
        if at_rest and not all(self.rests(i, state) for i in range(len(state.nodes))):
            return
        trace: list[str] = []
        try:
            while state not in self._finished:
                self._finished.add(state)
                text, new = self._turn(state)
                if new == state:
                    break
                trace.append(text)
                state = new
        except Violation as broken:
            law, text, *more = broken.args
            raise Violation(law, text, *(f"... {text}" for text in [*trace[-12:], *more])) from broken

    def rests(self, i: int, state: State) -> bool:
        """True if a process is at a pause, at its end, or not to begin yet."""
        step = state.nodes[i].step
        return step is None or isinstance(step, Sleep) or self.fact(i, state) is None

    def _turn(self, state: State) -> tuple[str, State]:
        """One turn: a step of the first process that does not rest, an inspection by each, or a long time.

        If no turn changes anything, the laws are checked.
        """
        for i in range(len(state.nodes)):
            if not self.rests(i, state):
                move = self.inspection(state, i)
                return move.text, self.go(state, i, move)
        waiting = [i for i, node in enumerate(state.nodes) if isinstance(node.step, Sleep)]
        new = state
        for i in waiting:
            new = self.finish_inspection(self.go(new, i, self.inspection(new, i)), i)
        if new != state:
            return f"{waiting} inspect", new
        enough = self.faults.long_times + MOST_CALLS + 2  # each call of a process may need one
        if waiting and self.needs_time(state) and state.content.beats < enough:
            return "a long time passes", self.long_time(state)
        return self.check_end(state)

    def inspection(self, state: State, i: int) -> Move:
        return [move for move in self.moves_of(i, state) if move.price == FREE][-1]

    def finish_inspection(self, state: State, i: int) -> State:
        """The state after steps of one process until it rests."""
        while not self.rests(i, state):
            state = self.go(state, i, self.inspection(state, i))
        return state

    def needs_time(self, state: State) -> bool:
        """True if a loss may be found only after a long time."""
        raise NotImplementedError

    def describe(self, step: Any) -> str:
        """A step in the trace of a violation."""
        if isinstance(step, (CompareSet, Set)):
            key, value = decision_in(step)
            verb = "sets" if isinstance(step, CompareSet) else "overwrites"
            return f"{verb} {key} to {value[:80].decode()}"
        if isinstance(step, (Append, Read)):
            return f"{'reads' if isinstance(step, Read) else 'arrives in'} {step.key}"
        return f"deletes {', '.join(step.keys)}" if isinstance(step, Delete) else f"{step}"


MANY = 10_000_000


def check(seen: Seen, space: Space, most: int = MANY) -> Seen:
    """Assert that no law was broken, and that the space was not cut short without a limit."""
    assert not seen.broken, f"{space.programs}, {space.faults}\n{seen.broken[0]}"
    assert not seen.cut_short or most < MANY
    return seen


@dataclass(frozen=True)
class Mutant:
    """A mutant, the law that it breaks, and the programs that reveal it.

    Args:
        programs, faults, more: the arguments of the space.
        code: the parts of the protocol that the mutant replaces.
    """

    name: str
    law: str
    programs: Sequence[Any]
    faults: Faults
    code: Any
    more: dict[str, Any] = field(default_factory=dict)

    def broken(self, space: Callable[..., Space], most: int = 300_000) -> Broken | None:
        """The law that the mutant breaks, if it is the expected one."""
        broken = space(self.programs, self.faults, self.code, **self.more).explore(most).broken
        return next((each for each in broken if each.law == self.law), None)
