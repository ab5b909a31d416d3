"""A model checker for how ranks meet: every interleaving, every crash, every time-out, over the protocol itself.

Ranks run small programs, each a row of connect calls. What runs is the code of ``pgmesh/rendezvous.py``, one access to
the store at a time; the checker plays the store, the clock and the misfortune.

A generator cannot be copied, so a rank's state is the shortest row of answers that leads to it, and is run again from
there when another branch needs it. Two states are one if they will behave alike: at a pause, what a rank will do is
what its party and its meetings hold, and between two pauses, what it was answered since. So polling that sees nothing
leads back to where it began, and a space is finite.

The laws:

    an end never changes            once a decision is laid down, it lies
    one end for all                 all members that see a meeting end see the same
    made means that all came        to that very meeting: not to an earlier one, nor to another group's
    made means that all mean the same
    no false circle                 ranks that are told of a circle would never have met
    no circle is missed             ranks that wait for each other are told so, long before any deadline
    no group is refused             a group whose members all come is made, if nothing fails
    nobody waits once all came      not even if one of them is lost right after
    a loss is found                 long before any deadline
    a retry works                   for those that are left

``python -m tests.model --minutes 5 --seed 7`` tries random programs for as long as that.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pgmesh import rendezvous as real
from pgmesh.rendezvous import Add, Append, Card, Delete, End, Pause, Read, Ready, Say, Step, Swap, Told, told

MOST_TRIES = 9
"""Calls of one rank, retries included: who needs more tries for ever."""

LONG = 1e6
"""Seconds after which a rank that told nothing new counts as lost. An inspection takes one, so it is never near."""

NEVER_CHANGES = "an end never changes"
ONE_END = "one end for all"
ALL_CAME = "made means that all came"
ALIKE = "made means that all mean the same"
FALSE_CIRCLE = "no false circle"
MISSED_CIRCLE = "no circle is missed"
NOT_REFUSED = "no group is refused"
NO_WAIT = "nobody waits once all came"
LOSS_FOUND = "a loss is found"
RETRY = "a retry works"
NO_ERROR = "nothing else is raised"

Group = tuple[int, ...]
Call = tuple[Group, ...]


# -- programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """What one rank does.

    Args:
        calls: the calls of connect, each with its groups, one after another.
        after: what a failed call leads to: "stop", "next" (the next call), or "retry" of those of its groups that
            were not made, until they are.
        otherwise: calls that a failed one leads to, instead.
        means: what this rank means by its groups.
        lasting: groups that are made have a first collective, and are not met again once that is done.
    """

    calls: tuple[Call, ...]
    after: str = "stop"
    otherwise: tuple[Call, ...] = ()
    means: int = 0
    lasting: bool = False


class Release(tuple[Group, ...]):
    """In place of a call of connect: these groups are let go of."""


class Collective(NamedTuple):
    """The first collective of a group that is made. It may be done on one member, and lost on another."""

    name: str


def spell(group: Group) -> str:
    return "g" + "-".join(map(str, group))


class Interruption(BaseException):
    """Ctrl-C, as the protocol sees it."""


@dataclass(frozen=True)
class Protocol:
    """What is checked: the protocol as it is, or a mutant of it.

    Args:
        live: fields of a meeting and of a party that a mutant still uses after a pause.
        numbered: whether a retry is another meeting, under another name.
        sound: decisions and arrivals stay, so that who reads them need not be tried in every order.
    """

    name: str = "pgmesh"
    meeting: type[real.Meeting] = real.Meeting
    party: type[real.Party] = real.Party
    live: tuple[str, ...] = ()
    numbered: bool = True
    sound: bool = True
    generations: type[real.Generations] = real.Generations


REAL = Protocol()


# -- one rank ---------------------------------------------------------------------------------------------------------


class Life:
    """One rank's program as steps, and what can be said of it between two of them."""

    def __init__(self, protocol: Protocol, rank: int, program: Program) -> None:
        self.protocol, self.rank, self.program = protocol, rank, program
        self.attempts: Counter[Group] = Counter()
        self.ends: dict[tuple[Group, int], str] = {}  # how each meeting ended that this rank saw end
        self.came: frozenset[tuple[Group, int]] = frozenset()  # where it posted its arrival
        self.open: dict[str, tuple[Group, int]] = {}  # the meetings of its call, by name
        self.party: real.Party | None = None
        self.generations = protocol.generations()
        self.connected: dict[Group, real.Meeting] = {}
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

    def _warm_up(self, meetings: Sequence[real.Meeting]) -> Iterator[Step]:
        """The first collective of each group that was made; those that are lost are told of."""
        lost = []
        for meeting in meetings:
            group = tuple(meeting.ranks)
            if meeting.end == real.MADE and (yield Collective(meeting.name)) == "done":
                self.connected[group] = meeting
            elif meeting.end == real.MADE:
                yield Swap(meeting.broken, End("missing").pack())
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

    def _party(self, call: Call) -> real.Party:
        meetings = []
        self.open = {}
        for group in call:
            released, failed = self.generations.of(group, "")
            attempt = 100 * released + 10 * failed + self.attempts[group]
            name = f"{spell(group)}#{attempt if self.protocol.numbered else 0}"
            card = Card(self.rank, {"means": self.program.means}, name, "Mend it.")
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


