"""The cache of a mesh's process groups: their names, creation, lookup and end.

Views and slices of a mesh share one ``GroupCache``. The name of a group is a function of the mesh, the ordered ranks,
the backend, the options, the tag and the generation. It never depends on the number of groups that this process has
created before, so all members derive the same name. Store operations go through ``rendezvous/``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import logging
import math
import os
import sys
import threading
import time
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, Union

import cachetools
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pgmesh import torch_private
from pgmesh._util.formatting import as_range, format_calls, format_ranks
from pgmesh.errors import (
    LifetimeError,
    MismatchError,
    NameTakenError,
    OptionsError,
    PlaceError,
    WorldError,
)
from pgmesh.groups import building, teardown
from pgmesh.groups.backends import backends_of
from pgmesh.groups.world import default_device, store_address, world_options, world_rank_and_size, world_store
from pgmesh.options import GroupOptions
from pgmesh.rendezvous.polling_store import PollingStore, once
from pgmesh.rendezvous.protocol import (
    ConnectAttempt,
    Decision,
    Delete,
    Fingerprint,
    Generations,
    Read,
    Step,
    StoreProtocol,
    publish_or_compare,
    register_mesh,
)
from pgmesh.rendezvous.store_thread import StoreThread

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout


log = logging.getLogger("pgmesh")

T = TypeVar("T")

GROUPS_BEFORE_WARNING = 100
"""Number of groups above which a process logs a warning, once."""


class _Registry:
    """The meshes of this process in one world: their count by name, and those that are open."""

    def __init__(self) -> None:
        self.store: Any = world_store()
        self.numbers: defaultdict[str, int] = defaultdict(int)
        self.caches: weakref.WeakSet[GroupCache] = weakref.WeakSet()
        self.open: set[GroupCache] = set()  # kept alive while they hold groups
        self.options = world_options()
        self.mismatch_keys: defaultdict[str, set[str]] = defaultdict(set)  # by name and ranks of a mesh
        self.thread: StoreThread | None = None  # started by the first store operation
        self.warned = False  # about too many groups
        self.ending = False  # torch is destroying this world
        self.forked = False  # this process is a forked child, and its parent is in the world

    def store_thread(self) -> StoreThread:
        """The store thread of this process. The first call starts it."""
        with _registering:
            if self.forked:
                raise LifetimeError(
                    "this process was forked from a rank and shares its sockets, so it cannot use the store."
                )
            if self.thread is None:
                rank, size = world_rank_and_size()
                self.thread = StoreThread(self.store, store_address(), rank, size)
            return self.thread

    def heartbeat_thread(self) -> StoreThread:
        """The store thread of this process, with its heartbeat started."""
        thread = self.store_thread()
        thread.start_heartbeat()
        return thread

    def run(self, steps: StoreProtocol[T], seconds: float) -> T:
        """Run a protocol on the store with a timeout."""
        return self.store_thread().run(steps, seconds)

    def warn_of_many_groups(self) -> None:
        """Log that this process holds too many groups."""
        self.warned = True
        log.warning(
            "this process holds %d groups, each with its own memory, threads and sockets. Release groups that are no "
            "longer used, or share meshes. (pgmesh.groups.cache.GROUPS_BEFORE_WARNING is %d.)",
            building.count_groups(),
            GROUPS_BEFORE_WARNING,
        )

    def living(self) -> list[GroupCache]:
        return [cache for cache in self.caches if cache.ended is None]


_registries: weakref.WeakKeyDictionary[Any, _Registry] = weakref.WeakKeyDictionary()
_serials = itertools.count()  # order of creation of the caches
_registering = threading.RLock()  # guards the registries; never held while waiting for a cache's lock


def _registry() -> _Registry:
    world: Any = dist.group.WORLD
    registry = _registries.get(world)
    if registry is None:
        with _registering:
            registry = _registries.setdefault(world, _Registry())
    return registry


def store_thread() -> StoreThread:
    """The store thread of this process."""
    return _registry().store_thread()


_OptionKey = tuple[Union[tuple[int, ...], frozenset[Any]], str]
"""Key of configured options: the ranks of a group, or the axes of a group of one rank; and the tag."""


class _Key:
    """Key of a group in the cache. It is hashed once, since a group may have many ranks."""

    __slots__ = ("_hash", "options", "ranks", "tag")

    def __init__(self, ranks: tuple[int, ...], options: GroupOptions, tag: str) -> None:
        self.ranks, self.options, self.tag = ranks, options, tag
        self._hash = hash((ranks, options, tag))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self.tag, self.ranks, self.options) == (
            other.tag,
            other.ranks,
            other.options,
        )


class GroupCache:
    """The groups of a mesh, its views and its slices. They are found by their properties and closed together.

    Args:
        name: name of the mesh, the same on every rank. An unnamed mesh is identified by the set of its ranks and the
            number of meshes that this process has created on it.
        layout: layout of the root mesh, the same on every rank.
        call: the call that created the root mesh, for messages. Default: derived from the layout.
        number: number of an unpickled mesh where it was created. It gets the same number here unless that is taken.
        outside: rank of an unpickled mesh outside any world; the cache is then closed.
    """

    def __init__(
        self,
        name: str | None,
        layout: Layout,
        call: str | None = None,
        *,
        number: int | None = None,
        outside: int | None = None,
    ) -> None:
        self.name, self.layout, self._call, self._pickled_number = name, layout, call, number
        self.rank, self.world_size = world_rank_and_size() if outside is None else (outside, 0)
        self.call_site = call_site()
        self.ended: str | None = None
        self.meshes: weakref.WeakSet[Any] = weakref.WeakSet()  # meshes that hold references to groups
        self._records: cachetools.Cache[_Key, building.GroupRecord] = cachetools.Cache(math.inf)
        self._configured: dict[_OptionKey, tuple[GroupOptions, str, str]] = {}
        self._single_rank_axes: set[_OptionKey] = set()  # groups of one rank that were returned
        self._generations = Generations()
        self._device_meshes: dict[Layout, DeviceMesh] = {}
        self.lock = threading.RLock()
        self.creation_seconds = 0.0
        self.store_timeout = 30.0  # seconds for one answer of the store
        self.operations = 0  # store operations of connect
        self.number, self.serial = 0, next(_serials)
        if outside is not None:
            self.ended = "was unpickled outside any world."
            return
        self._registry = registry = _registry()
        if registry.forked:
            raise LifetimeError(
                f"{self.call}: this process was forked from rank {self.rank} and shares its sockets, so it cannot "
                "create groups.\n\n"
                "  pgmesh.Layout(dp=2, tp=2)   # a layout needs no processes"
            )
        key_prefix = (
            name if name is not None else f"ranks/{_encode_rank_set(layout.ranks_in_order())}"
        )  # names have no "/"
        with _registering:
            for other in registry.living():
                if name is not None and other.name == name:
                    raise NameTakenError(
                        f"a mesh named {name!r} already exists, created at {other.call_site}: {other.call}.\n\n"
                        f"  mesh = pgmesh.meshes()[{name!r}]    # use that one\n"
                        f"  pgmesh.meshes()[{name!r}].close()   # or close it first, or use another name"
                    )
            self.number = max(registry.numbers[key_prefix], number or 0)
            registry.numbers[key_prefix] = self.number + 1
            registry.caches.add(self)
        self.key = f"{torch_private.PREFIX}{key_prefix}.{self.number}"
        self.registered = False
        self.attempt_counts: defaultdict[str, int] = defaultdict(int)  # by name of a group
        self.connected: dict[str, ConnectAttempt] = {}  # by name of a group: its successful attempt
        # By name of a group. The last member to release the group deletes the store keys of these attempts.
        self.attempts_to_clean_up: dict[str, list[ConnectAttempt]] = {}
        self.unpublished: dict[str, Decision] = {}  # by store key: decisions that the store did not take in time
        self.last_connect_failed = False
        self.identity: Hashable = (name, self.number, layout)

    @property
    def call(self) -> str:
        """The call that created the root mesh."""
        if self._call is None:
            named = {"name": self.name} if self.name else {}
            self._call = self.layout.spell("ProcessGroupMesh", world=self.world_size, **named)
        return self._call

    @property
    def label(self) -> str:
        """Name of the mesh in messages."""
        label = f"mesh {self.name!r}" if self.name else self.call
        if self._pickled_number in (None, self.number):
            return label
        return f"{label} (unpickled as number {self.number} of its name; number {self._pickled_number} was taken here)"

    def track(self, mesh: Any) -> None:
        """Register a mesh whose references to groups are cleared when groups end."""
        with self.lock:
            self.meshes.add(mesh)

    # -- creating -----------------------------------------------------------------------------------------------

    def group(self, layout: Layout, axes: tuple[Axis, ...], tag: str, asked: Mapping[str, Any]) -> dist.ProcessGroup:
        """The group of this rank's block along axes of a layout."""
        self.check()
        return self._get(layout.block_of(self.rank, *axes), tag, asked, layout, axes)

    def records(self) -> list[tuple[building.GroupRecord, GroupOptions, int]]:
        """The open groups with their options and generations. It does not wait for the lock."""
        found = [(key, self._records.get(key)) for key in tuple(self._records)]
        generation = {key: sum(self._generations.of(key.ranks, self._variant_of(key))) for key, _ in found}
        return [(record, key.options, generation[key]) for key, record in found if record is not None]

    def name_for(self, layout: Layout, axes: tuple[Axis, ...]) -> tuple[str, tuple[int, ...], Fingerprint]:
        """Name, ranks and fingerprint of a group that was not created."""
        ranks = layout.block_of(self.rank, *axes)
        with self.lock:
            options = self._default_options(ranks, "")
            name = self._name_of(_Key(ranks, options, ""), options)
        label = f"group {', '.join(map(str, axes))} of {self.label}"
        return name, ranks, Fingerprint(self.rank, options.given, label, "")

    def record_of(self, group: dist.ProcessGroup) -> building.GroupRecord:
        """The record of a group of this cache."""
        with self.lock:
            return next(record for record in self._records.values() if record.group is group)

    def discard(self, group: dist.ProcessGroup, reason: str) -> None:
        """Destroy a group that can no longer be used. The next call creates a new one under another name."""
        teardown.free_finished()
        with self.lock:
            for key in [key for key, record in self._records.items() if record.group is group]:
                self._drop([key], reason, abort=True)
                self._generations.fail(key.ranks, self._variant_of(key))

    def group_of(self, ranks: tuple[int, ...], tag: str, asked: Mapping[str, Any]) -> dist.ProcessGroup:
        """The group of any ranks of the mesh."""
        self.check()
        return self._get(ranks, tag, asked)

    def _get(
        self,
        ranks: tuple[int, ...],
        tag: str,
        asked: Mapping[str, Any],
        layout: Layout | None = None,
        axes: tuple[Axis, ...] = (),
    ) -> dist.ProcessGroup:
        """The group of these ranks. With a layout, they are its block along ``axes``."""
        teardown.free_finished()
        with self.lock:
            default = options = self._default_options(ranks, tag)
            if len(ranks) == 1 and layout is not None:
                options = self._single_rank_options(layout, axes, tag)
            options = options.but(asked) if asked else options
            key = _Key(ranks, options, tag)
            record = self._records.get(key)
            if record is None:
                self.check()
                start = time.monotonic()
                tagged = f", tag={tag}" if tag else ""
                if layout is None:
                    description = f"ranks {format_ranks(ranks)}{tagged}"
                    label = f"group of {description} of {self.label}"
                else:
                    description = layout.describe(self.rank, *axes) + tagged
                    along = ", ".join(map(str, axes or layout.axes)) or f"of rank {ranks[0]}"
                    label = f"group {along}{tagged} of {self.label}"
                if options is not self._registry.options:
                    _check_honoured(options, label)
                self._check_name()
                description = options.description or f"{self.name or 'mesh'}[{description}]"
                if backends_of(options.backend).by_members:
                    record = self._create(key, default, label, description)
                else:
                    blocks = () if layout is None else tuple(layout.partition(*axes))
                    record = self._create_collectively(options, label, description, blocks)
                self._records[key] = record
                building.gloo_stores[record.group] = record.gloo
                self.creation_seconds += time.monotonic() - start
                if building.count_groups() > GROUPS_BEFORE_WARNING and not self._registry.warned:
                    self._registry.warn_of_many_groups()
            if record.created_by == "caller" and not torch_private.is_known(record.group):
                raise LifetimeError(
                    f"{record.label} was adopted at {record.call_site}, and torch has destroyed it since.\n\n"
                    f"  mesh.{_call('release', axes) if layout else f'release(ranks={list(ranks)})'}   "
                    "# then adopt another, or let the mesh create one"
                )
            return record.group

    def _default_options(self, ranks: tuple[int, ...], tag: str) -> GroupOptions:
        """Options of a group without options in the call: those configured, otherwise those of the world."""
        default = self._registry.options
        if self._configured and (ranks, tag) in self._configured:
            default = default.but(self._configured[ranks, tag][0].keywords())
        return default

    def _single_rank_options(self, layout: Layout, axes: tuple[Axis, ...], tag: str) -> GroupOptions:
        """Default options of a group of one rank.

        All groups of one rank have the same ranks, so their options are stored by axes. Otherwise all axes of size 1
        would have the same backend. For the name of the group, these options count as options of the call.
        """
        key = self._option_key(layout, axes, tag)
        self._single_rank_axes.add(key)
        default = self._registry.options
        return default.but(self._configured[key][0].keywords()) if key in self._configured else default

    def _option_key(self, layout: Layout, axes: tuple[Axis, ...], tag: str) -> _OptionKey:
        """Key of the configured options of this rank's block."""
        ranks = layout.block_of(self.rank, *axes)
        return (ranks if len(ranks) > 1 else frozenset(layout.along(self.rank, *axes).axes), tag)

    def _create(self, key: _Key, default: GroupOptions, label: str, description: str) -> building.GroupRecord:
        """Create a group without waiting for other members.

        Members compare the group's fingerprint when they connect. If the options differ from those of the world, one
        store operation compares it now.
        """
        name, options, site = self._name_of(key, default), key.options, call_site()
        backends, store = backends_of(options.backend), self._registry.store
        if len(key.ranks) == 1 or backends.fake:
            local = dict.fromkeys(backends.names, dist.HashStore())
            group = building.build(name, key.ranks, self.rank, options, store, local, description)
            return building.GroupRecord(group, label, site, ranks=key.ranks)
        keys: list[str] = []
        mismatch_keys = (f"{name}/options/mismatch", self.mismatch_key)
        hint = "On every rank, configure its axes with the same options or pass the same options in the call."
        fingerprint = Fingerprint(self.rank, options.given, label, hint)
        if options is not self._registry.options and options != self._registry.options:
            keys = [f"{name}/options"]
            try:
                self._registry.run(self._compare_options(keys[0], fingerprint), self.store_timeout)
            except MismatchError:
                self.keep_mismatch_keys(mismatch_keys)
                raise
        polling = {
            backend: PollingStore(
                self._registry.run,
                fingerprint,
                key.ranks,
                options.timeout or timedelta(),
                addresses=backend == "gloo",
                before_first_use=self._ensure_registered,
                mismatch_keys=mismatch_keys,
                set_status=self.set_status,
                store_hint=self.store_hint,
            )
            for backend in backends.names
        }
        group = building.build(name, key.ranks, self.rank, options, store, polling, description)
        return building.GroupRecord(group, label, site, polling, keys, ranks=key.ranks, fingerprint=fingerprint)

    def _create_collectively(
        self,
        options: GroupOptions,
        label: str,
        description: str,
        blocks: Sequence[tuple[int, ...]],
    ) -> building.GroupRecord:
        """Create a group through the public ``new_group``. Every rank of the world must call it for every block."""
        if sum(map(len, blocks)) != self.world_size:
            raise OptionsError(
                f"{label}: groups of backend {options.backend} are created through torch's new_group, which all "
                f"{self.world_size} ranks of the world must call for every block. This partition has "
                f"{sum(map(len, blocks))} ranks. Use a mesh of the whole world, and a group along its axes."
            )
        mine: Any = None
        ranks: tuple[int, ...] = ()
        for block in blocks:
            group = dist.new_group(
                list(block),
                timeout=options.timeout,
                backend=options.backend,
                group_desc=description,
                sort_ranks=False,
            )
            if self.rank in block:
                mine, ranks = group, block
        return building.GroupRecord(mine, label, call_site(), created_by="torch", ranks=ranks)

    def _name_of(self, key: _Key, default: GroupOptions) -> str:
        """The name of a group: a function of its properties, not of the number of groups created before it."""
        variant = self._variant_of(key, default)
        released, failed = self._generations.of(key.ranks, variant)
        return f"{self.key}/{_encode_ranks(key.ranks)}/{variant}.{released}.{failed}"

    def _variant_of(self, key: _Key, default: GroupOptions | None = None) -> str:
        """Digest that separates groups of the same ranks: the tag, and options that differ from the default."""
        default = default or self._default_options(key.ranks, key.tag)
        unusual: list[tuple[str, Any]] = []
        if key.options is not default and key.options != default:
            configured = default.given
            unusual = sorted(each for each in key.options.given.items() if configured.get(each[0]) != each[1])
        return _variant(key.tag, str(unusual))

    def _check_name(self) -> None:
        """At the first group, check that no other unnamed mesh has the same layout."""
        if self in self._registry.open:
            return
        with _registering:
            others = [] if self.name is not None else self._registry.living()
            for other in others:
                if other is not self and other.name is None and other.layout == self.layout:
                    key = next(key for key, cache in living().items() if cache is other)
                    raise NameTakenError(
                        f"two unnamed meshes differ only in the order of creation: {self.call}, created at "
                        f"{other.call_site} and at {self.call_site}. Ranks that use them in different orders would "
                        "use different groups.\n\n"
                        f"  pgmesh.meshes()[{key!r}].close()   # close the other, if it is no longer used\n"
                        f"  {self.layout.spell('ProcessGroupMesh', world=self.world_size, name='actor')}   "
                        "# or name this one"
                    )
            self._registry.open.add(self)

    def _ensure_registered(self) -> StoreProtocol[None]:
        """Register the mesh in the store unless this rank has done so."""
        if not self.registered:
            yield from self.register_mesh(listed=False)

    def _compare_options(self, key: str, fingerprint: Fingerprint) -> StoreProtocol[None]:
        """Compare the fingerprints of the mesh and of a group with those of the other ranks."""
        yield from self._ensure_registered()
        yield from publish_or_compare(key, fingerprint)

    def ask(self, step: Step) -> Any:
        """Perform one store operation with a timeout."""
        return self._registry.store_thread().ask(step, self.store_timeout)

    def register_mesh(self, *, listed: bool) -> StoreProtocol[None]:
        """Publish or compare the mesh's fingerprint, as protocol steps; delete old mismatch keys."""
        keys = self._registry.mismatch_keys[self._same_name_key] if self._registry.mismatch_keys else set[str]()
        stale = [key for key in keys if not key.startswith(f"{self.key}/")]
        yield from register_mesh(self.key, self.fingerprint, listed=listed or bool(stale))
        self.registered = True
        if stale:
            seen = (yield Read(f"{self.key}/fingerprints")) or b""
            if len({encoded.partition(b" ")[0] for encoded in seen.splitlines()}) == self.layout.size():
                yield Delete(tuple(stale))
                keys.difference_update(stale)

    @property
    def _same_name_key(self) -> str:
        """Key that later meshes of the same name and ranks have in common with this one."""
        return f"{self.name}/{_encode_rank_set(self.layout.ranks_in_order())}"

    def keep_mismatch_keys(self, keys: Iterable[str]) -> None:
        """Remember store keys that may hold a mismatch, for deletion.

        Ranks that wait or arrive late still read them. Once all ranks have registered a later mesh of this name, they
        have closed this one, and a rank that knows the keys deletes them. Two unnamed meshes of the same ranks may be
        open at once, so their keys stay.
        """
        if self.name is not None:
            self._registry.mismatch_keys[self._same_name_key].update(keys)

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the mesh on this rank."""
        ranks = self.layout.ranks_in_order()
        fields = {
            "axes": list(self.layout.axes),
            "shape": list(self.layout.shape),
            "ranks": str(ranks) if isinstance(ranks, range) else f"{format_ranks(ranks, 64)} ({_encode_ranks(ranks)})",
            "size of the world": self.world_size,
        }
        hint = "Create the same mesh on every rank, or give different meshes different names."
        return Fingerprint(self.rank, fields, self.label, hint)

    @property
    def mismatch_key(self) -> str:
        """Store key under which a rank publishes a mismatch of the mesh."""
        return f"{self.key}/mismatch"

    def count(self) -> int:
        """Number of groups of this process, of all meshes."""
        return building.count_groups()

    def is_fake(self) -> bool:
        """True in a fake world, which has no other processes."""
        return backends_of(self._registry.options.backend).fake

    def set_status(self, activity: str) -> None:
        """Publish the activity of this process."""
        self._registry.store_thread().set_status(activity)

    def store_hint(self) -> str:
        """Return a reason why ranks may not find each other on this store; "" for none."""
        return self._registry.store_thread().store_hint()

    def heartbeat_thread(self) -> StoreThread:
        """The store thread of this process, with its heartbeat started."""
        return self._registry.heartbeat_thread()

    # -- configuring --------------------------------------------------------------------------------------------

    def configure(self, layout: Layout, axes: tuple[Axis, ...], tag: str, options: Mapping[str, Any]) -> None:
        """Set options for the group of this rank's block, before it is created."""
        self.check()
        given = GroupOptions.of(options)
        layout.size(*axes)  # raises for unknown axes, on ranks outside the mesh too
        if self.rank not in layout:
            return
        ranks = layout.block_of(self.rank, *axes)
        spelling = ", ".join(map(str, layout.along(self.rank, *axes).axes))
        option_key = self._option_key(layout, axes, tag)
        with self.lock:
            before, configured_as, site = self._configured.get(option_key, (GroupOptions(), spelling, ""))
            after = before.but(options)
            if after.keywords() == before.keywords():
                return
            for key, record in self._records.items():
                if (key.ranks, key.tag) == (ranks, tag) and (len(ranks) > 1 or option_key in self._single_rank_axes):
                    raise OptionsError(
                        f"{record.label} was created at {record.call_site}, so it is too late to configure it.\n\n"
                        f"{format_calls(_instead_of_configuring(axes, tag, given))}"
                    )
            kept = {name: value for name, value in before.keywords().items() if value is not None}
            if configured_as != spelling and any(after.keywords()[name] != value for name, value in kept.items()):
                keywords = [f"{name}={value!r}" for name, value in given.given.items()]
                separate = f"mesh.{_call('configure', axes, 'tag=' + repr(spelling), *keywords)}"
                raise OptionsError(
                    f"{spelling} and {configured_as} are the same ranks here ({format_ranks(ranks)}), so one group. "
                    f"But {configured_as} was configured with {before} at {site}, and {spelling} now with {given}.\n\n"
                    f"  {separate}   # a separate communicator; or use the same options for both"
                )
            self._configured[option_key] = (after, configured_as, call_site())

    def set_timeout(self, timeout: timedelta, chosen: Callable[[tuple[int, ...]], bool]) -> int:
        """Change the timeout of the existing groups whose ranks are chosen; return their number."""
        self.check()
        with self.lock:
            found = [record for key, record in self._records.items() if chosen(key.ranks)]
            for record in found:
                if torch_private.is_known(record.group):  # torch may have destroyed an adopted group
                    building.set_timeout(record, timeout)
        return len(found)

    # -- ending -------------------------------------------------------------------------------------------------

    def release(self, ranks: tuple[int, ...]) -> None:
        """Destroy the groups of these ranks. The next call creates new ones under new names."""
        self.check()
        teardown.free_finished()
        with self.lock:
            self._drop(
                [key for key in self._records if key.ranks == ranks],
                f"was released at {call_site()}; ask its mesh for it anew.",
            )
            self._generations.release(ranks)
            if len(ranks) == 1:
                self._single_rank_axes.clear()

    def close(self, reason: str | None = None, *, at_exit: bool = False) -> None:
        """Destroy all groups. The cache creates no more.

        Args:
            reason: the reason, if the user did not call ``close``: the end of the world or of the process.
            at_exit: the process ends, so the store is left as it is.
        """
        if not at_exit:
            teardown.free_finished()
        if not self.lock.acquire(timeout=-1 if reason is None else 1.0):
            self.ended = self.ended or reason  # another thread holds the lock and may never release it
            return
        try:
            if self.ended is not None:
                return
            self.ended = reason or f"was closed at {call_site()}."
            self._drop(list(self._records), self.ended, at_exit=at_exit)
            for name in (
                list(self.attempts_to_clean_up) if not at_exit else ()
            ):  # those of groups that were never created too
                self._clean_up_attempts(name)
            if self.registered and not at_exit:
                self._delete([self.key, f"{self.key}/fingerprints"])
            with _registering:
                self._registry.open.discard(self)
        finally:
            self.lock.release()

    def _clean(self, steps: StoreProtocol[None]) -> None:
        """Run a protocol that deletes store keys. A failed or stalled store is ignored.

        At the end of the world the store thread runs it later, and this call does not wait.
        """
        with contextlib.suppress(WorldError, LifetimeError):
            thread = self._registry.store_thread()
            if self._registry.ending:
                thread.post(steps)
            elif not thread.stalled:
                thread.run(steps, 1.0)

    def _delete(self, keys: Sequence[str]) -> None:
        if keys:
            self._clean(once(Delete(tuple(keys))))

    def _clean_up_attempts(self, name: str) -> None:
        """Release the store keys of all attempts for a group that has ended."""
        self.connected.pop(name, None)
        self.attempt_counts.pop(name, None)
        for attempt in self.attempts_to_clean_up.pop(name, ()):
            self._clean(attempt.leave())

    def _cancel_waits(self, record: building.GroupRecord) -> list[str]:
        """Cancel all waits for a group; return the store keys that were written for it."""
        for store in record.stores.values():
            if store.mismatched:
                self.keep_mismatch_keys(store.mismatch_keys)
        return record.cancel_waits()

    def _drop(self, keys: Iterable[_Key], reason: str, *, abort: bool = False, at_exit: bool = False) -> None:
        self._clear_caches()
        for key in keys:
            record = self._records.pop(key)
            if not at_exit:
                self._clean_up_attempts(record.name)
            if record.created_by == "caller":
                continue
            written = self._cancel_waits(record)
            if torch_private.is_known(record.group):
                teardown.destroy(record, reason, abort=abort or at_exit)
            else:
                teardown.invalidate(record, reason)
            if not at_exit:
                self._delete(written)

    def forget(self, group: Any) -> None:
        """Drop a group that torch destroyed. Its name is never used again."""
        if not any(record.group is group for record, _, _ in self.records()):
            return  # without the lock: its holder may be waiting
        with self.lock:
            for key, record in list(self._records.items()):
                if record.group is group:
                    self._clear_caches()
                    if record.created_by == "caller":  # the next call raises an error
                        continue
                    del self._records[key]
                    self._clean_up_attempts(record.name)
                    self._generations.fail(key.ranks, self._variant_of(key))
                    self._delete(self._cancel_waits(record))
                    teardown.mark_destroyed(group, f"{record.label} was destroyed; ask its mesh for it anew.")

    def _clear_caches(self) -> None:
        self._device_meshes.clear()
        for mesh in list(self.meshes):
            mesh._clear_groups()

    def end_in_child(self, reason: str) -> None:
        """Invalidate all groups in a forked child. They belong to the parent."""
        self.lock = threading.RLock()
        self.ended = reason
        self._clear_caches()
        for record in self._records.values():
            record.cancel_waits()
            teardown.invalidate(record, reason)
            torch_private.forget_group(record.group)

    def check(self) -> None:
        """Raise LifetimeError if the cache is closed, the world has ended, or this process is a forked child."""
        if self.ended is not None:
            raise LifetimeError(f"{self.label} {self.ended} Its layout can still be used, but it has no groups.")

    # -- torch's DeviceMesh -------------------------------------------------------------------------------------

    def device_mesh(self, layout: Layout, names: tuple[str, ...]) -> DeviceMesh:
        """A DeviceMesh over the groups of a layout, or a slice of it."""
        self.check()
        with self.lock:
            whole = self._device_meshes.get(layout)
            if whole is None:
                groups = [self.group(layout, (axis,), "", {}) for axis in layout.axes]
                table = torch.tensor(layout.ranks(), dtype=torch.int).view(layout.shape)
                whole = DeviceMesh.from_group(
                    groups[0] if len(groups) == 1 else groups,
                    default_device(),
                    None if len(groups) == 1 else table,
                    mesh_dim_names=tuple(map(str, layout.axes)),
                )
                torch_private.mark(whole, tuple(group.group_name for group in groups))
                self._device_meshes[layout] = whole
            return whole if names == whole.mesh_dim_names else whole[names]

    def adopt_device_mesh(self, layout: Layout, device_mesh: DeviceMesh) -> None:
        """Store the DeviceMesh whose groups were adopted."""
        with self.lock:
            self._device_meshes[layout] = device_mesh

    # -- adopted groups -----------------------------------------------------------------------------------------

    def adopt(self, layout: Layout, axes: tuple[Axis, ...], group: dist.ProcessGroup) -> None:
        """Use an existing group for these axes. pgmesh never destroys it."""
        self.check()
        label = f"group {', '.join(map(str, axes))} of {self.label}"
        if not (isinstance(group, dist.ProcessGroup) and torch_private.is_known(group)):
            raise PlaceError(f"{label}: only a process group that torch knows can be adopted, not {group!r}.")
        block, members = layout.block_of(self.rank, *axes), tuple(dist.get_process_group_ranks(group))
        if members != block:
            raise PlaceError(
                f"{label} has ranks {format_ranks(block)}; the group to adopt has {format_ranks(members)}."
            )
        key, option_key = _Key(block, self._registry.options, ""), self._option_key(layout, axes, "")
        with self.lock:
            if option_key in self._configured:
                options, configured_as, site = self._configured[option_key]
                raise OptionsError(
                    f"{label} was configured with {options} at {site}. An adopted group lacks these options.\n\n"
                    f"  mesh.{_call('group', axes)}   # a group with them; or adopt without configuring {configured_as}"
                )
            record = self._records.get(key)
            if record is not None and record.group is not group:
                how = "adopted" if record.created_by == "caller" else "created"
                raise LifetimeError(
                    f"{label} was already {how} at {record.call_site}, and may be in use.\n\n"
                    f"  mesh.{_call('release', axes)}   # release it first, then adopt"
                )
            if record is None:
                self._check_name()
                self._records[key] = building.GroupRecord(group, label, call_site(), created_by="caller", ranks=block)
            if len(block) == 1:
                self._single_rank_axes.add(option_key)


