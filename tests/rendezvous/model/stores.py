"""The store of the model: all its contents that were reached, each with a number."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from typing import Any

from pgmesh.rendezvous.protocol import (
    Add,
    Append,
    CompareSet,
    Decision,
    Delete,
    RankStatus,
    Read,
    SetStatus,
    Step,
    status_key,
)
from tests.rendezvous.model.programs import Group


class Stores:
    """All contents of the store that were reached so far, each with a number."""

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
        """Perform one step; return the answer and the number of the new content. Arrivals are sorted."""
        content = self.contents[number]
        if isinstance(step, Read):
            return content.get(step.key), number
        if isinstance(step, Append):
            lines = [*content.get(step.key, b"").splitlines(), *step.value.encode().splitlines()]
            return None, self.number({**content, step.key: b"".join(line + b"\n" for line in sorted(lines))})
        if isinstance(step, Add):
            count = content.get(step.key, 0) + 1
            return count, self.number({**content, step.key: count})
        if isinstance(step, CompareSet):
            held = content.get(step.key)
            if held is not None and not isinstance(step, Overwrite):
                return held, number
            value = _without_words(step)
            return value, self.number({**content, step.key: value})
        if isinstance(step, SetStatus):
            record = RankStatus(rank, content["long times"], pending=step.pending).pack().encode()
            return None, self.number({**content, status_key(rank): record})
        if isinstance(step, Delete):
            return None, self.number({key: value for key, value in content.items() if key not in step.keys})
        raise TypeError(f"{step!r} is not for the store")

    @functools.cache  # noqa: B019  it lives as long as its space
    def long_time(self, number: int, *silent: int) -> int:
        """A long time passes, in which every living rank sends a new heartbeat."""
        content = dict(self.contents[number])
        content["long times"] += 1
        for key, value in content.items():
            if key.startswith("pgmesh/status/"):
                rank = int(key.rpartition("/")[2])
                last = RankStatus.unpack(rank, value)
                assert last is not None
                if rank not in silent:
                    content[key] = replace(last, heartbeat=content["long times"]).pack().encode()
        return self.number(content)


@functools.lru_cache
def kind_of(value: bytes) -> str:
    return Decision.unpack("", value).kind


class Overwrite(CompareSet):
    """A write that replaces an existing value. Only mutants use it."""


def _without_words(step: CompareSet) -> bytes:
    """A decision without its text, which has no effect; for a circle, its ranks."""
    decision = Decision.unpack(step.key, step.value.encode())
    text = json.dumps(links_of(decision.text)) if decision.kind == "circle" else ""
    return Decision(decision.kind, text).pack().encode()


def links_of(text: str) -> list[tuple[int, str, int]]:
    """The circle in a text: the rank, the attempt in which it waits, and the rank that it waits for."""
    words = r"rank (\d+) connects (\S+) \(ranks [\d, ]+\) at \S+, and waits for rank (\d+)"
    return [(int(rank), name, int(other)) for rank, name, other in re.findall(words, text)]


def attempt_of(name: str) -> tuple[Group, int]:
    group, _, number = name[1:].partition("#")
    return tuple(map(int, group.split("-"))), int(number)