# -- the store --------------------------------------------------------------------------------------------------------


class Stores:
    """All contents of the store that were met so far, each with a number."""

    def __init__(self) -> None:
        self.contents: list[dict[str, Any]] = []
        self._numbers: dict[object, int] = {}

    def number(self, content: dict[str, Any]) -> int:
        key = frozenset(content.items())
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.contents)
            self.contents.append(content)
        return found

    def perform(self, rank: int, step: Step, number: int) -> tuple[Any, int]:
        """Do one step: the answer, and what the store holds then. The order of arrivals is nobody's concern."""
        content = self.contents[number]
        if isinstance(step, Read):
            return content.get(step.key), number
        if isinstance(step, Append):
            lines = [*content.get(step.key, b"").splitlines(), *step.value.encode().splitlines()]
            return None, self.number({**content, step.key: b"".join(line + b"\n" for line in sorted(lines))})
        if isinstance(step, Add):
            count = content.get(step.key, 0) + 1
            return count, self.number({**content, step.key: count})
        if isinstance(step, Swap):
            held = content.get(step.key)
            if held is not None and not isinstance(step, Overwrite):
                return held, number
            value = _without_words(step)
            return value, self.number({**content, step.key: value})
        if isinstance(step, Say):
            record = Told(rank, content["long times"], waits=step.waits).pack().encode()
            return None, self.number({**content, told(rank): record})
        if isinstance(step, Delete):
            return None, self.number({key: value for key, value in content.items() if key not in step.keys})
        raise TypeError(f"{step!r} is not for the store")

    @functools.cache  # noqa: B019  it lives as long as its space
    def long_time(self, number: int, *silent: int) -> int:
        """So long passes that a rank that lives has told something new."""
        content = dict(self.contents[number])
        content["long times"] += 1
        for key, value in content.items():
            if key.startswith("pgmesh/told/"):
                rank = int(key.rpartition("/")[2])
                last = Told.unpack(rank, value)
                assert last is not None
                if rank not in silent:
                    content[key] = replace(last, beat=content["long times"]).pack().encode()
        return self.number(content)


@functools.lru_cache
def kind_of(value: bytes) -> str:
    return End.unpack("", value).kind


class Overwrite(Swap):
    """A value laid down over what lies there: only mutants do this."""


def _without_words(step: Swap) -> bytes:
    """A decision without its text, which nobody acts upon; of a circle, who is on it."""
    end = End.unpack(step.key, step.value.encode())
    return End(end.kind, json.dumps(links_of(end.text)) if end.kind == "circle" else "").pack().encode()


def links_of(text: str) -> list[tuple[int, str, int]]:
    """The circle that a text tells of: which rank waits in which meeting for which other."""
    words = r"rank (\d+) connects (\S+) \(ranks [\d, ]+\) at \S+, and waits for rank (\d+)"
    return [(int(rank), name, int(other)) for rank, name, other in re.findall(words, text)]


def meeting_of(name: str) -> tuple[Group, int]:
    group, _, attempt = name[1:].partition("#")
    return tuple(map(int, group.split("-"))), int(attempt)


# -- what would happen if nothing failed ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ideal:
    """How programs end if nothing fails: there is only one way.

    Args:
        made: the meetings to which all members come.
        waits: by rank that waits for ever, and meeting: who never comes.
    """

    made: frozenset[tuple[Group, int]]
    waits: dict[int, dict[tuple[Group, int], frozenset[int]]]

    @classmethod
    def of(cls, programs: Sequence[Program]) -> Ideal:
        at = [0] * len(programs)
        came: set[tuple[int, Group, int]] = set()
        attempts: list[Counter[Group]] = [Counter() for _ in programs]
        made: set[tuple[Group, int]] = set()
        before = None
        while before != (before := (len(came), len(made), *at)):
            for rank, program in enumerate(programs):
                if at[rank] == len(program.calls):
                    continue
                now = [(group, attempts[rank][group]) for group in program.calls[at[rank]]]
                came |= {(rank, *meeting) for meeting in now}
                made |= {(g, n) for g, n in now if all((member, g, n) in came for member in g)}
                if made.issuperset(now):
                    at[rank] += 1
                    attempts[rank].update(group for group, _ in now)
        waits = {
            rank: {
                (group, attempts[rank][group]): missing
                for group in program.calls[at[rank]]
                if (missing := frozenset(r for r in group if (r, group, attempts[rank][group]) not in came))
            }
            for rank, program in enumerate(programs)
            if at[rank] < len(program.calls)
        }
        return cls(frozenset(made), waits)

    def has_circle(self) -> bool:
        return on_circle({rank: frozenset().union(*meetings.values()) for rank, meetings in self.waits.items()})


