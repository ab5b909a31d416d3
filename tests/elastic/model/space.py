"""All processes together: everything that can happen, and the laws that must hold in it."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pgmesh.elastic.records import Arrival, Outcome
from pgmesh.elastic.successor import successor
from pgmesh.layout import Layout
from pgmesh.rendezvous.operations import Add, Append, CompareSet, Delete, Raw, Read
from pgmesh.rendezvous.records import pack, unpack
from pgmesh.rendezvous.statuses import RankStatus, status_key
from tests.elastic.model.code import Code
from tests.elastic.model.processes import Ended, Node, Process, Program, Start, Step, plain
from tests.rendezvous.model.ranks import AFTER, BEFORE
from tests.rendezvous.model.space import Broken, Seen, Violation, _no_garbage_collection as no_garbage_collection
from tests.rendezvous.model.stores import Content, Sleep, Stores as ConnectStores

NEVER_CHANGES = "a decision never changes"
ONE_DECISION = "one decision for all"
ALL_ARRIVED = "success means that all arrived"
TRUE_LOST = "a rank that is called lost is"
CAUSE = "a failure has a cause"
NO_WAIT = "no wait once all arrived"
RETRY = "a retry works"
NOT_IN = "no mesh with a rank taken for lost"
ONE_SUCCESSOR = "one successor"
NO_ERROR = "nothing else is raised"


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
    """

    crashes: int = 0
    deadlines: int = 0
    interrupts: int = 0
    silences: int = 0
    long_times: int = 0
    mortal: frozenset[int] | None = None
    listeners: bool = True

    def left(self) -> int:
        """Number of each fault that may still happen, one digit for each."""
        return CRASH * self.crashes + DEADLINE * self.deadlines + INTERRUPT * self.interrupts + SILENCE * self.silences


FREE, CRASH, DEADLINE, INTERRUPT, SILENCE = 0, 1, 10, 100, 1000
"""The amounts that a step subtracts from the faults that are left."""

NO_FAULTS = Faults()


class Move(NamedTuple):
    """A step of one process: its price, a description, and the process and the store after it."""

    price: int
    text: str
    node: Node
    content: Content


class State(NamedTuple):
    """The processes, the content of the store, the faults that are left, and the processes that were ever silent."""

    nodes: tuple[Node, ...]
    content: Content
    left: int
    silent: frozenset[int] = frozenset()

    def affords(self, price: int) -> bool:
        return not price or self.left // price % 10 > 0


class Stores(ConnectStores):
    """All contents of the store that were reached so far."""

    def perform(self, rank: int, step: Any, content: Content) -> tuple[Any, Content]:
        """Perform one step; return the answer and the new content. Arrivals are sorted by rank."""
        values = content.values
        if isinstance(step, Read):
            return values.get(step.key), content
        if isinstance(step, Append):
            lines = [*values.get(step.key, b"").splitlines(), *step.value.encode().splitlines()]
            lines = [line for i, line in enumerate(lines) if line not in lines[i + 1 :]]  # the last of equal lines
            text = b"".join(line + b"\n" for line in sorted(lines, key=_rank_of))
            return None, self.content({**values, step.key: text}, content.beats)
        if isinstance(step, Delete):
            left = {key: value for key, value in values.items() if key not in step.keys}
            return None, self.content(left, content.beats)
        if isinstance(step, CompareSet) and step.key in values:
            return values[step.key], content
        if isinstance(step, Add):  # of an abort, which only heartbeats read
            return 1, content
        overwrites = isinstance(step, Raw) and step.operation == "set"  # of a mutant
        if not isinstance(step, CompareSet) and not overwrites:
            raise TypeError(f"{step!r} is not for the store")
        key, text = step.arguments if isinstance(step, Raw) else step
        value = without_text(text.encode())
        return value, self.content({**values, key: value}, content.beats)

    def contents(self) -> list[Content]:
        """All contents that were reached."""
        return [*self._known.values()]

    def count(self, node: Node, key: str, content: Content) -> Content:
        """The content with the processes that a decision counts: the last ones that the process has read."""
        counted = [[line.rank, line.process] for line in last_lines(node.looked).values()]
        return self.content({**content.values, f"counted {key}": pack(processes=counted).encode()}, content.beats)


