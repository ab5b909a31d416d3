"""How ranks meet: arrivals, cards, one decision for all, and who waits for whom. No clock and no store of its own.

Everything here is a generator that yields what it wants done, one access to the store at a time, and is sent the
answer. So the same code runs against the world's store and under a model checker, which tries every interleaving,
every crash and every time-out.

Members of a group meet in a *meeting*, under three keys:

    <name>/came     a line from each member that arrived: its rank, its line of code, its card
    <name>/count    how many arrived
    <name>/end      the decision: whoever lays it down first decides for all, and nothing ever changes it

A meeting ends as made when all have come, by the last of them; or it is given up, by the first member that has a
reason to: its deadline, a card that differs, a member that is not heard from any more, a circle of ranks that wait
for each other. A rank that comes later finds the decision and goes its way at once; the retry is another meeting,
under another name.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, Union

from pgmesh._util.formatting import format_ranks, name_ranks
from pgmesh.errors import CircleError, MismatchError, MissingRanksError, PgmeshError, WorldError

VERSION = 1
"""Of what is written here for others. Who reads another is told so."""

LONGEST = 1 << 16
"""Characters of one record; what is longer was written by nobody here."""

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.05
"""Seconds between two looks at the store; each pause is half as long again as the one before."""

FIRST_INSPECTION, INSPECTION = 0.025, 0.2
"""Seconds until a rank that waits asks why, and then between two times that it does: with the longest pause of the
others, what differs is told to all within 0.1 s of the one that came with it."""

SLOWEST = 0.3
"""Seconds up to which a rank that took long to come waits as long again before it first asks why: where the store is
slow, to ask would make it slower."""

MOST_ASKED = 32
"""How many of a group's missing ranks one inspection asks after, and how many of those that they wait for in turn.