def on_circle(waits: dict[int, frozenset[int]]) -> bool:
    """Whether some ranks wait for each other."""
    left = dict(waits)
    while leaving := [rank for rank, others in left.items() if not others & left.keys()]:
        for rank in leaving:
            del left[rank]
    return bool(left)


# -- all ranks together -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faults:
    """What may go wrong, and how often.

    Args:
        crashes: ranks that die, at any step.
        deadlines: calls whose deadline comes, at any pause.
        interrupts: Ctrl-C, before or after any step.
        long_times: how often so long passes that a rank that tells nothing new counts as lost.
        silences: how often a living rank tells nothing new in such a time.
        losses: first collectives that are lost, each on one member.
        mortal: who may die, if not anybody.
        heard: whether everybody was heard from before.
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
        """How often each may still happen, a digit for each."""
        kinds = {CRASH: self.crashes, DEADLINE: self.deadlines, INTERRUPT: self.interrupts, SILENCE: self.silences}
        kinds[LOSS] = self.losses
        return sum(price * times for price, times in kinds.items())


FREE, CRASH, DEADLINE, INTERRUPT, SILENCE, LOSS = 0, 1, 10, 100, 1000, 10_000
"""What a step takes from what may still go wrong."""

NO_FAULTS = Faults()


def affords(left: int, price: int) -> bool:
    return not price or left // price % 10 > 0


class Broken(NamedTuple):
    """A law that was broken, and the way there."""

    law: str
    what: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return "\n  ".join([f"{self.law}: {self.what}", *self.trace])


@dataclass
class Seen:
    """What was tried, in numbers."""

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
"""The ranks' nodes, what the store holds, and what may still go wrong: all as numbers."""

_Move = tuple[int, str, int, int, bool]
"""The price, the words, where it leads, what the store holds then, and whether laws look at it."""


class _Moves(NamedTuple):
    """What one rank can do next, whether others can wait until it did, and whether it is at a pause or at its end."""

    moves: list[_Move]
    settled: bool
    resting: bool


class _Violation(Exception):
    pass


