"""The group caches of this process in each world, and their end: with the world, the process or a fork.

It does not import ``GroupCache``: caches call it, and it calls their ``made``, ``forget``, ``close``,
``end_in_child`` and ``end_aborted``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh.errors import LifetimeError, NameTakenError, WorldError
from pgmesh.groups import teardown
from pgmesh.groups.numbers import MeshNumbers
from pgmesh.groups.watch import Watch
from pgmesh.groups.world import store_address, world_options, world_rank_and_size, world_store
from pgmesh.options import GroupOptions
from pgmesh.rendezvous.operations import Add, CompareSet, Delete, Operation, Raw, Read
from pgmesh.rendezvous.records import Decision
from pgmesh.rendezvous.statuses import RunningCollective, Statuses
from pgmesh.rendezvous.store_thread import StoreThread

log = logging.getLogger("pgmesh")

ABORTS_KEY = "pgmesh/aborts"
"""Store key with the number of aborts of meshes in this world."""

_LOG_DEAD_SECONDS = 1.0
"""Seconds after which the process, when it exits with an error, looks at no further group for members that ended."""


def publish_abort(run: Callable[..., list[Any]], key: str, text: str) -> str:
    """Publish that a mesh is aborted. All ranks of the world look for it at their next heartbeat.

    Args:
        run: performs operations on the store.
        key: store key under which the ranks of the mesh find it.
        text: the error message.

    Returns:
        The text of the rank that was first.
    """
    mine = Decision("aborted", text)
    (first,) = run(CompareSet(key, mine.pack()))
    if Decision.unpack(key, first).kind != "aborted":  # a mismatch ends no mesh that is connected
        run(Raw("set", (key, mine.pack())))
        first = mine.pack().encode()
    run(Add(ABORTS_KEY))
    return Decision.unpack(key, first).text


class Registry:
    """This process in one world: the store thread, the statuses of other ranks, the caches and their meshes' numbers.

    Args:
        store: the world's store.
        address: its host and port, for messages.
        rank: this process's rank.
        size: the number of ranks.
        options: the options of a group for which nothing else is configured.
    """

    def __init__(self, store: Any, address: str, rank: int, size: int, options: GroupOptions) -> None:
        self.store, self.address, self.rank, self.size, self.options = store, address, rank, size, options
        self.caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # in order of creation
        self.with_groups: set[Any] = set()  # caches that hold groups; kept alive
        self.forked = False  # this process is a forked child, and its parent is in the world
        self.watch: Watch | None = None  # started with the thread
        # At the last heartbeat: how many meshes ranks had aborted, and the keys of the registered meshes.
        self._aborts: tuple[bytes | None, list[str]] = None, []
        self.at_heartbeat: list[Callable[[Callable[[Operation], Any]], bool]] = []  # until they return False
        self._thread: StoreThread | None = None  # started by the first store operation
        self.numbers = MeshNumbers(rank)

    def store_thread(self) -> StoreThread:
        """The store thread of this process. The first call starts it."""
        with registering:
            if self.forked:
                raise LifetimeError(
                    "this process was forked from a rank and shares its sockets, so it cannot use the store."
                )
            if self._thread is None:
                thread = self._thread = StoreThread(self.store, self.address, self.rank, self.size)
                self.watch = Watch(self.statuses)
                thread.on_heartbeat = self._on_heartbeat
            return self._thread

    def new_statuses(self) -> Statuses:
        """For one call, which gives ranks that were cut off before it the time to send a heartbeat."""
        thread = self.store_thread()
        return Statuses(thread.lost_after, thread.answered_seconds, thread.has_ended)

    @functools.cached_property
    def statuses(self) -> Statuses:
        """For the watch and for ``shrink``: a silence is measured from its beginning, whoever reads."""
        return self.new_statuses()

    def _on_heartbeat(self, perform: Callable[[Operation], Any]) -> tuple[RunningCollective, ...]:
        """Look for aborted meshes, for lost ranks, and for collectives of this process that do not end."""
        caches = [cache for cache in self.open_caches() if cache.identity.registered]
        aborts = perform(Read(ABORTS_KEY)), [cache.identity.key for cache in caches]
        if aborts != self._aborts and aborts[0] is not None:
            for cache in caches:
                text = perform(Read(cache.identity.refusal_key))
                refusal = None if text is None else Decision.unpack(cache.identity.refusal_key, text)
                if refusal is not None and refusal.kind == "aborted":  # in another thread: this one sends heartbeats
                    teardown.in_background(cache.end_aborted, refusal.text)
        self._aborts = aborts  # only now: if the store fails, the next heartbeat looks again
        for look in tuple(self.at_heartbeat):
            if not look(perform):
                self.at_heartbeat.remove(look)
        return self.watch.find_running(perform) if self.watch is not None else ()

    def heartbeat_thread(self) -> StoreThread:
        """The store thread of this process, with its heartbeat started."""
        thread = self.store_thread()
        thread.start_heartbeat()
        return thread

    def clean_store(self, clean: Callable[[Callable[..., list[Any]]], object]) -> None:
        """Let a function delete store keys. A failed or stalled store is ignored."""
        with contextlib.suppress(WorldError, LifetimeError):
            thread = self.store_thread()
            if not thread.stalled:
                clean(lambda *operations: thread.run(*operations, seconds=1.0))

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete store keys. A failed or stalled store is ignored."""
        if keys:
            self.clean_store(lambda run: run(Delete(tuple(keys))))

    # -- caches -------------------------------------------------------------------------------------------------

    def add(self, cache: Any) -> None:
        """Add a new cache. Its mesh gets its local number.

        Raises:
            LifetimeError: this process is a forked child.
            NameTakenError: an open mesh has the same name.
        """
        if self.forked:
            raise LifetimeError(
                f"{cache.call}: this process was forked from rank {cache.rank} and shares its sockets, so it cannot "
                "create groups.\n\n"
                "  pgmesh.Layout(dp=2, tp=2)   # a layout needs no processes"
            )
        with registering:
            for other in self.open_caches():
                if cache.name is not None and other.name == cache.name:
                    raise NameTakenError(
                        f"a mesh named {cache.name!r} already exists, created at {other.call_site}: {other.call}.\n\n"
                        f"  mesh = pgmesh.meshes()[{cache.name!r}]    # use that one\n"
                        f"  pgmesh.meshes()[{cache.name!r}].close()   # or close it first, or use another name"
                    )
            if cache.identity.generation == 0:  # a mesh created by ``shrink`` has its number
                cache.identity.set_number(self.numbers, counts=cache.identity.pickled_number is None)
            self.caches[next(serials)] = cache

    def keep(self, cache: Any) -> None:
        """Keep a cache alive, from its first group on. An unpickled mesh is counted now.

        Raises:
            NameTakenError: it has no name, and the layout of another open mesh without a name.
        """
        if cache in self.with_groups:
            return
        with registering:
            for other in self.open_caches():
                if cache.name is None and other is not cache and (other.name, other.layout) == (None, cache.layout):
                    key = next(key for key, each in open_caches_by_name().items() if each is other)
                    raise NameTakenError(
                        f"two unnamed meshes differ only in the order of creation: {cache.call}, created at "
                        f"{other.call_site} and at {cache.call_site}. Ranks that use them in different orders would "
                        "use different groups.\n\n"
                        f"  pgmesh.meshes()[{key!r}].close()   # close the other, if it is no longer used\n"
                        f"  {cache.layout.spell('ProcessGroupMesh', world=cache.world_size, name='actor')}   "
                        "# or name this one"
                    )
            if cache.identity.pickled_number is not None:  # only now, since ranks that load no mesh count none
                cache.identity.set_number(self.numbers, counts=True)
            self.with_groups.add(cache)

    def stop_keeping(self, cache: Any) -> None:
        """Keep a cache alive no longer: it has no groups."""
        with registering:
            self.with_groups.discard(cache)

    def open_caches(self) -> list[Any]:
        """The caches that are not closed, in the order of creation."""
        with registering:
            return [cache for cache in self.caches.values() if cache.ended is None]

    def leave(self, reason: str) -> None:
        """Leave the world: publish the reason, and end the store thread."""
        if self._thread is not None:
            self._thread.stop(reason)
        self.store = None  # else a mesh that outlives the world keeps the connection open

    def fork(self) -> None:
        """Mark this process as a forked child."""
        if self._thread is not None:
            self._thread.close_listener()
        self.forked, self._thread = True, None


