"""One rank of the model: its program, its calls of connect, and what the laws are about in its states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pgmesh.connect.decisions import Decision
from pgmesh.connect.group_rounds import ConnectJudge, GroupRound
from pgmesh.connect.rounds import Rounds
from pgmesh.groups.naming import Fingerprint
from pgmesh.liveness.operations import Append, CompareSet
from pgmesh.liveness.statuses import Statuses
from tests.support.board import Board
from tests.support.model.processes import DEADLINE, LONG, MOST_CALLS, Call, Node, as_it_is

Group = tuple[int, ...]
Groups = tuple[Group, ...]


@dataclass(frozen=True)
class Program:
    """The program of one rank.

    Args:
        calls: the calls of connect, each with its groups, one after another.
        after: the action after a failed or interrupted call: "stop", or "retry" (its groups that were not made).
        otherwise: calls that replace the rest after a failed call.
        variant: a field of the fingerprints of its groups.
    """

    calls: tuple[Groups, ...]
    after: str = "stop"
    otherwise: tuple[Groups, ...] = ()
    variant: int = 0

    def retries(self) -> bool:
        return self.after == "retry" or bool(self.otherwise)


def one_after_another(*groups: Group, **more: Any) -> Program:
    """A call for each group."""
    return Program(tuple((group,) for group in groups), **more)


def at_once(*groups: Group, **more: Any) -> Program:
    """One call for all."""
    return Program((groups,), **more)


PAIRS_AND_TRIPLE: tuple[Group, ...] = ((0, 1), (0, 2), (1, 2), (0, 1, 2))

CONSTANTS = {"rank", "client", "call_site", "process", "statuses", "warn", "ready", "poll", "_waits"}
"""Fields of a judge that are no part of its explicit state."""


class SetPending(NamedTuple):
    """Publish the groups that a rank waits for."""

    pending: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "waits in " + "; ".join(f"{name}: {text}" for name, text in self.pending)


@dataclass(frozen=True)
class Code:
    """The code under the checker. A mutant replaces a part.

    Args:
        judge, round, statuses: the classes of the protocol.
        board: wraps the board of each call.
    """

    judge: type[ConnectJudge] = ConnectJudge
    round: type[GroupRound] = GroupRound
    statuses: type[Statuses] = Statuses
    board: Callable[[Board], Board] = as_it_is


def spell(group: Group) -> str:
    return "g" + "-".join(map(str, group))


def group_of(name: str) -> Group:
    """The group of an attempt's name, such as "g0-1/2"."""
    return tuple(map(int, name.partition("/")[0][1:].split("-")))


def plain(decision: Decision) -> str:
    """A decision without its text, which has no effect."""
    return Decision(decision.kind).pack()


@dataclass(frozen=True)
class Memory:
    """Everything that a rank remembers from one call of connect to the next.

    Args:
        calls, otherwise: the calls that are left.
        count: the number of calls so far.
        numbers: by group, the number of the next attempt.
        outcomes: by decision key, the decisions of attempts.
        arrived: names of attempts with an arrival of this rank.
        interrupted: names of the attempts of interrupted calls.
    """

    calls: tuple[Groups, ...]
    otherwise: tuple[Groups, ...]
    count: int = 0
    numbers: tuple[tuple[Group, int], ...] = ()
    outcomes: frozenset[tuple[str, str]] = frozenset()
    arrived: frozenset[str] = frozenset()
    interrupted: frozenset[str] = frozenset()


