"""The protocol by which the members of a group connect, as generators without a clock or a store.

Each generator yields one step at a time, such as one store operation, and is sent the answer. So the same code runs on
the world's store and under a model checker that tries every interleaving, crash and timeout.

A *connect attempt* is one round in which the members of a group connect. It has these store keys:

    <name>/arrivals   a record of each member that arrived: its rank, process, line of code, fingerprint and address
    <name>/count      the number of arrivals
    <name>/decision   the outcome, the same for all members. The first rank to write it decides, and it never changes

The last member to arrive decides that the group is made. The first member that finds a reason decides that the attempt
failed. Reasons are its deadline, a different fingerprint, a lost member, and a circle of ranks that wait for each
other. A rank that arrives later reads the decision at once. A retry is another attempt under another name.
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
from pgmesh.rendezvous import timing

VERSION = 1
"""Version of the records in the store. A record of another version is reported as a foreign value."""

UNRELIABLE = -1
"""Heartbeat of a rank whose heartbeats may pause for long while it lives."""

T = TypeVar("T")


# -- steps: operations on the store and the clock ---------------------------------------------------------------------


class Append(NamedTuple):
    """Append to the value of a key."""

    key: str
    value: str


class Add(NamedTuple):
    """Add 1 to a counter. The answer is its new value."""

    key: str


class Read(NamedTuple):
    """Read a key. The answer is its value, or None."""

    key: str


class CompareSet(NamedTuple):
    """Set a key that has no value yet. The answer is its value now."""

    key: str
    value: str


class Delete(NamedTuple):
    """Delete keys."""

    keys: tuple[str, ...]


class Raw(NamedTuple):
    """An operation that a backend asks of its store."""

    operation: str
    arguments: tuple[Any, ...]


class SetStatus(NamedTuple):
    """Publish the groups that this rank waits for, under ``status_key(rank)``."""

    pending: tuple[PendingConnect, ...]


class Pause(NamedTuple):
    """Wait. The answer is the time since the start, in seconds."""

    seconds: float


class Ready(NamedTuple):
    """An attempt succeeded, and its group can be used."""

    attempt: ConnectAttempt


Step = Union[Append, Add, Read, CompareSet, Delete, Raw, SetStatus, Pause, Ready]
StoreProtocol = Generator[Step, Any, T]


def status_key(rank: int) -> str:
    """The store key of a rank's status."""
    return f"pgmesh/status/{rank}"


def pauses(pace: float = 1.0, first: float = 0.0) -> Iterator[float]:
    """Pauses between reads of the store, in seconds: each is 1.5 times the one before, up to a limit.

    Args:
        pace: factor of the limit; greater than 1 in a large world.
        first: shortest first pause.

    >>> [round(pause, 4) for pause, _ in zip(pauses(), range(10))]
    [0.002, 0.003, 0.0045, 0.0068, 0.0101, 0.0152, 0.0228, 0.0342, 0.05, 0.05]
    """
    longest = timing.TIMING.longest_pause * pace
    pause = min(max(first, timing.TIMING.first_pause), longest)
    while True:
        yield pause
        pause = min(pause * 1.5, longest)


# -- records: data that is validated when it is read, and never executed ----------------------------------------------


def pack(**record: Any) -> str:
    """Encode a record as text."""
    return json.dumps({"v": VERSION, **record}, sort_keys=True)


def unpack(text: bytes | str, /, **kinds: Any) -> dict[str, Any] | None:
    """Decode a record. None unless it has this version and fields of these types.

    Args:
        kinds: the type of each required field.

    >>> unpack(pack(rank=3), rank=int), unpack(pack(rank="3"), rank=int), unpack("import os")
    ({'rank': 3, 'v': 1}, None, None)
    """
    if len(text) > timing.LIMITS.record_chars:
        return None
    try:
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # a lone surrogate can be read and not written
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("v") != VERSION:
        return None
    good = all(
        isinstance(record.get(name), kind) and not isinstance(record[name], bool) for name, kind in kinds.items()
    )
    return record if good else None


