"""The records that ranks exchange through the store: fingerprints, statuses and decisions.

Records are JSON text. They are validated when they are read, and never executed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pgmesh._util.formatting import format_ranks, name_ranks
from pgmesh.errors import CircleError, MismatchError, MissingRanksError, PgmeshError
from pgmesh.rendezvous import timing

VERSION = 2
"""Version of the records in the store. A record of another version is reported as a foreign value."""


def pack(**record: Any) -> str:
    """Encode a record as text."""
    return json.dumps({"v": VERSION, **record}, sort_keys=True)


def unpack(text: bytes | str, /, **kinds: Any) -> dict[str, Any] | None:
    """Decode a record. None unless it has this version and fields of these types.

    Args:
        kinds: the type of each required field.

    >>> unpack(pack(rank=3), rank=int), unpack(pack(rank="3"), rank=int), unpack("import os")
    ({'rank': 3, 'v': 2}, None, None)
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
    return record if all(type(record.get(name)) is kind for name, kind in kinds.items()) else None


def quoted(text: bytes | str) -> str:
    """The start of a value, for a message."""
    return repr(text[:80]) + ("..." if len(text) > 80 else "")


def foreign_value(key: str, text: bytes | str) -> str:
    """Message about a value under a key of pgmesh that pgmesh did not write."""
    where = f"the store's key {key}" if key else "the store"
    return f"{where} holds {quoted(text)}, which pgmesh did not write"


def error_text(error: BaseException) -> str:
    """Type and message of an error, for the errors of other ranks."""
    return f"{type(error).__name__}{': ' * bool(str(error))}{error}"


# -- fingerprints -----------------------------------------------------------------------------------------------------


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
        fields_by_rank: dict[tuple[int, str], dict[str, Any]] = {(self.rank, ""): dict(self.fields)}
        for encoded in seen:
            decoded = decode_fingerprint(encoded)
            if decoded is None:
                return f"{self.subject}: {foreign_value(key, encoded)}."
            rank, fields = decoded
            other = " (another process)" if rank == self.rank and fields != self.fields else ""
            fields_by_rank[rank, other] = fields
        lines = []
        for name in sorted({*self.fields, *(name for fields in fields_by_rank.values() for name in fields)}):
            holders: dict[str, list[str]] = {}
            for (rank, other), fields in sorted(fields_by_rank.items(), key=lambda item: item[0]):
                holders.setdefault(_format_field(fields.get(name)), []).append(f"{rank}{other}")
            if len(holders) > 1:
                lines.append(f"\n  {name}: " + ", ".join(f"{value} on {name_ranks(r)}" for value, r in holders.items()))
        return f"{self.subject} is not the same on all ranks:{''.join(lines)}\n\n{self.hint}"


def decode_fingerprint(encoded: bytes) -> tuple[int, dict[str, Any]] | None:
    """Rank and fields of an encoded fingerprint. None for any other value."""
    rank, _, text = encoded.decode(errors="replace").partition(" ")
    try:
        return int(rank), dict(json.loads(text).items())
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _format_field(value: Any) -> str:
    text = "none" if value is None else str(value)[:500]
    return f"({text})" if ", " in text and text[0].isdigit() else text


# -- statuses ---------------------------------------------------------------------------------------------------------


def status_key(rank: int) -> str:
    """The store key of a rank's status."""
    return f"pgmesh/status/{rank}"


class PendingConnect(NamedTuple):
    """One group that a rank waits for in ``connect``.

    Args:
        name: prefix of the attempt's store keys.
        group: the group, such as "group dp".
        mesh: its mesh, such as "mesh 'actor'".
        ranks: its members, such as "0, 2".
        call_site: the line of code, such as "train.py:12".
        missing: the members that had not arrived when the rank last read the arrivals.
    """

    name: str
    group: str
    mesh: str
    ranks: str
    call_site: str
    missing: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.group} of {self.mesh} (ranks {self.ranks})"

    def __str__(self) -> str:
        return f"connecting {self.label} at {self.call_site}, waiting for {name_ranks(self.missing)}"


class RunningCollective(NamedTuple):
    """A collective that a rank has entered and that is not done, from torch's flight recorder.

    Args:
        name: the group's name in torch.
        label: the group in messages, such as "group dp of mesh 'actor'".
        operation: the collective, such as "all_reduce".
        number: its number among the collectives of the group, from 1.
        seconds: time since the rank entered it.
    """

    name: str
    label: str
    operation: str
    number: int
    seconds: int

    def __str__(self) -> str:
        return f"in {self.operation} (collective {self.number}) of {self.label} for {self.seconds} s"


@dataclass(frozen=True)
class RankStatus:
    """The status that a rank last published.

    Args:
        heartbeat: a counter that grows while the process lives.
        activity: description of the activity that other ranks may wait for; "" for none.
        pending: the groups that the rank connects and that are undecided.
        running: the collectives that the rank has been in for longer than a heartbeat.
        exited: reason for the end of the heartbeats, if the rank has left.
    """

    rank: int
    heartbeat: int = 0
    activity: str = ""
    pending: tuple[PendingConnect, ...] = ()
    running: tuple[RunningCollective, ...] = ()
    exited: str = ""

    def pack(self) -> str:
        return pack(**vars(self))

    @classmethod
    def unpack(cls, rank: int, text: bytes | None) -> RankStatus | None:
        """Decode the status of a rank; None for no status or a foreign value."""
        record = unpack(text or b"", rank=int, heartbeat=int, activity=str, pending=list, running=list, exited=str)
        if record is None or record["rank"] != rank:
            return None
        pending = [_typed(PendingConnect, each, (str, str, str, str, str, list)) for each in record["pending"]]
        running = [_typed(RunningCollective, each, (str, str, str, int, int)) for each in record["running"]]
        if None in pending or None in running:
            return None
        waits = [wait._replace(missing=tuple(each for each in wait.missing if type(each) is int)) for wait in pending]
        return cls(rank, record["heartbeat"], record["activity"], tuple(waits), tuple(running), record["exited"])

    def __str__(self) -> str:
        lines = [*map(str, self.pending), self.activity, *map(str, self.running)]
        return self.exited or "; ".join(filter(None, lines)) or "not in connect"


