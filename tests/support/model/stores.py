"""The store of a model: all its contents that were reached."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pgmesh.liveness.operations import CompareSet, Delete, Operation, perform
from pgmesh.liveness.statuses import RankStatus, status_key
from tests.support.board import MemoryStore


def deleted(key: str) -> str:
    """Where a content keeps the last value of a deleted key."""
    return f"{key}, deleted"


class Content:
    """One content of the store. Equal contents are the same object."""

    __slots__ = ("beats", "values")

    def __init__(self, values: dict[str, bytes], beats: int) -> None:
        self.values, self.beats = values, beats

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def ever(self, key: str) -> bytes | None:
        """The value of a decision key, also after it was deleted."""
        return self.values.get(key, self.values.get(deleted(key)))


class Stores:
    """All contents of the store that were reached so far.

    Args:
        plain: a decision without its text, which has no effect.
        order: sorts the lines of arrivals, whose order has no effect; and drops those without effect.
    """

    def __init__(self, plain: Callable[[bytes], bytes], order: Callable[[list[bytes]], list[bytes]]) -> None:
        self._plain, self._order = plain, order
        self.known: dict[object, Content] = {}

    def content(self, values: dict[str, bytes], beats: int) -> Content:
        return self.known.setdefault((frozenset(values.items()), beats), Content(values, beats))

    def perform(self, operation: Operation, content: Content) -> tuple[Any, Content]:
        """Perform one operation; return the answer and the new content."""
        values = dict(content.values)
        answer = perform(MemoryStore(values), operation)
        if isinstance(operation, Delete):
            answer = None  # no call depends on it
            decisions = [key for key in operation.keys if key.endswith("/decision") and key in content.values]
            values |= {deleted(key): content.values[key] for key in decisions}  # for the laws
        if values == content.values:
            return answer, content
        for key, value in values.items() - content.values.items():
            if key.endswith("/decision"):
                values[key] = self._plain(value)
            elif key.endswith("/arrivals"):
                values[key] = b"".join(line + b"\n" for line in self._order(value.splitlines()))
        return values[operation.key] if isinstance(operation, CompareSet) else answer, self.content(
            values, content.beats
        )

    def long_time(self, content: Content, ranks: Iterable[int]) -> Content:
        """A long time passes, in which these ranks send new heartbeats."""
        values, beats = dict(content.values), content.beats + 1
        for rank in ranks:
            status = RankStatus.unpack(values.get(status_key(rank)))
            if status is not None:
                values[status_key(rank)] = replace(status, sent=float(beats)).pack().encode()
        return self.content(values, beats)


@functools.lru_cache(maxsize=100_000)
def rank_of(line: bytes) -> int:
    """The rank in an arrival."""
    rank: int = json.loads(line)["rank"]
    return rank


def decision_in(operation: Any) -> tuple[str, bytes]:
    """Key and value of an operation that publishes a decision. A mutant overwrites it."""
    return operation.key, operation.value.encode()