def _instead_of_configuring(axes: tuple[Axis, ...], tag: str, given: GroupOptions) -> list[tuple[str, str]]:
    """Calls that change options after the group was created, each with a comment."""
    ways, tagged = [], [f"tag={tag!r}"] * bool(tag)
    if [*given.given] == ["timeout"] and not tag:
        timeout = f"timeout={given.given['timeout']:g}"
        ways.append((f"mesh.{_call('set_timeout', axes, timeout)}", "on every member: the group stays"))
    options = [f"{name}={value!r}" for name, value in given.given.items()]
    recreate = f"mesh.{_call('release', axes)}; mesh.{_call('configure', axes, *tagged, *options)}"
    return [*ways, (recreate, f"{'or ' * bool(ways)}on every member: the next group has them")]


def _check_honoured(options: GroupOptions, label: str) -> None:
    backends = backends_of(options.backend)
    for option, value in (("high_priority", options.high_priority), ("nccl", options.nccl)):
        if value and "nccl" not in backends.names and not backends.fake:
            raise OptionsError(f"{label}: backend {options.backend} cannot honour {option}={value!r}; only NCCL can.")


def _encode_ranks(ranks: range | tuple[int, ...]) -> str:
    """Encode ordered ranks: "0-7", "1-7:2", or a digest."""
    straight = as_range(ranks)
    if straight is None:
        return _digest(array("q", ranks).tobytes())
    return f"{straight[0]}-{straight[-1]}" + (f":{straight.step}" if straight.step != 1 and len(straight) > 1 else "")


