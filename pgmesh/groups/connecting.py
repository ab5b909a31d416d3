"""The search of Gloo groups for their members, and the connections.

A lazy Gloo backend connects a pair of ranks when it first uses it, and needs the address of the other one then. Of each
pair one side is *passive*: it waits inside the operation until the other side has started the pair too. So a rank that
posts a receive first might wait for a rank that has no reason yet to use the group. Therefore:

1. Making a group publishes this member's address, with its fingerprint: one ``set``, whose answer is not awaited.
2. A backend that waits for addresses looks for them now and then. From ``PAIRS_AFTER`` seconds after the group was
   made, so does a thread, which ends once no group is left. When all members have made the group, the addresses of the
   others are taken, and the fingerprints compared.
3. The thread starts all pairs, and waits for none. From then on the group is as one of ``new_group``.

A backend waits in C++ between its looks, in the ``HashStore`` of its ``GroupStore``. To end such a wait, the addresses
are set to zeros, which Gloo refuses.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pgmesh._util import stores
from pgmesh._util.formatting import format_ranks, name_ranks
from pgmesh.errors import MismatchError, MissingRanksError, PgmeshError
from pgmesh.groups.naming import Fingerprint

log = logging.getLogger("pgmesh")

PAIRS_AFTER = 0.25
"""Seconds after a group was made, from which on the thread looks for its members and connects its pairs. If a backend
finds the members, the pairs wait as long from then on. Until then they would slow the start of a job."""

MOST_PAIRED = 64
"""The largest group whose pairs the thread connects. A larger one connects those that it uses, to save descriptors."""

_LONGEST_YOUNG_PAUSE = 0.02
_WARN_SECONDS = 10.0
_NOTES = "pgmesh/waits/"
_SEPARATOR = b"\0"
_REFUSED = bytes(16)
"""An address that Gloo refuses."""


_raised: weakref.WeakSet[PgmeshError] = weakref.WeakSet()  # by stores, in operations of backends


def clear_frames() -> None:
    """Clear the frames of errors that backends keep: they refer to the operation, and so to the backend."""
    for error in [*_raised]:
        error.__traceback__ = None


class GroupStore(dist.Store):
    """The store of one group's Gloo backends. It refers to no group: a backend keeps the errors that it raised.

    Args:
        name: the group's name in torch, the prefix of its keys.
        fingerprint: the group's fingerprint on this rank.
        ranks: the members' ranks in the world, in group order.
        own: this rank.
        timeout: the group's timeout.
        client: returns the client of the world's store, for short operations.
    """

    def __init__(
        self,
        name: str,
        fingerprint: Fingerprint,
        ranks: Sequence[int],
        own: int,
        timeout: timedelta,
        client: Callable[[], Any],
    ) -> None:
        super().__init__()
        self.name, self.fingerprint, self.ranks, self.limit = name, fingerprint, ranks, timeout
        self.waiting_since: float | None = None
        self.own_operations = 0  # that pgmesh has entered: the start of the pairs
        self.warned = False  # the others can read that it waits
        self.complete_at: float | None = None  # when all members were known
        self.look: Callable[[GroupStore], object] = lambda store: None  # for members
        self.made_at = self.next_look = time.monotonic()
        self.pairs_at = self.made_at + PAIRS_AFTER  # when the thread looks for members, and starts the pairs
        self.own: dict[str, bytes] = {}  # this rank's address, by key
        self._started: set[str] = set()  # the addresses that a backend has taken, to start a pair
        self._client, self._place = client, ranks.index(own)
        self._local: Any = dist.HashStore()
        self._error: PgmeshError | None = None
        self._completing = threading.RLock()  # guards the two fields that say whether it has ended or is complete

    # -- called by the backend, in any thread -----------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        self.own[key] = bytes(value)
        self._local.set(key, value)

    def get(self, key: str) -> bytes:
        self._started.add(key)
        return bytes(self._local.get(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._local.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        since = time.monotonic()
        self.waiting_since = self.waiting_since or since
        try:
            while not self._local.check(keys) and (left := since + self.limit.total_seconds() - time.monotonic()) > 0:
                self.look(self)
                pause = min(self.next_look - time.monotonic(), left)
                with contextlib.suppress(RuntimeError):  # the time is over
                    # At least a millisecond: a timeout of 0 is none.
                    self._local.wait(keys, timedelta(seconds=max(pause, 0.001)))
        finally:  # a signal handler may raise
            self.waiting_since = None
        found = self._error is None and self._local.check(keys)
        if self.warned:
            self.note("" if found else "waited, until it gave up,")
            self.warned = not found
        if not found:
            raise self._error_of_wait()

    def _error_of_wait(self) -> PgmeshError:
        """A new error that says why a wait has ended."""
        missing, limit = self.missing() if self._error is None else (), self.limit.total_seconds()
        if self._error is None:
            error: PgmeshError = MissingRanksError(f"{self.describe(missing, limit)}{self.notes(missing)}")
        else:
            error = type(self._error)(str(self._error))
        _raised.add(error)
        return error

    # -- the members ------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Publish this rank's address, with its fingerprint. No answer of the store is awaited."""
        for key, address in self.own.items():
            self._client().set(f"{self.name}/{key}", self.fingerprint.encoded + _SEPARATOR + address)

    @functools.cached_property
    def _others(self) -> list[str]:
        """The keys of the other members' addresses, which end in their places in the group.

        It is read once the backends have set this rank's addresses.
        """
        places = [place for place in range(len(self.ranks)) if place != self._place]
        return [f"{key.rpartition('/')[0]}/{place}" for place in places for key in self.own]

    @functools.cached_property
    def others_keys(self) -> list[str]:
        """The same in the world's store."""
        return [f"{self.name}/{key}" for key in self._others]

    def missing(self) -> tuple[int, ...]:
        """The ranks that have not made this group."""
        if self.complete_at is not None:
            return ()
        client = self._client()
        keys = [key for key in self.others_keys if not client.check([key])]
        return tuple(dict.fromkeys(self.ranks[int(key.rpartition("/")[2])] for key in keys))

    def addresses(self) -> list[bytes]:
        """The addresses of the other members; none before all are known."""
        if self.complete_at is None:
            return []
        return [self._local.get(key) for key in self._others]

    def describe(self, missing: Sequence[int], seconds: float) -> str:
        """Message about the members that have not made the group."""
        who = f"{name_ranks(missing)} did not make this group" if missing else "the members were not found"
        return f"{self.fingerprint.subject}: {who} in {seconds:g} s. Its ranks are {format_ranks(tuple(self.ranks))}."

    def note(self, does: str) -> None:
        """Let the other ranks read what this rank does in this group; "" for nothing any more.

        Args:
            does: such as "waits".
        """
        key, ranks = f"{_NOTES}{self.ranks[self._place]}", format_ranks(tuple(self.ranks))
        with contextlib.suppress(RuntimeError, OSError):  # the store has failed
            if does:
                text = f"rank {self.ranks[self._place]} {does} in {self.fingerprint.subject} with ranks {ranks}"
                self._client().set(key, text)
            else:
                self._client().delete_key(key)

    def notes(self, missing: Iterable[int]) -> str:
        """The notes of these ranks about where they wait, as far as there are any."""
        found = [stores.read(self._client(), f"{_NOTES}{rank}") for rank in missing]
        return "".join(f"\n  {note.decode()}" for note in found if note is not None)

    def complete(self, values: Sequence[bytes], pairs_after: float = 0.0) -> None:
        """Take the values under ``others_keys``, unless a member has another fingerprint.

        Args:
            pairs_after: seconds from now in which the pairs are not started.

        Raises:
            MismatchError: it has. The waits of this group end with it.
        """
        parts = [value.partition(_SEPARATOR) for value in values]
        if text := self.fingerprint.mismatch([encoded for encoded, *_ in parts]):
            error = MismatchError(text)
            self.end(error)
            raise error
        with self._completing:
            if self._error is None and self.complete_at is None:
                self.complete_at = time.monotonic()
                self.pairs_at = max(self.pairs_at, self.complete_at + pairs_after)
                self._set_addresses([address for *_, address in parts])

    def end(self, error: PgmeshError) -> None:
        """End every wait for an address with this error. The first one counts."""
        with self._completing:
            if self._error is None:
                self._error = error
                if self.complete_at is None:
                    self._set_addresses(itertools.repeat(_REFUSED))

    def _set_addresses(self, addresses: Iterable[bytes]) -> None:
        for key, address in zip(self._others, addresses):
            self._local.set(key, address)

    @property
    def age(self) -> float:
        """Seconds since this process has made the group."""
        return time.monotonic() - self.made_at

    @property
    def next_step(self) -> float:
        """The time when the thread looks for members, or starts the pairs."""
        return max(self.pairs_at, self.next_look if self.complete_at is None else 0.0)

    def pause(self, pace: float) -> None:
        """Look again after a part of the group's age, in seconds at most times the pace; later if it is large."""
        young = min(max(0.002, self.age / 8), _LONGEST_YOUNG_PAUSE) * max(1.0, len(self.ranks) / MOST_PAIRED)
        self.next_look = time.monotonic() + (young if self.age < 1.0 else min(self.age / 10, pace))

    @property
    def has_started_pairs(self) -> bool:
        """True if this rank has started the pairs with all members."""
        return self._started.issuperset(self._others)

    @property
    def has_ended(self) -> bool:
        return self._error is not None

    @property
    def left_key(self) -> str:
        """The key of the number of members that have ended the group."""
        return f"{self.name}/left"

    def leave(self) -> None:
        """Count this member as one that has ended the group. The last one deletes the group's keys."""
        client = self._client()
        if client.add(self.left_key, 1) == len(self.ranks):
            for key in [*self.others_keys, *(f"{self.name}/{key}" for key in self.own), self.left_key]:
                client.delete_key(key)