def quoted(text: bytes | str) -> str:
    """The start of a value, for a message."""
    return repr(text[:80]) + ("..." if len(text) > 80 else "")


def foreign_value(key: str, text: bytes | str) -> str:
    """Message about a value under a key of pgmesh that pgmesh did not write."""
    where = f"the store's key {key}" if key else "the store"
    return f"{where} holds {quoted(text)}, which pgmesh did not write"


@dataclass(frozen=True)
class Fingerprint:
    """The properties of a mesh or a group that all its ranks must have in common.

    Args:
        rank: this rank, for the errors of other ranks.
        fields: the properties by name, as plain data.
        subject: name of the mesh or group. Error messages begin with it.
        hint: suggested fix. Error messages end with it.
    """

    rank: int
    fields: Mapping[str, Any]
    subject: str
    hint: str

    @functools.cached_property
    def encoded(self) -> bytes:
        """The value in the store: the rank, and the fields as JSON."""
        return f"{self.rank} {json.dumps(self.fields, sort_keys=True)}".encode()

    def check(self, *seen: bytes, key: str = "") -> None:
        """Compare the encoded fingerprints of other ranks with this one.

        Raises:
            MismatchError: their fields differ.
        """
        if mismatch := self.mismatch(seen, key):
            raise MismatchError(mismatch)

    def mismatch(self, seen: Sequence[bytes], key: str = "") -> str | None:
        """Message about the fields that differ, with the ranks that have each value. None if all are equal.

        Args:
            seen: encoded fingerprints of other ranks.
            key: the store key they were read from, for the message about a foreign value.
        """
        mine = self.encoded.partition(b" ")[2]
        if all(encoded.partition(b" ")[2] == mine for encoded in seen):
            return None
        fields_by_rank = {self.rank: dict(self.fields)}
        for encoded in seen:
            decoded = _decode(encoded)
            if decoded is None:
                return f"{self.subject}: {foreign_value(key, encoded)}."
            fields_by_rank[decoded[0]] = decoded[1]
        lines = []
        for name in sorted({*self.fields, *(name for fields in fields_by_rank.values() for name in fields)}):
            holders: dict[str, list[int]] = {}
            for holder, fields in sorted(fields_by_rank.items()):
                holders.setdefault(_format_value(fields.get(name)), []).append(holder)
            if len(holders) > 1:
                lines.append(f"\n  {name}: " + ", ".join(f"{value} on {name_ranks(r)}" for value, r in holders.items()))
        return f"{self.subject} is not the same on all ranks:{''.join(lines)}\n\n{self.hint}"


def _decode(encoded: bytes) -> tuple[int, dict[str, Any]] | None:
    """Rank and fields of an encoded fingerprint. None for any other value."""
    rank, _, text = encoded.decode(errors="replace").partition(" ")
    try:
        return int(rank), dict(json.loads(text).items())
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _format_value(value: Any) -> str:
    text = "none" if value is None else str(value)[:200]
    return f"({text})" if ", " in text and text[0].isdigit() else text


def error_text(error: BaseException) -> str:
    """Type and message of an error, for the errors of other ranks."""
    return f"{type(error).__name__}{': ' * bool(str(error))}{error}"


class PendingConnect(NamedTuple):
    """One group that a rank waits for, as it is published in the rank's status.

    Args:
        number: number of the call of ``connect`` on this rank.
        name: name of the attempt.
        label: the group, such as "group dp of mesh 'actor'".
        call_site: the line of code, such as "train.py:12".
        missing: the members that had not arrived when the rank last read the arrivals.
        single_threaded: False if another thread of the rank may still connect a group.
    """

    number: int
    name: str
    label: str
    call_site: str
    missing: tuple[int, ...]
    single_threaded: bool = True

    def __str__(self) -> str:
        return f"connecting {self.label} at {self.call_site}, waiting for {name_ranks(self.missing)}"


