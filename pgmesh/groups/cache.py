"""A family: the groups of a mesh, its views and its slices. What it is called, what it has made, how it ends.

A group is found by what it is, and its name is a function of that: of the family, the ranks in their order, backend,
options, tag and generation. It never depends on how many groups this process made before.
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

MOST_GROUPS = 100
"""How many groups one process may hold before it is warned."""


class _Registry:
    """What this process has made in one world: how many meshes under each name, and which of them live."""

    def __init__(self) -> None:
        self.store: Any = world_store()
        self.numbers: defaultdict[str, int] = defaultdict(int)
        self.caches: weakref.WeakSet[GroupCache] = weakref.WeakSet()
        self.open: set[GroupCache] = set()  # those that hold groups live until they are closed
        self.options = world_options()
        self.refusals: defaultdict[str, set[str]] = defaultdict(set)  # by the meshes' name and ranks
        self.thread: StoreThread | None = None  # once the store was asked for something
        self.warned = False  # of too many groups
        self.ending = False  # whether torch is destroying this world
        self.forked = False  # whether this process only inherited the world, from the one it was forked off

    def store_thread(self) -> StoreThread:
        """The thread that speaks with the store for this process; it starts when it is first needed."""
        with _registering:
            if self.forked:
                raise LifetimeError("this process was forked off a rank and shares its sockets: it asks no store.")
            if self.thread is None:
                rank, size = world_rank_and_size()
                self.thread = StoreThread(self.store, store_address(), rank, size)
            return self.thread

    def beating(self) -> StoreThread:
        """The same thread, and it tells the others that this process lives."""
        thread = self.store_thread()
        thread.beat()
        return thread

    def run(self, steps: StoreProtocol[T], seconds: float) -> T:
        """Run a protocol on the store, for so many seconds and no longer."""
        return self.store_thread().run(steps, seconds)

    def warn_of_many(self) -> None:
        """Say once that this process holds too many groups."""
        self.warned = True
        log.warning(
            "this process holds %d groups, each with memory, threads and sockets of its own: release those that "
            "are done with, or share meshes. (pgmesh.groups.cache.MOST_GROUPS is %d.)",
            building.held(),
            MOST_GROUPS,
        )

    def living(self) -> list[GroupCache]:
        return [cache for cache in self.caches if cache.ended is None]


_registries: weakref.WeakKeyDictionary[Any, _Registry] = weakref.WeakKeyDictionary()
_serials = itertools.count()  # in which order families were made
_registering = threading.RLock()  # held for all that touches a registry, and never while waiting for a family's lock


def _registry() -> _Registry:
    world: Any = dist.group.WORLD
    registry = _registries.get(world)
    if registry is None:
        with _registering:
            registry = _registries.setdefault(world, _Registry())
    return registry


def store_thread() -> StoreThread:
    """The thread that speaks with the world's store for this process."""
    return _registry().store_thread()


_Kept = tuple[Union[tuple[int, ...], frozenset[Any]], str]
"""Where configured options are kept: the ranks of a group, or the axes of a group of one rank; and its tag."""


