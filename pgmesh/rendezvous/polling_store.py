"""The store that a backend reads through: it polls, and a wait that fails says who is missing."""

from __future__ import annotations

import base64
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pgmesh._util.formatting import format_ranks, name_ranks
from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError, WorldError
from pgmesh.rendezvous.protocol import (
    LONGEST_PAUSE,
    Add,
    Append,
    CompareSet,
    Decision,
    Delete,
    Fingerprint,
    Pause,
    RankStatus,
    Raw,
    Read,
    Step,
    StoreProtocol,
    pauses,
    publish_mismatch,
    status_key,
)

T = TypeVar("T")

log = logging.getLogger("pgmesh")

WATCH = 10.0
"""Seconds that a rank waits in a group's first collective before it says in the log for whom."""

TELL = 1.0
"""Seconds that it waits before it tells the others."""

LAST_WORDS = 1.0
"""Seconds beyond its deadline that a wait may take to say who is missing."""

OTHERWISE = (
    "That is another group by the same words: an option that is asked for in the call makes another one, and meshes "
    "without a name are told apart by how many were made before. Configure options, and name meshes."
)
"""Why ranks may wait for each other in what is called alike."""

SEAL = b"\0"
"""Between a rank's card and what it wrote."""

ABSENT = "?"
"""What no key holds: asked to put it in place of itself, a store answers with it, or with what the key does hold."""


def once(step: Step) -> StoreProtocol[Any]:
    """A protocol of one step."""
    return (yield step)


def perform(store: Any, step: Step) -> Any:
    """Do one step of a protocol on a store: one operation, or one for each key to delete."""
    if isinstance(step, Read):
        value = store.compare_set(step.key, ABSENT, ABSENT)
        return None if value == ABSENT.encode() else value
    if isinstance(step, CompareSet):
        return store.compare_set(step.key, "", step.value)
    if isinstance(step, Add):
        return store.add(step.key, 1)
    if isinstance(step, Append):
        return store.append(step.key, step.value)
    if isinstance(step, Delete):
        return [store.delete_key(key) for key in step.keys]
    if isinstance(step, Raw):
        return getattr(store, step.operation)(*step.arguments)
    raise TypeError(f"{step!r} is not for the store")