@functools.lru_cache
def without_text(decision: bytes) -> bytes:
    return plain(Outcome.unpack("", decision)).encode()


def _rank_of(line: bytes) -> int:
    record = unpack(line, rank=int)
    return record["rank"] if record else -1


@functools.lru_cache(maxsize=100_000)
def last_lines(arrivals: bytes) -> dict[int, Arrival]:
    """The arrival of each rank's last process."""
    lines = [Arrival.unpack(line) for line in arrivals.splitlines()]
    return {line.rank: line for line in lines if line is not None}


class Space:
    """Everything that can happen to some programs under the agreement.

    Args:
        layout: the layout of the first mesh.
        before: the decision on the mesh that replaced it before the programs begin; None for none.
        every_order: try every order of steps that commute too.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        faults: Faults = NO_FAULTS,
        code: Code | None = None,
        *,
        layout: Layout | None = None,
        before: Outcome | None = None,
        every_order: bool = False,
    ) -> None:
        self.programs, self.faults, self.every_order = programs, faults, every_order
        self.layout = layout or Layout(dp=len({each.rank for each in programs}))
        self.stores = Stores()
        self.out = Seen(programs=1)
        self._before: dict[State, State | None] = {}
        self._finished: set[State] = set()
        self._moves: dict[tuple[Node, Content, bool], list[Move]] = {}
        code = code or Code()
        self.processes = [Process(code, i, program, self.layout) for i, program in enumerate(programs)]
        first = {each.rank: i for i, each in reversed([*enumerate(programs)]) if each.replaces is None}
        statuses = {status_key(rank): _status(rank, i) for rank, i in first.items()}
        if before is not None:
            decision = {"m.0/shrink/0/decision": plain(before).encode()}
            statuses |= decision | {f"counted {key}": pack(processes=[]).encode() for key in decision}
        content = self.stores.content(statuses, 0)
        self.start = State(tuple(each.start for each in self.processes), content, faults.left())

    def explore(self, most: int = 10_000_000) -> Seen:
        """Try everything that can happen; stop at the first law that is broken.

        Args:
            most: states; a larger space is cut short, and that is counted.
        """
        self._before[self.start] = None
        row, state = [self.start], self.start
        with no_garbage_collection():
            try:
                while row and len(self._before) <= most:
                    next_row: list[State] = []
                    for state in row:
                        self._finish(state)
                        for _, new in self._steps(state):
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
        try:
            for _ in range(walks):
                state, trace = self.start, []
                hurry = chance.choice((0.01, 0.05, 0.2))
                while len(trace) < 500 and (steps := [*self._steps(state)]):
                    weights = [hurry if new.left < state.left else 1.0 for _, new in steps]
                    text, state = chance.choices(steps, weights)[0]
                    trace.append(text)
                    if chance.random() < 0.01:
                        break
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
            trace.append(next(text for text, new in self._steps(before) if new == state))
            state = before
        return trace[::-1]

    # -- what can happen next -------------------------------------------------------------------------------------

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Everything that can happen next: a description, and the new state."""
        everyone = range(len(state.nodes))
        settled = next((i for i in everyone if self._is_settled(i, state)), None)
        for i in everyone if settled is None else (settled,):
            for move in self._moves_of(i, state):
                if state.affords(move.price):
                    yield move.text, self._go(state, i, move)
        if settled is None and state.content.beats < self.faults.long_times:
            yield "a long time passes", self._long_time(state)
            for i in everyone if state.affords(SILENCE) and self.faults.silences else ():
                if not state.nodes[i].dead:
                    yield f"a long time passes, in which process {i} is stopped", self._long_time(state, i)

    def _is_settled(self, i: int, state: State) -> bool:
        """True if a process's next step commutes with all steps of others, so that no other need be tried first.

        It reads a value that never changes, or is at an attempt that has been decided.
        """
        node, content = state.nodes[i], state.content
        if self.every_order or node.step is None or isinstance(node.step, Start):
            return False
        if isinstance(node.step, Ended):
            return state.nodes[node.step.process].dead or not state.affords(CRASH)
        if isinstance(node.step, Sleep):
            return f"{node.attempt}/decision" in content.values
        if isinstance(node.step, (Read, CompareSet, Append)):
            name, _, key = node.step.key.rpartition("/")
            if key in ("decision", "arrivals"):
                return f"{name}/decision" in content.values
            return content.beats == self.faults.long_times and all(each.replaces is None for each in self.programs)
        return isinstance(node.step, Delete)

    def _long_time(self, state: State, stopped: int | None = None) -> State:
        """A long time passes, in which all living processes but one send heartbeats."""
        alive = [
            node.rank
            for i, node in enumerate(state.nodes)
            if not node.dead and i != stopped and self._has_status(i, state.content)
        ]
        if stopped is None:
            return state._replace(content=self.stores.long_time(state.content, alive))
        content = self.stores.long_time(state.content, alive)
        return State(state.nodes, content, state.left - SILENCE, state.silent | {stopped})

    def _has_status(self, i: int, content: Content) -> bool:
        """True if the status of the process's rank is its own, not that of another process."""
        return _publisher(content.values[status_key(self.programs[i].rank)]) == i

    def _moves_of(self, i: int, state: State) -> list[Move]:
        node, content = state.nodes[i], state.content
        dead = False
        if isinstance(node.step, Start):
            before = self.programs[i].replaces
            dead = before is not None and (state.nodes[before].dead or before in state.silent)
        elif isinstance(node.step, Ended):
            dead = state.nodes[node.step.process].dead
        key = node, content, dead
        if key not in self._moves:
            self._moves[key] = [*self._find_moves(i, *key)]
        return self._moves[key]

    def _find_moves(self, i: int, node: Node, content: Content, dead: bool) -> Iterator[Move]:
        """The next steps of one process, the one without a fault first.

        Args:
            dead: the process that the step is about has ended.
        """
        process, step = self.processes[i], node.step
        if step is None or (isinstance(step, Start) and not dead):
            return
        if isinstance(step, Sleep):
            yield self._wake(i, node, content, "inspect")
            if self.faults.deadlines:
                yield self._wake(i, node, content, "deadline", DEADLINE)
        else:
            yield self._perform(i, node, content, dead)
        if self.faults.interrupts and not isinstance(step, Start):
            yield Move(INTERRUPT, f"process {i} is interrupted", process.next(node, BEFORE), content)
            if not isinstance(step, (Sleep, Ended)):
                new = self._store(node, step, content)[1]
                yield Move(INTERRUPT, f"process {i} {describe(step)}, is interrupted", process.next(node, AFTER), new)
        if self.faults.crashes and (self.faults.mortal is None or i in self.faults.mortal):
            yield Move(CRASH, f"process {i} dies", process.die(node), content)

    def _wake(self, i: int, node: Node, content: Content, choice: str, price: int = FREE) -> Move:
        """A process ends its pause, and does the next step."""
        awake = self.processes[i].next(node, (choice, content.beats))
        move = self._perform(i, awake, content, False)
        return move._replace(price=price, text=f"{move.text} ({choice})")

    def _perform(self, i: int, node: Node, content: Content, dead: bool) -> Move:
        step, new = node.step, content
        answer: Any
        if isinstance(step, Start):
            answer = None
            status = {status_key(node.rank): _status(node.rank, i, content.beats)}
            new = self.stores.content({**content.values, **status}, content.beats)
        elif isinstance(step, Ended):
            answer = dead and self.faults.listeners
        elif isinstance(step, Sleep):  # a mutant pauses again
            answer = ("inspect", content.beats)
        else:
            assert step is not None
            answer, new = self._store(node, step, content)
            if isinstance(step, Read) and "/status/" in step.key:
                answer = content.beats, answer
        try:
            return Move(FREE, f"process {i} {describe(step)}", self.processes[i].next(node, answer), new)
        except Exception as error:
            raise Violation(NO_ERROR, f"process {i} {describe(step)}: {error!r}") from error

    def _store(self, node: Node, step: Any, content: Content) -> tuple[Any, Content]:
        """The store after one step of a process."""
        answer, new = self.stores.perform(node.rank, step, content)
        decides = isinstance(step, (CompareSet, Raw)) and new is not content
        return answer, self.stores.count(node, _key_of(step), new) if decides else new

    # -- laws -----------------------------------------------------------------------------------------------------

    def _go(self, state: State, i: int, move: Move) -> State:
        """Take a step, and check the laws if a decision was published or read, or a call has ended."""
        nodes = (*state.nodes[:i], move.node, *state.nodes[i + 1 :])
        new = State(nodes, move.content, state.left - move.price, state.silent)
        before, after, node = state.content.values, move.content.values, state.nodes[i]
        if before is not after:
            for key, value in after.items():
                if key.endswith("/decision") and key[:8] != "counted " and before.get(key) != value:
                    if key in before:
                        raise Violation(NEVER_CHANGES, f"{move.text}: it was {before[key].decode()}")
                    self._check_decision(state, i, key, value, move.text)
        if move.node.outcomes != node.outcomes:
            for key, text in move.node.outcomes:
                if after.get(key) != text.encode():
                    was = f"{key} is {text} on process {i}, and {after.get(key, b'nothing').decode()} in the store"
                    raise Violation(ONE_DECISION, was, move.text)
        for key in move.node.left - node.left:
            if node.request is not None and Outcome.unpack(key, after.get(key, b"")).error == "over":
                raise Violation(CAUSE, f"process {i} ends its call since no member is left, and is one", move.text)
        for result in move.node.results[len(node.results) :]:
            self._check_result(new, i, result, move.text)
        return new

    def _check_decision(self, state: State, i: int, key: str, value: bytes, text: str) -> None:
        """Check the laws for a decision that a process has published."""
        node, outcome = state.nodes[i], Outcome.unpack(key, value)
        arrivals = last_lines(state.content.values.get(key.replace("/decision", "/arrivals"), b""))
        text = f"{text}: {value.decode()}"
        if outcome.failed:
            calls = {line.call for line in arrivals.values()} - {""}
            causes = {
                "mismatch": len(calls) > 1,
                "left": node.interrupted or node.late,
                "over": node.request is None and self._all_lost(state, node),
                "missing": (node.late and node.request is not None) or self._too_many_lost(state, node),
            }
            if not causes[outcome.error]:
                raise Violation(CAUSE, f"process {i} ends the attempt of all without a cause", text)
            return
        looked = last_lines(node.looked)
        layout = Layout.of(dict(zip(self.layout.axes, (len(node.layout),))), node.layout)
        after = successor(layout, outcome.lost, outcome.replaced, outcome.axis)
        if len({line.call for line in looked.values()} - {""}) > 1:
            raise Violation(ALL_ARRIVED, "the ranks passed different arguments", text)
        for rank in after.ranks():
            if rank not in arrivals:
                raise Violation(ALL_ARRIVED, f"rank {rank} is in the new mesh, and never arrived", text)
            if rank not in looked:
                raise Violation(ALL_ARRIVED, f"rank {rank} is in the new mesh, and process {i} has not read so", text)
            process = int(looked[rank].process.split()[1])
            if key in state.nodes[process].left:
                raise Violation(ALL_ARRIVED, f"process {process} is in the new mesh, and had left", text)
        for rank in outcome.lost:
            member = self._member(state, node.mesh, rank)
            if not state.nodes[member].dead and member not in state.silent:
                raise Violation(TRUE_LOST, f"rank {rank} is called lost without a fault", text)
            if rank in looked and looked[rank].call:
                raise Violation(TRUE_LOST, f"rank {rank} is called lost, and had arrived", text)

    def _too_many_lost(self, state: State, node: Node) -> bool:
        """True if each index of the only axis, or a rank without a spare and an axis, may be lost."""
        dead = [j for j, each in enumerate(state.nodes) if each.dead or j in state.silent]
        return any(self.programs[j].rank in node.layout for j in dead)

    def _all_lost(self, state: State, node: Node) -> bool:
        """True if all other members of the mesh of a process are dead, or were silent."""
        members = [self._member(state, node.mesh, rank) for rank in node.layout if rank != node.rank]
        return all(state.nodes[j].dead or j in state.silent for j in members)

    def _member(self, state: State, mesh: str, rank: int) -> int:
        """The process that a rank of a mesh is."""
        for node in state.nodes:
            for result in node.results:
                if following(result.mesh) == mesh:
                    counted = unpack(state.content.values[f"counted {result.attempt}"], processes=list) or {}
                    return int(dict(counted["processes"])[rank].split()[1])
        return self._processes_of(rank)[0]

    def _check_result(self, state: State, i: int, result: Any, text: str) -> None:
        """Check the laws for a mesh that a process was given."""
        for j, node in enumerate(state.nodes):
            for other in node.results:
                if other.mesh == result.mesh and (other.attempt, other.ranks) != (result.attempt, result.ranks):
                    raise Violation(ONE_SUCCESSOR, f"{result} on process {i}, and {other} on process {j}", text)
        rank = self.programs[i].rank
        if rank in result.ranks:
            counted = unpack(state.content.values[f"counted {result.attempt}"], processes=list)
            assert counted is not None
            if dict(counted["processes"]).get(rank) != f"process {i}":
                raise Violation(NOT_IN, f"process {i} is in {result}, which counted {counted['processes']}", text)

    # -- from here on, processes take turns ------------------------------------------------------------------------

    def _finish(self, state: State, *, at_rest: bool = True) -> None:
        """Check that from this state on, if processes take turns and nothing more fails, all of them end well.

        Args:
            at_rest: only if all processes are at a pause or at their end.
        """
        if at_rest and not all(self._rests(i, state) for i in range(len(state.nodes))):
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

    def _rests(self, i: int, state: State) -> bool:
        """True if a process is at a pause, at its end, or not to begin yet."""
        step = state.nodes[i].step
        return step is None or isinstance(step, Sleep) or not self._moves_of(i, state)

    def _turn(self, state: State) -> tuple[str, State]:
        """One turn: a step of the first process that does not rest, an inspection by each, or a long time.

        If no turn changes anything, the laws are checked.
        """
        everyone = range(len(state.nodes))
        for i in everyone:
            if not self._rests(i, state):
                move = self._moves_of(i, state)[0]
                return move.text, self._go(state, i, move)
        waiting = [i for i in everyone if isinstance(state.nodes[i].step, Sleep)]
        new = state
        for i in waiting:
            new = self._go(new, i, self._moves_of(i, new)[0])
            while not self._rests(i, new):
                new = self._go(new, i, self._moves_of(i, new)[0])
        if new != state:
            return f"processes {waiting} inspect", new
        unheard = self.faults.silences or not self.faults.listeners
        if waiting and unheard and state.content.beats < self.faults.long_times + 3:
            return "a long time passes", self._long_time(state)
        for i in waiting:
            self._check_wait(i, state)
        return "", state

    def _check_wait(self, i: int, state: State) -> None:
        """Check that a process that would wait until its deadline has a reason."""
        node, values = state.nodes[i], state.content.values
        where = f"process {i} waits in {node.attempt} until its deadline"
        if f"{node.attempt}/decision" in values:
            raise Violation(NO_WAIT, f"{where}, though it is decided")
        for j, other in enumerate(state.nodes):
            if isinstance(other.step, Sleep) and other.mesh == node.mesh and other.number != node.number:
                raise Violation(RETRY, f"{where}, and process {j} in {other.attempt}")
        counted = any(following(each.mesh) == node.mesh for other in state.nodes for each in other.results)
        new = node.request is None and node.rank in node.layout
        if counted and new and self._member(state, node.mesh, node.rank) == i:
            raise Violation(ALL_ARRIVED, f"{where}, and others have a mesh with it")
        if node.request is None:
            others = [rank for rank in node.layout if rank != node.rank]
            if not any(lives(state.nodes[j]) for rank in others for j in self._processes_of(rank)):
                raise Violation(NO_WAIT, f"{where}, though no member is left")
            return
        arrivals = last_lines(values.get(f"{node.attempt}/arrivals", b""))
        if len({line.call for line in arrivals.values() if line.call}) > 1:
            raise Violation(NO_WAIT, f"{where}, though the arguments differ")
        spares = node.request.spares
        absent = [rank for rank in dict.fromkeys((*node.layout, *spares)) if rank not in arrivals]
        alive = {rank: [j for j in self._processes_of(rank) if lives(state.nodes[j])] for rank in absent}
        lost = [rank for rank in node.layout if (rank in absent and not alive[rank]) or self._is_new(arrivals, rank)]
        ready = [rank for rank in spares if rank in arrivals and (rank not in node.layout or rank in lost)]
        waits_for = [rank for rank in node.layout if rank in absent and alive[rank]]
        if len(ready) < len(lost):
            waits_for += [rank for rank in spares if rank in absent and (alive[rank] or rank in node.layout)]
        if not waits_for:
            raise Violation(NO_WAIT, f"{where}, though all arrived; {ready} for {lost}")
        for rank in waits_for:
            for j in alive[rank]:
                if isinstance(state.nodes[j].step, Sleep):
                    raise Violation(RETRY, f"{where} for rank {rank}, which waits in {state.nodes[j].attempt}")

    def _is_new(self, arrivals: dict[int, Arrival], rank: int) -> bool:
        return rank in arrivals and not arrivals[rank].call

    def _processes_of(self, rank: int) -> list[int]:
        return [i for i, program in enumerate(self.programs) if program.rank == rank]