_registries: weakref.WeakKeyDictionary[Any, Registry] = weakref.WeakKeyDictionary()
serials = itertools.count()  # of caches
registering = threading.RLock()  # guards the registries; never held while waiting for a cache's lock


def current_registry() -> Registry:
    """This process in torch's default world.

    Raises:
        WorldError: torch.distributed is not initialised.
    """
    rank, size = world_rank_and_size()
    world: Any = dist.group.WORLD
    registry = _registries.get(world)
    if registry is None:
        with registering:
            of_default = Registry(world_store(), store_address(), rank, size, world_options())
            registry = _registries.setdefault(world, of_default)
    return registry


def store_thread() -> StoreThread:
    """The store thread of this process."""
    return current_registry().store_thread()


def open_caches_by_name() -> dict[str, Any]:
    """The open caches of this world in the order of creation.

    The keys are names; for unnamed meshes the call, with a number if the same call created several.
    """
    if not dist.is_initialized():
        return {}
    with registering:
        caches = current_registry().open_caches()
    names, found = {cache.name for cache in caches}, dict[str, Any]()
    for cache in caches:
        calls = (cache.call + f" ({number})" * (number > 1) for number in itertools.count(1))
        key = cache.name or next(call for call in calls if call not in found and call not in names)
        found[key] = cache
    return found


# -- the end ------------------------------------------------------------------------------------------------------


def all_caches() -> list[Any]:
    """The caches of all worlds of this process, closed ones too."""
    with registering:
        return [cache for registry in list(_registries.values()) for cache in registry.caches.values()]


def _forget(group: Any) -> None:
    for cache in all_caches():
        cache.forget(group)


def _end_world(reason: str) -> None:
    for cache in all_caches():
        cache.close(f"ended when {reason}.")
    for registry in list(_registries.values()):
        registry.leave("has left the world")


def _log_dead() -> None:
    """Log the members of one group that have ended: errors of asynchronous collectives do not name them."""
    deadline = time.monotonic() + _LOG_DEAD_SECONDS
    for group in [group for cache in all_caches() for group in cache.made()]:
        if text := teardown.describe_dead(group):
            log.warning("%s", text)
        if text or time.monotonic() > deadline:
            return


def _at_exit() -> None:
    """Destroy all groups while Python still runs. Their threads would outlive it."""
    for registry in list(_registries.values()):
        registry.leave("its process has exited")
    if getattr(sys, "last_value", None) is not None:  # an error ends the process
        _log_dead()
    teardown.finish_background()
    for cache in all_caches():
        cache.close("ended with its process.", at_exit=True)
    teardown.wait_for_collectives()


def _in_child() -> None:
    """Invalidate all groups in a forked child: their threads do not exist there."""
    global registering
    registering = threading.RLock()  # a thread of the parent may hold the old one
    teardown.keep_all_groups()
    if dist.is_initialized():
        current_registry().fork()
    for cache in all_caches():
        cache.end_in_child("was created before this process was forked.")


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
torch_private.on_destroy.append(_forget)
torch_private.on_world_end.append(_end_world)