A circle is found all the same: where each rank that waits follows some of those it waits for, they lead round, and a
long way round is gone in several inspections."""

UNSTEADY = -1
"""The beat of a rank that may yet be silent for long and live."""

T = TypeVar("T")


# -- what is asked of the store and of the clock ---------------------------------------------------------------------


class Append(NamedTuple):
    """Add to what a key holds."""

    key: str
    value: str


class Add(NamedTuple):
    """Count one more; the answer is how many."""

    key: str


class Read(NamedTuple):
    """What a key holds; None for nothing."""

    key: str


class CompareSet(NamedTuple):
    """Lay a value down where there is none; the answer is what lies there now."""

    key: str
    value: str


class Delete(NamedTuple):
    """Take keys away."""

    keys: tuple[str, ...]


class Raw(NamedTuple):
    """Whatever a backend asks its store for."""

    operation: str
    arguments: tuple[Any, ...]


class SetStatus(NamedTuple):
    """Tell everyone what this rank waits for, under ``status_key(rank)``."""

    waits: tuple[PendingConnect, ...]


class Pause(NamedTuple):
    """Wait; the answer is the time now, in seconds since the start."""

    seconds: float


class Ready(NamedTuple):
    """A meeting ended as made, and its group can be used."""

    meeting: ConnectAttempt


Step = Union[Append, Add, Read, CompareSet, Delete, Raw, SetStatus, Pause, Ready]
StoreProtocol = Generator[Step, Any, T]


def status_key(rank: int) -> str:
    """The key under which a rank tells what it does."""
    return f"pgmesh/told/{rank}"


def pauses(pace: float = 1.0, first: float = 0.0) -> Iterator[float]:
    """How long to pause between looks, at least so long at first: each time half as long again, up to a limit.

    >>> [round(pause, 4) for pause, _ in zip(pauses(), range(10))]
    [0.002, 0.003, 0.0045, 0.0068, 0.0101, 0.0152, 0.0228, 0.0342, 0.05, 0.05]
    """
    longest = LONGEST_PAUSE * pace
    pause = min(max(first, FIRST_PAUSE), longest)
    while True:
        yield pause
        pause = min(pause * 1.5, longest)


# -- records: data that is read strictly, and never run --------------------------------------------------------------


def pack(**record: Any) -> str:
    """A record as text."""
    return json.dumps({"v": VERSION, **record}, sort_keys=True)


def unpack(text: bytes | str, /, **kinds: Any) -> dict[str, Any] | None:
    """A record from text, if it is one, of this version, with fields of these kinds.

    >>> unpack(pack(rank=3), rank=int), unpack(pack(rank="3"), rank=int), unpack("import os")
    ({'rank': 3, 'v': 1}, None, None)
    """
    if len(text) > LONGEST:
        return None
    try:
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # what can be read could also have been written
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("v") != VERSION:
        return None
    good = all(
        isinstance(record.get(name), kind) and not isinstance(record[name], bool) for name, kind in kinds.items()
    )
    return record if good else None


def quoted(text: bytes | str) -> str:
    """The start of what a key holds, for a message."""
    return repr(text[:80]) + ("..." if len(text) > 80 else "")


def foreign_value(key: str, text: bytes | str) -> str:
    """What lies under a key of ours and is no record of ours, for a message."""
    where = f"the store's key {key}" if key else "the store"
    return f"{where} holds {quoted(text)}, which no pgmesh wrote"


@dataclass(frozen=True)
class Fingerprint:
    """What this rank means by a mesh or a group, to hold against what others mean.

    Args:
        rank: this rank, to be named in the others' errors.
        meaning: field by field, as plain data.
        what: what is meant, to begin an error with.
        mend: the way out, to end an error with.
    """

    rank: int
    meaning: Mapping[str, Any]
    what: str
    mend: str

    @functools.cached_property
    def word(self) -> bytes:
        """The card as the store holds it: the rank, and the meaning as JSON."""
        return f"{self.rank} {json.dumps(self.meaning, sort_keys=True)}".encode()

    def check(self, *seen: bytes, key: str = "") -> None:
        """Hold other ranks' cards against this one.

        Raises:
            MismatchError: one of them means something else.
        """
        if trouble := self.trouble(seen, key):
            raise MismatchError(trouble)

    def trouble(self, seen: Sequence[bytes], key: str = "") -> str | None:
        """What differs between this card and others, field by field, with the ranks that hold each value.

        Args:
            key: where they were found, to be named if one is no card.
        """
        mine = self.word.partition(b" ")[2]
        if all(word.partition(b" ")[2] == mine for word in seen):
            return None
        meanings = {self.rank: dict(self.meaning)}
        for word in seen:
            meant = _meant(word)
            if meant is None:
                return f"{self.what}: {foreign_value(key, word)}."
            meanings[meant[0]] = meant[1]
        lines = []
        for name in sorted({*self.meaning, *(name for meaning in meanings.values() for name in meaning)}):
            holders: dict[str, list[int]] = {}
            for holder, meaning in sorted(meanings.items()):
                holders.setdefault(_value(meaning.get(name)), []).append(holder)
            if len(holders) > 1:
                lines.append(f"\n  {name}: " + ", ".join(f"{value} on {name_ranks(r)}" for value, r in holders.items()))
        return f"{self.what} is not the same on all ranks:{''.join(lines)}\n\n{self.mend}"


def _meant(word: bytes) -> tuple[int, dict[str, Any]] | None:
    """The rank and the meaning on a card, if it is one."""
    rank, _, text = word.decode(errors="replace").partition(" ")
    try:
        return int(rank), dict(json.loads(text).items())
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _value(value: Any) -> str:
    text = "none" if value is None else str(value)[:200]
    return f"({text})" if ", " in text and text[0].isdigit() else text


def error_in_words(error: BaseException) -> str:
    """An error as others are told of it."""
    return f"{type(error).__name__}{': ' * bool(str(error))}{error}"


class PendingConnect(NamedTuple):
    """One group that a rank waits for, as it tells the others."""

    number: int  # which of this rank's waits: a later one is another
    name: str  # the meeting's
    words: str  # "group dp of mesh 'actor'"
    line: str  # "train.py:12"
    missing: tuple[int, ...]  # who had not come when it last looked
    alone: bool = True  # whether no other thread of the rank could still come elsewhere

    def __str__(self) -> str:
        return f"connecting {self.words} at {self.line}, waiting for {name_ranks(self.missing)}"


@dataclass(frozen=True)
class RankStatus:
    """What a rank last told the others.

    Args:
        beat: counts up for as long as its process lives, once nothing can hold it up.
        doing: in words; "" for nothing that concerns others.
        waits: the groups that it connects and that are not decided.
        alone: no other thread of it could still come somewhere.
        gone: why it tells no more, if it said so.
    """

    rank: int
    beat: int = 0  # or UNSTEADY
    doing: str = ""
    waits: tuple[PendingConnect, ...] = ()
    alone: bool = True
    gone: str = ""

    def pack(self) -> str:
        return pack(
            rank=self.rank, beat=self.beat, doing=self.doing, waits=self.waits, alone=int(self.alone), gone=self.gone
        )

    @classmethod
    def unpack(cls, rank: int, text: bytes | None) -> RankStatus | None:
        """What a rank told, if it told anything that can be read."""
        kinds = {"rank": int, "beat": int, "doing": str, "waits": list, "alone": int, "gone": str}
        record = unpack(text or b"", **kinds)
        if record is None or record["rank"] != rank:
            return None
        waits = []
        for wait in record["waits"][:MOST_ASKED]:
            if not (isinstance(wait, list) and [*map(type, wait)] == [int, str, str, str, list, bool]):
                return None
            number, name, words, line, missing, alone = wait
            ranks = tuple(each for each in missing if isinstance(each, int))
            waits.append(PendingConnect(number, name, words, line, ranks, alone))
        return cls(rank, record["beat"], record["doing"], tuple(waits), bool(record["alone"]), record["gone"])

    def __str__(self) -> str:
        words = "; ".join(map(str, self.waits)) or self.doing
        return self.gone or words or "not waiting for anyone"


@dataclass
class Heartbeats:
    """When each rank was last heard to live.

    Args:
        suspicion: a rank that tells nothing new for so many seconds counts as lost.
    """

    suspicion: float
    last: dict[int, tuple[int, float]] = field(default_factory=dict)  # the last beat of a rank, and when it was new

    def hear(self, said: RankStatus, now: float) -> None:
        if self.last.get(said.rank, (None, 0.0))[0] != said.beat:
            self.last[said.rank] = (said.beat, now)

    def silence(self, rank: int, now: float) -> float:
        """Seconds for which a rank has told nothing new."""
        return now - self.last[rank][1]

    def is_lost(self, said: RankStatus, now: float) -> bool:
        return bool(said.gone) or (said.beat != UNSTEADY and self.silence(said.rank, now) >= self.suspicion)

    def next_look(self, now: float, period: float) -> float:
        """When to listen again: after a period, or sooner, at the moment in which a silence would become a loss."""
        due = (heard + self.suspicion for _, heard in self.last.values())
        return min([now + period, *(each for each in due if each > now)])


@dataclass(frozen=True)
class Decision:
    """How a meeting ended, the same for all its members.

    Args:
        at: where each member can be reached, in the order of the group, if it was made and each of them said so.
    """

    kind: str
    text: str = ""
    at: tuple[str, ...] = field(default=(), compare=False)

    def pack(self) -> str:
        return pack(kind=self.kind, text=self.text[: LONGEST // 8], at=self.at)

    @classmethod
    def unpack(cls, key: str, text: bytes) -> Decision:
        record = unpack(text, kind=str, text=str, at=list)
        if record is None or record["kind"] not in ERRORS or not all(isinstance(each, str) for each in record["at"]):
            return cls("mismatch", f"{foreign_value(key, text)}.")
        return cls(record["kind"], record["text"], tuple(record["at"]))

    def error(self) -> PgmeshError | None:
        """What a member raises; None for a group that was made."""
        kind = ERRORS[self.kind]
        return None if kind is None else kind(self.text)


MADE = Decision("made")
ERRORS: dict[str, type[PgmeshError] | None] = {
    "made": None,
    "missing": MissingRanksError,
    "mismatch": MismatchError,
    "circle": CircleError,
}


# -- a mesh is introduced ---------------------------------------------------------------------------------------------


def register_mesh(name: str, card: Fingerprint, *, listed: bool = True) -> StoreProtocol[None]:
    """Once for each rank and mesh: hold what it means by the mesh against what the first of them laid down.

    Args:
        listed: let every rank be named that means the same, in another's error, at the cost of one more operation.

    Raises:
        MismatchError: they differ; the ranks that came before are told too, under ``<name>/refused``.
    """
    if listed:
        yield Append(f"{name}/said", card.word.decode() + "\n")
    first = yield CompareSet(name, card.word.decode())
    if card.trouble([first]) is not None:
        said = (yield Read(f"{name}/said")) or b""
        trouble = card.trouble([first, *said.splitlines()], name if _meant(first) is None else f"{name}/said")
        end = yield CompareSet(f"{name}/refused", Decision("mismatch", trouble or "").pack())
        raise Decision.unpack(f"{name}/refused", end).error() or MismatchError(trouble)


def publish_or_compare(key: str, card: Fingerprint) -> StoreProtocol[None]:
    """Hold a card against the other members' in one operation: the first lays it down, later ones compare.

    Raises:
        MismatchError: the first rank to come means something else. It is told too, under ``<key>/refused``.
    """
    yield from publish_mismatch(f"{key}/refused", card, (yield CompareSet(key, card.word.decode())), key)


def publish_mismatch(key: str, card: Fingerprint, seen: bytes, where: str = "") -> StoreProtocol[None]:
    """Hold a card against another's, and where they differ tell those who wait.

    Args:
        key: under which to tell them.
        where: the key under which the other was found.

    Raises:
        MismatchError: they differ.
    """
    if trouble := card.trouble([seen], where):
        yield CompareSet(key, Decision("mismatch", trouble).pack())
        raise MismatchError(trouble)


class Generations:
    """How often the members of a group have let go of it: a part of its name.

    All members release a group, but it may fail on some of them alone, and the others follow once they learn of it. So
    each release counts, and what failed counts anew from there: members that have released meet again, whatever
    failed on whom before.
    """

    def __init__(self) -> None:
        self._released: dict[tuple[int, ...], int] = {}
        self._failed: dict[tuple[int, ...], dict[Hashable, int]] = {}  # by ranks, and by what else the group is

    def release(self, ranks: tuple[int, ...]) -> None:
        """All members let go of all groups of these ranks."""
        self._released[ranks] = self._released.get(ranks, 0) + 1
        self._failed.pop(ranks, None)

    def fail(self, ranks: tuple[int, ...], kind: Hashable) -> None:
        """This group is no more on this rank, and perhaps not yet so on others."""
        kinds = self._failed.setdefault(ranks, {})
        kinds[kind] = kinds.get(kind, 0) + 1

    def of(self, ranks: tuple[int, ...], kind: Hashable) -> tuple[int, int]:
        """How often the group was released, and how often it failed since.

        >>> generations = Generations()
        >>> generations.fail((0, 1), "tp"), generations.of((0, 1), "tp")
        (None, (0, 1))
        >>> generations.release((0, 1)), generations.of((0, 1), "tp")
        (None, (1, 0))
        """
        # Long tuples are hashed anew each time that they are looked up, so not in tables that are empty.
        released = self._released.get(ranks, 0) if self._released else 0
        return released, self._failed.get(ranks, {}).get(kind, 0) if self._failed else 0


# -- members meet -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ConnectAttempt:
    """One group that is being connected, once.

    Args:
        name: what its keys begin with, with its number at the end; never used twice.
        ranks: its members.
        card: what this rank means by it.
        refused: a key under which a rank that means something else by the group says so.
        mesh: the same for a rank that means another mesh.
        at: where this rank can be reached; "" for what the members do not tell each other here.
    """

    name: str
    ranks: Sequence[int]
    card: Fingerprint
    refused: str | None = None
    mesh: str | None = None
    at: str = ""
    end: Decision | None = None
    missing: tuple[int, ...] = ()
    counted: Any = ""  # what the count was when the roll was called

    @property
    def words(self) -> str:
        return f"{self.card.what} (ranks {format_ranks(tuple(self.ranks))})"

    @property
    def decision_key(self) -> str:
        """The key of the decision."""
        return f"{self.name}/end"

    @property
    def broken(self) -> str:
        """The key under which a member says that the group failed after it was made."""
        return f"{self.name}/broken"

    @property
    def keys(self) -> tuple[str, ...]:
        """All its keys."""
        return tuple(f"{self.name}/{what}" for what in ("came", "count", "end", "broken", "left"))

    def leave(self) -> StoreProtocol[None]:
        """Of those who came, the last to let go of the group takes the keys away: others may look until they do."""
        left = yield Add(f"{self.name}/left")
        came = (yield Read(f"{self.name}/count")) or b"0"
        if left >= int(came):
            yield Delete(self.keys)

    def decide(self, end: Decision) -> StoreProtocol[None]:
        """Lay a decision down, or take the one that lies there."""
        self.end = Decision.unpack(self.decision_key, (yield CompareSet(self.decision_key, end.pack())))
        yield from self._tell()

    def look(self) -> StoreProtocol[None]:
        """See whether there is a decision."""
        text = yield Read(self.decision_key)
        if text is not None:
            self.end = Decision.unpack(self.decision_key, text)
            yield from self._tell()

    def _tell(self) -> StoreProtocol[None]:
        if self.end == MADE:
            yield Ready(self)

    def catch_up(self) -> StoreProtocol[None]:
        """Go on to the first meeting that is not decided: others may have tried more often than this rank."""
        while (yield Read(self.decision_key)) is not None:
            stem, _, number = self.name.rpartition(".")
            self.name = f"{stem}.{int(number) + 1}"

    def arrive(self, me: int, line: str, who: str) -> StoreProtocol[None]:
        """Come to the meeting. The last to come, who is told so by the count, decides that it is made."""
        came = pack(rank=me, line=line, who=who, card=self.card.word.decode(), at=self.at)
        yield Append(f"{self.name}/came", came + "\n")
        if (yield Add(f"{self.name}/count")) >= len(self.ranks):
            yield from self._call_roll()

    def inspect(self, *, again: bool = False) -> StoreProtocol[None]:
        """See who has come, and give up where what they mean cannot go together.

        Args:
            again: call the roll also if nobody was counted since. One may have come and not be counted, if it died.
        """
        text = (yield Read(self.refused)) if self.refused else None
        if text is not None:
            yield from self.decide(Decision.unpack(self.refused or "", text))
            return
        counted = yield Read(f"{self.name}/count")
        if again or counted != self.counted:
            self.counted = counted
            yield from self._call_roll()

    def _call_roll(self) -> StoreProtocol[None]:
        """Read the line of each member that came. Once all have, the group is made."""
        key = f"{self.name}/came"
        cards: list[bytes] = []
        who: dict[int, str] = {}
        at: dict[int, str] = {}
        members = {*self.ranks}
        text = (yield Read(key)) or b""
        for line in text.splitlines():
            record = unpack(line, rank=int, line=str, who=str, card=str, at=str)
            if record is None or record["rank"] not in members or not record["at"].isascii():
                yield from self.decide(
                    Decision(
                        "mismatch", f"{self.words}: the store's key {key} holds {quoted(line)}, which no member wrote."
                    )
                )
                return
            if who.setdefault(record["rank"], record["who"]) != record["who"]:
                both = f"{who[record['rank']]} and {record['who']}"
                yield from self.decide(
                    Decision("mismatch", f"{self.words}: both {both} came as rank {record['rank']}.")
                )
                return
            cards.append(record["card"].encode())
            at[record["rank"]] = record["at"]
        trouble = self.card.trouble(cards, key)
        self.missing = tuple(rank for rank in self.ranks if rank not in who)
        if trouble is not None:
            yield from self.decide(Decision("mismatch", trouble))
        elif not self.missing:
            told_by_all = all(at.values()) and sum(map(len, at.values())) < LONGEST // 2
            yield from self.decide(Decision("made", at=tuple(map(at.__getitem__, self.ranks))) if told_by_all else MADE)


@dataclass
class Participant:
    """One rank's call of connect: all its meetings, come to at once.

    Args:
        me: this rank.
        meetings: the groups.
        number: which of this rank's waits this is.
        line: the line of code.
        who: this process, to tell it from another that takes itself for the same rank.
        deadline: in seconds from the start of the call.
        suspicion: after so many seconds in which a rank that told before tells nothing new, it counts as lost.
        again: whether an earlier call failed, so that members may have tried more or less often than this rank.
        pace: how many times slower than usual to look and to ask, so as to spare the store in a large world.
        alone: no other thread of this process could still come somewhere.
        warn: called once, with what is waited for, after a third of the deadline.
    """

    me: int
    meetings: Sequence[ConnectAttempt]
    number: int
    line: str
    who: str
    deadline: float
    suspicion: float
    again: bool = False
    pace: float = 1.0
    alone: bool = True
    warn: Callable[[str], None] = field(default=lambda text: None)
    _beats: Heartbeats = field(init=False)
    _told: dict[int, RankStatus] = field(default_factory=dict)
    _junk: dict[int, str] = field(default_factory=dict)  # what a rank's key holds that no rank tells
    _ways: list[list[tuple[int, PendingConnect]]] = field(default_factory=list)  # where the search for a circle goes on
    _seen: set[int] = field(default_factory=set)  # which ranks it has passed
    _asked: bool = False  # whether it has waited long enough to ask why
    _now: float = 0.0

    def __post_init__(self) -> None:
        self._beats = Heartbeats(self.suspicion)

    def meet(self) -> StoreProtocol[None]:
        """Come to every meeting, and see each to its end."""
        try:
            for meeting in self.meetings:
                if self.again:
                    yield from meeting.catch_up()
                yield from meeting.arrive(self.me, self.line, self.who)
            yield from self._wait()
        except (GeneratorExit, WorldError):
            raise
        except BaseException as error:
            with contextlib.suppress(WorldError):
                yield from self.cancel(error)
            raise

    def cancel(self, error: BaseException) -> StoreProtocol[None]:
        """Give up what is not decided, because of something that is no fault of the others."""
        why = f"rank {self.me} stopped connecting at {self.line}: {error_in_words(error)}"
        kind = "mismatch" if isinstance(error, MismatchError) else "missing"
        for meeting in self._open():
            yield from meeting.decide(Decision(kind, f"{meeting.words} was given up, because {why}"))
        yield from self._hush()

    def _open(self) -> list[ConnectAttempt]:
        return [meeting for meeting in self.meetings if meeting.end is None]

    def _wait(self) -> StoreProtocol[None]:
        now = yield Pause(0.0)
        inspection = now + max(FIRST_INSPECTION * self.pace, min(now, SLOWEST))
        warning, end = self.deadline / 3, self.deadline
        for pause in pauses(self.pace, now / 4):  # a slow store is asked less often
            self._now = now
            for meeting in self._open():
                yield from meeting.look()
            yield from self._heed()
            if not self._open():
                break
            if now >= end:
                yield from self._give_up()
                break
            if now >= inspection:
                yield from self._inspect()
                inspection = self._beats.next_look(now, INSPECTION * self.pace)
                if now >= warning and self._open():
                    self.warn("\n".join(self._why(meeting, f" so far, in {now:.0f} s") for meeting in self._open()))
                    warning = float("inf")
            now = yield Pause(min(pause, max(0.0, end - now)))
        yield from self._hush()

    def _heed(self) -> StoreProtocol[None]:
        """See whether a rank says that it means another mesh."""
        for mesh in {meeting.mesh: None for meeting in self._open() if meeting.mesh}:
            text = yield Read(mesh)
            for meeting in self._open() if text is not None else ():
                if meeting.mesh == mesh:
                    yield from meeting.decide(Decision.unpack(mesh, text))

    def _hush(self) -> StoreProtocol[None]:
        """Take back what this rank told the others of its waiting."""
        if self._asked:
            yield SetStatus(())

    def _inspect(self) -> StoreProtocol[None]:
        """Ask why this rank still waits."""
        self._asked = True
        for meeting in self._open():
            yield from meeting.inspect()
        waits = tuple(
            PendingConnect(
                self.number, meeting.name, meeting.words, self.line, meeting.missing[:MOST_ASKED], self.alone
            )
            for meeting in self._open()
        )
        yield SetStatus(waits)
        self._told.clear()
        self._junk.clear()
        for meeting in self._open():
            for rank in meeting.missing[:MOST_ASKED]:
                yield from self._ask(rank)
            if any(map(self._is_lost, meeting.missing)):
                yield from meeting.inspect(again=True)
                if meeting.end is None and any(map(self._is_lost, meeting.missing)):
                    yield from meeting.decide(Decision("missing", self._why(meeting)))
        circle = (yield from self._find_circle(waits)) if self.alone else []
        if circle:
            text = _circle_in_words(circle)
            for name in dict.fromkeys(wait.name for _, wait in circle):
                yield CompareSet(f"{name}/end", Decision("circle", text).pack())

    def _ask(self, rank: int) -> StoreProtocol[None]:
        if rank in self._told:
            return
        text = yield Read(status_key(rank))
        told_ = RankStatus.unpack(rank, text)
        if told_ is not None:
            self._told[rank] = told_
            self._beats.hear(told_, self._now)
        elif text is not None:
            self._junk[rank] = foreign_value(status_key(rank), text)

    def _is_lost(self, rank: int) -> bool:
        return rank in self._told and self._beats.is_lost(self._told[rank], self._now)

    def _give_up(self) -> StoreProtocol[None]:
        """The deadline has come."""
        for meeting in self._open():
            yield from meeting.inspect(again=True)
        for meeting in self._open():
            for rank in meeting.missing[:MOST_ASKED]:
                yield from self._ask(rank)
            yield from meeting.decide(Decision("missing", self._why(meeting, f" in {self.deadline:g} s")))

    def _why(self, meeting: ConnectAttempt, when: str = "") -> str:
        """Who is missing, and what each of them is doing."""
        lines = []
        for rank in meeting.missing[:8]:
            told_ = self._told.get(rank)
            if told_ is None:
                never = "was never heard from: it has not connected anything yet, or cannot be reached"
                lines.append(f"\n  rank {rank}{': ' * (rank in self._junk)}{self._junk.get(rank, ' ' + never)}")
            elif self._is_lost(rank) and not told_.gone:
                silence = self._beats.silence(rank, self._now)
                lines.append(f"\n  rank {rank} was last heard from {silence:.0f} s ago; it was {told_}")
            else:
                lines.append(f"\n  rank {rank} is {told_}")
        who = name_ranks(meeting.missing)
        return f"{meeting.words}: {who} did not come{when}.{''.join(lines)}\n\nRank {self.me} waited at {self.line}."

    # -- who waits for whom ---------------------------------------------------------------------------------------

    def _find_circle(self, mine: tuple[PendingConnect, ...]) -> StoreProtocol[list[tuple[int, PendingConnect]]]:
        """Ranks that wait for each other: each with the wait whose next member is the next rank of the circle.

        What is read at one time need not hold at another. So a circle is looked at twice, and counts if in the second
        look each rank is still in the same wait, the wait is undecided, and the next rank has still not come: then all
        of it held at the moment between the two.
        """
        circle = yield from self._first_look(mine)
        for i, (rank, wait) in enumerate(circle):
            following = circle[(i + 1) % len(circle)][0]
            if rank != self.me:
                again = RankStatus.unpack(rank, (yield Read(status_key(rank))))
                if again is None or not again.alone or not any(w[:2] == wait[:2] for w in again.waits):
                    return []
            came = (yield Read(f"{wait.name}/came")) or b""
            records = [unpack(line, rank=int) or {} for line in came.splitlines()]
            if any(record.get("rank") == following for record in records):
                return []
            if (yield Read(f"{wait.name}/end")) is not None:
                return []
        return circle

    def _first_look(self, mine: tuple[PendingConnect, ...]) -> StoreProtocol[list[tuple[int, PendingConnect]]]:
        """The shortest way from this rank back to it, along who waits for whom.

        A walk that asks after many ranks goes on in the next inspection; once it has ended, another begins.
        """
        if not self._ways:
            self._ways, self._seen = [[(self.me, wait)] for wait in mine], {self.me}
        asked = 0
        while self._ways:
            way = self._ways[0]
            for rank in way[-1][1].missing:
                if rank == self.me:
                    self._ways, self._seen = [], set()
                    return way
                if rank in self._seen:
                    continue
                if rank not in self._told:
                    if asked == MOST_ASKED:
                        return []
                    asked += 1
                    yield from self._ask(rank)
                self._seen.add(rank)
                last = self._told.get(rank)
                if last is not None and last.alone:
                    self._ways += [[*way, (rank, wait)] for wait in last.waits if wait.alone]
            self._ways.pop(0)
        self._seen = set()
        return []


def _circle_in_words(circle: Sequence[tuple[int, PendingConnect]]) -> str:
    first = circle.index(min(circle))
    circle = [*circle[first:], *circle[:first]]
    lines = [
        f"\n  rank {rank} connects {wait.words} at {wait.line}, and waits for rank {circle[(i + 1) % len(circle)][0]}"
        for i, (rank, wait) in enumerate(circle)
    ]
    mend = "Let every rank connect its groups in one call, as in mesh.connect('dp', 'tp'), or in one order."
    if len({wait.words for _, wait in circle}) < len({wait.name for _, wait in circle}):
        mend = (
            "What is called the same there is not the same group: these ranks have made, closed or tried it a different"
            " number of times. Let every rank make and close the same meshes, in one order."
        )
    return f"ranks {format_ranks([rank for rank, _ in circle])} wait for each other:{''.join(lines)}\n\n{mend}"