@dataclass(frozen=True)
class RankStatus:
    """The status that a rank last published.

    Args:
        heartbeat: a counter that grows while the process lives, or ``UNRELIABLE``.
        activity: description of the activity that other ranks may wait for; "" for none.
        pending: the groups that the rank connects and that are undecided.
        single_threaded: False if another thread of the rank may still connect a group.
        exited: reason for the end of the heartbeats, if the rank has left.
    """

    rank: int
    heartbeat: int = 0
    activity: str = ""
    pending: tuple[PendingConnect, ...] = ()
    single_threaded: bool = True
    exited: str = ""

    def pack(self) -> str:
        return pack(
            rank=self.rank,
            heartbeat=self.heartbeat,
            activity=self.activity,
            pending=self.pending,
            single_threaded=int(self.single_threaded),
            exited=self.exited,
        )

    @classmethod
    def unpack(cls, rank: int, text: bytes | None) -> RankStatus | None:
        """Decode the status of a rank; None for no status or a foreign value."""
        kinds = {
            "rank": int,
            "heartbeat": int,
            "activity": str,
            "pending": list,
            "single_threaded": int,
            "exited": str,
        }
        record = unpack(text or b"", **kinds)
        if record is None or record["rank"] != rank:
            return None
        pending = []
        for wait in record["pending"][: timing.LIMITS.statuses]:
            if not (isinstance(wait, list) and [*map(type, wait)] == [int, str, str, str, list, bool]):
                return None
            number, name, label, call_site, missing, single_threaded = wait
            ranks = tuple(each for each in missing if isinstance(each, int))
            pending.append(PendingConnect(number, name, label, call_site, ranks, single_threaded))
        return cls(
            rank,
            record["heartbeat"],
            record["activity"],
            tuple(pending),
            bool(record["single_threaded"]),
            record["exited"],
        )

    def __str__(self) -> str:
        return self.exited or "; ".join(map(str, self.pending)) or self.activity or "not waiting in connect"


@dataclass
class Heartbeats:
    """The last heartbeat of each rank and its time.

    Args:
        lost_after: seconds without a new heartbeat after which a rank counts as lost.
    """

    lost_after: float
    last: dict[int, tuple[int, float]] = field(default_factory=dict)  # heartbeat and time it was first read

    def update(self, status: RankStatus, now: float) -> None:
        if self.last.get(status.rank, (None, 0.0))[0] != status.heartbeat:
            self.last[status.rank] = (status.heartbeat, now)

    def silence(self, rank: int, now: float) -> float:
        """Seconds since the last new heartbeat of a rank."""
        return now - self.last[rank][1]

    def is_lost(self, status: RankStatus, now: float) -> bool:
        return bool(status.exited) or (
            status.heartbeat != UNRELIABLE and self.silence(status.rank, now) >= self.lost_after
        )

    def next_inspection(self, now: float, period: float) -> float:
        """Time of the next inspection: after ``period``, or earlier, when a silent rank becomes lost."""
        due = (heard + self.lost_after for _, heard in self.last.values())
        return min([now + period, *(each for each in due if each > now)])


