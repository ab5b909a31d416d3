"""All ranks together: everything that can happen, and the laws that must hold in it."""

from __future__ import annotations

import contextlib
import gc
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pgmesh.rendezvous.protocol import (
    CompareSet,
    Decision,
    Delete,
    Pause,
    RankStatus,
    Read,
    SetStatus,
    Step,
    status_key,
)
from tests.rendezvous.model.ideal import Ideal, on_circle
from tests.rendezvous.model.programs import (
    REAL,
    Collective,
    Program,
    Protocol,
    spell,
)
from tests.rendezvous.model.ranks import Node, Rank
from tests.rendezvous.model.stores import Stores, attempt_of, kind_of, links_of

NEVER_CHANGES = "a decision never changes"
ONE_END = "one decision for all"
ALL_CAME = "made means that all arrived"
ALIKE = "made means equal fingerprints"
FALSE_CIRCLE = "no false circle"
MISSED_CIRCLE = "no circle is missed"
NOT_REFUSED = "no group is refused"
NO_WAIT = "no wait once all arrived"
LOSS_FOUND = "a loss is found"
RETRY = "a retry works"
NO_ERROR = "nothing else is raised"


@dataclass(frozen=True)
class Faults:
    """The faults that may happen, with their numbers.

    Args:
        crashes: ranks that die, at any step.
        deadlines: calls whose deadline comes, at any pause.
        interrupts: Ctrl-C, before or after any step.
        long_times: how often a time passes after which a silent rank counts as lost.
        silences: how often a living rank sends no heartbeat in such a time.
        losses: first collectives that fail, each on one member.
        mortal: the ranks that may die; None for all.
        heard: all ranks have published a status before.
    """

    crashes: int = 0
    deadlines: int = 0
    interrupts: int = 0
    long_times: int = 0
    silences: int = 0
    losses: int = 0
    mortal: frozenset[int] | None = None
    heard: bool = True

    @property
    def left(self) -> int:
        """Number of each fault that may still happen, one digit for each."""
        kinds = {CRASH: self.crashes, DEADLINE: self.deadlines, INTERRUPT: self.interrupts, SILENCE: self.silences}
        kinds[LOSS] = self.losses
        return sum(price * times for price, times in kinds.items())


FREE, CRASH, DEADLINE, INTERRUPT, SILENCE, LOSS = 0, 1, 10, 100, 1000, 10_000
"""The amounts that a step subtracts from the remaining faults."""

NO_FAULTS = Faults()


def affords(left: int, price: int) -> bool:
    return not price or left // price % 10 > 0


class Broken(NamedTuple):
    """A law that was broken, and the path there."""

    law: str
    what: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return "\n  ".join([f"{self.law}: {self.what}", *self.trace])


@dataclass
class Seen:
    """Counts of the results."""

    programs: int = 0
    states: int = 0
    steps: int = 0
    crashes: int = 0
    circles: int = 0
    false_circles: int = 0
    missed_circles: int = 0
    cut_short: int = 0
    broken: list[Broken] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


State = tuple[int, ...]
"""The ranks' nodes, the content of the store, and the remaining faults, as numbers."""

_Move = tuple[int, str, int, int, bool]
"""The price, a description, the next node, the content of the store, and whether laws must be checked."""


class _Moves(NamedTuple):
    """The next steps of a rank; whether other ranks can wait for them; whether it is at a pause or at its end."""

    moves: list[_Move]
    settled: bool
    resting: bool


class _Violation(Exception):
    pass


