"""One rank of the model: its program as steps, and all its states that were reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pgmesh.rendezvous import protocol as real
from pgmesh.rendezvous.protocol import Append, CompareSet, Decision, Fingerprint, Pause, Read, Ready, Step
from tests.rendezvous.model.programs import (
    MOST_TRIES,
    Call,
    Collective,
    Group,
    Interruption,
    Program,
    Protocol,
    Release,
    spell,
)

LONG = 1e6
"""Seconds without a heartbeat after which a rank counts as lost. An inspection takes one second."""


class Life:
    """One rank's program as steps, and its properties between two steps."""

    def __init__(self, protocol: Protocol, rank: int, program: Program) -> None:
        self.protocol, self.rank, self.program = protocol, rank, program
        self.counts: Counter[Group] = Counter()
        self.outcomes: dict[tuple[Group, int], str] = {}  # of the attempts that this rank saw decided
        self.arrived: frozenset[tuple[Group, int]] = frozenset()  # attempts with an arrival of this rank
        self.open: dict[str, tuple[Group, int]] = {}  # the attempts of its call, by name
        self.participant: real.Participant | None = None
        self.generations = protocol.generations()
        self.connected: dict[Group, real.ConnectAttempt] = {}
        self.number = 0
        self.failed: frozenset[tuple[Group, int]] = frozenset()  # the attempts of an interrupted call
        self.steps = self._run()

    def _run(self) -> Iterator[Step]:
        calls = list(self.program.calls)
        otherwise: tuple[Call, ...] = self.program.otherwise
        while calls and self.number < MOST_TRIES:
            if isinstance(calls[0], Release):
                self._release(calls.pop(0))
                continue
            call = yield from self._unconnected(calls[0])
            if not call:
                calls.pop(0)
                continue
            participant = self._participant(call)
            try:
                yield from participant.connect()
            except Interruption:
                self.failed = frozenset(self.open.values())
                self._leave()
                return
            self._leave()
            lost = (yield from self._warm_up(participant.attempts)) if self.program.lasting else []
            made = not lost and all(attempt.decision == real.MADE for attempt in participant.attempts)
            if made or self.program.after == "next":
                calls.pop(0)
            elif otherwise:
                calls, otherwise = list(otherwise), ()
            elif self.program.after == "stop":
                return
            else:
                calls[0] = tuple(attempt.ranks for attempt in participant.attempts if attempt.decision != real.MADE)

    def _unconnected(self, call: Call) -> Iterator[Step]:
        """The groups that are not connected. Other members may have published that one failed."""
        for group in [group for group in call if group in self.connected]:
            if (yield Read(self.connected[group].broken_key)) is not None:
                self._fail(group)
        return tuple(group for group in call if group not in self.connected)

    def _warm_up(self, attempts: Sequence[real.ConnectAttempt]) -> Iterator[Step]:
        """The first collective of each group that was made. Failures are published."""
        lost = []
        for attempt in attempts:
            group = tuple(attempt.ranks)
            if attempt.decision == real.MADE and (yield Collective(attempt.name)) == "done":
                self.connected[group] = attempt
            elif attempt.decision == real.MADE:
                yield CompareSet(attempt.broken_key, Decision("missing").pack())
                self._fail(group)
                lost.append(group)
        return lost

    def _fail(self, group: Group) -> None:
        self.connected.pop(group, None)
        self.generations.fail(group, "")
        self.counts[group] = 0

    def _release(self, groups: Call) -> None:
        for group in groups:
            self.connected.pop(group, None)
            self.generations.release(group)
            self.counts[group] = 0

    def _participant(self, call: Call) -> real.Participant:
        attempts = []
        self.open = {}
        for group in call:
            released, failed = self.generations.of(group, "")
            number = 100 * released + 10 * failed + self.counts[group]
            name = f"{spell(group)}#{number if self.protocol.numbered else 0}"
            fingerprint = Fingerprint(self.rank, {"means": self.program.variant}, name, "Mend it.")
            attempts.append(self.protocol.attempt(name, group, fingerprint))
            self.open[name] = (group, number)
        self.number += 1
        self.participant = self.protocol.participant(
            self.rank,
            attempts,
            number=self.number,
            call_site=f"train.py:{self.number}",
            process=f"process {self.rank}",
            deadline=float("inf"),
            lost_after=LONG,
        )
        return self.participant

    def _leave(self) -> None:
        assert self.participant is not None
        self._see()
        for attempt in self.participant.attempts:
            self.counts[tuple(attempt.ranks)] += 1
        self.open, self.participant = {}, None

    def _see(self) -> None:
        for attempt in self.participant.attempts if self.participant else ():
            if attempt.decision is not None:
                self.outcomes[self.open[attempt.name]] = attempt.decision.kind

    def take(self, answer: Any) -> Step | None:
        """The next step, given the answer to the last one; None at the end."""
        try:
            step = self.steps.throw(answer) if isinstance(answer, Interruption) else self.steps.send(answer)
            while isinstance(step, Ready):
                step = self.steps.send(None)
        except StopIteration:
            return None
        finally:
            self._see()
        return step

    def posted(self, step: Step) -> None:
        """This rank's step was done."""
        if isinstance(step, Append) and step.key.endswith("/arrivals"):
            attempt = self.open.get(step.key.removesuffix("/arrivals"))
            self.arrived |= {attempt} if attempt else set()

    def fingerprint(self, timed: bool) -> object:
        """The state at a pause, on which all further steps depend."""
        assert self.participant is not None
        passing = {"_statuses"} - {*self.protocol.live}
        fixed = {
            "ranks",
            "fingerprint",
            "mismatch_key",
            "mesh_mismatch_key",
            "rank",
            "attempts",
            "number",
            "call_site",
            "process",
            "deadline",
            "lost_after",
            "warn",
        }
        dropped = passing | fixed | {"_now", "_heartbeats", "single_threaded"}
        participant = {name: value for name, value in vars(self.participant).items() if name not in dropped}
        if timed:
            last = self.participant._heartbeats.last
            participant["_heartbeats"] = sorted((rank, beat, epoch(at)) for rank, (beat, at) in last.items())
        over = {"missing", "count_seen"}  # unused once an attempt is decided
        attempts = [
            {
                name: value
                for name, value in vars(each).items()
                if name not in dropped | (over if each.decision else set())
            }
            for each in self.participant.attempts
        ]
        lasting = (repr(vars(self.generations)), tuple(sorted(self.connected)))
        return (
            self.number,
            repr(participant),
            repr(attempts),
            tuple(sorted(self.outcomes.items())),
            self.arrived,
            self.failed,
            lasting,
        )