class Connect(Call):
    """One call of connect."""

    def __init__(self, code: Code, rank: int, program: Program, memory: Memory, answers: tuple[Any, ...]) -> None:
        self.code, self.rank, self.program = code, rank, program
        self.published = False  # whether the status has groups of this call
        self.arrived: set[str] = set()
        numbers = dict(memory.numbers)
        self.attempts = [self._attempt(group, numbers.get(group, 0)) for group in memory.calls[0]]
        super().__init__(memory, answers, code.board)

    def _attempt(self, group: Group, number: int) -> GroupRound:
        name = spell(group)
        fingerprint = Fingerprint(self.rank, {"means": self.program.variant}, name, "Fix it.")
        return self.code.round(name, group, name, "mesh 'm'", fingerprint, number=number)

    def finish(self) -> Memory:
        self.judge = self.code.judge(
            self.rank,
            self,
            call_site="train.py:1",
            process=f"process {self.rank}",
            statuses=self.code.statuses(LONG, self.now),
        )
        self.rounds = Rounds(self.attempts, self.judge)
        interrupted = False
        try:
            self.rounds.run()
        except KeyboardInterrupt:
            interrupted = True
        return self._remember(interrupted)

    def outcomes(self) -> Iterable[tuple[str, str]]:
        return ((each.decision_key, plain(each.decision)) for each in self.attempts if each.decision)

    def _remember(self, interrupted: bool) -> Memory:
        memory: Memory = self.memory
        calls, otherwise = memory.calls, memory.otherwise
        failed = tuple(tuple(each.ranks) for each in self.attempts if not each.is_made())
        if not failed:
            calls = calls[1:]
        elif self.program.after == "retry":
            calls = (failed, *calls[1:])
        else:
            calls, otherwise = otherwise, ()
        numbers = {tuple(each.ranks): each.number + 1 for each in self.attempts}
        return Memory(
            calls if memory.count < MOST_CALLS else (),
            otherwise,
            memory.count + 1,
            tuple(sorted({**dict(memory.numbers), **numbers}.items())),
            memory.outcomes.union(self.outcomes()),
            memory.arrived | self.arrived,
            memory.interrupted.union(each.name for each in self.attempts if interrupted),
        )

    def explicit_state(self) -> object:
        """What the judge and its rounds offer. A new field is a part of it by default."""
        fields = [(name, value) for name, value in vars(self.judge).items() if name not in CONSTANTS]
        attempts = []
        for attempt in self.attempts:
            unused = ["ranks", "fingerprint", "group", "mesh", *(["missing", "count_seen"] if attempt.decision else [])]
            attempts.append([(name, value) for name, value in vars(attempt).items() if name not in unused])
        records = sorted(self.judge.statuses.records.items())  # the statuses themselves are read again after a pause
        heartbeats = [(rank, each.status.sent, each.since) for rank, each in records if each.status is not None]
        return (
            self.memory,
            frozenset(self.arrived),
            self.published,
            repr((fields, attempts)),
            tuple((rank, beat, at // LONG) for rank, beat, at in heartbeats),
        )

    def claim(self) -> tuple[int, ...]:
        """The missing ranks that the decision names that is about to be published."""
        if not isinstance(self.step, CompareSet):
            return ()
        decision = Decision.unpack(self.step.value.encode())
        missing = [each.missing for each in self.attempts if each.decision_key == self.step.key]
        return missing[0] if missing and "did not arrive" in decision.text else ()

    def done(self, step: Any) -> None:
        if isinstance(step, Append):
            self.arrived |= {each.name for each in self.attempts if step.key.startswith(f"{each.key}/")}

    # -- the client -----------------------------------------------------------------------------------------------

    def set_pending(self, pending: dict[str, str]) -> None:
        if pending or self.published:
            self.ask(SetPending(tuple(pending.items())))
            self.published = True

    def wake(self, choice: str) -> None:
        ticks = self.clock % LONG + (choice == "inspect")
        self.clock = DEADLINE if choice == "deadline" else self.beats * LONG + ticks


class Rank(Node):
    """One state of one rank."""

    kept = ("outcomes", "arrived")

    def __init__(self, memory: Memory, call: Connect | None, answers: tuple[Any, ...] = ()) -> None:
        super().__init__(memory, call, answers)
        self.outcomes = memory.outcomes.union(call.outcomes() if call else ())
        self.arrived = memory.arrived.union(call.arrived if call else ())
        self.open = tuple(each.name for each in call.attempts if each.decision is None) if call else ()
        self.claim = call.claim() if call else ()
        self.interrupted = memory.interrupted
