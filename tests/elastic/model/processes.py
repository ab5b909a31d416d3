"""One process of the model: its program, its calls of shrink and stand_by, and what the laws are about in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Union
from unittest import mock

from pgmesh.elastic import shrinking
from pgmesh.elastic.judging import SurvivorJudge
from pgmesh.elastic.records import MeshRound, Outcome, Request
from pgmesh.elastic.shrink_judge import ShrinkJudge
from pgmesh.elastic.stand_by_judge import StandByJudge
from pgmesh.elastic.state import ElasticState, Generation
from pgmesh.errors import MembershipError, MismatchError, MissingRanksError
from pgmesh.layout import Layout
from pgmesh.liveness.operations import Read
from pgmesh.liveness.statuses import Statuses
from tests.support.board import Board
from tests.support.model.processes import DEADLINE, LONG, MOST_CALLS, Call, Node, as_it_is
from tests.support.model.space import Faults

SINCE_BOOT = 1e12
"""Seconds on the clock of the statuses when a call begins, whose own clock is at 0."""

PAUSE = 10.0
"""Length of a pause, in seconds: after each, a process inspects."""

Arguments = Union[Request, None]
"""The arguments of ``shrink``; None for ``stand_by``."""


class Start(NamedTuple):
    """The begin of a process that replaces another one."""

    def __str__(self) -> str:
        return "starts"


class Ended(NamedTuple):
    """A connection to the listener of a process, which shows whether it has ended."""

    process: int

    def __str__(self) -> str:
        return f"asks whether process {self.process} has ended"


@dataclass(frozen=True)
class Code:
    """The code under the checker. A mutant replaces a part.

    Args:
        member, spare: the judges of ranks that shrink and that stand by.
        decide: ``shrinking.decide``.
        statuses: the class of the statuses.
        board: wraps the board of each call.
    """

    member: type[ShrinkJudge] = ShrinkJudge
    spare: type[StandByJudge] = StandByJudge
    decide: Callable[..., Outcome] = shrinking.decide
    statuses: type[Statuses] = Statuses
    board: Callable[[Board], Board] = as_it_is


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
    calls: tuple[Arguments, ...]
    retries: bool = False
    comes_back: bool = False
    replaces: int | None = None
    layout: Layout | None = None
    generation: int = 0


Programs = tuple[Program, ...]

DROP = Request("dp", ())
"""Drop the lost ranks."""

SPARE, SPARE_ONLY = Request("dp", (2,)), Request(None, (2,))
"""Rank 2 takes the place of a lost one; otherwise drop that one, or fail."""

ANEW = Request("dp", (1,))
"""A new process takes the place of rank 1."""

PAIR = Layout(dp=2)


def members(ranks: int, request: Request = DROP, **more: Any) -> Programs:
    return tuple(Program(rank, (request,), **more) for rank in range(ranks))


def with_spare(request: Request = SPARE, **more: Any) -> Programs:
    """The ranks 0 and 1 of a mesh, and rank 2, which stands by."""
    return (*members(2, request, **more), Program(2, (None,), **more))


def with_new(request: Request = ANEW, **more: Any) -> Programs:
    """The ranks 0 and 1 of a mesh, and a new process in the place of the second, which stands by."""
    comes_back = {"comes_back": True, **more}
    return (*members(2, request, **comes_back), Program(1, (None,), replaces=1, **more))


NEW_AND_AGAIN = (Program(0, (ANEW, DROP)), Program(1, (ANEW,)), Program(1, (None, DROP), replaces=1))
"""A new process comes in the place of rank 1, and all shrink once more."""

CAME_BACK = (
    Program(0, (SPARE,), layout=PAIR, generation=1),
    Program(1, (SPARE,), layout=PAIR, generation=1),
    Program(2, (DROP,), comes_back=True),
)
"""Rank 2 of three was taken for lost; it stands by, and the two others name it as a spare."""

BEFORE = Outcome(lost={2: "lost"}, axis="dp")

SECOND_DIES = Faults(crashes=1, mortal=frozenset([1]))


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
        called_shrink: it has called shrink on the mesh of the next call.
        left: the decision keys of attempts at which its call ended with an error.
    """

    calls: tuple[Arguments, ...]
    layout: Layout
    generation: int = 0
    count: int = 0
    outcomes: frozenset[tuple[str, str]] = frozenset()
    results: tuple[Result, ...] = ()
    called_shrink: bool = False
    left: frozenset[str] = frozenset()