def underlying(store: Any) -> Any:
    """The store behind those that only put a prefix before its keys."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def drive(steps: StoreProtocol[T], perform: Callable[[Step], Any]) -> T:
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


raised: list[weakref.ref[PgmeshError]] = []
"""Errors that were raised in a backend, and that it may keep."""


def without_frames(error: PgmeshError) -> PgmeshError:
    """The same error, without the frames that it passed: they hold what reads through the store that failed."""
    copy = type(error)(str(error))
    copy.__cause__ = error.__cause__
    return copy


def _raise_in_backend(error: PgmeshError) -> None:
    copy = without_frames(error)
    raised.append(weakref.ref(copy, raised.remove))
    try:
        raise copy
    finally:
        del copy  # else the error keeps this frame, and this frame the error


class PollingStore(dist.Store):
    """The store that a backend reads through: it polls where the client would hold its lock and wait.

    So one group's first collective cannot stall another's, a wait that fails says which ranks never came, and a
    group that is let go of while it waits stops waiting. What a rank writes bears its card, and who reads it checks
    it: so two ranks that mean different groups learn it before they connect, at no cost.

    Args:
        run: runs a protocol on the world's store, for so many seconds and no longer.
        card: what this rank means by the group.
        ranks: the members' ranks in the world, in the order of the group.
        timeout: how long to wait where the backend does not say.
        addresses: each member writes an address under a key that ends in its number, as Gloo does; else the first
            member writes for all, as with NCCL. Addresses are held back until this rank first waits: then an
            address says that its rank is in a collective, not only that it has made the group.
        first: what to do before this rank first writes to the others or waits for them.
        refused: keys under which a rank that means something else says so.
        tell: tells other processes what this one does.
        doubt: says why ranks may not find each other on this store; "" for nothing.
    """

    def __init__(
        self,
        run: Callable[[StoreProtocol[Any], float], Any],
        card: Fingerprint,
        ranks: Sequence[int],
        timeout: timedelta,
        *,
        addresses: bool,
        first: Callable[[], StoreProtocol[None]],
        refused: Sequence[str] = (),
        tell: Callable[[str], None] = lambda doing: None,
        doubt: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__()
        self._run, self._card, self._ranks, self._timeout = run, card, ranks, timeout
        self.limit: timedelta | None = None  # set later, and then whatever the backend says
        self._addresses, self._first, self.refused, self._tell, self._doubt = addresses, first, refused, tell, doubt
        self._own: dict[str, bytes] = {}  # where this rank can be reached
        self._held = addresses  # whether that is held back
        self._found: dict[str, bytes] = {}
        self._closed = self._telling = False
        self.used = False  # whether the group has been in a collective
        self.operations, self.waited = 0, 0.0  # how often the store was asked; seconds spent waiting
        self.written: set[str] = set()
        self.failure: PgmeshError | None = None
        self.mismatched = False  # whether it was ever learnt that ranks mean different things

    def close(self) -> None:
        """End every wait."""
        self._closed = True

    def _go(self, steps: StoreProtocol[T], seconds: float | None = None) -> T:
        """Run steps, for as long as the group's collectives may take unless a time is given."""
        limit = self._timeout.total_seconds() if seconds is None else seconds
        try:
            result: T = self._run(self._counted(steps), limit + LAST_WORDS)
        except MismatchError:
            self.mismatched = True
            raise
        return result

    def _counted(self, steps: StoreProtocol[T]) -> StoreProtocol[T]:
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as stop:
                result: T = stop.value
                return result
            self.operations += not isinstance(step, Pause)
            answer = yield step

    # -- what members tell each other as they meet ------------------------------------------------------------------

    @property
    def at(self) -> str:
        """Where this rank can be reached, as text; "" if the backend has not said."""
        return ",".join(base64.b64encode(value).decode() for value in self._own.values())

    def learn(self, at: Sequence[str]) -> None:
        """Where each member can be reached, as all of them are told: then nobody need ask the store for it."""
        try:
            addresses = [[base64.b64decode(each, validate=True) for each in words.split(",")] for words in at]
        except ValueError:
            return
        if {*map(len, addresses)} == {len(self._own)} and len(at) == len(self._ranks) and all(map(all, addresses)):
            for key, values in zip(self._own, zip(*addresses)):
                stem = key.rpartition("/")[0]
                self._found.update((f"{stem}/{i}", value) for i, value in enumerate(values))

    def publish(self) -> StoreProtocol[None]:
        """Say in the store too where this rank can be reached: it is taken back when the group is let go of."""
        yield from self._counted(self._begin())

    # -- what a backend waits for -------------------------------------------------------------------------------

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.used = True
        if not self._closed and all(key in self._found for key in keys):
            return
        limit = self.limit or (self._timeout if timeout is None else timeout)
        start = time.monotonic()
        try:
            self._go(self._wait(keys, limit), limit.total_seconds())
        except PgmeshError as error:
            if isinstance(error, MissingRanksError):
                error = MissingRanksError(f"{error}{self._doubt()}")
            self.failure = without_frames(error)  # a backend that failed to connect says only so if it is used again
        else:
            return
        finally:
            self.waited += time.monotonic() - start
            if self._telling:
                self._telling = False
                self._tell("")
        _raise_in_backend(self.failure)

    def _wait(self, keys: list[str], limit: timedelta) -> StoreProtocol[None]:
        yield from self._begin()
        start = time.monotonic()
        end = start + limit.total_seconds()
        pause = pauses()
        due = [(start + WATCH, self._warn), (start + TELL, self._tell_of_waiting)]
        for key in keys:
            while not (yield from self._look(key)):
                now = time.monotonic()
                self._check_open()
                if now >= end:
                    raise MissingRanksError((yield from self._missing(key, limit)) or self._late(key, limit))
                seconds = next(pause)
                if seconds == LONGEST_PAUSE:
                    yield from self._check_refused()
                while due and now >= due[-1][0]:
                    yield from due.pop()[1](key, now - start)
                yield Pause(min(seconds, end - now))

    def _warn(self, key: str, waited: float) -> StoreProtocol[None]:
        if words := (yield from self._missing(key, timedelta(seconds=round(waited)), yet=True)):
            # In a thread of its own: a handler of the user's may block, and this one beats and asks for all.
            threading.Thread(target=log.warning, args=("%s", words), name="pgmesh-word", daemon=True).start()

    def _tell_of_waiting(self, key: str, waited: float) -> StoreProtocol[None]:
        self._telling = True
        self._tell(self._waiting)
        yield from ()

    @property
    def _waiting(self) -> str:
        return f"in the first collective of {self._card.what}, waiting for others"

    def _check_refused(self) -> StoreProtocol[None]:
        for key in self.refused:
            text = yield Read(key)
            if text is not None and (error := Decision.unpack(key, text).error()):
                raise error

    def _check_open(self) -> None:
        if self._closed:
            raise LifetimeError(f"{self._card.what} was released on this rank while it waited for its members.")

    def _look(self, key: str) -> StoreProtocol[bool]:
        """Whether a key is there, in one operation that brings its value along."""
        value = yield Read(key)
        if value is None:
            return False
        card, _, body = value.partition(SEAL)
        yield from publish_mismatch(self.refused[0] if self.refused else f"{key}/refused", self._card, card, key)
        self._found[key] = body
        return True

    def get(self, key: str) -> bytes:
        if key not in self._found:
            self.wait([key])
        return self._found[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def missing(self, key: str | None = None, limit: timedelta | None = None) -> str | None:
        """Who never came, in words; None if all did, or if the store cannot tell.

        Args:
            key: one that was waited for; this rank's own address unless given.
            limit: how long it was waited for.

        Raises:
            MismatchError: not all mean the same.
        """
        try:
            return self._go(self._missing(key, limit), 0.0)
        except WorldError:
            return None

    def _missing(self, key: str | None, limit: timedelta | None, *, yet: bool = False) -> StoreProtocol[str | None]:
        yield from self._check_refused()
        key = key or next(iter(self.written), None)
        if key is None:
            return None
        stem, _, last = key.rpartition("/")
        if self._addresses:
            asked: dict[object, str] = {rank: f"{stem}/{i}" for i, rank in enumerate(self._ranks)}
        else:  # NCCL's first member writes the id of the group; who writes any other key, the key does not tell
            asked = {self._ranks[0] if last.isdecimal() else f"that writes {key}": key}
        seen: dict[object, bytes | None] = {}
        for rank, address in asked.items():
            seen[rank] = yield Read(address)
        who = [rank for rank, value in seen.items() if value is None]
        if not who:
            for rank, value in seen.items():
                self._card.check((value or b"").partition(SEAL)[0], key=asked[rank])
            return None
        said = {}
        for rank in who[:8]:
            if isinstance(rank, int) and (last_told := RankStatus.unpack(rank, (yield Read(status_key(rank))))):
                said[rank] = str(last_told)
        words = "".join(f"\n  rank {rank} last said: {last}" for rank, last in said.items())
        if self._waiting in said.values():
            words += f"\n{OTHERWISE}"
        came = f"ha{'ve' if len(who) > 1 else 's'} not come" if yet else "never came"
        return (
            f"{self._card.what}: {name_ranks(who)} {came} to the first collective, in "
            f"{(limit or self._timeout).total_seconds():g} s. The group's ranks are {format_ranks(self._ranks)}.{words}"
        )

    def _late(self, key: str, limit: timedelta) -> str:
        return f"{self._card.what}: all members came, but only after {limit.total_seconds():g} s, too late for {key}."

    # -- what a backend writes, and whatever else it asks -------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        if self._addresses:
            self._own[key] = bytes(value)
        if not self._held:
            self.used = True
            self._go(self._set(key, value))

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values):
            self.set(key, value)

    def _set(self, key: str, value: Any) -> StoreProtocol[None]:
        yield from self._begin()
        yield self._sealed(key, value)

    def _sealed(self, key: str, value: Any) -> Raw:
        self.written.add(key)  # before it is seen that nobody closed: who closes later takes this key away too
        self._check_open()
        return Raw("set", (key, self._card.word + SEAL + bytes(value)))

    def _begin(self) -> StoreProtocol[None]:
        """This rank is in a collective: see that all is agreed on, and say where it can be reached."""
        self._check_open()
        yield from self._first()
        if self._held:
            for key, value in self._own.items():
                yield self._sealed(key, value)
            self._held = False

    def _ask(self, operation: str, *arguments: Any) -> Any:
        return self._go(once(Raw(operation, arguments)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def add(self, key: str, amount: int) -> int:
        self.written.add(key)
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.written.add(key)
        return bytes(self._ask("compare_set", key, expected, desired))

    def append(self, key: str, value: Any) -> None:
        self.written.add(key)
        self._ask("append", key, value)

    def delete_key(self, key: str) -> bool:
        self.written.discard(key)
        return bool(self._ask("delete_key", key))

    def num_keys(self) -> int:
        return int(self._ask("num_keys"))

    def has_extended_api(self) -> bool:
        return True
