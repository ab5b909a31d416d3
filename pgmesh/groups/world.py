"""This process in each of its worlds, with the index of its meshes.

It does not import ``MeshGroups``: meshes add themselves. ``ending.py`` ends them with the world, the process or a fork.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh.errors import LifetimeError, NameTakenError, WorldError
from pgmesh.groups import background
from pgmesh.groups.aborts import Aborts
from pgmesh.groups.default_world import store_address, world_options, world_rank_and_size
from pgmesh.groups.group import Left
from pgmesh.groups.registration import Registration
from pgmesh.groups.watch import Watch
from pgmesh.options import GroupOptions
from pgmesh.rendezvous.operations import Delete, Run
from pgmesh.rendezvous.statuses import RunningCollective, Statuses
from pgmesh.rendezvous.store_thread import StoreThread
from pgmesh.rendezvous.world_store import WorldStore


class World:
    """This process in one world: the store thread, the statuses of other ranks, and its meshes.

        ``meshes``         all that are referred to, in order of creation; closed ones too
        ``open_meshes``    those of them that have not ended
        ``with_groups``    those that hold groups, and so are kept alive

    Args:
        store: the world's store.
        address: its host and port, for messages.
        rank: this process's rank.
        size: the number of ranks.
        options: the options of a group for which nothing else is configured.
    """

    def __init__(self, store: Any, address: str, rank: int, size: int, options: GroupOptions) -> None:
        self.store, self.address, self.rank, self.size, self.options = store, address, rank, size, options
        self.meshes: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self.with_groups: set[Any] = set()
        self.forked = False  # this process is a forked child, and its parent is in the world
        self._aborts = Aborts()
        self.at_heartbeat: list[Callable[[Run], bool]] = []  # until they return False
        self._thread: StoreThread | None = None  # started by the first store operation
        self._statuses: Statuses | None = None
        self.registration = Registration(rank, self.store_thread)

    def store_thread(self) -> StoreThread:
        """The store thread of this process. The first call starts it."""
        with registering:
            if self.forked:
                raise LifetimeError(
                    "this process was forked from a rank and shares its sockets, so it cannot use the store."
                )
            if self._thread is None:
                thread = self._thread = StoreThread(WorldStore(self.store, self.address, self.rank, self.size))
                thread.heartbeat.look = self._look
            return self._thread

    def new_statuses(self) -> Statuses:
        """For one call, which gives ranks that were cut off before it the time to send a heartbeat."""
        thread = self.store_thread()
        return Statuses(thread.lost_after, thread.store.clock.answered_seconds, thread.store.listeners.has_ended)

    @property
    def statuses(self) -> Statuses:
        """Shared by the watch and ``shrink``: a silence begins when one of them first reads the last heartbeat."""
        with registering:
            self._statuses = self._statuses or self.new_statuses()
            return self._statuses

    @functools.cached_property
    def watch(self) -> Watch:
        """Finds out why collectives of this process do not end."""
        return Watch(self.statuses)

    def _look(self, run: Run) -> tuple[RunningCollective, ...]:
        """Look for aborted meshes, for lost ranks, and for collectives of this process that do not end.

        Each look for a lost rank may wait for a host that does not answer. If these take long, the next heartbeat goes
        on with the others: this process must not seem lost itself.
        """
        self._aborts.look(run, [mesh for mesh in self.open_meshes() if mesh.identity.registered])
        end = time.monotonic() + self.statuses.lost_after / 4
        for look in tuple(self.at_heartbeat):
            self.at_heartbeat.remove(look)
            self.at_heartbeat.append(look)  # the last one of the next heartbeat
            if not look(run):
                self.at_heartbeat.remove(look)
            if time.monotonic() > end:
                break
        return self.watch.find_running(run)

    def heartbeat_thread(self) -> StoreThread:
        """The store thread of this process, with its heartbeat started."""
        thread = self.store_thread()
        thread.start_heartbeat()
        return thread

    def clean(self, left: Left) -> None:
        """Delete what ended groups have left in the store. A failed or stalled store is ignored.

        The caller holds no lock: this waits for the store.
        """
        if background.exiting.is_set():  # this process has left the world
            return
        tasks: list[Callable[..., object]] = [each.leave for each in left.rounds]
        if left.keys:
            tasks.append(lambda run: run(Delete(tuple(left.keys))))
        for task in tasks:
            with contextlib.suppress(WorldError, LifetimeError):
                thread = self.store_thread()
                if not thread.stalled:
                    task(functools.partial(thread.run, seconds=1.0))

    # -- meshes -------------------------------------------------------------------------------------------------

    def add(self, mesh: Any) -> None:
        """Add a new mesh. It gets its local number.

        Raises:
            LifetimeError: this process is a forked child.
            NameTakenError: an open mesh has the same name.
        """
        if self.forked:
            raise LifetimeError(
                f"{mesh.identity.call}: this process was forked from rank {mesh.rank} and shares its sockets, so it "
                "cannot create groups.\n\n"
                "  pgmesh.Layout(dp=2, tp=2)   # a layout needs no processes"
            )
        with registering:
            for other in self.open_meshes():
                if mesh.name is not None and other.name == mesh.name:
                    raise NameTakenError(
                        f"a mesh named {mesh.name!r} already exists, created at {other.call_site}: "
                        f"{other.identity.call}.\n\n"
                        f"  mesh = pgmesh.meshes()[{mesh.name!r}]    # use that one\n"
                        f"  pgmesh.meshes()[{mesh.name!r}].close()   # or close it first, or use another name"
                    )
            self.registration.count(mesh.identity, is_used=mesh.identity.pickled_number is None)
            self.meshes[mesh] = None

    def keep(self, mesh: Any) -> None:
        """Keep a mesh alive, from its first group on. An unpickled mesh is counted now.

        Raises:
            NameTakenError: it has no name, and the layout of another open mesh without a name.
        """
        if mesh in self.with_groups:
            return
        with registering:
            for other in self.open_meshes() if mesh.name is None else ():
                if other is not mesh and (other.name, other.layout) == (None, mesh.layout):
                    key = next(key for key, each in open_meshes_by_name().items() if each is other)
                    raise NameTakenError(
                        f"two unnamed meshes differ only in the order of creation: {mesh.identity.call}, created at "
                        f"{other.call_site} and at {mesh.call_site}. Ranks that use them in different orders would "
                        "use different groups.\n\n"
                        f"  pgmesh.meshes()[{key!r}].close()   # close the other, if it is no longer used\n"
                        f"  {mesh.layout.spell('ProcessGroupMesh', world=self.size, name='actor')}   "
                        "# or name this one"
                    )
            self.registration.count(mesh.identity)  # an unpickled one, which is used now
            self.with_groups.add(mesh)

    def stop_keeping(self, mesh: Any) -> None:
        """Keep a mesh alive no longer: it has no groups."""
        with registering:
            self.with_groups.discard(mesh)

    def open_meshes(self) -> list[Any]:
        """The meshes that are not closed, in the order of creation."""
        with registering:
            return [mesh for mesh in self.meshes if mesh.ended is None]

    def leave(self, reason: str) -> None:
        """Leave the world: publish the reason, and end the store thread."""
        if self._thread is not None:
            self._thread.stop(reason)
        self.store = None  # else a mesh that outlives the world keeps the connection open

    def fork(self) -> None:
        """Mark this process as a forked child."""
        if self._thread is not None:
            self._thread.store.listeners.close()
        self.forked, self._thread = True, None


_worlds: weakref.WeakKeyDictionary[Any, World] = weakref.WeakKeyDictionary()
registering = threading.RLock()  # guards the worlds; never held while waiting for a mesh's lock


def current_world() -> World:
    """This process in torch's default world.

    Raises:
        WorldError: torch.distributed is not initialised.
    """
    rank, size = world_rank_and_size()
    default: Any = dist.group.WORLD
    world = _worlds.get(default)
    if world is None:
        with registering:
            new = World(torch_private.default_store(), store_address(), rank, size, world_options())
            world = _worlds.setdefault(default, new)
    return world


def open_meshes_by_name() -> dict[str, Any]:
    """The open meshes of this world in the order of creation.

    The keys are names; for unnamed meshes the call, with a number if the same call created several.
    """
    if not dist.is_initialized():
        return {}
    with registering:
        meshes = current_world().open_meshes()
    names, found = {mesh.name for mesh in meshes}, dict[str, Any]()
    for mesh in meshes:
        numbered = (f"{mesh.identity.call} ({number})" for number in itertools.count(2))
        calls = itertools.chain([mesh.identity.call], numbered)
        key = mesh.name or next(call for call in calls if call not in found and call not in names)
        found[key] = mesh
    return found


def all_worlds() -> list[World]:
    """All worlds of this process, those that have ended too."""
    with registering:
        return list(_worlds.values())


def all_meshes() -> list[Any]:
    """The meshes of all worlds of this process, closed ones too."""
    with registering:  # another thread may create a mesh
        return [mesh for world in all_worlds() for mesh in world.meshes]


def fork() -> None:
    """Mark this process as a forked child."""
    global registering
    registering = threading.RLock()  # a thread of the parent may hold the old one
    if dist.is_initialized():
        current_world().fork()
