"""The store of the model: all its contents that were reached."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, Union

from pgmesh.rendezvous.operations import Add, Append, CompareSet, Operation, Raw, Read
from pgmesh.rendezvous.records import Decision, unpack
from pgmesh.rendezvous.statuses import PendingConnect, RankStatus, status_key


class SetPending(NamedTuple):
    """Publish the groups that a rank waits for."""

    pending: tuple[PendingConnect, ...]


class Sleep(NamedTuple):
    """A pause of ``connect``."""


Step = Union[Operation, SetPending, Sleep]


class Content:
    """One content of the store. Equal contents are the same object."""

    __slots__ = ("beats", "values")

    def __init__(self, values: dict[str, bytes], beats: int) -> None:
        self.values, self.beats = values, beats

    def decision(self, name: str) -> str | None:
        """The kind of the decision of an attempt."""
        value = self.values.get(f"{name}/decision")
        return None if value is None else kind_of(value)

    def arrived(self, name: str) -> frozenset[int]:
        """The ranks whose arrivals at an attempt can be read."""
        return ranks_in(self.values.get(f"{name}/arrivals", b""))

    def uncounted(self, name: str) -> bool:
        """True if a rank has arrived at an attempt and is not counted."""
        return len(self.arrived(name)) > int(self.values.get(f"{name}/count", b"0"))


class Stores:
    """All contents of the store that were reached so far."""

    def __init__(self) -> None:
        self._known: dict[object, Content] = {}

    def content(self, values: dict[str, bytes], beats: int) -> Content:
        return self._known.setdefault((frozenset(values.items()), beats), Content(values, beats))

    def perform(self, rank: int, step: Step, content: Content) -> tuple[Any, Content]:
        """Perform one step; return the answer and the new content. Arrivals are sorted."""
        values = content.values
        if isinstance(step, Read):
            return values.get(step.key), content
        if isinstance(step, SetPending):
            key, answer = status_key(rank), None
            value = RankStatus(rank, content.beats, pending=step.pending).pack().encode()
        elif isinstance(step, Append):
            key, answer = step.key, None
            lines = [*values.get(key, b"").splitlines(), *step.value.encode().splitlines()]
            value = b"".join(line + b"\n" for line in sorted(lines))
        elif isinstance(step, Add):
            key, answer = step.key, int(values.get(step.key, b"0")) + 1
            value = b"%d" % answer
        elif isinstance(step, CompareSet):
            key = step.key
            answer = value = values.get(key) or _without_text(step.value)
        elif isinstance(step, Raw) and step.operation == "set":  # of a mutant
            key, answer = step.arguments[0], None
            value = _without_text(step.arguments[1])
        else:
            raise TypeError(f"{step!r} is not for the store")
        return answer, content if values.get(key) == value else self.content({**values, key: value}, content.beats)

    def long_time(self, content: Content, ranks: Iterable[int]) -> Content:
        """A long time passes, in which these ranks send new heartbeats."""
        values, beats = dict(content.values), content.beats + 1
        for rank in ranks:
            status = RankStatus.unpack(rank, values.get(status_key(rank)))
            if status is not None:
                values[status_key(rank)] = replace(status, heartbeat=beats).pack().encode()
        return self.content(values, beats)


@functools.lru_cache
def kind_of(value: bytes) -> str:
    return Decision.unpack("", value).kind


@functools.lru_cache
def ranks_in(arrivals: bytes) -> frozenset[int]:
    records = [unpack(line, rank=int) for line in arrivals.splitlines()]
    return frozenset(record["rank"] for record in records if record)


def _without_text(decision: str) -> bytes:
    """A decision without its text, which has no effect."""
    return Decision(kind_of(decision.encode())).pack().encode()