@dataclass(frozen=True)
class Decision:
    """The outcome of an attempt, the same for all members.

    Args:
        kind: "made", "missing", "mismatch" or "circle".
        text: the error message.
        addresses: the address of each member in group order, if the group was made and all members published one.
    """

    kind: str
    text: str = ""
    addresses: tuple[str, ...] = field(default=(), compare=False)

    def pack(self) -> str:
        return pack(kind=self.kind, text=self.text[: timing.LIMITS.record_chars // 8], addresses=self.addresses)

    @classmethod
    def unpack(cls, key: str, text: bytes) -> Decision:
        record = unpack(text, kind=str, text=str, addresses=list)
        if (
            record is None
            or record["kind"] not in ERRORS
            or not all(isinstance(each, str) for each in record["addresses"])
        ):
            return cls("mismatch", f"{foreign_value(key, text)}.")
        return cls(record["kind"], record["text"], tuple(record["addresses"]))

    def error(self) -> PgmeshError | None:
        """The error that members raise; None if the group was made."""
        kind = ERRORS[self.kind]
        return None if kind is None else kind(self.text)


MADE = Decision("made")
ERRORS: dict[str, type[PgmeshError] | None] = {
    "made": None,
    "missing": MissingRanksError,
    "mismatch": MismatchError,
    "circle": CircleError,
}


# -- comparing fingerprints -------------------------------------------------------------------------------------------


def register_mesh(name: str, fingerprint: Fingerprint, *, listed: bool = True) -> StoreProtocol[None]:
    """Publish the fingerprint of a mesh, or compare it with the one that the first rank published.

    Each rank does this once for each mesh.

    Args:
        listed: append the fingerprint to a list, so that errors name every rank. It costs one more operation.

    Raises:
        MismatchError: they differ. It is also published under ``<name>/mismatch`` for the ranks that wait.
    """
    if listed:
        yield Append(f"{name}/fingerprints", fingerprint.encoded.decode() + "\n")
    first = yield CompareSet(name, fingerprint.encoded.decode())
    if fingerprint.mismatch([first]) is not None:
        seen = (yield Read(f"{name}/fingerprints")) or b""
        key = name if _decode(first) is None else f"{name}/fingerprints"
        mismatch = fingerprint.mismatch([first, *seen.splitlines()], key)
        decision = yield CompareSet(f"{name}/mismatch", Decision("mismatch", mismatch or "").pack())
        raise Decision.unpack(f"{name}/mismatch", decision).error() or MismatchError(mismatch)


def publish_or_compare(key: str, fingerprint: Fingerprint) -> StoreProtocol[None]:
    """Publish a fingerprint, or compare it with the first one, in one operation.

    Raises:
        MismatchError: they differ. It is also published under ``<key>/mismatch`` for the ranks that wait.
    """
    first = yield CompareSet(key, fingerprint.encoded.decode())
    yield from publish_mismatch(f"{key}/mismatch", fingerprint, first, key)


def publish_mismatch(key: str, fingerprint: Fingerprint, seen: bytes, where: str = "") -> StoreProtocol[None]:
    """Compare a fingerprint with an encoded one; publish a mismatch for the ranks that wait.

    Args:
        key: store key for the mismatch.
        where: store key that ``seen`` was read from.

    Raises:
        MismatchError: they differ.
    """
    if mismatch := fingerprint.mismatch([seen], where):
        yield CompareSet(key, Decision("mismatch", mismatch).pack())
        raise MismatchError(mismatch)


class Generations:
    """Counts of the releases and failures of groups: a part of each group's name.

    All members release a group, but it may fail on some members only. So each release restarts the count of failures:
    after a release, all members derive the same name again.
    """

    def __init__(self) -> None:
        self._released: dict[tuple[int, ...], int] = {}
        self._failed: dict[tuple[int, ...], dict[Hashable, int]] = {}  # by ranks, then variant

    def release(self, ranks: tuple[int, ...]) -> None:
        """Count a release of all groups of these ranks."""
        self._released[ranks] = self._released.get(ranks, 0) + 1
        self._failed.pop(ranks, None)

    def fail(self, ranks: tuple[int, ...], kind: Hashable) -> None:
        """Count a failure of one group on this rank."""
        kinds = self._failed.setdefault(ranks, {})
        kinds[kind] = kinds.get(kind, 0) + 1

    def of(self, ranks: tuple[int, ...], kind: Hashable) -> tuple[int, int]:
        """Number of releases of a group, and of its failures since the last release.

        >>> generations = Generations()
        >>> generations.fail((0, 1), "tp"), generations.of((0, 1), "tp")
        (None, (0, 1))
        >>> generations.release((0, 1)), generations.of((0, 1), "tp")
        (None, (1, 0))
        """
        # A lookup hashes the whole tuple of ranks, which may be long: none in empty tables.
        released = self._released.get(ranks, 0) if self._released else 0
        return released, self._failed.get(ranks, {}).get(kind, 0) if self._failed else 0


# -- connect attempts -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ConnectAttempt:
    """One round of connecting one group.

    Args:
        name: prefix of its store keys. It ends in the attempt's number and is never used again.
        ranks: the members.
        fingerprint: the group's fingerprint on this rank.
        mismatch_key: key under which a rank publishes a mismatch of the group's options.
        mesh_mismatch_key: key under which a rank publishes a mismatch of the mesh.
        address: this rank's address, for the arrivals; "" for none.
        decision: the outcome, once it is known.
        missing: the members that had not arrived when the arrivals were last read.
        count_seen: the count of arrivals at that time.
    """

    name: str
    ranks: Sequence[int]
    fingerprint: Fingerprint
    mismatch_key: str | None = None
    mesh_mismatch_key: str | None = None
    address: str = ""
    decision: Decision | None = None
    missing: tuple[int, ...] = ()
    count_seen: Any = ""

    @property
    def label(self) -> str:
        return f"{self.fingerprint.subject} (ranks {format_ranks(tuple(self.ranks))})"

    @property
    def decision_key(self) -> str:
        """Store key of the decision."""
        return f"{self.name}/decision"

    @property
    def broken_key(self) -> str:
        """Store key under which a member publishes that the group failed after it was made."""
        return f"{self.name}/broken"

    @property
    def keys(self) -> tuple[str, ...]:
        """All store keys of the attempt."""
        return tuple(f"{self.name}/{key}" for key in ("arrivals", "count", "decision", "broken", "left"))

    def leave(self) -> StoreProtocol[None]:
        """Release the attempt's keys. The last of the members that arrived deletes them."""
        left = yield Add(f"{self.name}/left")
        arrived = (yield Read(f"{self.name}/count")) or b"0"
        if left >= int(arrived):
            yield Delete(self.keys)

    def decide(self, decision: Decision) -> StoreProtocol[None]:
        """Publish a decision, or take the one that is already there."""
        self.decision = Decision.unpack(self.decision_key, (yield CompareSet(self.decision_key, decision.pack())))
        yield from self._yield_ready()

    def read_decision(self) -> StoreProtocol[None]:
        """Read the decision, if there is one."""
        text = yield Read(self.decision_key)
        if text is not None:
            self.decision = Decision.unpack(self.decision_key, text)
            yield from self._yield_ready()

    def _yield_ready(self) -> StoreProtocol[None]:
        if self.decision == MADE:
            yield Ready(self)

    def skip_decided_rounds(self) -> StoreProtocol[None]:
        """Advance to the first undecided attempt: other members may have tried more often than this rank."""
        while (yield Read(self.decision_key)) is not None:
            stem, _, number = self.name.rpartition(".")
            self.name = f"{stem}.{int(number) + 1}"

    def arrive(self, rank: int, call_site: str, process: str) -> StoreProtocol[None]:
        """Append to the arrivals. The last member to arrive, by the count, decides that the group is made."""
        encoded = self.fingerprint.encoded.decode()
        arrival = pack(rank=rank, call_site=call_site, process=process, fingerprint=encoded, address=self.address)
        yield Append(f"{self.name}/arrivals", arrival + "\n")
        if (yield Add(f"{self.name}/count")) >= len(self.ranks):
            yield from self._read_arrivals()

    def inspect(self, *, force: bool = False) -> StoreProtocol[None]:
        """Read the arrivals and decide on a mismatch or on success.

        Args:
            force: read them even if the count is unchanged. A rank that died may have arrived without being counted.
        """
        text = (yield Read(self.mismatch_key)) if self.mismatch_key else None
        if text is not None:
            yield from self.decide(Decision.unpack(self.mismatch_key or "", text))
            return
        count = yield Read(f"{self.name}/count")
        if force or count != self.count_seen:
            self.count_seen = count
            yield from self._read_arrivals()

    def _read_arrivals(self) -> StoreProtocol[None]:
        """Read the record of each member that arrived. Once all have, decide that the group is made."""
        key = f"{self.name}/arrivals"
        fingerprints: list[bytes] = []
        processes: dict[int, str] = {}
        addresses: dict[int, str] = {}
        members = {*self.ranks}
        text = (yield Read(key)) or b""
        for line in text.splitlines():
            record = unpack(line, rank=int, call_site=str, process=str, fingerprint=str, address=str)
            if record is None or record["rank"] not in members or not record["address"].isascii():
                foreign = f"{self.label}: the store's key {key} holds {quoted(line)}, which no member wrote."
                yield from self.decide(Decision("mismatch", foreign))
                return
            rank, process = record["rank"], record["process"]
            if processes.setdefault(rank, process) != process:
                both = f"{self.label}: both {processes[rank]} and {process} connect as rank {rank}."
                yield from self.decide(Decision("mismatch", both))
                return
            fingerprints.append(record["fingerprint"].encode())
            addresses[rank] = record["address"]
        mismatch = self.fingerprint.mismatch(fingerprints, key)
        self.missing = tuple(rank for rank in self.ranks if rank not in processes)
        if mismatch is not None:
            yield from self.decide(Decision("mismatch", mismatch))
        elif not self.missing:
            limit = timing.LIMITS.record_chars // 2
            all_published = all(addresses.values()) and sum(map(len, addresses.values())) < limit
            in_order = tuple(addresses[rank] for rank in self.ranks) if all_published else ()
            yield from self.decide(Decision("made", addresses=in_order))


@dataclass
class Participant:
    """One rank's call of ``connect``: all its attempts at once.

    Args:
        rank: this rank.
        attempts: one for each group.
        number: number of this call on this rank.
        call_site: the line of code that called.
        process: description of this process. It reveals two processes that have the same rank.
        deadline: seconds from the start of the call.
        lost_after: seconds without a new heartbeat after which a rank counts as lost.
        skip_decided: an earlier call failed, so other members may have tried more or less often than this rank.
        pace: factor of all pauses, to spare the store in a large world.
        single_threaded: no other thread of this process can connect a group.
        warn: called once after a third of the deadline, with a description of the missing ranks.
    """

    rank: int
    attempts: Sequence[ConnectAttempt]
    number: int
    call_site: str
    process: str
    deadline: float
    lost_after: float
    skip_decided: bool = False
    pace: float = 1.0
    single_threaded: bool = True
    warn: Callable[[str], None] = field(default=lambda text: None)
    _heartbeats: Heartbeats = field(init=False)
    _statuses: dict[int, RankStatus] = field(default_factory=dict)
    _foreign_values: dict[int, str] = field(default_factory=dict)  # messages, by rank
    _paths: list[list[tuple[int, PendingConnect]]] = field(default_factory=list)  # open ends of the search for a circle
    _visited: set[int] = field(default_factory=set)  # ranks that this search has seen
    _status_is_set: bool = False
    _now: float = 0.0

    def __post_init__(self) -> None:
        self._heartbeats = Heartbeats(self.lost_after)

    def connect(self) -> StoreProtocol[None]:
        """Arrive at every attempt and wait for its decision."""
        try:
            for attempt in self.attempts:
                if self.skip_decided:
                    yield from attempt.skip_decided_rounds()
                yield from attempt.arrive(self.rank, self.call_site, self.process)
            yield from self._wait_for_decisions()
        except (GeneratorExit, WorldError):
            raise
        except BaseException as error:
            with contextlib.suppress(WorldError):
                yield from self.cancel(error)
            raise

    def cancel(self, error: BaseException) -> StoreProtocol[None]:
        """Decide that all undecided attempts failed because of an error on this rank."""
        why = f"rank {self.rank} stopped connecting at {self.call_site}: {error_text(error)}"
        kind = "mismatch" if isinstance(error, MismatchError) else "missing"
        for attempt in self._undecided():
            yield from attempt.decide(Decision(kind, f"{attempt.label} was cancelled because {why}"))
        yield from self._clear_status()

    def _undecided(self) -> list[ConnectAttempt]:
        return [attempt for attempt in self.attempts if attempt.decision is None]

    def _wait_for_decisions(self) -> StoreProtocol[None]:
        now = yield Pause(0.0)
        inspection = now + max(timing.TIMING.first_inspection * self.pace, min(now, timing.TIMING.longest_start_delay))
        warning = self.deadline / 3
        for pause in pauses(self.pace, now / 4):  # a slow store gets fewer reads
            self._now = now
            for attempt in self._undecided():
                yield from attempt.read_decision()
            yield from self._check_mesh()
            if not self._undecided():
                break
            if now >= self.deadline:
                yield from self._time_out()
                break
            if now >= inspection:
                yield from self._inspect()
                inspection = self._heartbeats.next_inspection(now, timing.TIMING.inspection * self.pace)
                if now >= warning and self._undecided():
                    when = f" in {now:.0f} s so far"
                    self.warn("\n".join(self._describe_missing(attempt, when) for attempt in self._undecided()))
                    warning = float("inf")
            now = yield Pause(min(pause, max(0.0, self.deadline - now)))
        yield from self._clear_status()

    def _check_mesh(self) -> StoreProtocol[None]:
        """Read the mismatches of the meshes."""
        for key in {attempt.mesh_mismatch_key: None for attempt in self._undecided() if attempt.mesh_mismatch_key}:
            text = yield Read(key)
            for attempt in self._undecided() if text is not None else ():
                if attempt.mesh_mismatch_key == key:
                    yield from attempt.decide(Decision.unpack(key, text))

    def _clear_status(self) -> StoreProtocol[None]:
        """Remove the pending groups from this rank's status."""
        if self._status_is_set:
            yield SetStatus(())

    def _inspect(self) -> StoreProtocol[None]:
        """Read the arrivals, publish this rank's status, and read the statuses of the missing ranks."""
        self._status_is_set = True
        for attempt in self._undecided():
            yield from attempt.inspect()
        pending = tuple(
            PendingConnect(
                self.number,
                attempt.name,
                attempt.label,
                self.call_site,
                attempt.missing[: timing.LIMITS.statuses],
                self.single_threaded,
            )
            for attempt in self._undecided()
        )
        yield SetStatus(pending)
        self._statuses.clear()
        self._foreign_values.clear()
        for attempt in self._undecided():
            for rank in attempt.missing[: timing.LIMITS.statuses]:
                yield from self._read_status(rank)
            if any(map(self._is_lost, attempt.missing)):
                yield from attempt.inspect(force=True)
                if attempt.decision is None and any(map(self._is_lost, attempt.missing)):
                    yield from attempt.decide(Decision("missing", self._describe_missing(attempt)))
        circle = (yield from self._find_circle(pending)) if self.single_threaded else []
        if circle:
            text = _circle_text(circle)
            for name in dict.fromkeys(wait.name for _, wait in circle):
                yield CompareSet(f"{name}/decision", Decision("circle", text).pack())

    def _read_status(self, rank: int) -> StoreProtocol[None]:
        if rank in self._statuses:
            return
        text = yield Read(status_key(rank))
        status = RankStatus.unpack(rank, text)
        if status is not None:
            self._statuses[rank] = status
            self._heartbeats.update(status, self._now)
        elif text is not None:
            self._foreign_values[rank] = foreign_value(status_key(rank), text)

    def _is_lost(self, rank: int) -> bool:
        return rank in self._statuses and self._heartbeats.is_lost(self._statuses[rank], self._now)

    def _time_out(self) -> StoreProtocol[None]:
        """Decide that all undecided attempts failed at the deadline."""
        for attempt in self._undecided():
            yield from attempt.inspect(force=True)
        for attempt in self._undecided():
            for rank in attempt.missing[: timing.LIMITS.statuses]:
                yield from self._read_status(rank)
            yield from attempt.decide(Decision("missing", self._describe_missing(attempt, f" in {self.deadline:g} s")))

    def _describe_missing(self, attempt: ConnectAttempt, when: str = "") -> str:
        """Message about the missing ranks and the last status of each."""
        lines = []
        for rank in attempt.missing[:8]:
            status = self._statuses.get(rank)
            if status is None:
                none = "no status: it has not called connect yet, or cannot reach the store"
                lines.append(f"\n  rank {rank}: {self._foreign_values.get(rank, none)}")
            elif self._is_lost(rank) and not status.exited:
                silence = self._heartbeats.silence(rank, self._now)
                lines.append(f"\n  rank {rank} has sent no heartbeat for {silence:.0f} s; its last status: {status}")
            else:
                lines.append(f"\n  rank {rank}: {status}")
        missing = f"{attempt.label}: {name_ranks(attempt.missing)} did not arrive{when}."
        return f"{missing}{''.join(lines)}\n\nRank {self.rank} waited at {self.call_site}."

    # -- circles of ranks that wait for each other ----------------------------------------------------------------

    def _find_circle(self, mine: tuple[PendingConnect, ...]) -> StoreProtocol[list[tuple[int, PendingConnect]]]:
        """Ranks that wait for each other, each with the pending group whose missing member is the next rank.

        Statuses are read one after another, so a circle is read twice. It counts if on the second read each rank still
        waits for the same undecided attempt, and the next rank has still not arrived. Then the whole circle existed at
        the moment between the two reads.
        """
        circle = yield from self._search_circle(mine)
        for i, (rank, wait) in enumerate(circle):
            following = circle[(i + 1) % len(circle)][0]
            if rank != self.rank:
                status = RankStatus.unpack(rank, (yield Read(status_key(rank))))
                if status is None or not status.single_threaded or not any(w[:2] == wait[:2] for w in status.pending):
                    return []
            arrivals = (yield Read(f"{wait.name}/arrivals")) or b""
            records = [unpack(line, rank=int) or {} for line in arrivals.splitlines()]
            if any(record.get("rank") == following for record in records):
                return []
            if (yield Read(f"{wait.name}/decision")) is not None:
                return []
        return circle

    def _search_circle(self, mine: tuple[PendingConnect, ...]) -> StoreProtocol[list[tuple[int, PendingConnect]]]:
        """The shortest path from this rank back to itself, along the ranks that wait for each other.

        A search that reaches many ranks continues in the next inspection. After its end a new one begins.
        """
        if not self._paths:
            self._paths, self._visited = [[(self.rank, wait)] for wait in mine], {self.rank}
        reads = 0
        while self._paths:
            path = self._paths[0]
            for rank in path[-1][1].missing:
                if rank == self.rank:
                    self._paths, self._visited = [], set()
                    return path
                if rank in self._visited:
                    continue
                if rank not in self._statuses:
                    if reads == timing.LIMITS.statuses:
                        return []
                    reads += 1
                    yield from self._read_status(rank)
                self._visited.add(rank)
                last = self._statuses.get(rank)
                if last is not None and last.single_threaded:
                    self._paths += [[*path, (rank, wait)] for wait in last.pending if wait.single_threaded]
            self._paths.pop(0)
        self._visited = set()
        return []


def _circle_text(circle: Sequence[tuple[int, PendingConnect]]) -> str:
    first = circle.index(min(circle))
    circle = [*circle[first:], *circle[:first]]
    lines = [
        f"\n  rank {rank} connects {wait.label} at {wait.call_site}, and waits for rank {waited_for}"
        for (rank, wait), (waited_for, _) in zip(circle, [*circle[1:], circle[0]])
    ]
    hint = "Connect the groups in one call on every rank, as in mesh.connect('dp', 'tp'), or in the same order."
    if len({wait.label for _, wait in circle}) < len({wait.name for _, wait in circle}):
        hint = (
            "These are different groups with the same label: the ranks have created, closed or tried them a different "
            "number of times. Create and close the same meshes in the same order on every rank."
        )
    return f"ranks {format_ranks([rank for rank, _ in circle])} wait for each other:{''.join(lines)}\n\n{hint}"
