"""The records that ranks exchange through the store: fingerprints and decisions.

Records are JSON text. They are validated when they are read, and never executed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pgmesh._util.formatting import name_ranks
from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError
from pgmesh.rendezvous import timing

VERSION = 4
"""Version of the records in the store. A record of another version is reported as a foreign value."""


def pack(**record: Any) -> str:
    """Encode a record as text. Each lone surrogate, as of a file name that is no UTF-8, becomes a question mark."""
    return json.dumps({"v": VERSION, **record}, sort_keys=True, ensure_ascii=False).encode(errors="replace").decode()


def unpack(text: bytes | str, /, **kinds: Any) -> dict[str, Any] | None:
    """Decode a record. None unless it has this version and fields of these types.

    Args:
        kinds: the type of each required field.

    >>> unpack(pack(rank=3), rank=int), unpack(pack(rank="3"), rank=int), unpack("import os")
    ({'rank': 3, 'v': 4}, None, None)
    """
    if len(text) > timing.LIMITS.record_chars:
        return None
    try:
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # json.loads takes a lone surrogate, which cannot be encoded
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

    def mismatch(self, seen: Sequence[bytes], key: str = "") -> str | None:
        """Message about the fields that differ, with the ranks that have each value. None if all are equal.

        Args:
            seen: encoded fingerprints of other ranks.
            key: the store key they were read from, for the message about a foreign value.
        """
        mine = self.encoded.partition(b" ")[2]
        if all(encoded.partition(b" ")[2] == mine for encoded in seen):
            return None
        found = []
        for encoded in dict.fromkeys([self.encoded, *seen]):
            decoded = decode_fingerprint(encoded)
            if decoded is None:
                return f"{self.subject}: {foreign_value(key, encoded)}."
            rank, fields = decoded
            other = " (another process)" if rank == self.rank and encoded != self.encoded else ""
            found.append((rank, f"{rank}{other}", fields))
        found.sort(key=lambda item: item[0])
        lines = []
        for name in sorted({name for *_, fields in found for name in fields}):
            holders: dict[str, dict[str, None]] = {}  # a rank once, although its process was replaced
            for _, holder, fields in found:
                holders.setdefault(_format_field(fields.get(name)), {})[holder] = None
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


# -- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """The outcome of an attempt to connect a group, the same for all members.

    A rank that arrives at an attempt with a decision goes on to the next one, unless the decision is permanent, or is
    that the group was made with this rank.

        kind        who writes it                                               permanent   error
        made        a member that has read the arrivals of all                  no          none
        missing     a member that found a lost one, failed, was interrupted,    no          MissingRanksError
                    or reached its deadline
        circle      a member at its deadline, for each group of the circle      no          MissingRanksError
        duplicate   a member that found two processes with one rank, or that    no          MismatchError
                    failed with a MismatchError
        mismatch    a member that read another fingerprint or a foreign value   yes         MismatchError
        aborted     a rank that aborted the mesh, under the mesh's key          yes         LifetimeError

    Args:
        kind: one of these.
        text: the error message.
        addresses: the address of each member in group order, if the group was made and all members published one.
    """

    kind: str
    text: str = ""
    addresses: tuple[str, ...] = field(default=(), compare=False)

    def pack(self) -> str:
        return pack(kind=self.kind, text=self.text[: timing.LIMITS.record_chars // 32], addresses=self.addresses)

    @classmethod
    def unpack(cls, key: str, text: bytes) -> Decision:
        record = unpack(text, kind=str, text=str, addresses=list)
        if record is None or record["kind"] not in ERRORS or not {*map(type, record["addresses"])} <= {str}:
            return cls("mismatch", f"{foreign_value(key, text)}.")
        return cls(record["kind"], record["text"], tuple(record["addresses"]))

    @property
    def is_permanent(self) -> bool:
        """True if a later attempt under the same name cannot succeed either."""
        return self.kind in ("mismatch", "aborted")

    def error(self) -> PgmeshError | None:
        """The error that members raise; None if the group was made."""
        kind = ERRORS[self.kind]
        return None if kind is None else kind(self.text)

    @classmethod
    def of(cls, error: BaseException, text: str) -> Decision:
        """The decision of a rank that raised an error. Another attempt may succeed: it was this rank's call."""
        return cls("duplicate" if isinstance(error, MismatchError) else "missing", text)


ERRORS: dict[str, type[PgmeshError] | None] = {
    "made": None,
    "missing": MissingRanksError,
    "mismatch": MismatchError,
    "duplicate": MismatchError,  # two processes with one rank: it may be over at the next attempt
    "circle": MissingRanksError,
    "aborted": LifetimeError,
}