def _encode_rank_set(ranks: range | tuple[int, ...]) -> str:
    """Encode a set of ranks."""
    return _encode_ranks(ranks if isinstance(ranks, range) and ranks.step > 0 else tuple(sorted(ranks)))


@functools.lru_cache(64)
def _variant(tag: str, unusual: str) -> str:
    """Digest of the tag and unusual options. Configured options are compared in the fingerprint instead."""
    return _digest(f"{tag!r} {unusual}".encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _call(verb: str, axes: Iterable[Axis], *more: str) -> str:
    return f"{verb}({', '.join([*map(repr, axes), *more])})"


_PACKAGE_DIR = os.path.dirname(os.path.dirname(__file__)) + os.sep


def call_site() -> str:
    """File and line of the innermost frame outside this package: the call of the user."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"


def find_cache(name: str | None, number: int, layout: Layout, call: str, rank: int) -> GroupCache:
    """The cache of an unpickled mesh: the one it was pickled from, if that is open here, or a new one.

    Outside any world the new cache is closed and has only the rank that pickled it.
    """
    if not dist.is_initialized() or _registry().forked:
        return GroupCache(name, layout, call, outside=rank)
    _, world = world_rank_and_size()
    ranks = layout.ranks_in_order()
    highest = max(ranks[0], ranks[-1]) if isinstance(ranks, range) else max(ranks)
    if highest >= world:
        raise PlaceError(f"{call} was unpickled with rank {highest}, but the world's ranks are 0 to {world - 1}.")
    with _registering:
        for cache in _registry().living():
            if cache.identity == (name, number, layout):
                return cache
    cache = GroupCache(name, layout, call, number=number)
    cache.identity = (name, number, layout)
    return cache


# -- all caches, and their end ------------------------------------------------------------------------------------


def all_caches() -> list[GroupCache]:
    with _registering:
        return [cache for registry in list(_registries.values()) for cache in registry.caches]


def living() -> dict[str, GroupCache]:
    """The open caches of this world in the order of creation.

    The keys are names; for unnamed meshes the call, with a number if the same call created several.
    """
    if not dist.is_initialized():
        return {}
    with _registering:
        caches = sorted(_registry().living(), key=lambda cache: cache.serial)
    names, found = {cache.name for cache in caches}, dict[str, GroupCache]()
    for cache in caches:
        calls = (cache.call + f" ({number})" * (number > 1) for number in itertools.count(1))
        key = cache.name or next(call for call in calls if call not in found and call not in names)
        found[key] = cache
    return found


def close_all() -> None:
    """Close all meshes of this process."""
    for cache in all_caches():
        cache.close()


def _forget(group: Any) -> None:
    for cache in all_caches():
        cache.forget(group)


def _end_world(reason: str) -> None:
    for registry in list(_registries.values()):
        registry.ending = True
    for cache in all_caches():
        cache.close(f"ended when {reason}.")
    for registry in list(_registries.values()):
        if registry.thread is not None:
            registry.thread.stop("has left the world")
        registry.store = None  # else a mesh that outlives the world keeps the connection open


def _at_exit() -> None:
    """Destroy all groups while Python still runs. Their threads would outlive it."""
    for registry in list(_registries.values()):
        if registry.thread is not None:
            registry.thread.stop("its process has exited")
    for cache in all_caches():
        cache.close("ended with its process.", at_exit=True)


def _in_child() -> None:
    """Invalidate all groups in a forked child: their threads do not exist there."""
    global _registering
    _registering = threading.RLock()  # a thread of the parent may hold the old one
    teardown.keep_all_groups()
    if dist.is_initialized():
        _registry().forked, _registry().thread = True, None
    for cache in all_caches():
        cache.end_in_child("was created before this process was forked.")


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
torch_private.on_destroy.append(_forget)
torch_private.on_world_end.append(_end_world)
