"""The store that pgmesh gives to a backend: it polls, and an error names the missing ranks.

torch's own store client holds a lock while it waits. This store sends each operation through the store thread, and
polls in the backend's thread.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pgmesh._util.formatting import format_ranks, name_ranks
from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.addresses import Addresses
from pgmesh.rendezvous.comparing import check_published
from pgmesh.rendezvous.operations import CompareSet, Operation, Raw, Read
from pgmesh.rendezvous.records import Decision, Fingerprint
from pgmesh.rendezvous.rounds import pauses
from pgmesh.rendezvous.statuses import Statuses
from pgmesh.rendezvous.store_thread import StoreThread

SEPARATOR = b"\0"
"""Separates a rank's fingerprint from the value that it wrote."""

ASKED_FOR = " (asked for with "
"""Separates the label of a group from the options that were asked for in the call."""

_IN_FIRST_COLLECTIVE = "in the first collective of "


def without_frames(error: PgmeshError, hint: str = "") -> PgmeshError:
    """A copy of an error without its frames, which refer to the backend that reads through the failed store.

    Args:
        hint: text to append to the message.
    """
    copy = type(error)(f"{error}{hint}")
    copy.__cause__ = error.__cause__
    return copy


_raising = threading.Lock()  # guards _raised
if hasattr(os, "register_at_fork"):  # a thread of the parent may hold it
    os.register_at_fork(after_in_child=lambda: globals().update(_raising=threading.Lock()))
_raised: weakref.WeakKeyDictionary[PgmeshError, weakref.ref[PollingStore]] = weakref.WeakKeyDictionary()
"""Errors that were raised in a backend, each with the store that raised it.

The backend keeps the error, and the error's traceback keeps the backend: a cycle through C++ that Python cannot
collect. The traceback is cleared when any group is closed after the one of the error.
"""