class Checker:
    """Explores programs under one protocol; what it learns of a rank in one program it uses in the next."""

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
        return _Space(self, programs, faults).explore(most)

    def wander(
        self, programs: Sequence[Program], faults: Faults = NO_FAULTS, *, walks: int, chance: random.Random
    ) -> Seen:
        """Where there is too much to try all of it: so many ways through, drawn by chance."""
        return _Space(self, programs, faults).wander(walks, chance)


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
        self.alike = len({program.means for program in programs}) == 1
        self.seen: dict[State, State | None] = {}  # and from where it was come to first
        self.finished: set[State] = set()
        self._true: set[tuple[str, str]] = set()  # circles that were found to be
        self.out = Seen(programs=1)

    def _start(self) -> State:
        content: dict[str, Any] = {"long times": 0}
        if self.faults.heard:
            content |= {told(rank): Told(rank).pack().encode() for rank in range(len(self.programs))}
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
        """Try that many rows of things that can happen, drawn by chance; then let ranks take turns."""
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
        """Do all that can happen in a state, and note the states that are new."""
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
        """How a state was come to, in words."""
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
        """Whether a rank's next step is one that no other's can matter to, nor it to theirs.

        It reads what will never change, or says again what it said. Then no other's step need be tried before it.
        """
        step, content = node.step, self.stores.contents[store]
        if isinstance(step, Pause) and not self.timed:
            return any(f"{name}/end" in content for name, m in [*node.open.items()][:1] if m not in node.ends)
        if isinstance(step, (Read, Swap)) and step.key.endswith("/end"):
            return step.key in content
        if isinstance(step, Read) and step.key.endswith("/count"):
            return True  # what was counted since the step before it could as well have been so before that step
        if isinstance(step, Read) and step.key.endswith("/came"):
            return content.get(step.key, b"").count(b"\n") == step.key.count("-") + 1
        return isinstance(step, Say) and self.stores.perform(node.rank, step, store)[1] == store

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
        """What one rank can do next."""
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
            moves.append((price, f"rank {rank.rank}: {choice}", node.id, store, node.ends != before.ends))
            return
        answer, content = self.stores.perform(rank.rank, step, store)
        try:
            after = rank.next(node, answer)
        except Exception as error:
            raise _Violation(NO_ERROR, f"rank {rank.rank} in {_words(step)}: {error!r}", ()) from error
        mark = {"": "", "look": " (looks)", "inspect": " (inspects)", "deadline": " (its deadline has come)"}[choice]
        words = f"rank {rank.rank}{mark}: {_words(step)}"
        looked = after.ends != before.ends or (isinstance(step, Swap) and content != store)
        moves.append((price, words, after.id, content, looked))

    # -- laws -------------------------------------------------------------------------------------------------------

    def _check(self, state: State, new: State, what: str) -> None:
        """What must hold when a decision was laid down or seen."""
        last = len(self.ranks)
        before, after = self.stores.contents[state[last]], self.stores.contents[new[last]]
        nodes = [self.nodes[node] for node in new[:last]]
        for key, value in after.items() if after is not before else ():
            if key.endswith("/end") and before.get(key) != value:
                if key in before:
                    raise _Violation(NEVER_CHANGES, f"{key} was {before[key]!r} and is {value!r}", (what,))
                self._check_decision(state, key, kind_of(value), what)
        for i, node in enumerate(nodes):
            if node.id == state[i]:
                continue
            for meeting, kind in node.ends.items():
                group, attempt = meeting
                name = f"{spell(group)}#{attempt if self.checker.protocol.numbered else 0}"
                for j, other in enumerate(nodes):
                    if other.ends.get(meeting, kind) != kind:
                        words = f"{name} is {kind} on rank {i} and {other.ends[meeting]} on rank {j}"
                        raise _Violation(ONE_END, words, (what,))
                absent = [member for member in group if meeting not in nodes[member].came]
                if kind == "made" and absent:
                    raise _Violation(ALL_CAME, f"{name} is made, and {absent} never came to it", (what,))
                if f"{name}/end" not in after or kind_of(after[f"{name}/end"]) != kind:
                    raise _Violation(ONE_END, f"{name} is {kind} on rank {i}, and not in the store", (what,))
                if self.calm and kind != "made" and meeting in self.ideal.made and self.alike:
                    raise _Violation(NOT_REFUSED, f"{name} is {kind} on rank {i}", (what,))

    def _check_decision(self, state: State, key: str, kind: str, what: str) -> None:
        name = key.removesuffix("/end")
        if kind == "made":
            nodes = [self.nodes[node] for node in state[: len(self.ranks)]]
            asked = {meeting for node in nodes for other, meeting in node.open.items() if other == name}
            for group, attempt in asked:
                absent = [r for r in group if (group, attempt) not in nodes[r].came]
                if absent:
                    raise _Violation(ALL_CAME, f"{name} is made, and {absent} never came to it", (what,))
                if len({self.programs[rank].means for rank in group}) > 1:
                    raise _Violation(ALIKE, f"{name} is made, and its members mean different groups", (what,))
        if kind == "circle":
            self.out.circles = 1
            rank = int(what.split()[1].rstrip(":"))
            step = self.nodes[state[rank]].step
            assert isinstance(step, Swap)
            if self.calm and (name, step.value) not in self._true:
                self._check_circle(name, step, what)
                self._true.add((name, step.value))

    def _check_circle(self, name: str, step: Swap, what: str) -> None:
        """All that are told of a circle would have waited for ever."""
        links = links_of(step.value)
        ends, starts = [other for _, _, other in links], [rank for rank, _, _ in links]
        if not links or ends != starts[1:] + starts[:1] or name not in {name for _, name, _ in links}:
            raise _Violation(FALSE_CIRCLE, f"this is none: {step.value}", (what,))
        for rank, where, other in links:
            if other not in self.ideal.waits.get(rank, {}).get(meeting_of(where), ()):
                raise _Violation(FALSE_CIRCLE, f"rank {other} would come to {where}, where rank {rank} waits", (what,))

    # -- from here on, ranks take turns -----------------------------------------------------------------------------

    def _finish(self, state: State) -> None:
        """From every state on, if ranks take turns and nothing more fails, all of them end, and end well."""
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
        """Nobody moves any more."""
        nodes = [self.nodes[node] for node in state[: len(self.ranks)]]
        more = tuple(f"... {word}" for word in words[-12:])
        came = [node.came for node in nodes]
        waits: dict[int, frozenset[int]] = {}
        content = self.stores.contents[state[-2]]

        def uncounted(name: str) -> set[int]:
            """Who may have died after it came, and before it was counted: it is missed, and then found to have come."""
            posted = content.get(f"{name}/came", b"").count(b"\n")
            all_are = posted <= content.get(f"{name}/count", 0)
            return set() if all_are else {member for member, node in enumerate(nodes) if node.lost}

        for i, node in enumerate(nodes):
            if node.step is None:
                continue
            absent = [
                {member for member in meeting[0] if meeting not in came[member]} or uncounted(name)
                for name, meeting in node.open.items()
                if meeting not in node.ends
            ]
            if not all(absent):
                names = ", ".join(node.open)
                raise _Violation(NO_WAIT, f"rank {i} waits in {names} until its deadline, though all came", more)
            waits[i] = frozenset().union(*absent)
            lost = [member for member in waits[i] if nodes[member].lost]
            if lost and self.faults.heard:
                raise _Violation(LOSS_FOUND, f"rank {i} waits until its deadline for {lost}, which died", more)
            undecided = {meeting for meeting in node.open.values() if meeting not in node.ends}
            if any(undecided & nodes[member].failed for member in waits[i]):
                raise _Violation(LOSS_FOUND, f"rank {i} waits until its deadline, and was not told", more)
        if on_circle(waits):
            raise _Violation(MISSED_CIRCLE, f"ranks wait for each other until their deadlines: {waits}", more)
        if any(program.after == "retry" or program.otherwise or program.lasting for program in self.programs):
            self._check_retries(nodes, waits, more)
        elif self.calm and self.alike:
            self._check_calm(nodes, content, more)

    def _check_retries(self, nodes: list[Node], waits: dict[int, frozenset[int]], more: tuple[str, ...]) -> None:
        """Who tries again, or tries something else, gets it in the end."""
        for i, (node, program) in enumerate(zip(nodes, self.programs)):
            if node.lost or node.failed or not (program.after == "retry" or program.otherwise or program.lasting):
                continue
            if i in waits:
                raise _Violation(RETRY, f"rank {i} still waits for {sorted(waits[i])}", more)
            last = {group: kind for (group, _), kind in sorted(node.ends.items())}
            ways = [program.calls, program.otherwise] if program.otherwise else [program.calls]
            if not any(all(last.get(group) == "made" for call in way for group in call) for way in ways):
                raise _Violation(RETRY, f"rank {i} ended with {last}", more)

    def _check_calm(self, nodes: list[Node], content: dict[str, Any], more: tuple[str, ...]) -> None:
        for i, node in enumerate(nodes):
            for meeting in self.ideal.made:
                if i in meeting[0] and node.ends.get(meeting) != "made":
                    words = f"{spell(meeting[0])}#{meeting[1]} is {node.ends.get(meeting)} on rank {i}"
                    raise _Violation(NOT_REFUSED, words, more)
        for key, value in content.items():
            if key.endswith("/end") and kind_of(value) == "circle":
                for rank, name, _ in json.loads(End.unpack(key, value).text):
                    if nodes[rank].ends.get(meeting_of(name)) != "circle":
                        raise _Violation(MISSED_CIRCLE, f"rank {rank} is not told of the circle in {name}", more)


