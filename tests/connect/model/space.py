"""All ranks together: the laws of the connect protocol."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any
from unittest import mock

from pgmesh.connect import group_rounds
from pgmesh.connect.decisions import Decision
from pgmesh.liveness.operations import CompareSet, Delete, Read
from pgmesh.liveness.statuses import RankStatus, status_key
from tests.connect.model.ranks import Code, Connect, Memory, Program, Rank, SetPending, group_of, plain
from tests.support.model.processes import MOST_CALLS, Process, Sleep
from tests.support.model.space import NO_FAULTS, NO_WAIT, RETRY, Faults, Space, State, Violation
from tests.support.model.stores import Content, Stores, decision_in, rank_of

ALL_ARRIVED = "made means that all arrived"
EQUAL = "made means equal fingerprints"
NO_FAILURE = "no group fails without a fault"
TRUE_MISSING = "a rank that is called missing is"
LOSS_FOUND = "a loss is found"
MISMATCH_FOUND = "a mismatch is found"


@functools.lru_cache
def kind_of(value: bytes | None) -> str:
    """The kind of a decision; "" for none."""
    return "" if value is None else Decision.unpack(value).kind


@functools.lru_cache
def ranks_in(arrivals: bytes) -> frozenset[int]:
    return frozenset(map(rank_of, arrivals.splitlines()))


def decision(content: Content, name: str) -> str:
    """The kind of the decision of an attempt; "" for none."""
    return kind_of(content.ever(f"{name}/decision"))


def arrived(content: Content, name: str) -> frozenset[int]:
    """The ranks whose arrivals at an attempt can be read."""
    return ranks_in(content.get(f"{name}/arrivals") or b"")


class ConnectSpace(Space):
    """Everything that can happen to some programs under the connect protocol."""

    name = "rank"

    def __init__(self, programs: Sequence[Program], faults: Faults = NO_FAULTS, code: Code | None = None) -> None:
        stores = Stores(lambda value: plain(Decision.unpack(value)).encode(), sorted)
        super().__init__(programs, faults, stores)
        self.timed = bool(faults.long_times or faults.crashes)
        calls = [functools.partial(Connect, code or Code(), rank, program) for rank, program in enumerate(programs)]
        with self.running():
            self.processes = [
                Process(call, Rank, Memory(each.calls, each.otherwise)) for call, each in zip(calls, programs)
            ]
        statuses = {status_key(rank): RankStatus().pack().encode() for rank in range(len(programs))}
        content = self.stores.content(statuses if faults.heard else {}, 0)
        self.start = State(tuple(each.start for each in self.processes), content, faults.left())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        seconds = 0.0 if self.faults.warns else float("inf")
        with super().running(), mock.patch.object(group_rounds, "WARN_SECONDS", seconds):
            yield

    # -- what can happen next -------------------------------------------------------------------------------------

    def is_settled(self, i: int, state: State) -> bool:
        """True for a rank that reads a value that never changes, deletes keys, or publishes the same status again."""
        node, content = state.nodes[i], state.content
        step = node.step
        if isinstance(step, Sleep):
            return not node.open or (not self.timed and decision(content, node.open[0]) != "")
        if isinstance(step, SetPending):
            return self.answer(i, node, content, False)[1] is content
        if not isinstance(step, (Read, CompareSet)):
            return isinstance(step, Delete)
        name, _, key = step.key.rpartition("/")
        if key == "arrivals":
            return len(arrived(content, name)) == len(group_of(name))
        return key == "decision" and step.key in content.values

    def choices(self, node: Rank) -> Sequence[str]:
        return ("look", "inspect") if len(node.open) > 1 else ("inspect",)

    def arrivals_seen(self, node: Rank, content: Content, choice: str) -> frozenset[tuple[str, int]]:
        if not self.timed and choice != "deadline":
            return frozenset()
        return frozenset((name, rank) for name in node.open for rank in arrived(content, name))

    def answer(self, i: int, node: Any, content: Content, fact: bool) -> tuple[Any, Content]:
        if not isinstance(node.step, SetPending):
            return super().answer(i, node, content, fact)
        status = RankStatus(pending=dict(node.step.pending), sent=float(content.beats)).pack().encode()
        if content.get(status_key(i)) == status:
            return None, content
        return None, self.stores.content({**content.values, status_key(i): status}, content.beats)

    # -- laws -----------------------------------------------------------------------------------------------------

    def check_decision(self, state: State, i: int, key: str, value: bytes, text: str) -> None:
        node = state.nodes[i]
        name, kind = key.removesuffix("/decision"), kind_of(decision_in(node.step)[1])
        members = group_of(name)
        differ = len({self.programs[rank].variant for rank in members}) > 1
        absent = [rank for rank in members if name not in state.nodes[rank].arrived]
        if kind == "made" and absent:
            raise Violation(ALL_ARRIVED, f"{name} is made, and {absent} never arrived", text)
        if kind == "made" and differ:
            raise Violation(EQUAL, f"{name} is made, and its members mean different groups", text)
        if kind != "made" and not differ and (kind == "mismatch" or (self.faults == NO_FAULTS and not node.late)):
            raise Violation(NO_FAILURE, f"{name} is {kind}", text)
        if there := [rank for rank in node.claim if (name, rank) in node.seen]:
            raise Violation(TRUE_MISSING, f"{there} had arrived at {name}", text)

    # -- from here on, ranks take turns ---------------------------------------------------------------------------

    def needs_time(self, state: State) -> bool:
        return any(node.dead for node in state.nodes)

    def check_end(self, state: State) -> tuple[str, State]:
        """Check each wait, and each retry. Then a rank of a circle reaches its deadline."""
        waits: dict[int, set[int]] = {i: set() for i in range(len(state.nodes))}
        for i, node in enumerate(state.nodes):
            for name in node.open if node.step is not None else ():
                waits[i] |= self._check_wait(state, i, name)
        circle = [rank for rank in waits if rank in _reachable(rank, waits)]
        if circle:
            return "a deadline in the circle", self._deadline(state, circle[0])
        self._check_retries(state, waits)
        return "", state

    def _check_wait(self, state: State, i: int, name: str) -> set[int]:
        """Check that a rank that would wait until its deadline has a reason; return the members that it waits for."""
        nodes, members = state.nodes, group_of(name)
        where = f"rank {i} waits in {name} until its deadline"
        came = [rank for rank in members if name in nodes[rank].arrived]
        absent = {*members} - {*came}
        uncounted = len(arrived(state.content, name)) > int(state.content.get(f"{name}/count") or b"0")
        if not self.faults.heard and uncounted:
            absent |= {rank for rank in members if nodes[rank].dead}
        if not absent or decision(state.content, name):
            raise Violation(NO_WAIT, f"{where}, though all arrived")
        if self.faults.heard and any(nodes[rank].dead for rank in absent):
            raise Violation(LOSS_FOUND, f"{where} for a rank that died")
        if any(name in nodes[rank].interrupted for rank in members):
            raise Violation(LOSS_FOUND, f"{where} for an interrupted rank")
        kinds = [decision(state.content, f"{name.partition('/')[0]}/{number}") for number in range(MOST_CALLS)]
        if len({self.programs[rank].variant for rank in came}) > 1 or "mismatch" in kinds:
            raise Violation(MISMATCH_FOUND, f"{where}, which means another group on {came}")
        return absent

    def _deadline(self, state: State, i: int) -> State:
        """The deadline of a rank in a circle."""
        late = self.wake(i, state.nodes[i], state.content, "deadline")
        return self.finish_inspection(self.go(state, i, late), i)

    def _check_retries(self, state: State, waits: Mapping[int, Set[int]]) -> None:
        for i, (node, program) in enumerate(zip(state.nodes, self.programs)):
            if node.dead or not program.retries() or (node.interrupted and program.after != "retry"):
                continue
            last = {group_of(name): kind_of(value.encode()) for name, value in sorted(node.outcomes)}
            ways = [program.calls, program.otherwise][: 1 + bool(program.otherwise)]
            if waits[i] or not any(all(last.get(group) == "made" for call in way for group in call) for way in ways):
                raise Violation(RETRY, f"rank {i} waits for {sorted(waits[i])}, with {last}")


def _reachable(start: int, waits: Mapping[int, Set[int]]) -> set[int]:
    """The ranks that a rank waits for, and those that they wait for."""
    found: set[int] = set()
    row = set(waits[start])
    while row:
        found |= row
        row = {rank for each in row for rank in waits[each]} - found
    return found