class PollingStore(dist.Store):
    """The store that a backend reads through. It polls, while torch's client would hold its lock and wait.

    So the first collective of one group cannot block another group. A failed wait names the missing ranks, and
    releasing a group ends its waits. Each value carries the fingerprint of the rank that wrote it, and each reader
    compares it with its own. So a mismatch is found before the ranks connect, without more store operations.

    Args:
        thread: returns the store thread.
        key_prefix: returns the prefix of the group's keys. It is called when this rank first writes or waits.
        fingerprint: the group's fingerprint on this rank.
        ranks: the members' ranks in the world, in group order.
        timeout: timeout of a wait for which the backend gives none.
        refusal_keys: returns the keys of a published mismatch of the group, and of a mismatch or an abort of the mesh.
        writes_address: True for Gloo: each member writes its address under a key that ends in its group rank. False for
            NCCL: the first member writes for all. An address is published when this rank first waits, so it shows that
            the rank has entered a collective.
        compares: also compare the fingerprint with the one that the first rank published. It is needed where a rank may
            read no other member's address.
    """

    def __init__(
        self,
        thread: Callable[[], StoreThread],
        key_prefix: Callable[[], str],
        fingerprint: Fingerprint,
        ranks: Sequence[int],
        timeout: timedelta,
        *,
        refusal_keys: Callable[[], Sequence[str]],
        writes_address: bool,
        compares: bool = False,
    ) -> None:
        super().__init__()
        self._thread, self._key_prefix, self._fingerprint = thread, key_prefix, fingerprint
        self._ranks, self._timeout = ranks, timeout
        self._writes_address, self._compares, self._refusal_keys = writes_address, compares, refusal_keys
        self.new_timeout: timedelta | None = None  # if set, it overrides the timeout of the backend
        self._prefix = ""  # of the group's keys; known once this rank has written or waited
        self._address_unpublished = writes_address
        self.values: dict[str, bytes] = {}  # that the backend has read, by key
        self.addresses = Addresses(ranks, self.values)
        self._closed = ""  # the reason
        self.refusal: Decision | None = None  # a mismatch that a rank published, or that it aborted the mesh
        self.used = False  # the group has been in a collective
        self.operations, self.waited = 0, 0.0  # number of store operations; seconds of waiting
        self.written: set[str] = set()  # store keys

    def close(self, reason: str) -> list[str]:
        """End every wait; return the store keys that this rank has written."""
        self._closed = reason
        with _raising:
            raised = list(_raised.items())
        for error, raised_by in raised:
            store = raised_by()
            if store is None or store._closed:
                error.__traceback__ = None
        return [*self.written]

    def _ask(self, *operations: Operation) -> list[Any]:
        """Perform operations. Their timeout is a second more than that of the group's collectives."""
        limit = self.timeout.total_seconds()
        self.operations += len(operations)
        return self._thread().run(*operations, seconds=limit + timing.TIMING.report_missing)

    def _store_key(self, key: str) -> str:
        self._prefix = self._prefix or self._key_prefix()
        return f"{self._prefix}/{key}"

    @property
    def timeout(self) -> timedelta:
        """The timeout of the group's collectives."""
        return self.new_timeout or self._timeout

    # -- addresses ------------------------------------------------------------------------------------------------

    def unread_addresses(self) -> dict[int, str]:
        """The first members whose addresses this rank has not read, each with the store key of its address.

        None if this rank is in no first collective, or if ``connect`` gave it all addresses.
        """
        if not (self._prefix and self._writes_address):
            return {}
        return {rank: self._store_key(key) for rank, key in self.addresses.unread().items()}

    def set_addresses(self, encoded: Sequence[str]) -> None:
        """Set the addresses of all members, so that the backend need not read them from the store."""
        if self.addresses.set_all(encoded):
            self._address_unpublished = False

    # -- waiting ------------------------------------------------------------------------------------------------

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.used = True
        if not self._closed and all(key in self.values for key in keys):
            return
        start = time.monotonic()
        try:
            self._wait(keys, self.new_timeout or (self._timeout if timeout is None else timeout), start)
            return
        except PgmeshError as error:
            copy = without_frames(error, self._thread().store_hint() if isinstance(error, MissingRanksError) else "")
            if isinstance(error, MismatchError):
                self.refusal = Decision("mismatch", str(error))
        finally:
            self.waited += time.monotonic() - start
        with _raising:
            _raised[copy] = weakref.ref(self)
        try:
            raise copy
        finally:
            del copy  # else the error and this frame keep each other alive

    def _wait(self, keys: list[str], limit: timedelta, start: float) -> None:
        self._publish()
        end = start + limit.total_seconds()
        status = start + timing.TIMING.status_after
        pause = pauses()
        try:
            for key in keys:
                while not self._read(key):
                    now = time.monotonic()
                    if now >= end:
                        raise MissingRanksError(self._timeout_text(key, limit))
                    seconds = next(pause)
                    if seconds == timing.TIMING.longest_pause:
                        self._raise_refusal()
                    if now >= status:
                        status = end
                        self._thread().set_status(self._activity)
                    time.sleep(min(seconds, end - now))
        finally:
            if status == end:
                self._thread().set_status("")

    @property
    def _subject(self) -> str:
        return self._fingerprint.subject

    @property
    def _activity(self) -> str:
        return f"{_IN_FIRST_COLLECTIVE}{self._subject}, waiting for its members"

    def read_refusal(self, run: Callable[..., list[Any]]) -> Decision | None:
        """The refusal that a rank has published; None if there is none, or before this rank has written or waited.

        Args:
            run: performs operations on the store.
        """
        keys = self._refusal_keys() if self._prefix or self.values else ()
        for key, text in zip(keys, run(*map(Read, keys)) if keys else ()):
            found = None if text is None else Decision.unpack(key, text)
            if found is not None and (self.refusal is None or found.kind == "aborted"):  # the end of the mesh counts
                self.refusal = found
        return self.refusal

    def ask_for_refusal(self, seconds: float) -> Decision | None:
        """The same, read with a timeout; None if there is no answer."""
        with contextlib.suppress(PgmeshError):
            self.read_refusal(functools.partial(self._thread().run, seconds=seconds))
        return self.refusal

    def _raise_refusal(self) -> None:
        refusal = self.read_refusal(self._ask)
        if refusal is not None and (error := refusal.error()):
            raise error

    def _check_open(self) -> None:
        if self._closed:
            raise LifetimeError(self._closed)

    def _read(self, key: str) -> bool:
        """Read a key and cache its value. False if it has none yet."""
        self._check_open()
        full = self._store_key(key)
        (value,) = self._ask(Read(full))
        if value is None:
            return False
        encoded, _, body = value.partition(SEPARATOR)
        self._check_published(full, encoded)
        self.values[key] = body
        return True

    def _check_published(self, key: str, encoded: bytes) -> None:
        check_published(self._ask, self._refusal_keys()[0], self._fingerprint, encoded, key)

    def get(self, key: str) -> bytes:
        if key not in self.values:
            self.wait([key])
        return self.values[key]

    def _timeout_text(self, key: str, limit: timedelta) -> str:
        """Message about the members that are missing at a timeout.

        Args:
            key: the key that was waited for.
            limit: the timeout of that wait.

        Raises:
            MismatchError: the members' fingerprints differ.
        """
        self._raise_refusal()
        stem, _, last = key.rpartition("/")
        if self._writes_address:
            keys: dict[object, str] = {rank: self._store_key(f"{stem}/{i}") for i, rank in enumerate(self._ranks)}
        else:  # NCCL's first member writes the id of the group. For other keys the writing rank is unknown
            keys = {self._ranks[0] if last.isdecimal() else f"that writes {key}": self._store_key(key)}
        seen = dict(zip(keys, self._ask(*map(Read, keys.values()))))
        missing = [rank for rank, value in seen.items() if value is None]
        seconds = f"{limit.total_seconds():g} s"
        if not missing:
            for rank, value in seen.items():
                self._check_published(keys[rank], (value or b"").partition(SEPARATOR)[0])
            return f"{self._subject}: {key} was still missing after {seconds}, and was written just afterwards."
        known = [rank for rank in missing[:8] if isinstance(rank, int)]
        statuses = Statuses(math.inf, time.monotonic)
        statuses.read(self._ask, known)
        found = {rank: status for rank in known if (status := statuses.get(rank))}
        details = "".join(f"\n  last status of rank {rank}: {status}" for rank, status in found.items())
        details += self._hint_for([status.activity for status in found.values()])
        return (
            f"{self._subject}: {name_ranks(missing)} did not reach the first collective in {seconds}. "
            f"The group's ranks are {format_ranks(self._ranks)}.{details}"
        )

    def _hint_for(self, activities: Sequence[str]) -> str:
        """A hint if missing ranks wait in a different group with the same label."""
        if self._activity in activities:
            return (
                "\nThese are different groups with the same label: unnamed meshes are numbered in the order of "
                "creation, and groups by the number of their releases. Name the meshes, and release groups on all "
                "members."
            )
        label = self._subject.partition(ASKED_FOR)[0]
        if any(activity.startswith(f"{_IN_FIRST_COLLECTIVE}{label}") for activity in activities):
            return (
                "\nThese are different groups: an option asked for in a call makes a different group. Use "
                "mesh.configure for options, with the same options on all ranks."
            )
        return ""

    # -- writing, and other operations --------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        if self._writes_address:
            self.addresses.own[key] = bytes(value)
        if not self._address_unpublished:
            self.used = True
            self._write({key: bytes(value)})

    def _publish(self) -> None:
        """Publish this rank's address before it first waits."""
        self._check_open()
        if self._compares:
            self._compares = False
            key = self._store_key("options")
            self.written.add(key)
            (first,) = self._ask(CompareSet(key, self._fingerprint.encoded.decode()))
            self._check_published(key, first)
        if self._address_unpublished:
            self._write(self.addresses.own)
            self._address_unpublished = False

    def _write(self, values: dict[str, bytes]) -> None:
        full = {self._store_key(key): value for key, value in values.items()}
        self.written.update(full)  # before the check, so that a later close deletes these keys too
        self._check_open()
        self._ask(*(Raw("set", (key, self._fingerprint.encoded + SEPARATOR + value)) for key, value in full.items()))

    def _raw(self, operation: str, key: Any, *arguments: Any) -> Any:
        self.written.add(self._store_key(key))
        return self._ask(Raw(operation, (self._store_key(key), *arguments)))[0]

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(Raw("check", ([*map(self._store_key, keys)],)))[0])

    def add(self, key: str, amount: int) -> int:
        return int(self._raw("add", key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._raw("compare_set", key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._raw("delete_key", key))