def _words(step: Step) -> str:
    if isinstance(step, Say):
        waits = "; ".join(f"{wait.name} for {[*wait.missing]}" for wait in step.waits)
        return f"says that it waits in {waits}" if waits else "says that it waits no more"
    if isinstance(step, Swap):
        kind = End.unpack(step.key, step.value.encode()).kind if step.key.endswith("/end") else step.value
        return f"lays {kind} down in {step.key}"
    if isinstance(step, Delete):
        return f"deletes {', '.join(step.keys)}"
    if isinstance(step, (Pause, Collective)):
        return "pauses"
    return f"{type(step).__name__.lower()}s {step.key}"  # type: ignore[union-attr]


# -- programs to try --------------------------------------------------------------------------------------------------


def one_after_another(*groups: Group, **more: Any) -> Program:
    """A call for each group."""
    return Program(tuple((group,) for group in groups), **more)


def at_once(*groups: Group, **more: Any) -> Program:
    """One call for all."""
    return Program((groups,), **more)


PAIRS_AND_TRIPLE: tuple[Group, ...] = ((0, 1), (0, 2), (1, 2), (0, 1, 2))


def two_each() -> list[tuple[Program, ...]]:
    """Three ranks, each of which connects two of its three groups one after another: 216 programs."""
    ways = [itertools.permutations([g for g in PAIRS_AND_TRIPLE if r in g], 2) for r in range(3)]
    return [tuple(one_after_another(*way) for way in choice) for choice in itertools.product(*ways)]


def up_to_two_each() -> list[tuple[Program, ...]]:
    """Three ranks, each of which connects up to two of its groups, also one twice: 2197 programs."""
    ways = []
    for rank in range(3):
        mine = [group for group in PAIRS_AND_TRIPLE if rank in group]
        ways.append([way for many in range(3) for way in itertools.product(mine, repeat=many)])
    return [tuple(one_after_another(*way) for way in choice) for choice in itertools.product(*ways)]