def _status(rank: int, process: int, beats: int = 0) -> bytes:
    return RankStatus(rank, heartbeat=beats, endpoint=("listener", process)).pack().encode()


@functools.lru_cache
def _publisher(status: bytes) -> int:
    """The process that published a status."""
    record = RankStatus.unpack(_rank_of(status), status)
    assert record is not None
    return record.endpoint[1] if record.endpoint else -1


def lives(node: Node) -> bool:
    """True if a process has begun and not died."""
    return not node.dead and not isinstance(node.step, Start)


def following(mesh: str) -> str:
    """The key of the mesh that replaces a mesh."""
    first, _, generation = mesh.partition("~")
    return f"{first}~{int(generation or 0) + 1}"


def _key_of(step: Any) -> str:
    """The key of a step that publishes a decision."""
    return str(step.arguments[0] if isinstance(step, Raw) else step.key)


def describe(step: Step | None) -> str:
    """A step in the trace of a violation."""
    if isinstance(step, CompareSet):
        return f"sets {step.key} to {without_text(step.value.encode()).decode()}"
    if isinstance(step, Raw):
        return f"overwrites {step.arguments[0]}"
    if isinstance(step, Ended):
        return f"asks whether process {step.process} has ended"
    if isinstance(step, Delete):
        return f"deletes {', '.join(step.keys)}"
    if isinstance(step, Append):
        return f"arrives in {step.key}"
    if isinstance(step, Read):
        return f"reads {step.key}"
    return "starts" if isinstance(step, Start) else "pauses"
