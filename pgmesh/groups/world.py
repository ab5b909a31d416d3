"""This process in one world: its clients of the world's store, and the meshes that it has made there.

It does not import ``MeshGroups``: meshes add themselves. torch's default world ends when torch destroys it, one beside
it by ``close``, and all with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh.errors import LifetimeError, NameTakenError, PgmeshError, WorldError
from pgmesh.groups.connecting import Connector
from pgmesh.groups.default_world import store_address, underlying, world_options, world_rank_and_size
from pgmesh.options import GroupOptions

S = TypeVar("S")

_OPERATIONS = ("set", "get", "check", "wait", "add", "append", "compare_set", "delete_key")
"""The operations that a store needs, under their names in torch."""

FULL_RATE_RANKS = 1024
"""The largest world whose ranks use the store as often as those of a small one."""


def pace(size: int) -> float:
    """The factor of the pauses between operations on the store, by which a larger world asks no more of it."""
    return max(1.0, size / FULL_RATE_RANKS)


class World:
    """This process in one world.

    Args:
        store: the world's store.
        rank: this process's rank.
        size: the number of ranks.
        options: the options of a group for which nothing else is configured.
        address: host and port of the store, for messages.
        name: of a world beside torch's default one; "" for that.
    """

    def __init__(
        self, store: Any, rank: int, size: int, options: GroupOptions, address: str = "", name: str = ""
    ) -> None:
        self.rank, self.size, self.options, self.address, self.name = rank, size, options, address, name
        self.ended = ""  # why this process has left the world
        self.exits = False  # and it ends
        self.on_end: list[Callable[[], object]] = []
        """Called in reverse order when this process leaves the world, before its meshes end."""
        self.meshes: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        """The meshes that are referred to, in the order of creation; closed ones too."""
        self.with_groups: dict[Any, None] = {}
        """The meshes that hold groups, and so are kept alive."""
        self.lock = threading.RLock()  # guards the meshes and the fields below; never held while a mesh's lock is taken
        self.has_server = isinstance(underlying(store), dist.TCPStore)
        self.root_store = store  # torch's own client, for torch's table of groups
        self._client, self._waiting = None, None
        self._counts: Counter[str] = Counter()  # meshes made so far, by name
        self._states: dict[type, Any] = {}
        self.connector = Connector(rank, self.store, self.error, pace(size))

    # -- the store --------------------------------------------------------------------------------------------------

    def store(self) -> Any:
        """This process's client for short operations. They block until the store answers, and wait for no key."""
        with self.lock:
            if self._client is None:
                self._client = self.new_client()
            return self._client

    def new_client(self) -> Any:
        """A further client. Each connection of a ``TCPStore`` holds a lock while an operation waits."""
        if self.ended:
            raise LifetimeError(f"this process has no store: {self.ended}.")
        if not self.has_server:
            return self.root_store
        with self.raising_errors():
            if self._client is not None:
                self._client.check([""])  # fails at once if the server has ended, where ``clone`` would try for minutes
            return self.root_store.clone()

    @contextlib.contextmanager
    def raising_errors(self) -> Iterator[None]:
        """Raise what the store raises in the block as WorldError."""
        try:
            yield
        except PgmeshError:
            raise
        except (RuntimeError, OSError) as error:
            raise self.error(error) from error

    def error(self, error: Exception) -> WorldError:
        """The error for a failure of the store."""
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        return WorldError(
            f"the store at {self.address} failed: {reason}. Connected groups continue to work. No group can be "
            "connected without the store."
        )

    def waiting_store(self) -> Any:
        """A client for backends that wait for keys with its lock held, as NCCL does."""
        with self.lock:
            if self._waiting is None:
                self._waiting = self.new_client()
            return self._waiting

    def check_size(self) -> None:
        """Raise WorldError if the first rank that called this has another size of the world."""
        ours = f"{self.size} on rank {self.rank}"
        with self.raising_errors():
            first = self.store().compare_set(f"{torch_private.PREFIX}size", "", ours).decode()
        if int(first.partition(" ")[0]) != self.size:
            which = f"world {self.name!r}" if self.name else "the world"
            raise WorldError(f"the size of {which} is {first} and {ours}; all ranks give the same.")

    # -- meshes, and what layers keep ---------------------------------------------------------------------------------

    def state_of(self, kind: Callable[[World], S]) -> S:
        """The state of a layer about this world: ``kind(world)``, made at its first use."""
        with self.lock:
            if kind not in self._states:
                self._states[kind] = kind(self)  # type: ignore[index]
            return self._states[kind]  # type: ignore[index, no-any-return]

    def add(self, mesh: Any, prefix: str) -> int:
        """Add a new mesh.

        Args:
            prefix: the same for meshes of one name.

        Returns:
            The number of meshes of its name that this process has made before in this world.

        Raises:
            LifetimeError: this process has left the world.
            NameTakenError: an open mesh that has groups has this name.
        """
        if self.ended:
            raise LifetimeError(
                f"{mesh.call}: {self.ended}.\n\n  pgmesh.Layout(dp=2, tp=2)   # a layout needs no processes"
            )
        with self.lock:
            if mesh.name is not None:
                self._check_name(mesh)
            self.meshes[mesh] = None
            self._counts[prefix] += 1
            return self._counts[prefix] - 1

    def keep(self, mesh: Any) -> None:
        """Keep a mesh alive, from its first group on.

        Raises:
            NameTakenError: another mesh with groups has its name, or has no name either and the same layout.
        """
        with self.lock:
            if mesh not in self.with_groups:
                self._check_name(mesh)
                self.with_groups[mesh] = None

    def name_in_torch(self, name: str) -> str:
        """The name of a group in torch's tables, which the groups of all worlds share."""
        return f"{torch_private.BESIDE}{self.name}/{name}" if self.name else name

    def _check_name(self, mesh: Any) -> None:
        """Raise NameTakenError if another mesh with groups has the name of this one."""
        for other in [*self.with_groups]:
            if other is mesh or other.ended is not None or other.prefix != mesh.prefix:
                continue
            existing = f"pgmesh.meshes()[{other.title!r}]"
            if mesh.name is not None:
                raise NameTakenError(
                    f"a mesh named {mesh.name!r} already exists, created at {other.call_site}: {other.call}.\n\n"
                    f"  mesh = {existing}    # use that one\n"
                    f"  {existing}.close()   # or close it first, or use another name"
                )
            raise NameTakenError(
                f"two unnamed meshes differ only in the order of creation: {mesh.call}, created at {other.call_site} "
                f"and at {mesh.call_site}. Ranks that use them in different orders would use different groups.\n\n"
                f"  {existing}.close()   # close the other, if it is no longer used\n"
                f"  {mesh.layout.spell('ProcessGroupMesh', world_size=self.size, name='actor')}   # or name this one"
            )

    def open_meshes(self) -> list[Any]:
        """The meshes that are not closed, in the order of creation."""
        with self.lock:
            return [mesh for mesh in self.meshes if mesh.ended is None]

    # -- the end ----------------------------------------------------------------------------------------------------

    def end(self, reason: str, *, exits: bool = False) -> None:
        """Leave the world: end the threads of the layers, and then all groups.

        Args:
            exits: the process ends. Then no group is freed, which may take for ever after a member has died.
        """
        with self.lock:
            if self.ended:
                return
            self.ended, self.exits = reason, exits
            meshes = [*self.meshes]
        for act in reversed(self.on_end):
            with contextlib.suppress(Exception):  # the store has failed
                act()
        for mesh in meshes:
            mesh.end(f"ended when {reason}.")
        self.connector.stop()
        self.on_end.clear()
        self.root_store = self._client = self._waiting = (
            None  # a mesh that outlives the world would keep the connections open
        )

    def close(self) -> None:
        """Leave a world beside torch's default one."""
        self.end(f"world {self.name!r} was closed")
        with _lock:
            if _beside.get(self.name) is self:
                del _beside[self.name]

    def end_in_child(self) -> None:
        """Invalidate the world in a forked child. Its threads, locks and connections are the parent's."""
        self.ended = "this process was forked from a rank, and shares its connections"
        self.lock = threading.RLock()  # a thread of the parent may hold the old one
        for mesh in [*self.meshes]:
            mesh.end_in_child()