def but_for_names(programs: list[tuple[Program, ...]]) -> list[tuple[tuple[Program, ...], int]]:
    """One for all that differ only in the numbers of their ranks, and how many they are."""

    def renamed(programs: tuple[Program, ...], order: tuple[int, ...]) -> tuple[Program, ...]:
        new = {
            order[rank]: Program(tuple(tuple(tuple(sorted(order[r] for r in g)) for g in call) for call in p.calls))
            for rank, p in enumerate(programs)
        }
        return tuple(new[rank] for rank in range(len(programs)))

    def first(programs: tuple[Program, ...]) -> tuple[Program, ...]:
        orders = itertools.permutations(range(len(programs)))
        return min((renamed(programs, order) for order in orders), key=lambda each: [p.calls for p in each])

    return list(Counter(map(first, programs)).items())


def drawn(chance: random.Random, ranks: int, **more: Any) -> tuple[Program, ...]:
    """Programs by chance: groups of which each member knows, in orders that may or may not agree."""
    many = chance.randint(2, ranks + 1)
    groups = {tuple(sorted(chance.sample(range(ranks), chance.randint(2, min(3, ranks))))) for _ in range(many)}
    common = sorted(groups, key=lambda _: chance.random())
    programs = []
    for rank in range(ranks):
        mine = [group for group in common if rank in group]
        if chance.random() < 0.4:
            chance.shuffle(mine)
        if mine and chance.random() < 0.1:
            mine.pop()
        calls: list[Call] = []
        while mine:
            many = chance.choice((1, 1, 2))
            calls.append(tuple(mine[:many]))
            mine = mine[many:]
        programs.append(Program(tuple(calls), **more))
    return tuple(programs)


# -- mutants ----------------------------------------------------------------------------------------------------------


def _without(steps: Any, unwanted: Callable[[Step], bool]) -> Any:
    """Steps, without some of them: they are answered as if they had been done on an empty store."""
    answer: Any = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        if unwanted(step):
            answer = step.value.encode() if isinstance(step, Swap) else None
        else:
            answer = yield step


class BelievesTheFirstLook(real.Party):
    def _find_circle(self, mine: Any) -> Any:
        return (yield from self._first_look(mine))


class LooksTwiceAtWaitsAlone(real.Party):
    def _find_circle(self, mine: Any) -> Any:
        circle = yield from self._first_look(mine)
        for rank, wait in circle:
            if rank != self.me:
                again = Told.unpack(rank, (yield Read(told(rank))))
                if again is None or not any(each[:2] == wait[:2] for each in again.waits):
                    return []
        return circle


class TellsOnlyItself(real.Party):
    """Lays the circle down where it waits itself, and nowhere else."""

    def _inspect(self) -> Any:
        mine = [meeting.tomb for meeting in self.meetings]
        yield from _without(super()._inspect(), lambda step: isinstance(step, Swap) and step.key not in mine)


class SaysNothing(real.Party):
    def _inspect(self) -> Any:
        yield from _without(super()._inspect(), lambda step: isinstance(step, Say))


class SuspectsAtOnce(real.Party):
    def _is_lost(self, rank: int) -> bool:
        return rank in self._told


class NeverSuspects(real.Party):
    def _is_lost(self, rank: int) -> bool:
        return False


class GivesUpAlone(real.Party):
    """Takes its arrival back and goes, without a decision."""

    def _give_up(self) -> Any:
        for meeting in self._open():
            yield Delete((f"{meeting.name}/count",))
            meeting.end = End("missing")


class GoesSilently(real.Party):
    """Tells nobody that it was interrupted."""

    def cancel(self, error: BaseException) -> Any:
        yield from self._hush()


class Overwrites(real.Meeting):
    def decide(self, end: End) -> Any:
        yield Overwrite(self.tomb, end.pack())
        self.end = end


class BelievesItself(real.Meeting):
    """Lays its decision down where there is none, and does not look what lies there."""

    def decide(self, end: End) -> Any:
        yield Swap(self.tomb, end.pack())
        self.end = end


class CountsAlone(real.Meeting):
    """The last to come goes ahead, and decides nothing."""

    def arrive(self, me: int, line: str, who: str) -> Any:
        yield from _without(super().arrive(me, line, who), lambda step: isinstance(step, Swap))


class CallsNoRoll(real.Meeting):
    """The last to come, by the count, decides without a look at who came and what they mean."""

    def arrive(self, me: int, line: str, who: str) -> Any:
        yield next(iter(super().arrive(me, line, who)))
        if (yield Add(f"{self.name}/count")) == len(self.ranks):
            yield from self.decide(real.MADE)