def epoch(now: float) -> int:
    """Number of long times that had passed."""
    return int(now // LONG)


class Node:
    """One state of one rank."""

    __slots__ = ("after", "arrived", "failed", "history", "id", "life", "lost", "open", "outcomes", "rank", "step")

    def __init__(self, life: Life, step: Step | None, history: tuple[Any, ...]) -> None:
        self.life: Life | None = life
        self.rank, self.step, self.history = life.rank, step, history
        self.outcomes, self.arrived = dict(life.outcomes), life.arrived
        self.open, self.failed = dict(life.open), life.failed
        self.after: dict[Any, Node] = {}
        self.lost = False
        self.id = -1


class Rank:
    """All states of one rank that were reached so far. All spaces in which it runs this program share them."""

    def __init__(self, protocol: Protocol, rank: int, program: Program, timed: bool, nodes: list[Node]) -> None:
        self.protocol, self.rank, self.program, self.timed = protocol, rank, program, timed
        self.nodes = nodes
        self._known: dict[object, Node] = {}
        life = Life(protocol, rank, program)
        self.start = self._enter(("start",), life, life.take(None), ())

    def _enter(self, key: object, life: Life, step: Step | None, history: tuple[Any, ...]) -> Node:
        if step is None:
            key = ("done", tuple(sorted(life.outcomes.items())), life.arrived, life.failed)
        elif isinstance(step, Pause):
            key = ("pause", step.seconds > 0.0, life.fingerprint(self.timed))
        node = self._known.get(key)
        if node is None:
            node = self._known[key] = Node(life, step, history)
            node.id = len(self.nodes)
            self.nodes.append(node)
        return node

    def next(self, node: Node, answer: Any) -> Node:
        """The state after an answer."""
        found = node.after.get(answer)
        if found is None:
            life, node.life = node.life, None
            if life is None:
                life = Life(self.protocol, self.rank, self.program)
                step = life.take(None)
                for earlier in node.history:
                    assert step is not None
                    step = self._take(life, step, earlier)
            assert node.step is not None
            step = self._take(life, node.step, answer)
            found = node.after[answer] = self._enter((node.id, answer), life, step, (*node.history, answer))
        return found

    def _take(self, life: Life, step: Step, answer: Any) -> Step | None:
        if answer == "interrupted before":
            return life.take(Interruption("Ctrl-C"))
        life.posted(step)
        if answer == "interrupted after":
            return life.take(Interruption("Ctrl-C"))
        if isinstance(step, Pause):
            choice, long_times, ticks = answer
            return life.take(float("inf") if choice == "deadline" else long_times * LONG + ticks)
        return life.take(answer)

    def lose(self, node: Node) -> Node:
        """The state after the rank's death."""
        key = ("lost", tuple(sorted(node.outcomes.items())), node.arrived)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Node.__new__(Node)
            found.life, found.step, found.history, found.rank = None, None, node.history, node.rank
            found.outcomes, found.arrived, found.open, found.after = node.outcomes, node.arrived, {}, {}
            found.lost, found.failed = True, node.failed
            found.id = len(self.nodes)
            self.nodes.append(found)
        return found
