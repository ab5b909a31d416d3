"""All ranks together: everything that can happen, and the laws that must hold in it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from pgmesh.rendezvous import protocol as real, timing
from pgmesh.rendezvous.operations import CompareSet, Raw, Read
from pgmesh.rendezvous.statuses import RankStatus, status_key
from tests.rendezvous.model.programs import Program
from tests.rendezvous.model.ranks import AFTER, BEFORE, MOST_CALLS, Node, Rank, group_of
from tests.rendezvous.model.stores import Content, SetPending, Sleep, Step, Stores, kind_of

NEVER_CHANGES = "a decision never changes"
ONE_DECISION = "one decision for all"
ALL_ARRIVED = "made means that all arrived"
EQUAL = "made means equal fingerprints"
NO_FAILURE = "no group fails without a fault"
TRUE_MISSING = "a rank that is called missing is"
TRUE_CIRCLE = "a circle is true"
CIRCLE_STATED = "a circle is stated"
NO_WAIT = "no wait once all arrived"
LOSS_FOUND = "a loss is found"
MISMATCH_FOUND = "a mismatch is found"
RETRY = "a retry works"
NO_ERROR = "nothing else is raised"


@dataclass(frozen=True)
class Faults:
    """The faults that may happen, with their numbers.

    Args:
        crashes: ranks that die, at any step.
        deadlines: calls whose deadline comes, at any pause.
        interrupts: Ctrl-C, before or after any step.
        silences: how often a living rank sends no heartbeat in a long time.
        long_times: how often a time passes after which a silent rank counts as lost.
        mortal: the ranks that may die; None for all.
        heard: all ranks have published a status before.
        warns: each rank logs what it waits for at its first inspection.
    """

    crashes: int = 0
    deadlines: int = 0
    interrupts: int = 0
    silences: int = 0
    long_times: int = 0
    mortal: frozenset[int] | None = None
    heard: bool = True
    warns: bool = False

    def left(self) -> int:
        """Number of each fault that may still happen, one digit for each."""
        amounts = (
            (CRASH, self.crashes),
            (DEADLINE, self.deadlines),
            (INTERRUPT, self.interrupts),
            (SILENCE, self.silences),
        )
        return sum(price * times for price, times in amounts)


FREE, CRASH, DEADLINE, INTERRUPT, SILENCE = 0, 1, 10, 100, 1000
"""The amounts that a step subtracts from the faults that are left."""

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

    programs: int = 0
    states: int = 0
    circles: int = 0
    cut_short: int = 0
    broken: list[Broken] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Move(NamedTuple):
    """A step of one rank: its price, a description, and the rank and the store after it."""

    price: int
    text: str
    node: Node
    content: Content


class State(NamedTuple):
    """The ranks, the content of the store, and the faults that are left."""

    nodes: tuple[Node, ...]
    content: Content
    left: int

    def affords(self, price: int) -> bool:
        return not price or self.left // price % 10 > 0


class Space:
    """Everything that can happen to some programs under a protocol.

    Args:
        every_order: try every order of reads of values that never change too.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        faults: Faults = NO_FAULTS,
        protocol: Any = real,
        *,
        every_order: bool = False,
    ) -> None:
        self.programs, self.faults, self.every_order = programs, faults, every_order
        self.timed = bool(faults.long_times or faults.crashes)
        self.stores = Stores()
        self.out = Seen(programs=1)
        self._before: dict[State, State | None] = {}
        self._finished: set[State] = set()
        self._moves: dict[tuple[Node, Content], list[Move]] = {}
        stragglers = 0.0 if faults.warns else float("inf")
        self._timing = mock.patch.object(timing, "TIMING", dataclasses.replace(timing.TIMING, stragglers=stragglers))
        with self._timing:
            self.ranks = [Rank(protocol, rank, program) for rank, program in enumerate(programs)]
        statuses = {status_key(rank): RankStatus(rank).pack().encode() for rank in range(len(programs))}
        content = self.stores.content(statuses if faults.heard else {}, 0)
        self.start = State(tuple(rank.start for rank in self.ranks), content, faults.left())

    def explore(self, most: int = 10_000_000) -> Seen:
        """Try everything that can happen; stop at the first law that is broken.

        Args:
            most: states; a larger space is cut short, and that is counted.
        """
        self._before[self.start] = None
        row, state = [self.start], self.start
        with self._timing, _no_garbage_collection():
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
        """Take random walks through a space that is too large to explore; then let the ranks take turns."""
        trace: list[str] = []
        with self._timing:
            try:
                for _ in range(walks):
                    state, trace = self.start, []
                    eager = [*(chance.choice((1.0, 1.0, 4.0, 16.0)) for _ in self.ranks), 0.05]
                    while len(trace) < 3000 and (steps := [*self._steps(state)]):
                        weights = [0.03 if new.left < state.left else eager[i] for i, _, new in steps]
                        _, text, state = chance.choices(steps, weights)[0]
                        trace.append(text)
                    self._finish(state, at_rest=False)
                    self.out.states += len(trace)
            except Violation as broken:
                law, text, *more = broken.args
                self.out.broken.append(Broken(law, text, ["...", *trace[-60:], *more]))
        return self.out

    def _trace(self, state: State) -> list[str]:
        """The path to a state, as text."""
        trace: list[str] = []
        while (before := self._before[state]) is not None:
            trace.append(next(text for _, text, new in self._steps(before) if new == state))
            state = before
        return trace[::-1]

    # -- what can happen next -------------------------------------------------------------------------------------

    def _steps(self, state: State) -> Iterator[tuple[int, str, State]]:
        """Everything that can happen next: the rank, or -1, a description, and the new state."""
        everyone = range(len(state.nodes))
        settled = next((i for i in everyone if self._is_settled(state.nodes[i], state.content)), None)
        for i in everyone if settled is None else (settled,):
            for move in self._moves_of(i, state):
                if state.affords(move.price):
                    yield i, move.text, self._go(state, i, move)
        if settled is None and state.content.beats < self.faults.long_times:
            yield -1, "a long time passes", self._long_time(state)
            for i in everyone if state.affords(SILENCE) and self.faults.silences else ():
                yield -1, f"a long time passes, in which rank {i} is stopped", self._long_time(state, i)

    def _is_settled(self, node: Node, content: Content) -> bool:
        """True if a rank's next step commutes with all steps of other ranks, so that no other need be tried first.

        It reads a value that never changes, or publishes the same status again.
        """
        step = node.step
        if self.every_order or step is None:
            return False
        if isinstance(step, Sleep):
            return not node.open or (not self.timed and content.decision(node.open[0]) is not None)
        if isinstance(step, SetPending):
            return self.stores.perform(node.rank, step, content)[1] is content
        if not isinstance(step, (Read, CompareSet)):
            return False
        name, _, key = step.key.rpartition("/")
        if key == "arrivals":
            return len(content.arrived(name)) == len(group_of(name))
        return key == "mismatch" or (key == "decision" and step.key in content.values)

    def _long_time(self, state: State, stopped: int | None = None) -> State:
        alive = [i for i, node in enumerate(state.nodes) if not node.lost and i != stopped]
        left = state.left - SILENCE * (stopped is not None)
        return State(state.nodes, self.stores.long_time(state.content, alive), left)

    def _moves_of(self, i: int, state: State) -> list[Move]:
        key = state.nodes[i], state.content
        if key not in self._moves:
            self._moves[key] = [*self._find_moves(i, *key)]
        return self._moves[key]

    def _find_moves(self, i: int, node: Node, content: Content) -> Iterator[Move]:
        """The next steps of one rank. The last one without a fault is an inspection, if it has the choice."""
        rank, step = self.ranks[i], node.step
        if step is None:
            return
        if not isinstance(step, Sleep):
            yield self._perform(i, node, content)
        else:
            if len(node.open) > 1:
                yield self._wake(i, node, content, "look")
            yield self._wake(i, node, content, "inspect")
            if self.faults.deadlines:
                yield self._wake(i, node, content, "deadline", DEADLINE)
        if self.faults.interrupts:
            yield Move(INTERRUPT, f"rank {i} is interrupted", rank.next(node, BEFORE), content)
            if not isinstance(step, Sleep):
                _, new = self.stores.perform(i, step, content)
                yield Move(INTERRUPT, f"rank {i} {describe(step)}, is interrupted", rank.next(node, AFTER), new)
        if self.faults.crashes and (self.faults.mortal is None or i in self.faults.mortal):
            yield Move(CRASH, f"rank {i} dies", rank.lose(node), content)

    def _wake(self, i: int, node: Node, content: Content, choice: str, price: int = FREE) -> Move:
        """A rank ends its pause, and does the next step."""
        seen = frozenset((name, rank) for name in node.open for rank in content.arrived(name))
        known = seen if self.timed or choice == "deadline" else frozenset()
        awake = self.ranks[i].next(node, (choice, content.beats, known))
        move = self._perform(i, awake, content) if node.open else Move(FREE, f"rank {i} wakes", awake, content)
        return move._replace(price=price, text=f"{move.text} ({choice})")

    def _perform(self, i: int, node: Node, content: Content) -> Move:
        assert node.step is not None
        answer, new = self.stores.perform(i, node.step, content)
        try:
            return Move(FREE, f"rank {i} {describe(node.step)}", self.ranks[i].next(node, answer), new)
        except Exception as error:
            raise Violation(NO_ERROR, f"rank {i} {describe(node.step)}: {error!r}") from error

    # -- laws -----------------------------------------------------------------------------------------------------

    def _go(self, state: State, i: int, move: Move) -> State:
        """Take a step, and check the laws if a decision was published or read."""
        new = State((*state.nodes[:i], move.node, *state.nodes[i + 1 :]), move.content, state.left - move.price)
        before, after = state.content, move.content
        if before is not after:
            for key, value in after.values.items():
                if key.endswith("/decision") and before.values.get(key) != value:
                    if key in before.values:
                        text = f"{move.text}: it was {kind_of(before.values[key])}"
                        raise Violation(NEVER_CHANGES, text)
                    self._check_decision(state, state.nodes[i], key.removesuffix("/decision"), move.text)
        if move.node.outcomes != state.nodes[i].outcomes:
            for name, kind in move.node.outcomes.items():
                if after.decision(name) != kind:
                    text = f"{name} is {kind} on rank {i}, and {after.decision(name)} in the store"
                    raise Violation(ONE_DECISION, text, move.text)
        return new

    def _check_decision(self, state: State, node: Node, name: str, text: str) -> None:
        """Check the laws for a decision that a rank is about to publish."""
        assert isinstance(node.step, (CompareSet, Raw))
        kind = kind_of(node.step[1].encode() if isinstance(node.step, CompareSet) else node.step.arguments[1].encode())
        members = group_of(name)
        differ = len({self.programs[rank].variant for rank in members}) > 1
        absent = [rank for rank in members if name not in state.nodes[rank].arrived]
        if kind == "made" and absent:
            raise Violation(ALL_ARRIVED, f"{name} is made, and {absent} never arrived", text)
        if kind == "made" and differ:
            raise Violation(EQUAL, f"{name} is made, and its members mean different groups", text)
        if kind != "made" and not differ and (kind == "mismatch" or (self.faults == NO_FAULTS and not node.late)):
            raise Violation(NO_FAILURE, f"{name} is {kind}", text)
        claim, details = node.claim or ("", ())
        if claim == "missing" and (there := [rank for rank in details if (name, rank) in node.seen]):
            raise Violation(TRUE_MISSING, f"{there} had arrived at {name}", text)
        if claim == "circle":
            self.out.circles = 1
            self._check_circle(state, details, text)

    def _check_circle(self, state: State, circle: Sequence[tuple[int, str]], text: str) -> None:
        """Check that each rank of a circle waits, and that the next one has not arrived."""
        if any(state.content.decision(name) not in (None, "made") for _, name in circle):
            return  # an attempt failed since the check, at a deadline: ranks may have gone on
        for (rank, name), (following, _) in zip(circle, [*circle[1:], *circle[:1]]):
            waits = name in state.nodes[rank].arrived and name not in state.nodes[rank].outcomes
            if not waits or name in state.nodes[following].arrived:
                raise Violation(TRUE_CIRCLE, f"rank {rank} does not wait for rank {following} in {name}", text)
        if not circle:
            raise Violation(TRUE_CIRCLE, "there is none", text)

    # -- from here on, ranks take turns ---------------------------------------------------------------------------

    def _finish(self, state: State, *, at_rest: bool = True) -> None:
        """Check that from this state on, if ranks take turns and nothing more fails, all of them end well.

        Args:
            at_rest: only if all ranks are at a pause or at their end.
        """
        if at_rest and not all(map(rests, state.nodes)):
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

    def _turn(self, state: State) -> tuple[str, State]:
        """One turn: a step of the first rank that does not rest, an inspection by each, or a long time.

        If no turn changes anything, the laws are checked. Then a rank of a circle reaches its deadline.
        """
        for i, node in enumerate(state.nodes):
            if not rests(node):
                move = self._inspection(state, i)
                return move.text, self._go(state, i, move)
        waiting = [i for i, node in enumerate(state.nodes) if node.step is not None]
        new = state
        for i in waiting:
            new = self._rest(self._go(new, i, self._inspection(new, i)), i)
        if new != state:
            return f"ranks {waiting} inspect", new
        if waiting and any(node.lost for node in state.nodes) and state.content.beats < self.faults.long_times + 3:
            return "a long time passes", self._long_time(state)
        circle = self._check_end(state)
        return ("a deadline in the circle", self._deadline(state, min(circle))) if circle else ("", state)

    def _inspection(self, state: State, i: int) -> Move:
        return [move for move in self._moves_of(i, state) if move.price == FREE][-1]

    def _rest(self, state: State, i: int) -> State:
        """The state after steps of one rank until it rests."""
        while not rests(state.nodes[i]):
            state = self._go(state, i, self._inspection(state, i))
        return state

    def _deadline(self, state: State, i: int) -> State:
        """The deadline of a rank in a circle. All ranks in it get the error."""
        new = self._go(state, i, self._wake(i, state.nodes[i], state.content, "deadline"))
        circle: Sequence[tuple[int, str]] = ()
        while not rests(new.nodes[i]):
            claim, details = new.nodes[i].claim or ("", ())
            circle = details if claim == "circle" else circle
            new = self._go(new, i, self._inspection(new, i))
        kinds = {name: new.content.decision(name) for name in [*state.nodes[i].open, *(name for _, name in circle)]}
        if "circle" not in kinds.values() or None in kinds.values():
            raise Violation(CIRCLE_STATED, f"at the deadline of rank {i}, the decisions are {kinds}")
        return new

    def _check_end(self, state: State) -> set[int]:
        """Check the laws where nothing happens any more; return the ranks that wait for each other."""
        nodes, decision = state.nodes, state.content.decision
        waits: dict[int, set[int]] = {i: set() for i in range(len(nodes))}
        for i, node in enumerate(nodes):
            for name in node.open if node.step is not None else ():
                members = group_of(name)
                absent = {rank for rank in members if name not in nodes[rank].arrived}
                if not self.faults.heard and state.content.uncounted(name):
                    absent |= {rank for rank in members if nodes[rank].lost}
                if not absent or decision(name):
                    raise Violation(NO_WAIT, f"rank {i} waits in {name} until its deadline, though all arrived")
                if self.faults.heard and any(nodes[rank].lost for rank in absent):
                    raise Violation(LOSS_FOUND, f"rank {i} waits in {name} until its deadline for a rank that died")
                if any(name in nodes[rank].interrupted for rank in members):
                    raise Violation(LOSS_FOUND, f"rank {i} waits in {name} until its deadline for an interrupted rank")
                came = [rank for rank in members if name in nodes[rank].arrived]
                earlier = [f"{name.partition('/')[0]}/{number}" for number in range(MOST_CALLS)]
                if len({self.programs[rank].variant for rank in came}) > 1 or "mismatch" in map(decision, earlier):
                    raise Violation(MISMATCH_FOUND, f"rank {i} waits in {name}, which means another group on {came}")
                waits[i] |= absent
        circle = {rank for rank in waits if rank in _reachable(rank, waits)}
        if not circle:
            self._check_retries(state, waits)
        return circle

    def _check_retries(self, state: State, waits: Mapping[int, Set[int]]) -> None:
        """Check that every retry has succeeded."""
        for i, (node, program) in enumerate(zip(state.nodes, self.programs)):
            if node.lost or not program.retries() or (node.interrupted and program.after != "retry"):
                continue
            last = {group_of(name): kind for name, kind in sorted(node.outcomes.items())}
            ways = [program.calls, program.otherwise][: 1 + bool(program.otherwise)]
            if waits[i] or not any(all(last.get(group) == "made" for call in way for group in call) for way in ways):
                raise Violation(RETRY, f"rank {i} waits for {sorted(waits[i])}, with {last}")


def rests(node: Node) -> bool:
    """True if a rank is at a pause or at its end."""
    return node.step is None or isinstance(node.step, Sleep)


def _reachable(start: int, waits: Mapping[int, Set[int]]) -> set[int]:
    """The ranks that a rank waits for, and those that they wait for."""
    found: set[int] = set()
    row = set(waits[start])
    while row:
        found |= row
        row = {rank for each in row for rank in waits[each]} - found
    return found


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, which takes long with a million states and finds nothing."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def describe(step: Step) -> str:
    """A step in the trace of a violation."""
    if isinstance(step, SetPending):
        return "publishes that it waits in " + "; ".join(f"{wait.name} for {[*wait.missing]}" for wait in step.pending)
    if isinstance(step, CompareSet):
        return f"sets {step.key} to {kind_of(step.value.encode())}"
    if isinstance(step, Raw):
        return f"overwrites {step.arguments[0]}"
    return "pauses" if isinstance(step, Sleep) else f"{type(step).__name__.lower()}s {step.key}"