class LeavesItToTheLast(real.Meeting):
    """Nobody but the last to come decides that all came."""

    def inspect(self, **more: Any) -> Any:
        yield from _without(super().inspect(**more), lambda step: isinstance(step, Swap) and '"made"' in step.value)
        self.end = None if self.end == real.MADE else self.end


class CountsFirst(real.Meeting):
    """Is counted before it posts that it came."""

    def arrive(self, me: int, line: str, who: str) -> Any:
        count = yield Add(f"{self.name}/count")
        post = next(iter(super().arrive(me, line, who)))
        yield post
        if count == len(self.ranks):
            yield from self.decide(real.MADE)


class CountsOneTooFew(real.Meeting):
    def arrive(self, me: int, line: str, who: str) -> Any:
        yield next(iter(super().arrive(me, line, who)))
        if (yield Add(f"{self.name}/count")) >= len(self.ranks) - 1:
            yield from self.decide(real.MADE)


class CountsForEver(real.Meeting):
    """Arrivals outlive their meeting: those of an earlier attempt count too."""

    def arrive(self, me: int, line: str, who: str) -> Any:
        yield next(iter(super().arrive(me, line, who)))
        if (yield Add(f"{self.name.partition('#')[0]}/count")) >= len(self.ranks):
            yield from self.decide(real.MADE)


class CountsWhatFailedForEver(real.Generations):
    """Members that released do not begin at one count again."""

    def release(self, ranks: Group) -> None:
        self._released[ranks] = self._released.get(ranks, 0) + 1


class Mutant(NamedTuple):
    """A protocol that is wrong, where that shows, and the law that it breaks there."""

    protocol: Protocol
    law: str
    programs: tuple[Program, ...]
    faults: Faults = NO_FAULTS


def _mutants() -> list[Mutant]:
    a, b, c, _ = PAIRS_AND_TRIPLE
    pair = (at_once(a), at_once(a))
    again = (at_once(a, after="retry"), at_once(a, after="retry"))
    knot = (one_after_another(a, b), one_after_another(c, a), one_after_another(b, c))
    line = (one_after_another(a, b), one_after_another(a, c), one_after_another(b, c))
    late = Faults(deadlines=1)
    let_go = (Program(((a,), Release((a,)), (a,)), after="next", lasting=True),) * 2

    def party(kind: type[real.Party]) -> Protocol:
        return Protocol(kind.__name__, party=kind, sound=False)

    def meeting(kind: type[real.Meeting]) -> Protocol:
        return Protocol(kind.__name__, meeting=kind, sound=False)

    return [
        Mutant(party(BelievesTheFirstLook), FALSE_CIRCLE, line),
        Mutant(party(LooksTwiceAtWaitsAlone), FALSE_CIRCLE, line),
        Mutant(party(TellsOnlyItself), MISSED_CIRCLE, knot),
        Mutant(party(SaysNothing), MISSED_CIRCLE, knot),
        Mutant(party(SuspectsAtOnce), NOT_REFUSED, pair),
        Mutant(party(NeverSuspects), LOSS_FOUND, pair, Faults(crashes=1)),
        Mutant(party(GivesUpAlone), ONE_END, pair, late),
        Mutant(party(GoesSilently), LOSS_FOUND, pair, Faults(interrupts=1)),
        Mutant(meeting(Overwrites), NEVER_CHANGES, again, late),
        Mutant(meeting(BelievesItself), ONE_END, again, late),
        Mutant(meeting(CountsAlone), ONE_END, pair),
        Mutant(meeting(CallsNoRoll), ALIKE, (at_once(a), at_once(a, means=1))),
        Mutant(meeting(LeavesItToTheLast), LOSS_FOUND, pair, Faults(crashes=1)),
        Mutant(meeting(CountsFirst), ALL_CAME, pair),
        Mutant(meeting(CountsOneTooFew), ALL_CAME, pair),
        Mutant(meeting(CountsForEver), ALL_CAME, again, late),
        Mutant(
            Protocol("CountsWhatFailedForEver", generations=CountsWhatFailedForEver, sound=False),
            RETRY,
            let_go,
            Faults(losses=1),
        ),
        Mutant(Protocol("UsesANameAgain", numbered=False, sound=False), RETRY, again, late),
    ]


MUTANTS = _mutants()


def caught(mutant: Mutant) -> Broken | None:
    """The law that a mutant was seen to break, if it is the one that it does break."""
    broken = Checker(mutant.protocol).explore(mutant.programs, mutant.faults).broken
    return next((each for each in broken if each.law == mutant.law), None)


# -- as long as one likes ---------------------------------------------------------------------------------------------


