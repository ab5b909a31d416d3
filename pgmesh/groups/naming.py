"""The members that a call asks for, names of groups, the same on all members without communication, and fingerprints.

A group's part of a name is a function of its ranks, its tag, the options asked for in the call, and how often it was
released or destroyed. It never depends on the number of groups that a process has created.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pgmesh._util.formatting import as_range, format_ranks, name_ranks
from pgmesh.options import GroupOptions

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout


class Members(NamedTuple):
    """The members that a call of ``group`` or ``group_of`` asks for.

    Args:
        ranks: the members in group order.
        tag: the tag.
        layout: the ranks are this rank's block along ``axes`` of it; None for any ranks.
    """

    ranks: tuple[int, ...]
    tag: str = ""
    layout: Layout | None = None
    axes: tuple[Axis, ...] = ()

    @property
    def label(self) -> str:
        """Their group in messages, such as "group dp, tp"."""
        if self.layout is None:
            place = f"of ranks {format_ranks(self.ranks)}"
        else:
            place = ", ".join(map(str, self.axes or self.layout.axes)) or f"of rank {self.ranks[0]}"
        return f"group {place}{f', tag={self.tag}' if self.tag else ''}"

    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """All blocks of the partition; none for any ranks."""
        return () if self.layout is None else tuple(self.layout.partition(*self.axes))


def asked_options(options: GroupOptions, default: GroupOptions) -> dict[str, Any]:
    """The options that differ from the default, as JSON data."""
    if options is default or options == default:
        return {}
    return {name: value for name, value in options.given.items() if default.given.get(name) != value}


def encode_ranks(ranks: range | tuple[int, ...]) -> str:
    """Encode ordered ranks: "0-7", "1-7:2", or a digest."""
    straight = as_range(ranks)
    if straight is None:
        return hashlib.blake2b(struct.pack(f"{len(ranks)}q", *ranks), digest_size=8).hexdigest()
    return f"{straight[0]}-{straight[-1]}" + (f":{straight.step}" if straight.step != 1 and len(straight) > 1 else "")


def describe_ranks(ranks: range | tuple[int, ...]) -> str:
    """Ordered ranks for a fingerprint: all of them, or the first ones and a digest of all."""
    return format_ranks(ranks, 32) + (f" ({encode_ranks(ranks)})" if len(ranks) > 32 else "")


def encode_layout(layout: Layout) -> str:
    """Encode the axes, the shape and the ordered ranks of a layout."""
    return _digest(f"{layout.axes} {layout.shape} {encode_ranks(layout.ranks_in_order())}")


def variant_of(backend: str | None, tag: str, asked: Mapping[str, Any]) -> str:
    """Encode what tells groups of the same ranks apart.

    Args:
        asked: options of the call that differ from those configured. All members have to ask for the same ones. The
            other options are no part of the name: the members' fingerprints are compared instead.
    """
    return _variant(str(backend), tag, str(sorted(asked.items())) if asked else "[]")


@functools.lru_cache(64)
def _variant(backend: str, tag: str, asked: str) -> str:
    return _digest(f"{backend} {tag!r} {asked}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# -- fingerprints -----------------------------------------------------------------------------------------------------


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

    def mismatch(self, seen: Sequence[bytes]) -> str | None:
        """Message about the fields that differ, with the ranks that have each value. None if all are equal.

        Args:
            seen: encoded fingerprints of other ranks.
        """
        mine = self.encoded.partition(b" ")[2]
        if all(encoded.partition(b" ")[2] == mine for encoded in seen):
            return None
        found = []
        for encoded in dict.fromkeys([self.encoded, *seen]):
            rank, fields = _decode(encoded)
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


def _decode(encoded: bytes) -> tuple[int, dict[str, Any]]:
    """Rank and fields of an encoded fingerprint."""
    rank, _, text = encoded.partition(b" ")
    return int(rank), json.loads(text)


def _format_field(value: Any) -> str:
    text = "none" if value is None else str(value)[:500]
    return f"({text})" if ", " in text and text[0].isdigit() else text
