"""The store that pgmesh gives to a backend: it polls, and an error names the missing ranks.

torch's own store client holds a lock while it waits. This store sends each operation through the store thread, and
polls in the backend's thread. Its methods run in these threads:

- the methods of torch's ``Store``, such as ``wait`` and ``set``: in the thread that makes the group or enters a
  collective, or in one of the backend's.
- ``is_refused`` and ``GlooStore.unread_addresses``: in the store thread, at a heartbeat, so they ask it for nothing.
- all others: in a thread of pgmesh's caller or of its background work, also while a backend waits.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError
from pgmesh.rendezvous import backend_errors, timing
from pgmesh.rendezvous.comparing import check_published
from pgmesh.rendezvous.missing import activity, describe_missing
from pgmesh.rendezvous.operations import CompareSet, Operation, Raw, Read, Run
from pgmesh.rendezvous.records import Decision, Fingerprint
from pgmesh.rendezvous.refusals import Refusals
from pgmesh.rendezvous.rounds import pauses
from pgmesh.rendezvous.store_thread import StoreThread

SEPARATOR = b"\0"
"""Separates a rank's fingerprint from the value that it wrote."""


class PollingStore(dist.Store):
    """The store that a backend reads through. It polls, while torch's client would hold its lock and wait.

    So the first collective of one group cannot block another group. A failed wait names the missing ranks, and
    releasing a group ends its waits. Each value carries the fingerprint of the rank that wrote it, and each reader
    compares it with its own. So a mismatch is found before the ranks connect. That needs no further store operation,
    except one if ``compares`` is set, and one that publishes a mismatch.

    Args:
        thread: returns the store thread.
        make_prefix: returns the prefix of the group's keys, within so many seconds. It is called when this rank first
            writes or waits.
        fingerprint: the group's fingerprint on this rank.
        ranks: the members' ranks in the world, in group order.
        timeout: timeout of a wait for which the backend gives none.
        refusals: what other ranks may publish to end the waits.
        compares: also compare the fingerprint with the one that the first rank published. Members with different
            backends need it: they write different keys, so they never read each other's values.
    """

    def __init__(
        self,
        thread: Callable[[], StoreThread],
        make_prefix: Callable[[float], str],
        fingerprint: Fingerprint,
        ranks: Sequence[int],
        timeout: timedelta,
        *,
        refusals: Refusals,
        compares: bool = False,
    ) -> None:
        super().__init__()
        self._thread, self._make_prefix, self._fingerprint = thread, make_prefix, fingerprint
        self._ranks, self._timeout = ranks, timeout
        self._compares, self._refusals = compares, refusals
        self.new_timeout: timedelta | None = None  # if set, it overrides the timeout of the backend
        self._known_prefix = ""  # of the group's keys; known once this rank has written or waited
        self.closed = ""  # why it waits no longer; "" while it is open
        # What this rank has read and written:
        self.values: dict[str, bytes] = {}  # that the backend has read, by key
        self.written: set[str] = set()  # store keys
        self.used = False  # the group has been in a collective
        # For ``mesh.stats``:
        self.operations, self.waited = 0, 0.0  # number of store operations; seconds of waiting

    def close(self, reason: str) -> list[str]:
        """End every wait; return the store keys that this rank has written."""
        self.closed = reason
        backend_errors.clear_frames()
        return [*self.written]

    def _run_until(self, deadline: float = math.inf) -> Run:
        """The function with which one call performs its operations."""

        def run(*operations: Operation) -> list[Any]:
            self.operations += len(operations)
            return self._thread().run(*operations, seconds=self._seconds_left(deadline))

        return run

    def _seconds_left(self, deadline: float) -> float:
        """The timeout of an operation: a second more than the time to the deadline, or than the group's timeout.

        Raises:
            LifetimeError: the store is closed.
        """
        if self.closed:
            raise LifetimeError(self.closed)
        left = min(self.timeout.total_seconds(), deadline - time.monotonic())
        return max(0.0, left) + timing.TIMING.report_missing

    def _prefix(self, deadline: float = math.inf) -> str:
        """The prefix of the group's keys. The first call may register the mesh."""
        self._known_prefix = self._known_prefix or self._make_prefix(self._seconds_left(deadline))
        return self._known_prefix

    def _store_key(self, key: str) -> str:
        return f"{self._prefix()}/{key}"

    @property
    def timeout(self) -> timedelta:
        """The timeout of the group's collectives."""
        return self._timeout if self.new_timeout is None else self.new_timeout

    # -- waiting ------------------------------------------------------------------------------------------------

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.used = True
        if not self.closed and all(key in self.values for key in keys):
            return
        limit = self.timeout if timeout is None or self.new_timeout is not None else timeout
        backend_errors.raise_inside(self._error_of_wait(keys, limit.total_seconds()), self)

    def _error_of_wait(self, keys: list[str], limit: float) -> PgmeshError | None:
        """Wait, and return the error that ended it, without its frames; None for none."""
        start = time.monotonic()
        try:
            self._wait(keys, start, limit)
            return None
        except PgmeshError as error:
            if isinstance(error, MismatchError):
                self._refusals.known = Decision("mismatch", str(error))
            hint = self._thread().store_hint() if isinstance(error, MissingRanksError) else ""
            return backend_errors.without_frames(error, hint)
        finally:
            self.waited += time.monotonic() - start

    def _wait(self, keys: list[str], start: float, limit: float) -> None:
        """Poll until all keys have a value, or until one of these errors:

        LifetimeError        this rank has closed the store
        MismatchError        a value has another fingerprint, or a rank has published a mismatch
        LifetimeError        a rank has published that it aborted the mesh
        MissingRanksError    the time is over
        WorldError           the world's store does not answer
        """
        deadline = start + limit
        run, pace, shows_status = self._run_until(deadline), self._thread().pace, False
        pause, longest_pause = pauses(pace), timing.TIMING.longest_pause * pace
        self._prefix(deadline)  # in the time of this wait
        try:
            self._compare_with_first(run)
            for key in keys:
                while not self._read(run, key):
                    now = time.monotonic()
                    if now >= deadline:
                        raise MissingRanksError(self._timeout_text(run, key, limit))
                    seconds = next(pause)
                    if seconds == longest_pause:
                        self._refusals.check(run)
                    if not shows_status and now >= start + timing.TIMING.status_after:
                        shows_status = True
                        self._thread().set_status(activity(self._fingerprint.subject))
                    time.sleep(min(seconds, deadline - now))
        finally:
            if shows_status:
                self._thread().set_status("")

    def find_refusal(self, seconds: float) -> Decision | None:
        """The refusal that holds; the one that this rank knows if the store does not answer in time.

        Args:
            seconds: the timeout.
        """
        if self._known_prefix or self.values:  # otherwise the mesh may not be registered
            with contextlib.suppress(PgmeshError):
                return self._refusals.read(functools.partial(self._thread().run, seconds=seconds))
        return self._refusals.known

    def is_refused(self, run: Run) -> bool:
        """True if a mismatch or an abort ends the waits of this group. It is called in the store thread."""
        refusal = self._refusals.read(run) if self._known_prefix else None
        return refusal is not None and refusal.kind != "duplicate"

    def _read(self, run: Run, key: str) -> bool:
        """Read a key and cache its value. False if it has none yet."""
        full = self._store_key(key)
        value: bytes | None = self._ask_for(run, full)
        if value is not None:
            self.values[key] = self._compare(run, full, value)
        return value is not None

    def _ask_for(self, run: Run, key: str) -> Any:
        """Read a store key; None if it has no value yet."""
        return run(Read(key))[0]

    def _compare(self, run: Run, key: str, value: bytes) -> bytes:
        """Compare the fingerprint in a value with this rank's one; return the value without it.

        Raises:
            MismatchError: they differ.
        """
        encoded, _, body = value.partition(SEPARATOR)
        check_published(run, self._refusals.keys().group, self._fingerprint, encoded, key)
        return body

    def get(self, key: str) -> bytes:
        if key not in self.values:
            self.wait([key])
        return self.values[key]

    def _timeout_text(self, run: Run, key: str, limit: float) -> str:
        """Message about the members that are missing at a timeout.

        Args:
            key: the key that was waited for.
            limit: the timeout of that wait in seconds.

        Raises:
            MismatchError: the members' fingerprints differ.
        """
        self._refusals.check(run)
        keys = self._writers_of(key)
        values = run(*map(Read, keys.values()))
        missing = [rank for rank, value in zip(keys, values) if value is None]
        subject, seconds = self._fingerprint.subject, f"{limit:g} s"
        if missing:
            return describe_missing(run, subject, self._ranks, missing, seconds)
        for each, value in zip(keys.values(), values):
            self._compare(run, each, value)
        return f"{subject}: {key} was still missing after {seconds}, and was written just afterwards."

    def _writers_of(self, key: str) -> dict[int | str, str]:
        """The ranks that write this key and those like it, each with its store key; text for an unknown rank."""
        # NCCL's first member writes the id of the group.
        writer = self._ranks[0] if key.rpartition("/")[2].isdecimal() else f"that writes {key}"
        return {writer: self._store_key(key)}

    # -- writing, and other operations --------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        self.used = True
        run = self._run_until()
        run(*self._writes({key: bytes(value)}))

    def _compare_with_first(self, run: Run) -> None:
        """Compare the fingerprint with that of the first rank, once, if needed."""
        if self._compares:
            key = self._store_key("options")
            self.written.add(key)
            (first,) = run(CompareSet(key, self._fingerprint.encoded.decode()))
            self._compares = False  # only now: the store may have failed
            self._compare(run, key, first)

    def _writes(self, values: dict[str, bytes]) -> list[Operation]:
        """The operations that write these values."""
        full = {self._store_key(key): value for key, value in values.items()}
        self.written.update(full)  # before the write, so that a later close deletes these keys too
        return [Raw("set", (key, self._fingerprint.encoded + SEPARATOR + value)) for key, value in full.items()]

    def _raw(self, operation: str, key: Any, *arguments: Any) -> Any:
        run, full = self._run_until(), self._store_key(key)
        self.written.add(full)
        return run(Raw(operation, (full, *arguments)))[0]

    def check(self, keys: list[str]) -> bool:
        run = self._run_until()
        return bool(run(Raw("check", ([*map(self._store_key, keys)],)))[0])

    def add(self, key: str, amount: int) -> int:
        return int(self._raw("add", key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._raw("compare_set", key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._raw("delete_key", key))