class Checker:
    """Explores programs under one protocol. States of a rank are shared between programs."""

    def __init__(self, protocol: Protocol = REAL) -> None:
        self.protocol = protocol
        self.nodes: list[Node] = []
        self._ranks: dict[object, Rank] = {}

    def rank(self, rank: int, program: Program, timed: bool) -> Rank:
        key = (rank, program, timed)
        if key not in self._ranks:
            self._ranks[key] = Rank(self.protocol, rank, program, timed, self.nodes)
        return self._ranks[key]

    def explore(self, programs: Sequence[Program], faults: Faults = NO_FAULTS, *, most: int = 10_000_000) -> Seen:
        """Try everything that can happen; stop at the first law that is broken.

        Args:
            most: states; a larger space is cut short, and that is counted.
        """
        with _nothing_collected():
            return _Space(self, programs, faults).explore(most)

    def wander(
        self, programs: Sequence[Program], faults: Faults = NO_FAULTS, *, walks: int, chance: random.Random
    ) -> Seen:
        """Random walks through a space that is too large to explore."""
        return _Space(self, programs, faults).wander(walks, chance)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable the garbage collector, which takes long with a million states and finds nothing."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class _Space:
    def __init__(self, checker: Checker, programs: Sequence[Program], faults: Faults) -> None:
        self.checker, self.programs, self.faults = checker, programs, faults
        self.nodes = checker.nodes
        self.timed = bool(faults.long_times or faults.crashes)
        self.ranks = [checker.rank(rank, program, self.timed) for rank, program in enumerate(programs)]
        self.stores = Stores()
        self.moves: dict[tuple[int, int], _Moves] = {}
        self.calm = faults == NO_FAULTS and all(p.after == "stop" and not p.otherwise for p in programs)
        self.ideal = Ideal.of(programs)
        self.same = len({program.variant for program in programs}) == 1
        self.seen: dict[State, State | None] = {}  # and the state before it
        self.finished: set[State] = set()
        self._true: set[tuple[str, str]] = set()  # circles that were found to be true
        self.out = Seen(programs=1)

    def _start(self) -> State:
        content: dict[str, Any] = {"long times": 0}
        if self.faults.heard:
            content |= {status_key(rank): RankStatus(rank).pack().encode() for rank in range(len(self.programs))}
        return (*(rank.start.id for rank in self.ranks), self.stores.number(content), self.faults.left)

    def explore(self, most: int) -> Seen:
        state = self._start()
        self.seen[state] = None
        rows = [state]
        try:
            while rows and len(self.seen) <= most:
                row, rows = rows, []
                for state in row:
                    self._expand(state, rows)
        except _Violation as broken:
            law, words, more = broken.args
            self._note(Broken(law, words, (*self._trace(state), *more)))
        self.out.cut_short = int(bool(rows) and not self.out.broken)
        self.out.states = len(self.seen)
        return self.out

    def wander(self, walks: int, chance: random.Random) -> Seen:
        """Take random walks; then let ranks take turns."""
        start = self._start()
        state: State = start
        trace: list[str] = []
        try:
            for _ in range(walks):
                state, trace = start, []
                eager = [chance.choice((1, 1, 4, 16)) for _ in self.ranks]
                while len(trace) < 3000:
                    ways = self._ways(state)
                    if not ways:
                        break
                    weights = [weight * eager[i] if i >= 0 else weight for i, weight, *_ in ways]
                    _, _, what, new, looked = chance.choices(ways, weights)[0]
                    if looked:
                        self._check(state, new, what)
                    trace.append(what)
                    self.out.crashes += what.endswith(" dies")
                    state = new
                    self.out.steps += 1
                    self.seen.setdefault(state, None)
                self._finish(state)
        except _Violation as broken:
            law, words, more = broken.args
            self._note(Broken(law, words, (*trace, *more)))
        self.out.states = len(self.seen)
        return self.out

    def _ways(self, state: State) -> list[tuple[int, float, str, State, bool]]:
        *ranks, store, left = state
        ways = []
        for i, node in enumerate(ranks):
            for price, what, after, content, looked in self._moves_of(i, node, store).moves:
                if affords(left, price):
                    new = (*state[:i], after, *state[i + 1 : -2], content, left - price)
                    ways.append((i, 0.03 if price else 1.0, what, new, looked))
        if ways and self.stores.contents[store]["long times"] < self.faults.long_times:
            ways += [(-1, 0.05, what, new, False) for what, new in self._long_times(state)]
        return ways

    def _note(self, broken: Broken) -> None:
        self.out.broken.append(broken)
        self.out.false_circles += broken.law == FALSE_CIRCLE
        self.out.missed_circles += broken.law == MISSED_CIRCLE

    def _expand(self, state: State, rows: list[State]) -> None:
        """Take all steps from a state, and record the new states."""
        last = len(self.ranks)
        store, left = state[last], state[last + 1]
        seen, known, resting, steps = self.seen, self.moves, True, 0
        each = []
        for i in range(last):
            moves = known.get((state[i], store)) or self._moves_of(i, state[i], store)
            if moves.settled:
                each, resting = [(i, moves)], False
                break
            resting = resting and moves.resting
            each.append((i, moves))
        if resting:
            self._finish(state)
        for i, moves in each:
            before, after = state[:i], state[i + 1 : last]
            for price, what, node, content, looked in moves.moves:
                if price and not affords(left, price):
                    continue
                new = (*before, node, *after, content, left - price)
                steps += 1
                if looked:
                    self._check(state, new, what)
                if price == CRASH:
                    self.out.crashes += 1
                if new not in seen:
                    seen[new] = state
                    rows.append(new)
        if self.stores.contents[store]["long times"] < self.faults.long_times and each[0][1].settled is False:
            for _, new in self._long_times(state):
                steps += 1
                if new not in seen:
                    seen[new] = state
                    rows.append(new)
        self.out.steps += steps

    def _trace(self, state: State) -> tuple[str, ...]:
        """The path to a state, as text."""
        trace: list[str] = []
        last = len(self.ranks)
        while (before := self.seen[state]) is not None:
            ways = {new: what for what, new in self._long_times(before)}
            for i in range(last):
                for price, what, node, content, _ in self._moves_of(i, before[i], before[last]).moves:
                    ways[(*before[:i], node, *before[i + 1 : last], content, before[-1] - price)] = what
            trace.append(ways[state])
            state = before
        return tuple(reversed(trace))

    # -- what can happen next ---------------------------------------------------------------------------------------

    def _is_settled(self, node: Node, store: int) -> bool:
        """True if a rank's next step commutes with all steps of other ranks.

        It reads a value that never changes, or publishes the same status again. So no other step need be tried first.
        """
        step, content = node.step, self.stores.contents[store]
        if isinstance(step, Pause) and not self.timed:
            return any(f"{name}/decision" in content for name, m in [*node.open.items()][:1] if m not in node.outcomes)
        if isinstance(step, (Read, CompareSet)) and step.key.endswith("/decision"):
            return step.key in content
        if isinstance(step, Read) and step.key.endswith("/count"):
            return True  # a count since the previous step could as well have been before that step
        if isinstance(step, Read) and step.key.endswith("/arrivals"):
            return content.get(step.key, b"").count(b"\n") == step.key.count("-") + 1
        return isinstance(step, SetStatus) and self.stores.perform(node.rank, step, store)[1] == store

    def _long_times(self, state: State) -> Iterator[tuple[str, State]]:
        *ranks, store, left = state
        lost = [i for i, node in enumerate(ranks) if self.nodes[node].lost]
        yield "a long time passes", (*ranks, self.stores.long_time(store, *lost), left)
        for i in range(len(ranks)) if affords(left, SILENCE) and self.faults.silences else ():
            silent = self.stores.long_time(store, *lost, i)
            yield f"a long time passes, in which rank {i} is stopped", (*ranks, silent, left - SILENCE)

    def _moves_of(self, i: int, number: int, store: int) -> _Moves:
        moves = self.moves.get((number, store))
        if moves is None:
            node = self.nodes[number]
            settled = self.checker.protocol.sound and self._is_settled(node, store)
            resting = node.step is None or isinstance(node.step, Pause)
            moves = self.moves[number, store] = _Moves(self._moves(i, node, store), settled, resting)
        return moves

    def _moves(self, i: int, node: Node, store: int) -> list[_Move]:
        """The next steps of one rank."""
        moves: list[_Move] = []
        if node.step is None:
            return moves
        rank, now = self.ranks[i], self.stores.contents[store]["long times"]
        if isinstance(node.step, Pause):
            ticks = sum(isinstance(answer, tuple) and answer[0] != "look" for answer in node.history)
            choices = [("look", FREE)]
            if node.step.seconds > 0.0:
                choices += [("inspect", FREE), ("deadline", DEADLINE)]
            for choice, price in choices:
                if affords(self.faults.left, price):
                    asked = rank.next(node, (choice, now, ticks + (choice == "inspect")))
                    self._do(moves, rank, asked, store, price, choice, node)
        elif isinstance(node.step, Collective):
            for choice, price in [("lost", LOSS), ("done", FREE)]:
                if affords(self.faults.left, price):
                    after = rank.next(node, choice)
                    moves.append(
                        (
                            price,
                            f"rank {i}: the first collective of {node.step.name} is {choice}",
                            after.id,
                            store,
                            False,
                        )
                    )
        else:
            self._do(moves, rank, node, store, FREE, "", node)
        if self.faults.interrupts:
            after = rank.next(node, "interrupted before")
            moves.append((INTERRUPT, f"rank {i} is interrupted", after.id, store, True))
            if not isinstance(node.step, (Pause, Collective)):
                _, content = self.stores.perform(i, node.step, store)
                after = rank.next(node, "interrupted after")
                moves.append((INTERRUPT, f"rank {i} is interrupted in {_words(node.step)}", after.id, content, True))
        if self.faults.crashes and (self.faults.mortal is None or i in self.faults.mortal):
            moves.append((CRASH, f"rank {i} dies", rank.lose(node).id, store, False))
        return moves

    def _do(self, moves: list[Any], rank: Rank, node: Node, store: int, price: int, choice: str, before: Node) -> None:
        step = node.step
        if step is None or isinstance(step, (Pause, Collective)):
            moves.append((price, f"rank {rank.rank}: {choice}", node.id, store, node.outcomes != before.outcomes))
            return
        answer, content = self.stores.perform(rank.rank, step, store)
        try:
            after = rank.next(node, answer)
        except Exception as error:
            raise _Violation(NO_ERROR, f"rank {rank.rank} in {_words(step)}: {error!r}", ()) from error
        mark = {"": "", "look": " (looks)", "inspect": " (inspects)", "deadline": " (its deadline has come)"}[choice]
        words = f"rank {rank.rank}{mark}: {_words(step)}"
        looked = after.outcomes != before.outcomes or (isinstance(step, CompareSet) and content != store)
        moves.append((price, words, after.id, content, looked))

    # -- laws -------------------------------------------------------------------------------------------------------

    def _check(self, state: State, new: State, what: str) -> None:
        """Check the laws after a decision was published or read."""
        last = len(self.ranks)
        before, after = self.stores.contents[state[last]], self.stores.contents[new[last]]
        nodes = [self.nodes[node] for node in new[:last]]
        for key, value in after.items() if after is not before else ():
            if key.endswith("/decision") and before.get(key) != value:
                if key in before:
                    raise _Violation(NEVER_CHANGES, f"{key} was {before[key]!r} and is {value!r}", (what,))
                self._check_decision(state, key, kind_of(value), what)
        for i, node in enumerate(nodes):
            if node.id == state[i]:
                continue
            for attempt, kind in node.outcomes.items():
                group, number = attempt
                name = f"{spell(group)}#{number if self.checker.protocol.numbered else 0}"
                for j, other in enumerate(nodes):
                    if other.outcomes.get(attempt, kind) != kind:
                        words = f"{name} is {kind} on rank {i} and {other.outcomes[attempt]} on rank {j}"
                        raise _Violation(ONE_END, words, (what,))
                absent = [member for member in group if attempt not in nodes[member].arrived]
                if kind == "made" and absent:
                    raise _Violation(ALL_CAME, f"{name} is made, and {absent} never arrived at it", (what,))
                if f"{name}/decision" not in after or kind_of(after[f"{name}/decision"]) != kind:
                    raise _Violation(ONE_END, f"{name} is {kind} on rank {i}, and not in the store", (what,))
                if self.calm and kind != "made" and attempt in self.ideal.made and self.same:
                    raise _Violation(NOT_REFUSED, f"{name} is {kind} on rank {i}", (what,))

    def _check_decision(self, state: State, key: str, kind: str, what: str) -> None:
        name = key.removesuffix("/decision")
        if kind == "made":
            nodes = [self.nodes[node] for node in state[: len(self.ranks)]]
            asked = {attempt for node in nodes for other, attempt in node.open.items() if other == name}
            for group, number in asked:
                absent = [r for r in group if (group, number) not in nodes[r].arrived]
                if absent:
                    raise _Violation(ALL_CAME, f"{name} is made, and {absent} never arrived at it", (what,))
                if len({self.programs[rank].variant for rank in group}) > 1:
                    raise _Violation(ALIKE, f"{name} is made, and its members mean different groups", (what,))
        if kind == "circle":
            self.out.circles = 1
            rank = int(what.split()[1].rstrip(":"))
            step = self.nodes[state[rank]].step
            assert isinstance(step, CompareSet)
            if self.calm and (name, step.value) not in self._true:
                self._check_circle(name, step, what)
                self._true.add((name, step.value))

    def _check_circle(self, name: str, step: CompareSet, what: str) -> None:
        """Check that all ranks of a circle would have waited forever."""
        links = links_of(step.value)
        outcomes, starts = [other for _, _, other in links], [rank for rank, _, _ in links]
        if not links or outcomes != starts[1:] + starts[:1] or name not in {name for _, name, _ in links}:
            raise _Violation(FALSE_CIRCLE, f"this is none: {step.value}", (what,))
        for rank, where, other in links:
            if other not in self.ideal.waits.get(rank, {}).get(attempt_of(where), ()):
                raise _Violation(
                    FALSE_CIRCLE, f"rank {other} would arrive at {where}, and rank {rank} waits there", (what,)
                )

    # -- from here on, ranks take turns -----------------------------------------------------------------------------

    def _finish(self, state: State) -> None:
        """Check that from this state on, if ranks take turns and nothing more fails, all of them end well."""
        words: list[str] = []
        while state not in self.finished:
            self.finished.add(state)
            what, new = self._turn(state)
            if new is None:
                self._check_final(state, words)
                break
            words.append(what)
            state = new

    def _turn(self, state: State) -> tuple[str, State | None]:
        """One step of the first rank that is not at a pause; if all are, an inspection by each; then a long time."""
        *ranks, store, left = state
        for i, node in enumerate(ranks):
            if not self._moves_of(i, node, store).resting:
                return self._one(state, i)
        waiting = [i for i, node in enumerate(ranks) if self.nodes[node].step is not None]
        new = state
        for i in waiting:
            _, new = self._one(new, i)
            while not self._moves_of(i, new[i], new[-2]).resting:
                _, new = self._one(new, i)
        if new != state:
            return f"ranks {waiting} inspect", new
        lost = [i for i, node in enumerate(ranks) if self.nodes[node].lost]
        if waiting and lost and self.stores.contents[store]["long times"] < self.faults.long_times + 3:
            return "a long time passes", (*ranks, self.stores.long_time(store, *lost), left)
        return "", None

    def _one(self, state: State, i: int) -> tuple[str, State]:
        """One step of one rank: an inspection, if it has the choice."""
        *_, store, left = state
        free = [move for move in self._moves_of(i, state[i], store).moves if move[0] == FREE]
        _, what, after, content, looked = free[-1]
        new = (*state[:i], after, *state[i + 1 : -2], content, left)
        if looked:
            self._check(state, new, what)
        return what, new

    def _check_final(self, state: State, words: list[str]) -> None:
        """Check the laws in a final state."""
        nodes = [self.nodes[node] for node in state[: len(self.ranks)]]
        more = tuple(f"... {word}" for word in words[-12:])
        arrived = [node.arrived for node in nodes]
        waits: dict[int, frozenset[int]] = {}
        content = self.stores.contents[state[-2]]

        def uncounted(name: str) -> set[int]:
            """Dead ranks that may have arrived without being counted."""
            posted = content.get(f"{name}/arrivals", b"").count(b"\n")
            all_are = posted <= content.get(f"{name}/count", 0)
            return set() if all_are else {member for member, node in enumerate(nodes) if node.lost}

        for i, node in enumerate(nodes):
            if node.step is None:
                continue
            absent = [
                {member for member in attempt[0] if attempt not in arrived[member]} or uncounted(name)
                for name, attempt in node.open.items()
                if attempt not in node.outcomes
            ]
            if not all(absent):
                names = ", ".join(node.open)
                raise _Violation(NO_WAIT, f"rank {i} waits in {names} until its deadline, though all arrived", more)
            waits[i] = frozenset().union(*absent)
            lost = [member for member in waits[i] if nodes[member].lost]
            if lost and self.faults.heard:
                raise _Violation(LOSS_FOUND, f"rank {i} waits until its deadline for {lost}, which died", more)
            undecided = {attempt for attempt in node.open.values() if attempt not in node.outcomes}
            if any(undecided & nodes[member].failed for member in waits[i]):
                raise _Violation(LOSS_FOUND, f"rank {i} waits until its deadline, and was not told", more)
        if on_circle(waits):
            raise _Violation(MISSED_CIRCLE, f"ranks wait for each other until their deadlines: {waits}", more)
        if any(program.after == "retry" or program.otherwise or program.lasting for program in self.programs):
            self._check_retries(nodes, waits, more)
        elif self.calm and self.same:
            self._check_calm(nodes, content, more)

    def _check_retries(self, nodes: list[Node], waits: dict[int, frozenset[int]], more: tuple[str, ...]) -> None:
        """Check that every retry succeeds in the end."""
        for i, (node, program) in enumerate(zip(nodes, self.programs)):
            if node.lost or node.failed or not (program.after == "retry" or program.otherwise or program.lasting):
                continue
            if i in waits:
                raise _Violation(RETRY, f"rank {i} still waits for {sorted(waits[i])}", more)
            last = {group: kind for (group, _), kind in sorted(node.outcomes.items())}
            ways = [program.calls, program.otherwise] if program.otherwise else [program.calls]
            if not any(all(last.get(group) == "made" for call in way for group in call) for way in ways):
                raise _Violation(RETRY, f"rank {i} ended with {last}", more)

    def _check_calm(self, nodes: list[Node], content: dict[str, Any], more: tuple[str, ...]) -> None:
        for i, node in enumerate(nodes):
            for attempt in self.ideal.made:
                if i in attempt[0] and node.outcomes.get(attempt) != "made":
                    words = f"{spell(attempt[0])}#{attempt[1]} is {node.outcomes.get(attempt)} on rank {i}"
                    raise _Violation(NOT_REFUSED, words, more)
        for key, value in content.items():
            if key.endswith("/decision") and kind_of(value) == "circle":
                for rank, name, _ in json.loads(Decision.unpack(key, value).text):
                    if nodes[rank].outcomes.get(attempt_of(name)) != "circle":
                        raise _Violation(MISSED_CIRCLE, f"rank {rank} does not get the circle in {name}", more)


def _words(step: Step) -> str:
    if isinstance(step, SetStatus):
        waits = "; ".join(f"{wait.name} for {[*wait.missing]}" for wait in step.pending)
        return f"publishes that it waits in {waits}" if waits else "publishes that it no longer waits"
    if isinstance(step, CompareSet):
        kind = Decision.unpack(step.key, step.value.encode()).kind if step.key.endswith("/decision") else step.value
        return f"sets {step.key} to {kind}"
    if isinstance(step, Delete):
        return f"deletes {', '.join(step.keys)}"
    if isinstance(step, (Pause, Collective)):
        return "pauses"
    return f"{type(step).__name__.lower()}s {step.key}"  # type: ignore[union-attr]