class Shrink(Call):
    """One call of shrink or stand_by."""

    def __init__(self, code: Code, process: int, program: Program, memory: Memory, answers: tuple[Any, ...]) -> None:
        self.code, self.process, self.program = code, process, program
        self.time = 0.0  # a deadline comes without a silence of the others
        self.looked = b""  # the arrivals when they were last read
        self.learnt: dict[str, Outcome] = {}  # by decision key, the decisions that this call has taken
        self.round: MeshRound | None = None  # the last one
        self.judge: SurvivorJudge | None = None
        asks = lambda status, seconds, wait: self.ask(Ended(status.endpoint[1]))  # noqa: E731
        statuses = code.statuses(LONG, lambda: self.time + SINCE_BOOT, asks)
        self.liveness = SimpleNamespace(statuses=statuses)
        super().__init__(memory, answers, code.board)

    def _seen(self, judge: type[SurvivorJudge]) -> type[SurvivorJudge]:
        """The judge, which tells this call of its round and of the decisions."""
        call = self

        class Seen(judge):  # type: ignore[valid-type, misc]
            def arrival(self, each: MeshRound) -> Any:
                call.judge, call.round = self, each
                return super().arrival(each)

            def decided(self, each: MeshRound) -> None:
                super().decided(each)
                call.learnt[each.decision_key] = each.decision

        return Seen

    def known(self) -> frozenset[tuple[str, str]]:
        """By key, the decisions that this process has acted on."""
        return frozenset(self.memory.outcomes.union((key, plain(each)) for key, each in self.learnt.items()))

    def finish(self) -> Memory:
        call, *others = self.memory.calls
        called_shrink = self.memory.called_shrink or (call is not None and self.program.rank in self.memory.layout)
        memory = replace(self.memory, count=self.memory.count + 1, called_shrink=called_shrink)
        if self.program.replaces is not None and not self.memory.count:
            self.ask(Start())
        own = {"process": f"process {self.process}"}
        judge_of = functools.partial(self._seen(self.code.spare), **own)
        if call is not None:
            judge_of = functools.partial(self._seen(self.code.member), **own, request=call)
        make = lambda name, layout, world: SimpleNamespace(layout=layout, state_of=_state_of(ElasticState()))  # noqa: E731
        try:
            with mock.patch.multiple(shrinking, MeshGroups=make, decide=self.code.decide):
                mesh = shrinking.agree(self._mesh(called_shrink), self, judge_of)  # type: ignore[arg-type]
        except (KeyboardInterrupt, MissingRanksError, MismatchError) as error:
            if isinstance(error, KeyboardInterrupt) and not self.interrupted:
                raise AssertionError("nobody pressed Ctrl-C") from error
            again = memory.calls if self.program.retries and memory.count < MOST_CALLS else ()
            left = memory.left.union([self.round.decision_key] if self.round else [])
            return replace(memory, calls=again, left=left, outcomes=self.known())
        except MembershipError:
            again = (None, *others) if self.program.comes_back and call is not None else ()
            return replace(memory, calls=again, outcomes=self.known())
        ranks = mesh.layout.ranks()
        assert self.round is not None
        result = Result(self.round.decision_key, mesh_key(self.round), ranks)
        return replace(
            memory,
            calls=tuple(others) if self.program.rank in ranks else (None,) * len(others),
            layout=mesh.layout,
            generation=mesh.state_of(ElasticState).generation.number,
            called_shrink=False,
            outcomes=self.known(),
            results=(*memory.results, result),
        )

    def _mesh(self, called_shrink: bool) -> Any:
        """The mesh of this call."""
        layout, number = self.memory.layout, self.memory.generation
        state = ElasticState(Generation("m", layout, number), called_shrink=called_shrink)
        return SimpleNamespace(
            layout=layout,
            rank=self.program.rank,
            key="pgmesh/m.0",
            label="mesh 'm'",
            world=None,
            ended=None,
            state_of=_state_of(state),
            end=lambda reason, abort: None,
        )

    def explicit_state(self) -> object:
        """What the last round and its judge offer."""
        each, judge = self.round, self.judge
        assert each is not None
        assert judge is not None
        records = sorted(judge.statuses.records.items())
        heard = [(rank, each.status.sent, each.since) for rank, each in records if each.status is not None]
        return (
            self.memory,
            self.known(),
            repr([each.name, judge.generation.layout.ranks(), judge.call, judge.came_late]),
            tuple((rank, beat, (at - SINCE_BOOT) // LONG) for rank, beat, at in heard),
            tuple((rank, each.ended) for rank, each in records if each.ended is not None),
        )

    # -- the client -----------------------------------------------------------------------------------------------

    def received(self, step: Any, answer: Any) -> Any:
        if isinstance(step, Read) and step.key.endswith("/arrivals"):
            self.looked = answer or b""
        if isinstance(step, Read) and "/status/" in step.key:
            beats, answer = answer
            self.time = max(self.time, beats * LONG + self.time % LONG)
        return answer

    def set_pending(self, pending: dict[str, str]) -> None:
        assert not pending

    def wake(self, choice: str) -> None:
        self.time = self.beats * LONG + self.time % LONG + PAUSE
        self.clock = DEADLINE if choice == "deadline" else self.time


def _state_of(state: ElasticState) -> Callable[[type], ElasticState]:
    """The ``state_of`` of a mesh with this state."""
    return lambda kind: state


def mesh_key(each: MeshRound) -> str:
    return each.key.removesuffix("/shrink")


def plain(outcome: Any) -> str:
    """An outcome without its texts, which have no effect."""
    if outcome.failed:
        return Outcome(failed="failed", error=outcome.error).pack()
    lost = dict.fromkeys(outcome.lost, "lost")
    return Outcome("", outcome.error, lost, dict(outcome.replaced), outcome.axis, tuple(outcome.processes)).pack()


class Standing(Node):
    """One state of one process.

    Its ``mesh``, ``number``, ``layout`` and ``request`` are those of its last round.
    """

    kept = ("outcomes", "results")

    def __init__(self, rank: int, memory: Memory, call: Shrink | None, answers: tuple[Any, ...] = ()) -> None:
        super().__init__(memory, call, answers)
        self.rank = rank
        each, judge = (call.round, call.judge) if call else (None, None)
        self.mesh = mesh_key(each) if each else ""
        self.number = each.number if each else 0
        self.layout = judge.generation.layout.ranks() if judge else ()
        self.request = judge.request if isinstance(judge, ShrinkJudge) else None
        self.outcomes = call.known() if call else memory.outcomes
        self.looked = call.looked if call else b""
        self.interrupted = call.interrupted if call else False
        self.results, self.left = memory.results, memory.left

    @property
    def attempt(self) -> str:
        """Prefix of the store keys of its attempt."""
        return f"{self.mesh}/shrink/{self.number}"