def _typed(kind: Any, values: object, types: tuple[type, ...]) -> Any:
    """A named tuple of these values; None unless they have these types."""
    return kind(*values) if isinstance(values, list) and tuple(map(type, values)) == types else None


@dataclass
class Heartbeats:
    """The last heartbeat of each rank and the time when it was first read.

    Args:
        lost_after: seconds without a new heartbeat after which a rank counts as lost.
    """

    lost_after: float
    last: dict[int, tuple[int, float]] = field(default_factory=dict)  # heartbeat and time

    def update(self, status: RankStatus, now: float) -> None:
        if self.last.get(status.rank, (None, 0.0))[0] != status.heartbeat:
            self.last[status.rank] = (status.heartbeat, now)

    def silence(self, rank: int, now: float) -> float:
        """Seconds since the last new heartbeat of a rank was read."""
        return now - self.last[rank][1]

    def next_inspection(self, now: float, period: float) -> float:
        """Time of the next inspection: after a period, or earlier, when a silent rank becomes lost."""
        losses = (heard + self.lost_after for _, heard in self.last.values())
        return min([now + period, *(each for each in losses if each > now)])

    def is_lost(self, status: RankStatus, now: float) -> bool:
        return bool(status.exited) or self.silence(status.rank, now) >= self.lost_after

    def describe(self, status: RankStatus, now: float) -> str:
        """The status of a rank for a message, with the seconds without a heartbeat if it is silent."""
        silence = self.silence(status.rank, now)
        if status.exited or silence < self.lost_after:
            return f"rank {status.rank}: {status}"
        return f"rank {status.rank} has sent no heartbeat for at least {silence:.0f} s; its last status: {status}"


# -- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """The outcome of an attempt to connect a group, the same for all members.

    Args:
        kind: a key of ``ERRORS``.
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
        if record is None or record["kind"] not in ERRORS or not {*map(type, record["addresses"])} <= {str}:
            return cls("mismatch", f"{foreign_value(key, text)}.")
        return cls(record["kind"], record["text"], tuple(record["addresses"]))

    @property
    def is_permanent(self) -> bool:
        """True if a later attempt under the same name cannot succeed either."""
        return self.kind == "mismatch"

    def error(self) -> PgmeshError | None:
        """The error that members raise; None if the group was made."""
        kind = ERRORS[self.kind]
        return None if kind is None else kind(self.text)

    @classmethod
    def of(cls, error: BaseException, text: str) -> Decision:
        """The decision of a rank that raised an error."""
        kinds = (kind for kind, error_type in ERRORS.items() if error_type and isinstance(error, error_type))
        return cls(next(kinds, "missing"), text)


MADE = Decision("made")
ERRORS: dict[str, type[PgmeshError] | None] = {
    "made": None,
    "missing": MissingRanksError,
    "mismatch": MismatchError,
    "duplicate": MismatchError,  # two processes with one rank: it may be over at the next attempt
    "circle": CircleError,
}


# -- circles of ranks that wait for each other ------------------------------------------------------------------------

Circle = Sequence[tuple[int, PendingConnect]]
"""Ranks that wait for each other, each with the pending group whose missing member is the next rank."""


def find_circle(rank: int, pending: Mapping[int, Sequence[PendingConnect]]) -> Circle:
    """A shortest path from a rank back to itself, along the ranks that wait for each other; empty if there is none.

    Args:
        pending: the groups that each rank waits for.
    """
    paths: list[list[tuple[int, PendingConnect]]] = [[(rank, wait)] for wait in pending.get(rank, ())]
    seen: set[int] = set()
    for path in paths:  # grows below
        for missing in path[-1][1].missing:
            if missing == rank:
                return path
            if missing not in seen:
                seen.add(missing)
                paths += [[*path, (missing, wait)] for wait in pending.get(missing, ())]
    return []


def circle_text(circle: Circle) -> str:
    """Message about ranks that wait for each other. It begins at the lowest rank."""
    first = min(range(len(circle)), key=lambda i: circle[i][0])
    circle = [*circle[first:], *circle[:first]]
    lines = [
        f"\n  rank {rank} connects {wait.label} at {wait.call_site}, and waits for rank {waited_for}"
        for (rank, wait), (waited_for, _) in zip(circle, [*circle[1:], circle[0]])
    ]
    waits = {wait.name: wait for _, wait in circle}.values()
    meshes = {wait.mesh: rank for rank, wait in reversed(circle)}
    hint = "Connect the groups in one call on every rank, as in mesh.connect('dp', 'tp'), or in the same order."
    if len({(wait.group, wait.ranks) for wait in waits}) == 1 and len(meshes) > 1:
        each = ", ".join(f"{mesh} on rank {rank}" for mesh, rank in sorted(meshes.items()))
        hint = f"These are different meshes: {each}. Create the mesh with the same name on every rank."
    elif len({wait.label for wait in waits}) < len(waits):
        hint = (
            "These are different groups with the same label: the ranks have created, closed or released them a "
            "different number of times. Create and close the same meshes in the same order on every rank."
        )
    return f"ranks {format_ranks([rank for rank, _ in circle])} wait for each other:{''.join(lines)}\n\n{hint}"
