"""The store that pgmesh gives to a backend: it polls, and an error names the missing ranks.

torch's own store client holds a lock while it waits. This store sends single operations through a function that the
caller provides, in general the one of the store thread. It also drives the generators of ``protocol.py``.
"""

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
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.protocol import (
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

SAME_LABEL_HINT = (
    "These are different groups with the same label. Options asked for in a call make a different group, and unnamed "
    "meshes are numbered in the order of creation. Use mesh.configure for options, and name the meshes."
)
"""Hint for ranks that wait for each other in groups with the same label."""

SEPARATOR = b"\0"
"""Separates a rank's fingerprint from the value that it wrote."""

ABSENT = "?"
"""Marker for a missing key. ``compare_set(key, ABSENT, ABSENT)`` returns it, or the value of the key."""


def once(step: Step) -> StoreProtocol[Any]:
    """A protocol with one step."""
    return (yield step)


def perform(store: Any, step: Step) -> Any:
    """Perform one step of a protocol on a store: one operation, or one for each key to delete."""
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
    """The store inside any ``PrefixStore`` wrappers."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def drive(steps: StoreProtocol[T], perform: Callable[[Step], Any]) -> T:
    """Run a protocol to its end. Errors and interrupts of a step are raised inside the protocol."""
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


backend_errors: list[weakref.ref[PgmeshError]] = []
"""Errors that were raised in a backend. The backend may keep them."""


def without_frames(error: PgmeshError) -> PgmeshError:
    """A copy of an error without its frames, which refer to the backend that reads through the failed store."""
    copy = type(error)(str(error))
    copy.__cause__ = error.__cause__
    return copy


def _raise_in_backend(error: PgmeshError) -> None:
    copy = without_frames(error)
    backend_errors.append(weakref.ref(copy, backend_errors.remove))
    try:
        raise copy
    finally:
        del copy  # else the error and this frame keep each other alive


class PollingStore(dist.Store):
    """The store that a backend reads through. It polls, while torch's client would hold its lock and wait.

    So the first collective of one group cannot block another group. A failed wait names the missing ranks, and
    releasing a group ends its waits. Each value carries the fingerprint of the rank that wrote it, and each reader
    compares it with its own. So a mismatch is found before the ranks connect, without more store operations.

    Args:
        run: runs a protocol on the world's store with a timeout in seconds.
        fingerprint: the group's fingerprint on this rank.
        ranks: the members' ranks in the world, in group order.
        timeout: timeout of a wait for which the backend gives none.
        addresses: True if each member writes an address under a key that ends in its group rank, as with Gloo. False
            if the first member writes for all, as with NCCL. An address is published when this rank first waits. So it
            shows that the rank is in a collective.
        before_first_use: protocol to run before this rank first writes or waits.
        mismatch_keys: keys under which a rank publishes a mismatch.
        set_status: publishes this rank's activity.
        store_hint: returns a reason why ranks may not find each other on this store; "" for none.
    """

    def __init__(
        self,
        run: Callable[[StoreProtocol[Any], float], Any],
        fingerprint: Fingerprint,
        ranks: Sequence[int],
        timeout: timedelta,
        *,
        addresses: bool,
        before_first_use: Callable[[], StoreProtocol[None]],
        mismatch_keys: Sequence[str] = (),
        set_status: Callable[[str], None] = lambda doing: None,
        store_hint: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__()
        self._run, self._fingerprint, self._ranks, self._timeout = run, fingerprint, ranks, timeout
        self.limit: timedelta | None = None  # if set, it overrides the timeout of the backend
        self._addresses, self._before_first_use, self.mismatch_keys, self._set_status, self._store_hint = (
            addresses,
            before_first_use,
            mismatch_keys,
            set_status,
            store_hint,
        )
        self._own_addresses: dict[str, bytes] = {}  # by key
        self._unpublished = addresses
        self._values: dict[str, bytes] = {}
        self._closed = self._status_is_set = False
        self.used = False  # whether the group has been in a collective
        self.operations, self.waited = 0, 0.0  # number of store operations; seconds of waiting
        self.written: set[str] = set()
        self.failure: PgmeshError | None = None
        self.mismatched = False  # whether a mismatch was ever found

    def close(self) -> None:
        """End every wait."""
        self._closed = True

    def _run_steps(self, steps: StoreProtocol[T], seconds: float | None = None) -> T:
        """Run a protocol. The default timeout is that of the group's collectives."""
        limit = self._timeout.total_seconds() if seconds is None else seconds
        try:
            result: T = self._run(self._count_operations(steps), limit + timing.TIMING.report_missing)
        except MismatchError:
            self.mismatched = True
            raise
        return result

    def _count_operations(self, steps: StoreProtocol[T]) -> StoreProtocol[T]:
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as stop:
                result: T = stop.value
                return result
            self.operations += not isinstance(step, Pause)
            answer = yield step

    # -- addresses ------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """This rank's address as text; "" if the backend has not set it."""
        return ",".join(base64.b64encode(value).decode() for value in self._own_addresses.values())

    def set_addresses(self, encoded: Sequence[str]) -> None:
        """Set the addresses of all members, so that the backend need not read them from the store."""
        try:
            addresses = [[base64.b64decode(each, validate=True) for each in text.split(",")] for text in encoded]
        except ValueError:
            return
        if (
            {*map(len, addresses)} == {len(self._own_addresses)}
            and len(encoded) == len(self._ranks)
            and all(map(all, addresses))
        ):
            for key, values in zip(self._own_addresses, zip(*addresses)):
                stem = key.rpartition("/")[0]
                self._values.update((f"{stem}/{i}", value) for i, value in enumerate(values))

    def publish_address(self) -> StoreProtocol[None]:
        """Publish this rank's address in the store. It is deleted when the group is released."""
        yield from self._count_operations(self._before_wait())

    # -- waiting ------------------------------------------------------------------------------------------------

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.used = True
        if not self._closed and all(key in self._values for key in keys):
            return
        limit = self.limit or (self._timeout if timeout is None else timeout)
        start = time.monotonic()
        try:
            self._run_steps(self._wait(keys, limit), limit.total_seconds())
        except PgmeshError as error:
            if isinstance(error, MissingRanksError):
                error = MissingRanksError(f"{error}{self._store_hint()}")
            self.failure = without_frames(error)  # raised again if the failed backend is used again
        else:
            return
        finally:
            self.waited += time.monotonic() - start
            if self._status_is_set:
                self._status_is_set = False
                self._set_status("")
        _raise_in_backend(self.failure)

    def _wait(self, keys: list[str], limit: timedelta) -> StoreProtocol[None]:
        yield from self._before_wait()
        start = time.monotonic()
        end = start + limit.total_seconds()
        pause = pauses()
        due = [
            (start + timing.TIMING.warn_after, self._warn),
            (start + timing.TIMING.status_after, self._publish_status),
        ]
        for key in keys:
            while not (yield from self._read(key)):
                now = time.monotonic()
                self._check_open()
                if now >= end:
                    raise MissingRanksError((yield from self._missing_text(key, limit)) or self._late_text(key, limit))
                seconds = next(pause)
                if seconds == timing.TIMING.longest_pause:
                    yield from self._check_mismatch()
                while due and now >= due[-1][0]:
                    yield from due.pop()[1](key, now - start)
                yield Pause(min(seconds, end - now))

    def _warn(self, key: str, waited: float) -> StoreProtocol[None]:
        if text := (yield from self._missing_text(key, timedelta(seconds=round(waited)), yet=True)):
            # In another thread, since a log handler may block and this thread sends the heartbeats.
            threading.Thread(target=log.warning, args=("%s", text), name="pgmesh-warning", daemon=True).start()

    def _publish_status(self, key: str, waited: float) -> StoreProtocol[None]:
        self._status_is_set = True
        self._set_status(self._activity)
        yield from ()

    @property
    def _activity(self) -> str:
        return f"in the first collective of {self._fingerprint.subject}, waiting for its members"

    def _check_mismatch(self) -> StoreProtocol[None]:
        for key in self.mismatch_keys:
            text = yield Read(key)
            if text is not None and (error := Decision.unpack(key, text).error()):
                raise error

    def _check_open(self) -> None:
        if self._closed:
            raise LifetimeError(
                f"{self._fingerprint.subject} was released on this rank while it waited for its members."
            )

    def _read(self, key: str) -> StoreProtocol[bool]:
        """Read a key and store its value. False if it has none yet."""
        value = yield Read(key)
        if value is None:
            return False
        encoded, _, body = value.partition(SEPARATOR)
        mismatch_key = self.mismatch_keys[0] if self.mismatch_keys else f"{key}/mismatch"
        yield from publish_mismatch(mismatch_key, self._fingerprint, encoded, key)
        self._values[key] = body
        return True

    def get(self, key: str) -> bytes:
        if key not in self._values:
            self.wait([key])
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def missing(self, key: str | None = None, limit: timedelta | None = None) -> str | None:
        """Message about the missing members. None if all are there or the store does not answer.

        Args:
            key: the key that was waited for. Default: this rank's own address.
            limit: the timeout of that wait.

        Raises:
            MismatchError: the members' fingerprints differ.
        """
        try:
            return self._run_steps(self._missing_text(key, limit), 0.0)
        except WorldError:
            return None

    def _missing_text(
        self, key: str | None, limit: timedelta | None, *, yet: bool = False
    ) -> StoreProtocol[str | None]:
        yield from self._check_mismatch()
        key = key or next(iter(self.written), None)
        if key is None:
            return None
        stem, _, last = key.rpartition("/")
        if self._addresses:
            keys: dict[object, str] = {rank: f"{stem}/{i}" for i, rank in enumerate(self._ranks)}
        else:  # NCCL's first member writes the id of the group. For other keys the writing rank is unknown
            keys = {self._ranks[0] if last.isdecimal() else f"that writes {key}": key}
        seen: dict[object, bytes | None] = {}
        for rank, address_key in keys.items():
            seen[rank] = yield Read(address_key)
        missing = [rank for rank, value in seen.items() if value is None]
        if not missing:
            for rank, value in seen.items():
                self._fingerprint.check((value or b"").partition(SEPARATOR)[0], key=keys[rank])
            return None
        statuses = {}
        for rank in missing[:8]:
            if isinstance(rank, int) and (status := RankStatus.unpack(rank, (yield Read(status_key(rank))))):
                statuses[rank] = str(status)
        details = "".join(f"\n  last status of rank {rank}: {status}" for rank, status in statuses.items())
        if self._activity in statuses.values():
            details += f"\n{SAME_LABEL_HINT}"
        seconds = f"{(limit or self._timeout).total_seconds():g} s"
        failed = f"ha{'ve' if len(missing) > 1 else 's'} not reached" if yet else "did not reach"
        return (
            f"{self._fingerprint.subject}: {name_ranks(missing)} {failed} the first collective in {seconds}. "
            f"The group's ranks are {format_ranks(self._ranks)}.{details}"
        )

    def _late_text(self, key: str, limit: timedelta) -> str:
        return (
            f"{self._fingerprint.subject}: all members have reached the first collective, but {key} was still missing "
            f"after {limit.total_seconds():g} s."
        )

    # -- writing, and other operations --------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        if self._addresses:
            self._own_addresses[key] = bytes(value)
        if not self._unpublished:
            self.used = True
            self._run_steps(self._set(key, value))

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values):
            self.set(key, value)

    def _set(self, key: str, value: Any) -> StoreProtocol[None]:
        yield from self._before_wait()
        yield self._write(key, value)

    def _write(self, key: str, value: Any) -> Raw:
        self.written.add(key)  # before the check, so that a later close deletes this key too
        self._check_open()
        return Raw("set", (key, self._fingerprint.encoded + SEPARATOR + bytes(value)))

    def _before_wait(self) -> StoreProtocol[None]:
        """Compare fingerprints and publish this rank's address, before the rank first writes or waits."""
        self._check_open()
        yield from self._before_first_use()
        if self._unpublished:
            for key, value in self._own_addresses.items():
                yield self._write(key, value)
            self._unpublished = False

    def _ask(self, operation: str, *arguments: Any) -> Any:
        return self._run_steps(once(Raw(operation, arguments)))

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
