"""The store that a backend reads through: it polls, and a wait that fails says who is missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError
from pgmesh.rendezvous import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    Add,
    Append,
    Card,
    Delete,
    End,
    Read,
    Step,
    Swap,
    Told,
    told,
)
from pgmesh.sizes import some

T = TypeVar("T")

log = logging.getLogger("pgmesh")

WATCH = 10.0
"""Seconds that a rank waits in a group's first collective before it says in the log for whom."""

TELL = 1.0
"""Seconds that it waits before it tells the others."""

SEAL = b"\0"
"""Between a rank's card and what it wrote."""

ABSENT = "?"
"""What no key holds: asked to put it in place of itself, a store answers with it, or with what the key does hold."""


def perform(store: Any, step: Step) -> Any:
    """Do one step of a protocol on a store: one operation, or one for each key to delete."""
    if isinstance(step, Read):
        value = store.compare_set(step.key, ABSENT, ABSENT)
        return None if value == ABSENT.encode() else value
    if isinstance(step, Swap):
        return store.compare_set(step.key, "", step.value)
    if isinstance(step, Add):
        return store.add(step.key, 1)
    if isinstance(step, Append):
        return store.append(step.key, step.value)
    if isinstance(step, Delete):
        return [store.delete_key(key) for key in step.keys]
    raise TypeError(f"{step!r} is not for the store")


def drive(steps: Generator[Step, Any, T], perform: Callable[[Step], Any]) -> T:
    """Run a protocol to its end. What a step raises, and what interrupts it, is raised inside the protocol too."""
    send: Callable[[Any], Step] = steps.send
    answer: Any = None
    while True:
        try:
            step = send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        try:
            send, answer = steps.send, perform(step)
        except BaseException as error:
            send, answer = steps.throw, error


def agree(ask: Callable[[Step], Any], key: str, card: Card) -> None:
    """Hold a card against the other members' in one operation: the first lays it down, later ones compare.

    Raises:
        MismatchError: the first rank to come means something else. It is told too, under ``<key>/refused``.
    """
    refuse(ask, f"{key}/refused", card, ask(Swap(key, card.word.decode())))


def refuse(ask: Callable[[Step], Any], key: str, card: Card, seen: bytes) -> None:
    """Hold a card against another's, and where they differ tell those who wait.

    Raises:
        MismatchError: they differ.
    """
    if trouble := card.trouble([seen]):
        ask(Swap(key, End("mismatch", trouble).pack()))
        raise MismatchError(trouble)


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
        refused: keys under which a rank that means something else says so.
        tell: tells other processes what this one does.
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
        refused: Sequence[str] = (),
        tell: Callable[[str], None] = lambda doing: None,
    ) -> None:
        super().__init__()
        self._inner, self._card, self._ranks, self._timeout = inner, card, ranks, timeout
        self._addresses, self._first, self._refused, self._tell = addresses, first, refused, tell
        self._held: list[tuple[str, Any]] | None = [] if addresses else None
        self._found: dict[str, bytes] = {}
        self._closed = self._telling = False
        self.operations, self.waited = 0, 0.0  # how often the store was asked; seconds spent waiting
        self.written: set[str] = set()
        self.failure: PgmeshError | None = None

    @property
    def used(self) -> bool:
        """Whether the group has been in a collective."""
        return self._held is None and self.operations > 0

    def close(self) -> None:
        """End every wait."""
        self._closed = True

    def _do(self, step: Step) -> Any:
        self.operations += 1
        return perform(self._inner, step)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        start = time.monotonic()
        try:
            self._wait(keys, timeout)
        except PgmeshError as error:
            self.failure = error  # a backend that failed to connect says only so if it is used again
            raise
        finally:
            self.waited += time.monotonic() - start
            if self._telling:
                self._telling = False
                self._tell("")

    def _wait(self, keys: list[str], timeout: timedelta | None) -> None:
        self._begin()
        limit = self._timeout if timeout is None else timeout
        start = time.monotonic()
        end = start + limit.total_seconds()
        pause = FIRST_PAUSE
        due = [(start + WATCH, self._warn), (start + TELL, self._tell_of_waiting)]
        for key in keys:
            while not self._look(key):
                now = time.monotonic()
                self._check_open()
                if now >= end:
                    raise MissingRanksError(self.missing(key, limit) or self._late(key, limit))
                if pause == LONGEST_PAUSE:
                    self._check_refused()
                while due and now >= due[-1][0]:
                    due.pop()[1](key, now - start)
                time.sleep(min(pause, end - now))
                pause = min(pause * 1.5, LONGEST_PAUSE)

    def _warn(self, key: str, waited: float) -> None:
        log.warning("%s", self.missing(key, timedelta(seconds=round(waited))))

    def _tell_of_waiting(self, key: str, waited: float) -> None:
        self._telling = True
        self._tell(f"in the first collective of {self._card.what}, waiting for others")

    def _check_refused(self) -> None:
        for key in self._refused:
            if (text := self._do(Read(key))) is not None and (error := End.unpack(key, text).error()):
                raise error

    def _check_open(self) -> None:
        if self._closed:
            raise LifetimeError(f"{self._card.what} was released on this rank while it waited for its members.")

    def _look(self, key: str) -> bool:
        """Whether a key is there, in one operation that brings its value along."""
        value = self._do(Read(key))
        if value is None:
            return False
        card, _, body = value.partition(SEAL)
        refuse(self._do, self._refused[0] if self._refused else f"{key}/refused", self._card, card)
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
        seen = {rank: self._do(Read(address)) for rank, address in asked.items()}
        who = [rank for rank, value in seen.items() if value is None]
        if not who:
            self._card.check(*(value.partition(SEAL)[0] for value in seen.values()))
            return None
        return (
            f"{self._card.what}: rank{'s' * (len(who) > 1)} {some(who)} never came to the first collective, in "
            f"{(limit or self._timeout).total_seconds():g} s. The group's ranks are {some(self._ranks)}."
            f"{''.join(self._last_words(rank) for rank in who[:8])}"
        )

    def _last_words(self, rank: object) -> str:
        """What a rank last told the others, for a message; "" if it told nothing."""
        last = Told.unpack(rank, self._do(Read(told(rank)))) if isinstance(rank, int) else None
        return f"\n  rank {rank} last said: {last}" if last else ""

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
