"""One rank: its program as steps, and all states of it that were met."""

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
"""Seconds after which a rank that told nothing new counts as lost. An inspection takes one, so it is never near."""


class Life:
    """One rank's program as steps, and what can be said of it between two of them."""

    def __init__(self, protocol: Protocol, rank: int, program: Program) -> None:
        self.protocol, self.rank, self.program = protocol, rank, program
        self.attempts: Counter[Group] = Counter()
        self.ends: dict[tuple[Group, int], str] = {}  # how each meeting ended that this rank saw end
        self.came: frozenset[tuple[Group, int]] = frozenset()  # where it posted its arrival
        self.open: dict[str, tuple[Group, int]] = {}  # the meetings of its call, by name
        self.party: real.Participant | None = None
        self.generations = protocol.generations()
        self.connected: dict[Group, real.ConnectAttempt] = {}
        self.number = 0
        self.failed: frozenset[tuple[Group, int]] = frozenset()  # the meetings of a call that was interrupted
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
            party = self._party(call)
            try:
                yield from party.meet()
            except Interruption:
                self.failed = frozenset(self.open.values())
                self._leave()
                return
            self._leave()
            lost = (yield from self._warm_up(party.meetings)) if self.program.lasting else []
            made = not lost and all(meeting.end == real.MADE for meeting in party.meetings)
            if made or self.program.after == "next":
                calls.pop(0)
            elif otherwise:
                calls, otherwise = list(otherwise), ()
            elif self.program.after == "stop":
                return
            else:
                calls[0] = tuple(meeting.ranks for meeting in party.meetings if meeting.end != real.MADE)

    def _unconnected(self, call: Call) -> Iterator[Step]:
        """Those of these groups that are to be met: others may have said since that one failed."""
        for group in [group for group in call if group in self.connected]:
            if (yield Read(self.connected[group].broken)) is not None:
                self._fail(group)
        return tuple(group for group in call if group not in self.connected)

    def _warm_up(self, meetings: Sequence[real.ConnectAttempt]) -> Iterator[Step]:
        """The first collective of each group that was made; those that are lost are told of."""
        lost = []
        for meeting in meetings:
            group = tuple(meeting.ranks)
            if meeting.end == real.MADE and (yield Collective(meeting.name)) == "done":
                self.connected[group] = meeting
            elif meeting.end == real.MADE:
                yield CompareSet(meeting.broken, Decision("missing").pack())
                self._fail(group)
                lost.append(group)
        return lost

    def _fail(self, group: Group) -> None:
        self.connected.pop(group, None)
        self.generations.fail(group, "")
        self.attempts[group] = 0

    def _release(self, groups: Call) -> None:
        for group in groups:
            self.connected.pop(group, None)
            self.generations.release(group)
            self.attempts[group] = 0

    def _party(self, call: Call) -> real.Participant:
        meetings = []
        self.open = {}
        for group in call:
            released, failed = self.generations.of(group, "")
            attempt = 100 * released + 10 * failed + self.attempts[group]
            name = f"{spell(group)}#{attempt if self.protocol.numbered else 0}"
            card = Fingerprint(self.rank, {"means": self.program.means}, name, "Mend it.")
            meetings.append(self.protocol.meeting(name, group, card))
            self.open[name] = (group, attempt)
        self.number += 1
        self.party = self.protocol.party(
            self.rank,
            meetings,
            number=self.number,
            line=f"train.py:{self.number}",
            who=f"process {self.rank}",
            deadline=float("inf"),
            suspicion=LONG,
        )
        return self.party

    def _leave(self) -> None:
        assert self.party is not None
        self._see()
        for meeting in self.party.meetings:
            self.attempts[tuple(meeting.ranks)] += 1
        self.open, self.party = {}, None

    def _see(self) -> None:
        for meeting in self.party.meetings if self.party else ():
            if meeting.end is not None:
                self.ends[self.open[meeting.name]] = meeting.end.kind

    def take(self, answer: Any) -> Step | None:
        """The next step, given the answer to the last; None after the last."""
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
        if isinstance(step, Append) and step.key.endswith("/came"):
            meeting = self.open.get(step.key.removesuffix("/came"))
            self.came |= {meeting} if meeting else set()

    def fingerprint(self, timed: bool) -> object:
        """All that what comes next can depend on, at a pause."""
        assert self.party is not None
        passing = {"came", "_told"} - {*self.protocol.live}
        fixed = {
            "ranks",
            "card",
            "refused",
            "mesh",
            "me",
            "meetings",
            "number",
            "line",
            "who",
            "deadline",
            "suspicion",
            "warn",
        }
        dropped = passing | fixed | {"_now", "_beats", "alone"}
        party = {name: value for name, value in vars(self.party).items() if name not in dropped}
        if timed:
            party["_beats"] = sorted((rank, beat, epoch(at)) for rank, (beat, at) in self.party._beats.last.items())
        over = {"missing", "counted"}  # of a meeting that has ended, nobody asks for them
        meetings = [
            {name: value for name, value in vars(each).items() if name not in dropped | (over if each.end else set())}
            for each in self.party.meetings
        ]
        lasting = (repr(vars(self.generations)), tuple(sorted(self.connected)))
        return (
            self.number,
            repr(party),
            repr(meetings),
            tuple(sorted(self.ends.items())),
            self.came,
            self.failed,
            lasting,
        )


def epoch(now: float) -> int:
    """How many long times had passed."""
    return int(now // LONG)


class Node:
    """One state of one rank."""

    __slots__ = ("after", "came", "ends", "failed", "history", "id", "life", "lost", "open", "rank", "step")

    def __init__(self, life: Life, step: Step | None, history: tuple[Any, ...]) -> None:
        self.life: Life | None = life
        self.rank, self.step, self.history = life.rank, step, history
        self.ends, self.came, self.open, self.failed = dict(life.ends), life.came, dict(life.open), life.failed
        self.after: dict[Any, Node] = {}
        self.lost = False
        self.id = -1


class Rank:
    """All states of one rank that were met so far: shared by all spaces in which it runs this program."""

    def __init__(self, protocol: Protocol, rank: int, program: Program, timed: bool, nodes: list[Node]) -> None:
        self.protocol, self.rank, self.program, self.timed = protocol, rank, program, timed
        self.nodes = nodes
        self._known: dict[object, Node] = {}
        life = Life(protocol, rank, program)
        self.start = self._enter(("start",), life, life.take(None), ())

    def _enter(self, key: object, life: Life, step: Step | None, history: tuple[Any, ...]) -> Node:
        if step is None:
            key = ("done", tuple(sorted(life.ends.items())), life.came, life.failed)
        elif isinstance(step, Pause):
            key = ("pause", step.seconds > 0.0, life.fingerprint(self.timed))
        node = self._known.get(key)
        if node is None:
            node = self._known[key] = Node(life, step, history)
            node.id = len(self.nodes)
            self.nodes.append(node)
        return node

    def next(self, node: Node, answer: Any) -> Node:
        """Where an answer leads."""
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
        """The rank dies: what it did stays done."""
        key = ("lost", tuple(sorted(node.ends.items())), node.came)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Node.__new__(Node)
            found.life, found.step, found.history, found.rank = None, None, node.history, node.rank
            found.ends, found.came, found.open, found.after = node.ends, node.came, {}, {}
            found.lost, found.failed = True, node.failed
            found.id = len(self.nodes)
            self.nodes.append(found)
        return found
