"""The properties that all ranks of a mesh or a group must have in common, and the message when they differ."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pgmesh._util.formatting import name_ranks


@dataclass(frozen=True)
class Fingerprint:
    """The properties of a mesh or a group on one rank.

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
            decoded = _decode(encoded)
            if decoded is None:
                return f"{self.subject}: the store's key {key} holds {encoded[:80]!r}, which pgmesh did not write."
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


def _decode(encoded: bytes) -> tuple[int, dict[str, Any]] | None:
    """Rank and fields of an encoded fingerprint. None for any other value."""
    rank, _, text = encoded.decode(errors="replace").partition(" ")
    try:
        return int(rank), dict(json.loads(text).items())
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _format_field(value: Any) -> str:
    text = "none" if value is None else str(value)[:500]
    return f"({text})" if ", " in text and text[0].isdigit() else text