class Connector:
    """The connections of this process's Gloo groups in one world, until their pairs are started.

    Args:
        rank: this process's rank.
        client: returns the client of the world's store, for short operations.
        error: makes the error for a failure of the store.
        pace: factor of the pauses between looks for groups that have been missing members for long.
    """

    def __init__(
        self, rank: int, client: Callable[[], Any], error: Callable[[Exception], PgmeshError], pace: float
    ) -> None:
        self._rank, self._client, self._error, self._pace = rank, client, error, pace
        self._open: dict[GroupStore, Callable[[], object]] = {}  # each with what starts its pairs
        self._changed = threading.Condition()  # guards ``_open`` and the next two
        self._runs = False  # the thread
        self._looking = threading.RLock()  # held during a look, so that no member's keys go meanwhile
        self._wakes_at = 0.0

    def add(self, store: GroupStore, start_pairs: Callable[[], object]) -> None:
        """Find the other members of a group that this process has made, and then connect its pairs.

        Args:
            start_pairs: connects all pairs, and waits for none.
        """
        with self._changed:
            if not self._runs:
                _thread.start_new_thread(self._run, ())  # a Thread waits until it has started, for long on a busy core
                self._runs = True
            elif store.next_step < self._wakes_at:
                self._changed.notify()
            self._open[store], store.look = start_pairs, self._look

    def _look(self, store: GroupStore) -> None:
        """Look for members in a thread of a backend, which waits for them."""
        self._find_members([*self._open], PAIRS_AFTER)

    def remove(self, store: GroupStore) -> None:
        """Forget a group that ends."""
        with self._looking:
            self._forget(store)

    def _forget(self, store: GroupStore) -> None:
        with self._changed:
            self._changed.notify()
            self._open.pop(store, None)

    def stop(self) -> None:
        """Forget all groups, and wait for the end of the thread."""
        with self._changed:
            self._open.clear()
            self._changed.notify()
            self._changed.wait_for(lambda: not self._runs)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._turn():  # nothing refers to a group while the thread ends
            pass

    def _turn(self) -> bool:
        """Wait until there is something to do, and do it. False at the end."""
        with self._changed:
            while self._open and (pause := min(each.next_step for each in self._open) - time.monotonic()) > 0:
                self._wakes_at = time.monotonic() + pause
                self._changed.wait(pause)
            if not self._open:
                self._runs = False
                self._changed.notify_all()
                return False
            stores = [*self._open]
        self._find_members(stores)
        self._start_pairs(stores)
        return True

    def _find_members(self, stores: Sequence[GroupStore], pairs_after: float = 0.0) -> None:
        """Look for members if it is time for a group."""
        with self._looking:
            incomplete = [each for each in stores if each in self._open and each.complete_at is None]
            due = [each for each in incomplete if time.monotonic() >= each.next_look]
            if not due:
                return
            try:
                self._complete(self._with_all_members(incomplete, due), pairs_after)
                for each in due:
                    each.pause(self._pace)
                    self._warn_if_late(each)
            except Exception as error:  # of a store in Python, any
                self._give_up(error)

    def _with_all_members(self, incomplete: Sequence[GroupStore], due: Sequence[GroupStore]) -> Sequence[GroupStore]:
        """The groups that all members have made; of those that are not due, only if it is all of them.

        Mostly, groups are made together, here and on other ranks. Then one operation is enough.
        """
        client = self._client()
        if client.check([key for each in incomplete for key in each.others_keys]):
            return incomplete
        return [each for each in due if len(incomplete) > 1 and client.check(each.others_keys)]

    def _complete(self, found: Sequence[GroupStore], pairs_after: float) -> None:
        """Give each group the addresses of its members."""
        if not found:
            return
        values = iter(read_all(self._client(), [key for each in found for key in each.others_keys]))
        for each in found:
            try:
                each.complete([next(values) for _ in each.others_keys], pairs_after)
            except MismatchError as error:
                log.warning("rank %s: %s", self._rank, error)
            if each.has_ended or len(each.ranks) > MOST_PAIRED:
                self._forget(each)

    def _start_pairs(self, stores: Sequence[GroupStore]) -> None:
        """Start the pairs of groups whose members are known, unless one has left."""
        for each in stores:
            if each.complete_at is None or time.monotonic() < each.next_step or (start := self._open.get(each)) is None:
                continue
            with contextlib.suppress(Exception):  # it has ended meanwhile, or the store has failed
                if not each.has_started_pairs and not self._client().check([each.left_key]):
                    # After a member has left, Gloo would log that a listener refuses.
                    start()
                    each.own_operations = 1
            self._forget(each)

    def _warn_if_late(self, store: GroupStore) -> None:
        """Say in the log and in the store where this rank has been waiting for long."""
        since = store.waiting_since
        if since is None or store.warned or store.has_ended:
            return
        seconds = time.monotonic() - since
        if seconds >= min(_WARN_SECONDS, store.limit.total_seconds() / 3):
            store.warned = True
            store.note("waits")
            missing = store.missing()
            text = f"{store.describe(missing, round(seconds, 1))}{store.notes(missing)}"
            log.warning("rank %s waits. %s", self._rank, text)

    def _give_up(self, error: Exception) -> None:
        """The store has failed: end the waits of all groups that miss members."""
        reason = self._error(error)
        with self._changed:
            for store in [*self._open]:
                store.end(reason)
            self._open.clear()


def read_all(client: Any, keys: Sequence[str]) -> list[bytes]:
    """Read keys that the store has; at once, if the store can."""
    return list(client.multi_get(keys)) if client.has_extended_api() else [client.get(key) for key in keys]