def misfortunes(chance: random.Random) -> tuple[tuple[Program, ...], Faults]:
    """Two or three ranks, and something that goes wrong."""
    ranks = chance.choice((2, 2, 3))
    kind = chance.randrange(6)
    everybody = tuple(range(ranks))
    if kind == 0:  # one dies, and the others go on without it
        lost = chance.randrange(ranks)
        left = tuple(rank for rank in everybody if rank != lost)
        otherwise = ((left,),) if len(left) > 1 else ()
        programs = [at_once(everybody, otherwise=otherwise if rank != lost else ()) for rank in everybody]
        return tuple(programs), Faults(crashes=1, long_times=chance.randint(0, 1), mortal=frozenset([lost]))
    if kind == 1:
        return drawn(chance, ranks), Faults(crashes=1)
    if kind == 2:  # a deadline comes, and all try again
        return tuple(at_once(everybody, after="retry") for _ in everybody), Faults(deadlines=chance.randint(1, 2))
    if kind == 3:
        return drawn(chance, ranks), Faults(interrupts=1)
    if kind == 4:  # first collectives are lost on some, and all release the group and connect it again
        calls = ((everybody,), Release((everybody,))) * chance.randint(1, 2)
        return (Program((*calls, (everybody,)), after="next", lasting=True),) * ranks, Faults(losses=2)
    return drawn(chance, ranks), Faults(silences=1, long_times=2)


@dataclass
class Table:
    """What was tried, by what it is."""

    rows: dict[str, tuple[Seen, float]] = field(default_factory=dict)

    def add(self, row: str, seen: Seen, seconds: float) -> None:
        total, so_far = self.rows.setdefault(row, (Seen(), 0.0))
        total.add(seen)
        self.rows[row] = (total, so_far + seconds)

    @property
    def broken(self) -> list[Broken]:
        return [each for seen, _ in self.rows.values() for each in seen.broken]

    def __str__(self) -> str:
        heads = ("", "programs", "cut short", "states", "crashes", "circles", "false", "missed", "broken", "seconds")
        lines = [heads]
        for row, (seen, seconds) in self.rows.items():
            numbers = (seen.programs, seen.cut_short, seen.states, seen.crashes, seen.circles, seen.false_circles)
            last = (seen.missed_circles, len(seen.broken))
            lines.append((row, *(f"{number:,}" for number in (*numbers, *last)), f"{seconds:.1f}"))
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *(word.rjust(width) for word, width in zip(line[1:], widths[1:]))])
            for line in lines
        )


def try_all(table: Table, row: str, programs: Sequence[Program], faults: Faults = NO_FAULTS, **more: Any) -> Seen:
    """Explore programs, or wander through them, and enter what was seen."""
    start = time.perf_counter()
    checker = Checker()
    seen = checker.wander(programs, faults, **more) if "walks" in more else checker.explore(programs, faults, **more)
    table.add(row, seen, time.perf_counter() - start)
    for broken in seen.broken[:1]:
        if len(broken.trace) > 60:  # found by chance, and so not the shortest
            broken = broken._replace(trace=("...", *broken.trace[-60:]))
        print(f"\n{row}: {programs}, {faults}\n{broken}\n", flush=True)
    return seen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description="Try the protocol behind connect().")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=1_500_000, help="states of one space, about 0.5 GB for a million")
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}, {given.minutes:g} minutes", flush=True)
    end = time.perf_counter() + 60 * given.minutes
    chance, table = random.Random(given.seed), Table()
    known = [mutant for mutant in MUTANTS if caught(mutant)]
    every = but_for_names(up_to_two_each())
    chance.shuffle(every)
    while time.perf_counter() < end:
        if every:
            programs, alike = every.pop()
            seen = try_all(table, "three ranks, up to two calls each", programs, most=given.most)
            table.add("the same, but for names", Seen(programs=alike, circles=alike * seen.circles), 0.0)
        programs, faults = misfortunes(chance)
        try_all(table, "two or three ranks, and faults", programs, faults, most=given.most // 10)
        for ranks in (4, 5):
            programs = drawn(chance, ranks)
            try_all(table, f"{ranks} ranks, by chance", programs, walks=30, chance=chance)
            faults = Faults(crashes=1, deadlines=1, long_times=1)
            try_all(table, f"{ranks} ranks, by chance, and faults", programs, faults, walks=30, chance=chance)
    print(table)
    laws = Counter(broken.law for broken in table.broken)
    print(f"mutants caught: {len(known)} of {len(MUTANTS)}; three-rank programs not reached: {len(every)}")
    print(f"laws broken: {', '.join(f'{law} ({times})' for law, times in laws.items()) or 'none'}")
    return int(bool(laws) or len(known) < len(MUTANTS))


if __name__ == "__main__":
    sys.exit(main())