class _Key:
    """What a group is, hashed once: its ranks may be many."""

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
    """The groups of a mesh, its views and its slices: made once, found by what they are, and ended together.

    Args:
        name: what tells this family from others on every rank; without one, the set of its ranks and the count
            of meshes that this process has made on it do.
        layout: the root's layout, which all members must describe alike.
        call: the call that made the root, for messages, where that was not here.
        number: the number that the mesh had where it was made, if that was not here. It gets the same one here unless
            this process has used that up.
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
        self.name, self.layout, self._call, self._travelled = name, layout, call, number
        self.rank, self.world_size = world_rank_and_size() if outside is None else (outside, 0)
        self.call_site = call_site()
        self.ended: str | None = None
        self.meshes: weakref.WeakSet[Any] = weakref.WeakSet()  # those that remember groups of ours
        self._records: cachetools.Cache[_Key, building.GroupRecord] = cachetools.Cache(math.inf)
        self._configured: dict[_Kept, tuple[GroupOptions, str, str]] = {}
        self._alone: set[_Kept] = set()  # the axes whose group of one rank was asked for
        self._generations = Generations()
        self._device_meshes: dict[Layout, DeviceMesh] = {}
        self.lock = threading.RLock()
        self.making = 0.0  # seconds spent making groups
        self.store_timeout = 30.0  # seconds that the store may take for one answer
        self.asked = 0  # how often connect asked the store
        self.number, self.serial = 0, next(_serials)
        if outside is not None:
            self.ended = "came here outside any world."
            return
        self._registry = registry = _registry()
        if registry.forked:
            raise LifetimeError(
                f"{self.call}: this process was forked off rank {self.rank} and shares its sockets: "
                "it makes no groups.\n\n"
                "  pgmesh.Layout(dp=2, tp=2)   # places need no processes"
            )
        key_prefix = name if name is not None else f"ranks/{_set_word(layout.ranks_in_order())}"  # no name has a "/"
        with _registering:
            for other in registry.living():
                if name is not None and other.name == name:
                    raise NameTakenError(
                        f"a mesh named {name!r} lives already, made at {other.call_site}: {other.call}.\n\n"
                        f"  mesh = pgmesh.meshes()[{name!r}]    # use that one\n"
                        f"  pgmesh.meshes()[{name!r}].close()   # or close it first, or give this one another name"
                    )
            self.number = max(registry.numbers[key_prefix], number or 0)
            registry.numbers[key_prefix] = self.number + 1
            registry.caches.add(self)
        self.key = f"{torch_private.PREFIX}{key_prefix}.{self.number}"
        self.agreed = False
        self.meetings: defaultdict[str, int] = defaultdict(int)  # by group, how often its members met to connect it
        self.connected: dict[str, ConnectAttempt] = {}  # by a group's name, the meeting in which connect saw it through
        self.attended: dict[
            str, list[ConnectAttempt]
        ] = {}  # by group; the last member to let go of it takes their keys away
        self.untold: dict[str, Decision] = {}  # by key, what connect has yet to tell, since the store did not answer
        self.failed = False  # whether the last call of connect did
        self.identity: Hashable = (name, self.number, layout)

    @property
    def call(self) -> str:
        """The call that made the root."""
        if self._call is None:
            named = {"name": self.name} if self.name else {}
            self._call = self.layout.spell("ProcessGroupMesh", world=self.world_size, **named)
        return self._call

    @property
    def words(self) -> str:
        """What messages call the mesh."""
        words = f"mesh {self.name!r}" if self.name else self.call
        if self._travelled in (None, self.number):
            return words
        return (
            f"{words} (unpickled as number {self.number} of its name, since number {self._travelled} was used up here)"
        )

    def remember(self, mesh: Any) -> None:
        """A mesh of this family remembers groups: it is told to forget them when they go."""
        with self.lock:
            self.meshes.add(mesh)

    # -- making -------------------------------------------------------------------------------------------------

    def group(self, layout: Layout, axes: tuple[Axis, ...], tag: str, asked: Mapping[str, Any]) -> dist.ProcessGroup:
        """The group of this rank's block along axes of a layout of this family."""
        self.check()
        return self._get(layout.block_of(self.rank, *axes), tag, asked, layout, axes)

    def known(self) -> list[tuple[building.GroupRecord, GroupOptions, int]]:
        """The groups that live, each with its options and its generation. It waits for no thread that makes one."""
        found = [(key, self._records.get(key)) for key in tuple(self._records)]
        generation = {key: sum(self._generations.of(key.ranks, self._kind_of(key))) for key, _ in found}
        return [(made, key.options, generation[key]) for key, made in found if made is not None]

    def name_for(self, layout: Layout, axes: tuple[Axis, ...]) -> tuple[str, tuple[int, ...], Fingerprint]:
        """The name, the ranks and the card of a group that could not be made."""
        ranks = layout.block_of(self.rank, *axes)
        with self.lock:
            options = self._usual(ranks, "")
            name = self._name_of(_Key(ranks, options, ""), options)
        words = f"group {', '.join(map(str, axes))} of {self.words}"
        return name, ranks, Fingerprint(self.rank, options.given, words, "")

    def made(self, group: dist.ProcessGroup) -> building.GroupRecord:
        """What is known of a group of this family."""
        with self.lock:
            return next(made for made in self._records.values() if made.group is group)

    def discard(self, group: dist.ProcessGroup, reason: str) -> None:
        """Let go of a group that cannot be used any more; asked for again, it is another."""
        teardown.free_finished()
        with self.lock:
            for key in [key for key, made in self._records.items() if made.group is group]:
                self._drop([key], reason, abort=True)
                self._generations.fail(key.ranks, self._kind_of(key))

    def group_of(self, ranks: tuple[int, ...], tag: str, asked: Mapping[str, Any]) -> dist.ProcessGroup:
        """The group of any ranks of this family."""
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
        """The group of these ranks, which are a block along axes of a layout where one is given."""
        teardown.free_finished()
        with self.lock:
            usual = options = self._usual(ranks, tag)
            if len(ranks) == 1 and layout is not None:
                options = self._usual_alone(layout, axes, tag)
            options = options.but(asked) if asked else options
            key = _Key(ranks, options, tag)
            made = self._records.get(key)
            if made is None:
                self.check()
                start = time.monotonic()
                tagged = f", tag={tag}" if tag else ""
                if layout is None:
                    description = f"ranks {format_ranks(ranks)}{tagged}"
                    words = f"group of {description} of {self.words}"
                else:
                    description = layout.describe(self.rank, *axes) + tagged
                    along = ", ".join(map(str, axes or layout.axes)) or f"of rank {ranks[0]}"
                    words = f"group {along}{tagged} of {self.words}"
                if options is not self._registry.options:
                    _check_honoured(options, words)
                self._open()
                description = options.description or f"{self.name or 'mesh'}[{description}]"
                if backends_of(options.backend).direct:
                    made = self._make(key, usual, words, description)
                else:
                    blocks = () if layout is None else tuple(layout.partition(*axes))
                    made = self._make_with_all(options, words, description, blocks)
                self._records[key] = made
                building.gloo_stores[made.group] = made.gloo
                self.making += time.monotonic() - start
                if building.held() > MOST_GROUPS and not self._registry.warned:
                    self._registry.warn_of_many()
            if made.by == "others" and not torch_private.is_known(made.group):
                raise LifetimeError(
                    f"{made.words} was adopted at {made.call_site}, and torch has destroyed it since.\n\n"
                    f"  mesh.{_call('release', axes) if layout else f'release(ranks={list(ranks)})'}   "
                    "# then adopt another, or ask for a group of the mesh's own"
                )
            return made.group

    def _usual(self, ranks: tuple[int, ...], tag: str) -> GroupOptions:
        """What a group is made with where nothing else is asked for: what was configured, else what the world has."""
        usual = self._registry.options
        if self._configured and (ranks, tag) in self._configured:
            usual = usual.but(self._configured[ranks, tag][0].keywords())
        return usual

    def _usual_alone(self, layout: Layout, axes: tuple[Axis, ...], tag: str) -> GroupOptions:
        """The same for a group of one rank.

        All groups of one rank have the same ranks, so their options are kept by axes: else the backend of one axis of
        size 1 would be that of all. In the name of the group they count as if they were asked for in the call.
        """
        kept = self._kept_by(layout, axes, tag)
        self._alone.add(kept)
        usual = self._registry.options
        return usual.but(self._configured[kept][0].keywords()) if kept in self._configured else usual

    def _kept_by(self, layout: Layout, axes: tuple[Axis, ...], tag: str) -> _Kept:
        """Where options that are configured for this rank's block are kept."""
        ranks = layout.block_of(self.rank, *axes)
        return (ranks if len(ranks) > 1 else frozenset(layout.along(self.rank, *axes).axes), tag)

    def _make(self, key: _Key, usual: GroupOptions, words: str, description: str) -> building.GroupRecord:
        """Build a group directly. Nobody waits for anybody.

        What all members have to mean alike stands on the card that they show each other when they connect. Where
        there is something special to mean, one store operation holds the cards against each other at once.
        """
        name, options, line = self._name_of(key, usual), key.options, call_site()
        backends, store = backends_of(options.backend), self._registry.store
        if len(key.ranks) == 1 or backends.dry:
            alone = dict.fromkeys(backends.names, dist.HashStore())
            group = building.build(name, key.ranks, self.rank, options, store, alone, description)
            return building.GroupRecord(group, words, line, ranks=key.ranks)
        keys: list[str] = []
        refused = (f"{name}/options/refused", self.refused)
        mend = "Configure its axes alike on every rank, or let every rank ask for it with the same options."
        card = Fingerprint(self.rank, options.given, words, mend)
        if options is not self._registry.options and options != self._registry.options:
            keys = [f"{name}/options"]
            try:
                self._registry.run(self._agree_on(keys[0], card), self.store_timeout)
            except MismatchError:
                self.remember_refusals(refused)
                raise
        polling = {
            backend: PollingStore(
                self._registry.run,
                card,
                key.ranks,
                options.timeout or timedelta(),
                addresses=backend == "gloo",
                first=self._agree_on_mesh,
                refused=refused,
                tell=self.tell,
                doubt=self.doubt,
            )
            for backend in backends.names
        }
        group = building.build(name, key.ranks, self.rank, options, store, polling, description)
        return building.GroupRecord(group, words, line, polling, keys, ranks=key.ranks, card=card)

    def _make_with_all(
        self,
        options: GroupOptions,
        words: str,
        description: str,
        blocks: Sequence[tuple[int, ...]],
    ) -> building.GroupRecord:
        """Make a group through the public new_group, which every rank of the world has to call for every block."""
        if sum(map(len, blocks)) != self.world_size:
            raise OptionsError(
                f"{words}: backend {options.backend} makes groups through torch's new_group, which all "
                f"{self.world_size} ranks of the world call for every block, but this partition holds "
                f"{sum(map(len, blocks))}. Ask the mesh of the whole world for a group along its axes."
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
        return building.GroupRecord(mine, words, call_site(), by="torch", ranks=ranks)

    def _name_of(self, key: _Key, usual: GroupOptions) -> str:
        """A name that is a function of what the group is, never of how many groups were made before it."""
        kind = self._kind_of(key, usual)
        released, failed = self._generations.of(key.ranks, kind)
        return f"{self.key}/{_word(key.ranks)}/{kind}.{released}.{failed}"

    def _kind_of(self, key: _Key, usual: GroupOptions | None = None) -> str:
        """What tells a group from others of the same ranks: its tag, and what was asked for beyond the configured."""
        usual = usual or self._usual(key.ranks, key.tag)
        unusual: list[tuple[str, Any]] = []
        if key.options is not usual and key.options != usual:
            plain = usual.given
            unusual = sorted(each for each in key.options.given.items() if plain.get(each[0]) != each[1])
        return _kind(key.tag, str(unusual))

    def _open(self) -> None:
        """At the family's first group: see that no other could be taken for it."""
        if self in self._registry.open:
            return
        with _registering:
            twins = [] if self.name is not None else self._registry.living()
            for other in twins:
                if other is not self and other.name is None and other.layout == self.layout:
                    key = next(key for key, cache in living().items() if cache is other)
                    raise NameTakenError(
                        f"two unnamed meshes live that only the order of making tells apart: {self.call}, made at "
                        f"{other.call_site} and at {self.call_site}. Ranks that use them in other orders would "
                        "cross.\n\n"
                        f"  pgmesh.meshes()[{key!r}].close()   # close the other, if it is done with\n"
                        f"  {self.layout.spell('ProcessGroupMesh', world=self.world_size, name='actor')}   "
                        "# or name this one"
                    )
            self._registry.open.add(self)

    def _agree_on_mesh(self) -> StoreProtocol[None]:
        """Once: see that all members mean the same mesh."""
        if not self.agreed:
            yield from self.register_mesh(listed=False)

    def _agree_on(self, key: str, card: Fingerprint) -> StoreProtocol[None]:
        """See that all members mean the same mesh and the same group."""
        yield from self._agree_on_mesh()
        yield from publish_or_compare(key, card)

    def ask(self, step: Step) -> Any:
        """Ask the store, with a deadline."""
        return self._registry.store_thread().ask(step, self.store_timeout)

    def register_mesh(self, *, listed: bool) -> StoreProtocol[None]:
        """See that all members mean the same mesh, as steps."""
        known = self._registry.refusals[self._namesake] if self._registry.refusals else set[str]()
        stale = [key for key in known if not key.startswith(f"{self.key}/")]
        yield from register_mesh(self.key, self.card, listed=listed or bool(stale))
        self.agreed = True
        if stale:
            said = (yield Read(f"{self.key}/said")) or b""
            if len({line.partition(b" ")[0] for line in said.splitlines()}) == self.layout.size():
                yield Delete(tuple(stale))
                known.difference_update(stale)

    @property
    def _namesake(self) -> str:
        """What a later mesh of the same name, over the same ranks, has in common with this one."""
        return f"{self.name}/{_set_word(self.layout.ranks_in_order())}"

    def remember_refusals(self, keys: Iterable[str]) -> None:
        """These keys may tell that ranks meant different things.

        They are for those who still wait, or come late. Once all ranks have introduced themselves to a later mesh of
        this name, they have closed this one, and the last of them takes the keys away if it knows them; else who does,
        once it is the last. Where there is no name, two such meshes may live at once, and the keys stay.
        """
        if self.name is not None:
            self._registry.refusals[self._namesake].update(keys)

    @functools.cached_property
    def card(self) -> Fingerprint:
        """What this rank means by the mesh."""
        ranks = self.layout.ranks_in_order()
        meaning = {
            "axes": list(self.layout.axes),
            "shape": list(self.layout.shape),
            "ranks": str(ranks) if isinstance(ranks, range) else f"{format_ranks(ranks, 64)} ({_word(ranks)})",
            "size of the world": self.world_size,
        }
        mend = "Make the mesh alike on every rank; where ranks mean to have different meshes, name each."
        return Fingerprint(self.rank, meaning, self.words, mend)

    @property
    def refused(self) -> str:
        """The key under which a rank says that it means another mesh."""
        return f"{self.key}/refused"

    def count(self) -> int:
        """How many groups this process holds, of all families."""
        return building.held()

    def is_dry(self) -> bool:
        """Whether there are no other processes to ask."""
        return backends_of(self._registry.options.backend).dry

    def tell(self, doing: str) -> None:
        """Tell other processes what this one does."""
        self._registry.store_thread().say(doing)

    def doubt(self) -> str:
        """Return why ranks may not find each other on this store; "" for nothing."""
        return self._registry.store_thread().doubt()

    def beating(self) -> StoreThread:
        """The thread that speaks with the store for this process; it tells the others that this process lives."""
        return self._registry.beating()

    # -- configuring --------------------------------------------------------------------------------------------

    def configure(self, layout: Layout, axes: tuple[Axis, ...], tag: str, options: Mapping[str, Any]) -> None:
        """Set what the group of this rank's block will be made with."""
        self.check()
        given = GroupOptions.of(options)
        layout.size(*axes)  # there are such axes, also where this rank is not in the mesh and has nothing to do
        if self.rank not in layout:
            return
        ranks = layout.block_of(self.rank, *axes)
        spelling = ", ".join(map(str, layout.along(self.rank, *axes).axes))
        kept_by = self._kept_by(layout, axes, tag)
        with self.lock:
            before, by, line = self._configured.get(kept_by, (GroupOptions(), spelling, ""))
            after = before.but(options)
            if after.keywords() == before.keywords():
                return
            for key, made in self._records.items():
                if (key.ranks, key.tag) == (ranks, tag) and (len(ranks) > 1 or kept_by in self._alone):
                    raise OptionsError(
                        f"{made.words} was made at {made.call_site}, so it is too late to configure it.\n\n"
                        f"{format_calls(_instead_of_configuring(axes, tag, given))}"
                    )
            kept = {name: value for name, value in before.keywords().items() if value is not None}
            if by != spelling and any(after.keywords()[name] != value for name, value in kept.items()):
                words = [f"{name}={value!r}" for name, value in given.given.items()]
                apart = f"mesh.{_call('configure', axes, 'tag=' + repr(spelling), *words)}"
                raise OptionsError(
                    f"{spelling} and {by} are the same ranks here ({format_ranks(ranks)}), and so one group, but {by} "
                    f"was configured with {before} at {line}, and {spelling} now with {given}.\n\n"
                    f"  {apart}   # a communicator of its own; else the same options for both"
                )
            self._configured[kept_by] = (after, by, call_site())

    def set_timeout(self, timeout: timedelta, chosen: Callable[[tuple[int, ...]], bool]) -> int:
        """Change how long collectives may wait: of the groups that were made whose ranks are chosen; how many."""
        self.check()
        with self.lock:
            found = [made for key, made in self._records.items() if chosen(key.ranks)]
            for made in found:
                if torch_private.is_known(made.group):  # torch may have destroyed an adopted one
                    building.set_timeout(made, timeout)
        return len(found)

    # -- ending -------------------------------------------------------------------------------------------------

    def release(self, ranks: tuple[int, ...]) -> None:
        """Destroy the groups of these ranks; asked for again, they are made anew under new names."""
        self.check()
        teardown.free_finished()
        with self.lock:
            self._drop(
                [key for key in self._records if key.ranks == ranks],
                f"was released at {call_site()}; ask its mesh for it anew.",
            )
            self._generations.release(ranks)
            if len(ranks) == 1:
                self._alone.clear()

    def close(self, reason: str | None = None, *, at_exit: bool = False) -> None:
        """Destroy every group of the family; it makes no more.

        Args:
            reason: why, where that was not asked for here: the world ended, or the process.
        """
        if not at_exit:
            teardown.free_finished()
        if not self.lock.acquire(timeout=-1 if reason is None else 1.0):
            self.ended = self.ended or reason  # a thread is stuck with the lock, and the process or the world is ending
            return
        try:
            if self.ended is not None:
                return
            self.ended = reason or f"was closed at {call_site()}."
            self._drop(list(self._records), self.ended, at_exit=at_exit)
            for name in list(self.attended) if not at_exit else ():  # of groups that could not even be made
                self._forget_meetings(name)
            if self.agreed and not at_exit:
                self._delete([self.key, f"{self.key}/said"])
            with _registering:
                self._registry.open.discard(self)
        finally:
            self.lock.release()

    def _clean(self, steps: StoreProtocol[None]) -> None:
        """Take something out of the store; where that is gone, so is this, and where it hangs nobody waits for it.

        At the end of the world nobody waits at all: the thread does it before it ends.
        """
        with contextlib.suppress(WorldError, LifetimeError):
            thread = self._registry.store_thread()
            if self._registry.ending:
                thread.post(steps)
            elif not thread.silent:
                thread.run(steps, 1.0)

    def _delete(self, keys: Sequence[str]) -> None:
        if keys:
            self._clean(once(Delete(tuple(keys))))

    def _forget_meetings(self, name: str) -> None:
        """A group of this name will not come again."""
        self.connected.pop(name, None)
        self.meetings.pop(name, None)
        for meeting in self.attended.pop(name, ()):
            self._clean(meeting.leave())

    def _stop(self, made: building.GroupRecord) -> list[str]:
        """Let nobody wait for a group any more, and say which keys were written for it."""
        for store in made.stores.values():
            if store.mismatched:
                self.remember_refusals(store.refused)
        return made.stop()

    def _drop(self, keys: Iterable[_Key], reason: str, *, abort: bool = False, at_exit: bool = False) -> None:
        self._forget_hits()
        for key in keys:
            made = self._records.pop(key)
            if not at_exit:
                self._forget_meetings(made.name)
            if made.by == "others":
                continue
            written = self._stop(made)
            if torch_private.is_known(made.group):
                teardown.destroy(made, reason, abort=abort or at_exit)
            else:
                teardown.invalidate(made, reason)
            if not at_exit:
                self._delete(written)

    def forget(self, group: Any) -> None:
        """torch destroyed a group: if it is one of ours, drop it, and never use its name again."""
        if not any(made.group is group for made, _, _ in self.known()):
            return  # without the lock, which its holder may wait with
        with self.lock:
            for key, made in list(self._records.items()):
                if made.group is group:
                    self._forget_hits()
                    if made.by == "others":  # whoever asks for it learns that it is gone
                        continue
                    del self._records[key]
                    self._forget_meetings(made.name)
                    self._generations.fail(key.ranks, self._kind_of(key))
                    self._delete(self._stop(made))
                    teardown.mark_destroyed(group, f"{made.words} was destroyed; ask its mesh for it anew.")

    def _forget_hits(self) -> None:
        self._device_meshes.clear()
        for mesh in list(self.meshes):
            mesh._clear_groups()

    def end_in_child(self, reason: str) -> None:
        """The groups stayed behind in the process that was forked."""
        self.lock = threading.RLock()
        self.ended = reason
        self._forget_hits()
        for made in self._records.values():
            made.stop()
            teardown.invalidate(made, reason)
            torch_private.unregister_rank_map(made.group)

    def check(self) -> None:
        """LifetimeError once this family is closed, its world gone, or this process a fork."""
        if self.ended is not None:
            raise LifetimeError(f"{self.words} {self.ended} It still knows every rank's place, but holds no groups.")

    # -- torch's DeviceMesh -------------------------------------------------------------------------------------

    def device_mesh(self, layout: Layout, names: tuple[str, ...]) -> DeviceMesh:
        """A slice of the one DeviceMesh over the groups of a layout, which is made from the full table of ranks."""
        self.check()
        with self.lock:
            whole = self._device_meshes.get(layout)
            if whole is None:
                made = [self.group(layout, (axis,), "", {}) for axis in layout.axes]
                table = torch.tensor(layout.ranks(), dtype=torch.int).view(layout.shape)
                words = tuple(map(str, layout.axes))
                whole = DeviceMesh.from_group(
                    made[0] if len(made) == 1 else made,
                    default_device(),
                    None if len(made) == 1 else table,
                    mesh_dim_names=words,
                )
                torch_private.mark(whole, tuple(group.group_name for group in made))
                self._device_meshes[layout] = whole
            return whole if names == whole.mesh_dim_names else whole[names]

    def adopt_device_mesh(self, layout: Layout, device_mesh: DeviceMesh) -> None:
        """Take the DeviceMesh whose groups were adopted for the one over them."""
        with self.lock:
            self._device_meshes[layout] = device_mesh

    # -- others' groups -----------------------------------------------------------------------------------------

    def adopt(self, layout: Layout, axes: tuple[Axis, ...], group: dist.ProcessGroup) -> None:
        """Take a group made elsewhere for the one along these axes. It is never destroyed from here."""
        self.check()
        words = f"group {', '.join(map(str, axes))} of {self.words}"
        if not (isinstance(group, dist.ProcessGroup) and torch_private.is_known(group)):
            raise PlaceError(f"{words}: what is adopted is a process group that torch knows, not {group!r}.")
        block, members = layout.block_of(self.rank, *axes), tuple(dist.get_process_group_ranks(group))
        if members != block:
            raise PlaceError(
                f"{words} has ranks {format_ranks(block)}; the group to adopt has {format_ranks(members)}."
            )
        key, kept_by = _Key(block, self._registry.options, ""), self._kept_by(layout, axes, "")
        with self.lock:
            if kept_by in self._configured:
                options, by, line = self._configured[kept_by]
                raise OptionsError(
                    f"{words} was configured with {options} at {line}, which a group that was made elsewhere does not "
                    f"follow.\n\n"
                    f"  mesh.{_call('group', axes)}   # a group that does; else adopt without configuring {by}"
                )
            made = self._records.get(key)
            if made is not None and made.group is not group:
                how = "adopted" if made.by == "others" else "made"
                raise LifetimeError(
                    f"{words} was {how} at {made.call_site} already, and may be in use.\n\n"
                    f"  mesh.{_call('release', axes)}   # let go of it first, then adopt"
                )
            if made is None:
                self._open()
                self._records[key] = building.GroupRecord(group, words, call_site(), by="others", ranks=block)
            if len(block) == 1:
                self._alone.add(kept_by)


def _instead_of_configuring(axes: tuple[Axis, ...], tag: str, given: GroupOptions) -> list[tuple[str, str]]:
    """Calls for options that come after the group was made."""
    ways, tagged = [], [f"tag={tag!r}"] * bool(tag)
    if [*given.given] == ["timeout"] and not tag:
        timeout = f"timeout={given.given['timeout']:g}"
        ways.append((f"mesh.{_call('set_timeout', axes, timeout)}", "on every member: the group stays"))
    options = [f"{name}={value!r}" for name, value in given.given.items()]
    again = f"mesh.{_call('release', axes)}; mesh.{_call('configure', axes, *tagged, *options)}"
    return [*ways, (again, f"{'or ' * bool(ways)}on every member: the next one is made so")]


def _check_honoured(options: GroupOptions, words: str) -> None:
    backends = backends_of(options.backend)
    for option, value in (("high_priority", options.high_priority), ("nccl", options.nccl)):
        if value and "nccl" not in backends.names and not backends.dry:
            raise OptionsError(f"{words}: backend {options.backend} cannot honour {option}={value!r}; NCCL alone can.")


def _word(ranks: range | tuple[int, ...]) -> str:
    """Ranks in their order as a short word: "0-7", "1-7:2", or a digest."""
    straight = as_range(ranks)
    if straight is None:
        return _digest(array("q", ranks).tobytes())
    return f"{straight[0]}-{straight[-1]}" + (f":{straight.step}" if straight.step != 1 and len(straight) > 1 else "")


def _set_word(ranks: range | tuple[int, ...]) -> str:
    """Ranks in no order as a short word."""
    return _word(ranks if isinstance(ranks, range) and ranks.step > 0 else tuple(sorted(ranks)))


@functools.lru_cache(64)
def _kind(tag: str, unusual: str) -> str:
    """What tells groups of the same ranks apart, as a short word. What is configured does not: it is compared."""
    return _digest(f"{tag!r} {unusual}".encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _call(verb: str, axes: Iterable[Axis], *more: str) -> str:
    return f"{verb}({', '.join([*map(repr, axes), *more])})"


_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def call_site() -> str:
    """The line outside this package that is being run: where the user asked."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"


def find_cache(name: str | None, number: int, layout: Layout, call: str, rank: int) -> GroupCache:
    """The family of a mesh that travelled: the one it left where that lives here, else one made anew.

    Outside any world it is a family that knows the rank it left, and makes no groups.
    """
    if not dist.is_initialized() or _registry().forked:
        return GroupCache(name, layout, call, outside=rank)
    _, world = world_rank_and_size()
    ranks = layout.ranks_in_order()
    highest = max(ranks[0], ranks[-1]) if isinstance(ranks, range) else max(ranks)
    if highest >= world:
        raise PlaceError(f"{call} came here with rank {highest}, but the world's ranks are 0 to {world - 1}.")
    with _registering:
        for cache in _registry().living():
            if cache.identity == (name, number, layout):
                return cache
    cache = GroupCache(name, layout, call, number=number)
    cache.identity = (name, number, layout)
    return cache


# -- what ends without being asked --------------------------------------------------------------------------------


def all_caches() -> list[GroupCache]:
    with _registering:
        return [cache for registry in list(_registries.values()) for cache in registry.caches]


def living() -> dict[str, GroupCache]:
    """The families of this world that are not closed, in the order in which they were made.

    They are found by name; unnamed ones by their call, with a number where several were made by one call.
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
    """Close every mesh of this process."""
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
            registry.thread.stop("not there any more: it left the world")
        registry.store = None  # a mesh that outlives the world holds no connection


def _at_exit() -> None:
    """Let go of our groups while Python still runs: their threads would outlive it."""
    for registry in list(_registries.values()):
        if registry.thread is not None:
            registry.thread.stop("not there any more: its process has ended")
    for cache in all_caches():
        cache.close("ended with its process.", at_exit=True)


def _in_child() -> None:
    """In a forked child: the threads behind the groups are not there, so neither use nor destroy any."""
    global _registering
    _registering = threading.RLock()  # whoever held the old one is not here
    teardown.keep_from_destructors()
    if dist.is_initialized():
        _registry().forked, _registry().thread = True, None
    for cache in all_caches():
        cache.end_in_child("was made before this process was forked.")


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
torch_private.on_destroy.append(_forget)
torch_private.on_world_end.append(_end_world)