_worlds: weakref.WeakKeyDictionary[Any, World] = weakref.WeakKeyDictionary()  # by torch's default group
_beside: dict[str, World] = {}  # by name
_lock = threading.RLock()


def open_world(name: str, store: Any, rank: int, size: int, options: GroupOptions) -> World:
    """Enter a world beside torch's default one, over a store of its own or the same one.

    Raises:
        NameTakenError: this process is in a world of this name, or has closed one on this store, whose keys stay.
        WorldError: the store fails or lacks an operation, or another rank has entered the world with another size.
    """
    _check_store(store)
    world = World(dist.PrefixStore(name, store), rank, size, options, store_address(store), name)
    closed = f"{torch_private.PREFIX}closed/{rank}"
    with world.raising_errors():
        if world.store().check([closed]):
            raise NameTakenError(
                f"rank {rank} has closed a world {name!r} on this store, whose keys stay there.\n\n"
                f"  launch.open_world({name + '-1'!r}, ...)   # another name, on all ranks"
            )
    with _lock:
        if name in _beside:
            raise NameTakenError(f"this process is in a world {name!r} already, as rank {_beside[name].rank}.")
        _beside[name] = world
    try:
        world.check_size()
    except WorldError:
        world.close()
        raise
    world.on_end.append(lambda: world.exits or world.store().set(closed, ""))
    return world


