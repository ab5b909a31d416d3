"""How ranks meet through the store: cards that say what each means, and a wait that says who is missing."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError
from pgmesh.sizes import some

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.05
"""Seconds between two looks into the store; each pause is half as long again as the one before."""

SEAL = b"\0"
"""Between a rank's card and what it wrote."""

ABSENT = "?"
"""What no key holds: asked to put it in place of itself, a store answers with it, or with what the key does hold."""


@dataclass(frozen=True)
class Card:
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

    def check(self, seen: bytes) -> None:
        """Hold another rank's card against this one.

        Raises:
            MismatchError: it means something else.
        """
        if seen.partition(b" ")[2] == self.word.partition(b" ")[2]:
            return
        rank, _, text = seen.decode(errors="replace").partition(" ")
        try:
            int(rank)
            theirs = dict(json.loads(text))
        except (ValueError, TypeError):
            raise MismatchError(f"{self.what}: the store holds {seen[:200]!r}, which no pgmesh wrote.") from None
        mine = self.meaning
        lines = [
            f"\n  {name}: {_value(theirs.get(name))} on rank {rank}, {_value(mine.get(name))} on rank {self.rank}"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]
        raise MismatchError(f"{self.what} is not the same on all ranks:{''.join(lines)}\n\n{self.mend}")


def _value(value: Any) -> str:
    return "none" if value is None else str(value)


def agree(store: dist.Store, key: str, card: Card) -> None:
    """Hold a card against the other members' in one operation: the first lays it down, later ones compare.

    Raises:
        MismatchError: the first rank to come means something else.
    """
    card.check(store.compare_set(key, "", card.word.decode()))


class PollingStore(dist.Store):
    """The store that a backend reads through: it polls where the client would hold its lock and wait.

    So one group's first collective cannot stall another's, a wait that fails says which ranks never came, and a
    group that is let go of while it waits stops waiting. What a rank writes bears its card, and who reads it checks
    it: so two ranks that mean different groups learn it before they connect, at no cost.

    Args:
        inner: the world's store.
        card: what this rank means by the group.
        ranks: the members' ranks in the world, in the order of the group.
        timeout: how long to wait where the backend does not say.
        addresses: each member writes an address under a key that ends in its number, as Gloo does; else the first
            member writes for all, as with NCCL. Addresses are held back until this rank first waits: then an
            address says that its rank is in a collective, not only that it has made the group.
        first: what to do before this rank first writes to the others or waits for them.
    """

    def __init__(
        self,
        inner: dist.Store,
        card: Card,
        ranks: Sequence[int],
        timeout: timedelta,
        *,
        addresses: bool,
        first: Callable[[], None],
    ) -> None:
        super().__init__()
        self._inner, self._card, self._ranks, self._timeout = inner, card, ranks, timeout
        self._addresses, self._first = addresses, first
        self._held: list[tuple[str, Any]] | None = [] if addresses else None
        self._found: dict[str, bytes] = {}
        self._closed = False
        self.written: set[str] = set()
        self.failure: PgmeshError | None = None

    def close(self) -> None:
        """End every wait."""
        self._closed = True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        try:
            self._wait(keys, timeout)
        except PgmeshError as error:
            self.failure = error  # a backend that failed to connect says only so if it is used again
            raise

    def _wait(self, keys: list[str], timeout: timedelta | None) -> None:
        self._begin()
        limit = self._timeout if timeout is None else timeout
        end = time.monotonic() + limit.total_seconds()
        pause = FIRST_PAUSE
        for key in keys:
            while not self._look(key):
                left = end - time.monotonic()
                self._check_open()
                if left <= 0:
                    raise MissingRanksError(self.missing(key, limit) or self._late(key, limit))
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, LONGEST_PAUSE)

    def _check_open(self) -> None:
        if self._closed:
            raise LifetimeError(f"{self._card.what} was released on this rank while it waited for its members.")

    def _look(self, key: str) -> bool:
        """Whether a key is there, in one operation that brings its value along."""
        value = self._inner.compare_set(key, ABSENT, ABSENT)
        if value == ABSENT.encode():
            return False
        card, _, body = value.partition(SEAL)
        self._card.check(card)
        self._found[key] = body
        return True

    def get(self, key: str) -> bytes:
        if key not in self._found:
            self.wait([key])
        return self._found.pop(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def missing(self, key: str | None = None, limit: timedelta | None = None) -> str | None:
        """Who never came, in words; None if all did, or if the store cannot tell.

        Args:
            key: one that was waited for; this rank's own address unless given.
            limit: how long it was waited for.

        Raises:
            MismatchError: all came, but not all mean the same.
        """
        key = key or next(iter(self.written), None)
        if key is None:
            return None
        stem, _, last = key.rpartition("/")
        if self._addresses:
            asked: dict[object, str] = {rank: f"{stem}/{i}" for i, rank in enumerate(self._ranks)}
        else:  # NCCL's first member writes the id of the group; who writes any other key, the key does not tell
            asked = {self._ranks[0] if last.isdecimal() else f"that writes {key}": key}
        seen = {rank: self._inner.compare_set(address, ABSENT, ABSENT) for rank, address in asked.items()}
        who = [rank for rank, value in seen.items() if value == ABSENT.encode()]
        if not who:
            for value in seen.values():
                self._card.check(value.partition(SEAL)[0])
            return None
        return (
            f"{self._card.what}: rank{'s' * (len(who) > 1)} {some(who)} never came to the first collective, in "
            f"{(limit or self._timeout).total_seconds():g} s. The group's ranks are {some(self._ranks)}."
        )

    def _late(self, key: str, limit: timedelta) -> str:
        return f"{self._card.what}: all members came, but only after {limit.total_seconds():g} s, too late for {key}."

    def set(self, key: str, value: Any) -> None:
        if self._held is not None:
            self._held.append((key, value))
        else:
            self._begin()
            self.written.add(key)
            self._inner.set(key, self._card.word + SEAL + bytes(value))  # type: ignore[arg-type]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values):
            self.set(key, value)

    def _begin(self) -> None:
        """This rank is in a collective: see that all is agreed on, and say where it can be reached."""
        self._check_open()
        self._first()
        held, self._held = self._held, None
        for key, value in held or ():
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def add(self, key: str, amount: int) -> int:
        self.written.add(key)
        return self._inner.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.written.add(key)
        return self._inner.compare_set(key, expected, desired)

    def append(self, key: str, value: Any) -> None:
        self.written.add(key)
        self._inner.append(key, value)  # type: ignore[attr-defined]

    def delete_key(self, key: str) -> bool:
        self.written.discard(key)
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def has_extended_api(self) -> bool:
        return True