def world_named(name: str) -> World | None:
    """The open world beside torch's default one with this name; with "", the default one."""
    return _beside.get(name) if name else current_world() if dist.is_initialized() else None


def current_world() -> World:
    """This process in torch's default world.

    Raises:
        WorldError: torch.distributed is not initialised, or its store lacks an operation.
    """
    rank, size = world_rank_and_size()
    default: Any = dist.group.WORLD
    world = _worlds.get(default)
    if world is None:
        store = torch_private.default_store()
        if torch_private.backend_name(default) != "fake":
            _check_store(store)
        with _lock:
            world = _worlds.setdefault(default, World(store, rank, size, world_options(), store_address(store)))
    return world


def _check_store(store: Any) -> None:
    """Raise WorldError if a store that is written in Python lacks an operation."""
    inner = underlying(store)
    kind = type(inner)
    lacking = [name for name in _OPERATIONS if getattr(kind, name, None) is getattr(dist.Store, name)]
    if lacking and not isinstance(inner, (dist.TCPStore, dist.FileStore, dist.HashStore)):
        raise WorldError(
            f"the world's store is a {kind.__module__}.{kind.__qualname__}, which lacks {', '.join(lacking)}. Groups "
            "are found through these operations.\n\n"
            "  dist.init_process_group(..., store=dist.TCPStore(host, port, ...))   # for example"
        )


def all_worlds() -> list[World]:
    """All worlds of this process: torch's default one while its group is referred to, and the open ones beside it."""
    return [*_worlds.values(), *_beside.values()]


def _end_all(reason: str) -> None:
    for world in all_worlds():
        world.end(reason, exits=True)


def _end_default(reason: str) -> None:
    """torch has destroyed its default world, and forgotten the groups of the others."""
    for world in [*_worlds.values()]:
        world.end(reason)
    for mesh in itertools.chain.from_iterable(world.open_meshes() for world in _beside.values()):
        mesh.clear_references()


def _forget(process_group: Any) -> None:
    """A group was destroyed through torch."""
    for world in all_worlds():
        with world.lock:  # another thread may make a mesh
            meshes = [*world.meshes]
        for mesh in meshes:
            mesh.forget(process_group)


def _in_child() -> None:
    """Invalidate all groups in a forked child, whose destructors would wait for threads that do not exist there."""
    global _lock
    _lock = threading.RLock()
    for process_group in torch_private.all_groups():
        torch_private.keep_for_ever(process_group)
    for world in all_worlds():
        world.end_in_child()


atexit.register(_end_all, "its process has exited")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
torch_private.on_destroy.append(_forget)
torch_private.on_world_end.append(_end_default)
