"""Process groups: the one file that makes and destroys them, and that knows torch's private names.

A group is made by its members alone, without waiting for anyone: its name is a function of what it is, it is built
directly and not split off the world, and its backend connects when it is first used.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import functools
import hashlib
import itertools
import math
import os
import sys
import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import cachetools
import torch
import torch.distributed as dist
from torch.distributed import c10d_logger as _c10d_logger
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.device_mesh import DeviceMesh

from pgmesh.errors import (
    LifetimeError,
    MissingRanksError,
    NameTakenError,
    OptionsError,
    PgmeshError,
    PlaceError,
    SeamError,
    WorldError,
)
from pgmesh.options import GroupOptions
from pgmesh.rendezvous import Card, PollingStore, agree
from pgmesh.sizes import progression, some

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout

c10d: Any = _c10d  # its tables are read and written here as torch itself does, whatever their stubs say
c10d_logger: Any = _c10d_logger

# -- the seam: every private name of torch, with its reason ------------------------------------------------------

TRIED_ON = ("2.13",)
"""The versions of torch on which every name of the seam was tried."""

SEAM: dict[str, str] = {
    **{
        f"distributed_c10d._world.{table}": "a table where torch.distributed looks groups up"
        for table in ("pg_map", "pg_group_ranks", "pg_backend_config", "pg_coalesce_state", "pg_to_tag", "tags_to_pg")
    },
    "distributed_c10d._pg_names": "its length goes into the names of torch's local synchronisation",
    "distributed_c10d._rank_not_in_group": "torch asks this of every group it is given: one let go of says so",
    "c10d_logger._get_msg_dict": "torch calls it when a collective has raised: the moment to say why",
    "distributed_c10d._get_default_store": "the world's store, where members agree and backends meet",
    "distributed_c10d._register_process_group": "functional collectives find a group by name",
    "distributed_c10d._unregister_process_group": "the registry keeps a group alive until it is told",
    "distributed_c10d._use_torchcomms_enabled": "torchcomms cannot be made member by member",
    "distributed_c10d._get_default_timeout": "the timeout of a world whose backend does not tell",
    "device_mesh.DeviceMesh._hash_key": "meshes of one shape with groups of their own have to differ",
    "ProcessGroup._set_default_backend": "a group built directly is told what it runs on",
    "ProcessGroup._register_backend": "the same, device by device",
    "ProcessGroup._get_backend": "the world's timeout is kept by its backend",
    "ProcessGroup._device_types": "the devices a group answers for",
    "ProcessGroup._set_group_name": "torch names only what new_group makes",
    "ProcessGroup._set_group_desc": "profiles and flight records show this",
    "ProcessGroupGloo._Options._devices": "a lazy device can be handed over in no other way",
    "ProcessGroupGloo._Options._threads": "how many threads a group takes",
    "ProcessGroupGloo._Options._timeout": "options of ours carry their timeout",
    "ProcessGroupGloo.create_default_device": "a device that connects when it is first used",
    "_C._distributed_c10d.FakeProcessGroup._create_internal": "dry runs",
    "_C._distributed_c10d.FakeProcessGroup.Options.error_on_collective": "what a released group answers with",
}
"""Private names of torch that this file stands on, each with what it is needed for."""


def missing_names(torch: Any = torch) -> dict[str, str]:
    """The names of the seam that this torch does not have, with what each is needed for."""

    def there(path: str) -> bool:
        root, *names = path.split(".")
        place = torch._C if root == "_C" else getattr(torch.distributed, root, None)
        for name in names:
            place = getattr(place, name, None)
        return place is not None

    optional = {name for name in SEAM if name.startswith("ProcessGroupGloo") and not dist.is_gloo_available()}
    return {name: reason for name, reason in SEAM.items() if name not in optional and not there(name)}


if _gone := missing_names():
    raise SeamError(
        f"torch {torch.__version__} lacks what pgmesh, tried on torch {', '.join(TRIED_ON)}, makes groups with:"
        + "".join(f"\n  {name}: {reason}" for name, reason in _gone.items())
    )

_FakeBackend: Any = torch._C._distributed_c10d.FakeProcessGroup
_PREFIX = "pgmesh/"


class _Names(dict[Any, str]):
    """torch's table of group names, whose length does not count ours.

    torch names the groups of its local synchronisation by this length, so a rank that holds more groups of ours
    than another would name them otherwise than the other does. And torch's own destroy tells us here.
    """

    def __len__(self) -> int:
        return sum(not name.startswith(_PREFIX) for name in self.values())

    def __delitem__(self, group: Any) -> None:
        super().__delitem__(group)
        _forget(group)

    def clear(self) -> None:
        super().clear()
        _end_world("torch.distributed was destroyed")


_released: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_reading: weakref.WeakKeyDictionary[Any, PollingStore] = weakref.WeakKeyDictionary()
_is_outside = c10d._rank_not_in_group
_describe_failure = c10d_logger._get_msg_dict


def _check_and_tell_outside(group: Any) -> Any:
    """What torch asks of every group it is given: for one that was let go of, the answer is which it was."""
    if _released and group in _released:
        raise LifetimeError(_released[group])
    return _is_outside(group)


def _explain_failure(function: str, *args: Any, **kwargs: Any) -> Any:
    """What torch logs of a collective that raised: the moment to raise what we know in place of what torch says."""
    error = sys.exc_info()[1]
    if isinstance(error, PgmeshError):
        return {"func_name": function}
    group = next((each for each in (*args, *kwargs.values()) if isinstance(each, dist.ProcessGroup)), None)
    if group in _reading and isinstance(error, RuntimeError):
        store = _reading[group]
        if store.failure is not None:
            raise store.failure from error
        missing = store.missing() if "timed out" in str(error).lower() else None
        if missing:
            raise MissingRanksError(missing) from error
    return _describe_failure(function, *args, **kwargs)


def _mark_of(mesh: DeviceMesh) -> Any:
    """What tells DeviceMeshes of one shape apart: the mark of the one that this was cut from."""
    root = mesh.__dict__.get("_root_mesh")
    return (mesh if root is None else root).__dict__.get("_thread_id")


def _mark(mesh: DeviceMesh, mark: Any) -> None:
    mesh.__dict__["_thread_id"], mesh.__dict__["_hash"] = mark, None


# torch takes DeviceMeshes of one shape for equal whatever their groups are, so that what DTensor remembers of one mesh
# would run on the groups of another. It does compare this field, made for tests that run ranks as threads.
DeviceMesh._thread_id = property(_mark_of, _mark)  # type: ignore[assignment]
c10d._pg_names = _Names(c10d._pg_names)
c10d._rank_not_in_group = _check_and_tell_outside
c10d_logger._get_msg_dict = _explain_failure


# -- the world that groups are made in ----------------------------------------------------------------------------


def world_rank_and_size() -> tuple[int, int]:
    """This process's rank and the size of the world.

    Raises:
        WorldError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise WorldError(
            "torch.distributed is not initialised, so there are no ranks to arrange.\n\n"
            "  pgmesh.launch.join()                     # in a script that torchrun starts\n"
            "  pgmesh.Layout(dp=2, tp=2)                # to plan a mesh without processes"
        )
    return dist.get_rank(), dist.get_world_size()


def _world_options() -> GroupOptions:
    """What the default group was made with: what a group of ours inherits."""
    group: Any = dist.group.WORLD
    backend = str(c10d._world.pg_map[group][0]).lower()
    if backend == "undefined":
        backend = str(c10d.BackendConfig(c10d.Backend(backend)))
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):
            return GroupOptions(backend=backend, timeout=group._get_backend(device).options._timeout)
    return GroupOptions(backend=backend, timeout=c10d._get_default_timeout(c10d.Backend(backend)))


class Backends(NamedTuple):
    """What a backend's name means to torch."""

    by_device: dict[str, str]
    names: frozenset[str]
    direct: bool  # members can build it by themselves
    dry: bool  # there are no other processes to meet


@functools.cache
def backends_of(name: str | None) -> Backends:
    """The backend for each device, and what follows.

    Raises:
        OptionsError: torch.distributed knows no such backend, or was built without it.
    """
    known = {*c10d.Backend.backend_list} - {"undefined"}
    parts = {part.rpartition(":")[2] for part in str(name).split(",")}
    if not parts <= known:
        raise OptionsError(f"torch.distributed knows no backend {name!r}; it knows {', '.join(sorted(known))}.")
    absent = sorted(part for part in parts if not dist.is_backend_available(part))
    if absent:
        raise OptionsError(f"this torch was built without backend {', '.join(absent)}.")
    table = c10d.BackendConfig(c10d.Backend(name)).get_device_backend_map()
    names = frozenset(map(str, table.values()))
    direct = names <= {*_DIRECT} and not c10d._use_torchcomms_enabled()
    return Backends({device: str(backend) for device, backend in table.items()}, names, direct, names == {"fake"})


def default_device() -> str:
    """The type of the device that groups communicate from: an accelerator where the backend serves one that is here."""
    devices = list(backends_of(_registry().options.backend).by_device)
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None and accelerator.type in devices else devices[0]


# -- one group, built directly ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A group that was made here, with what it takes to let it go."""

    group: dist.ProcessGroup
    words: str  # "group dp, tp of mesh 'actor'"
    line: str  # where it was asked for
    stores: tuple[PollingStore, ...] = ()  # what its backends read through
    keys: tuple[str, ...] = ()  # what we wrote for it
    by: Literal["us", "torch", "others"] = "us"


def _gloo(store: dist.Store, rank: int, size: int, name: str, options: GroupOptions, ranks: Sequence[int]) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    settings = gloo._Options()
    # Devices of its own for each group: on a lazy one, pairs are told apart by the rank in the group alone.
    interfaces = [each for each in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if each]
    settings._devices = [gloo.create_device(interface=each, lazy_init=True) for each in interfaces] or [
        gloo.create_default_device(lazy_init=True)
    ]
    settings._threads = 1  # collectives of one group come one after another, as on NCCL's stream
    settings._timeout = options.timeout
    settings.global_ranks_in_group = list(ranks)
    settings.group_name = name
    return gloo(store, rank, size, settings)


def _nccl(store: dist.Store, rank: int, size: int, name: str, options: GroupOptions, ranks: Sequence[int]) -> Any:
    settings: Any = dist.ProcessGroupNCCL.Options()
    settings.is_high_priority_stream = bool(options.high_priority)
    settings._timeout = options.timeout
    settings.global_ranks_in_group = list(ranks)
    settings.group_name = name
    for setting, value in (options.nccl or {}).items():
        if not hasattr(settings.config, setting):
            raise OptionsError(f"this torch's NCCL has no setting {setting}.")
        setattr(settings.config, setting, value)
    return dist.ProcessGroupNCCL(store, rank, size, settings)


def _fake(store: dist.Store, rank: int, size: int, name: str, options: GroupOptions, ranks: Sequence[int]) -> Any:
    return _FakeBackend._create_internal(rank, size, _FakeBackend.Options())


_DIRECT: dict[str, Callable[..., Any]] = {"gloo": _gloo, "nccl": _nccl, "fake": _fake}
"""The backends that members can build by themselves."""


def _build(
    name: str, ranks: Sequence[int], me: int, options: GroupOptions, stores: Mapping[str, Any], description: str
) -> Any:
    """A process group of these ranks that torch.distributed knows as its own."""
    rank, size, backends = ranks.index(me), len(ranks), backends_of(options.backend).by_device
    prefixed = dist.PrefixStore(f"{name}/", c10d._get_default_store())
    group: Any = dist.ProcessGroup(prefixed, rank, size)
    types = {each: c10d.Backend.backend_type_map[each] for each in backends.values()}
    group._set_default_backend(types["nccl"] if "nccl" in types else next(iter(types.values())))
    built: dict[str, Any] = {}
    for device, backend in backends.items():
        if backend not in built:
            inner = dist.PrefixStore(f"{name}/{device}", stores[backend])
            built[backend] = _DIRECT[backend](inner, rank, size, name, options, ranks)
        group._register_backend(torch.device(device), types[backend], built[backend])
    group._set_group_name(name)
    group._set_group_desc(description)
    world, tag = c10d._world, f"user:{name}"
    c10d._register_process_group(name, group)
    world.pg_map[group] = (options.backend, prefixed)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = dict(zip(ranks, range(size)))
    world.pg_backend_config[group] = ",".join(f"{device}:{backend}" for device, backend in backends.items())
    world.pg_to_tag[group] = tag
    world.tags_to_pg[tag] = [group]
    return group


def _tear_down(made: Made, reason: str, *, abort: bool = False) -> None:
    """Take a group out of torch's tables, end its backend, and have it name itself to whoever still uses it."""
    group: Any = made.group
    for store in made.stores:
        store.close()
    _released[group] = f"{made.words} {reason}"
    if made.by == "torch":
        dist.destroy_process_group(group)
    else:
        world, name = c10d._world, group.group_name
        for table in (world.pg_map, world.pg_group_ranks, world.pg_backend_config, world.pg_coalesce_state):
            table.pop(group, None)
        dict.pop(world.pg_names, group, None)
        world.tags_to_pg.pop(world.pg_to_tag.pop(group, None), None)
        c10d._unregister_process_group(name)
        with contextlib.suppress(RuntimeError):  # a backend that cannot be ended has nothing to end
            group.abort() if abort else group.shutdown()
    _disarm(group)


def _disarm(group: Any) -> None:
    """Have a group answer every collective with an error: a destroyed Gloo group would go on working."""
    settings = _FakeBackend.Options()
    settings.error_on_collective = True
    refusal = _FakeBackend._create_internal(group.rank(), group.size(), settings)
    # torch keeps the first backend of each type, so the refusal goes by a type that no group of ours is made with.
    for device in group._device_types:
        group._register_backend(device, dist.ProcessGroup.BackendType.UNDEFINED, refusal)
    group._set_default_backend(dist.ProcessGroup.BackendType.UNDEFINED)


# -- the groups of a mesh, its views and its slices ---------------------------------------------------------------


class _Registry:
    """What this process has made in one world: how many meshes under each name, and which of them live."""

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.families: weakref.WeakSet[Family] = weakref.WeakSet()
        self.open: set[Family] = set()  # those that hold groups live until they are closed
        self.options = _world_options()

    def living(self) -> list[Family]:
        return [family for family in self.families if family.ended is None]


_registries: weakref.WeakKeyDictionary[Any, _Registry] = weakref.WeakKeyDictionary()


def _registry() -> _Registry:
    world: Any = dist.group.WORLD
    if world not in _registries:
        _registries[world] = _Registry()
    return _registries[world]


class _Key(NamedTuple):
    """What a group is."""

    ranks: tuple[int, ...]
    options: GroupOptions
    tag: str


class Family:
    """The groups of a mesh, its views and its slices: made once, found by what they are, and ended together.

    Args:
        name: what tells this family from others on every rank; without one, the set of its ranks and the count
            of meshes that this process has made on it do.
        layout: the root's layout, which all members must describe alike.
        call: the call that made the root, for messages.
    """

    def __init__(self, name: str | None, layout: Layout, call: str, *, outside: int | None = None) -> None:
        self.name, self.layout, self.call = name, layout, call
        self.rank, self.world_size = world_rank_and_size() if outside is None else (outside, 0)
        self.words = f"mesh {name!r}" if name else f"{call}"
        self.line = _caller()
        self.ended: str | None = None
        self.meshes: weakref.WeakSet[Any] = weakref.WeakSet()  # those that remember groups of ours
        self._cache: cachetools.Cache[_Key, Made] = cachetools.Cache(math.inf)
        self._configured: dict[tuple[tuple[int, ...], str], tuple[GroupOptions, str, str]] = {}
        self._generations: Counter[tuple[int, ...]] = Counter()
        self._device_meshes: dict[Layout, DeviceMesh] = {}
        self.lock = threading.RLock()
        self.number = 0
        if outside is not None:
            self.ended = "came here outside any world."
            return
        self._registry = registry = _registry()
        if name is not None:
            for other in registry.living():
                if other.name == name:
                    raise NameTakenError(
                        f"a mesh named {name!r} lives already, made at {other.line}: {other.call}.\n\n"
                        f"  close() it first, or give this one a name of its own."
                    )
        kin = name if name is not None else f"ranks/{_set_word(layout.ranks_in_order())}"  # no name has a "/"
        self.number = registry.numbers[kin]
        registry.numbers[kin] += 1
        self._key = f"{_PREFIX}{kin}.{self.number}"
        self._agreed = False
        self.origin: Hashable = (name, self.number, layout)
        registry.families.add(self)

    # -- making -------------------------------------------------------------------------------------------------

    def group(self, layout: Layout, axes: tuple[Axis, ...], tag: str, asked: Mapping[str, Any]) -> dist.ProcessGroup:
        """The group of this rank's block along axes of a layout of this family."""
        self.check()
        ranks = layout.block_of(self.rank, *axes)
        words = ", ".join(map(str, axes or layout.axes))
        return self._get(
            ranks,
            f"group {words} of {self.words}",
            layout.describe(self.rank, *axes),
            tag,
            asked,
            lambda: layout.partition(*axes),
        )

    def group_of(self, ranks: tuple[int, ...], tag: str, asked: Mapping[str, Any]) -> dist.ProcessGroup:
        """The group of any ranks of this family."""
        self.check()
        words = f"ranks {some(ranks)}"
        return self._get(ranks, f"group of {words} of {self.words}", words, tag, asked, None)

    def _get(
        self,
        ranks: tuple[int, ...],
        words: str,
        description: str,
        tag: str,
        asked: Mapping[str, Any],
        partition: Callable[[], Iterable[tuple[int, ...]]] | None,
    ) -> dist.ProcessGroup:
        with self.lock:
            self.check()
            usual = self._registry.options
            if (ranks, tag) in self._configured:
                usual = usual.but(self._configured[ranks, tag][0].keywords())
            options = usual.but(asked) if asked else usual
            key = _Key(ranks, options, tag)
            made = self._cache.get(key)
            if made is None:
                _check_honoured(options, words)
                self._open()
                make = self._make if backends_of(options.backend).direct else self._make_with_all
                description = options.description or f"{self.name or 'mesh'}[{description}]"
                made = make(key, usual, words, description, partition)
                self._cache[key] = made
            return made.group

    def _make(self, key: _Key, usual: GroupOptions, words: str, description: str, _: object) -> Made:
        """Build a group directly. Nobody waits for anybody.

        What all members have to mean alike stands on the card that they show each other when they connect. Where
        there is something special to mean, one store operation holds the cards against each other at once.
        """
        name, options, line = self._name_of(key, usual), key.options, _caller()
        if len(key.ranks) == 1 or backends_of(options.backend).dry:
            stores: Mapping[str, Any] = collections.defaultdict(dist.HashStore)
            return Made(_build(name, key.ranks, self.rank, options, stores, description), words, line)
        store: Any = c10d._get_default_store()
        keys: tuple[str, ...] = ()
        mend = "Configure its axes alike on every rank, or let every rank ask for it with the same options."
        card = Card(self.rank, options.given(), words, mend)
        if options != self._registry.options:
            keys = (f"{name}/options",)
            self._agree_on_mesh()
            agree(store, keys[0], card)
        polling = {
            backend: PollingStore(
                store,
                card,
                key.ranks,
                options.timeout or timedelta(),
                addresses=backend == "gloo",
                first=self._agree_on_mesh,
            )
            for backend in backends_of(options.backend).names
        }
        group = _build(name, key.ranks, self.rank, options, polling, description)
        if "gloo" in polling:
            _reading[group] = polling["gloo"]
        return Made(group, words, line, tuple(polling.values()), keys)

    def _make_with_all(
        self,
        key: _Key,
        usual: GroupOptions,
        words: str,
        description: str,
        partition: Callable[[], Iterable[tuple[int, ...]]] | None,
    ) -> Made:
        """Make a group through the public new_group, which every rank of the world has to call for every block."""
        blocks = tuple(partition()) if partition is not None else ()
        if sum(map(len, blocks)) != self.world_size:
            raise OptionsError(
                f"{words}: backend {key.options.backend} makes groups through torch's new_group, which all "
                f"{self.world_size} ranks of the world call for every block, but this partition holds "
                f"{sum(map(len, blocks))}. Ask the mesh of the whole world for a group along its axes."
            )
        mine: Any = None
        for block in blocks:
            group = dist.new_group(
                list(block),
                timeout=key.options.timeout,
                backend=key.options.backend,
                group_desc=description,
                sort_ranks=False,
            )
            if self.rank in block:
                mine = group
        return Made(mine, words, _caller(), by="torch")

    def _name_of(self, key: _Key, usual: GroupOptions) -> str:
        """A name that is a function of what the group is, never of how many groups were made before it."""
        unusual = {}
        if key.options != usual:
            plain = usual.given()
            unusual = {what: value for what, value in key.options.given().items() if plain.get(what) != value}
        kind = _digest(f"{key.options.backend} {key.tag!r} {sorted(unusual.items())}".encode())
        return f"{self._key}/{_word(key.ranks)}/{kind}.{self._generations[key.ranks]}"

    def _open(self) -> None:
        """At the family's first group: see that no other could be taken for it."""
        if self in self._registry.open:
            return
        if self.name is None:
            for other in self._registry.living():
                if other is not self and other.name is None and other.layout == self.layout:
                    raise NameTakenError(
                        f"two unnamed meshes live that only the order of making tells apart: {self.call}, made at "
                        f"{other.line} and at {self.line}. Ranks that use them in other orders would cross.\n\n"
                        f"  ProcessGroupMesh(..., name='actor')   # name them, or close() the one that is done with"
                    )
        self._registry.open.add(self)

    def _agree_on_mesh(self) -> None:
        """Once: see in one store operation that all members mean the same mesh."""
        if self._agreed:
            return
        ranks = self.layout.ranks_in_order()
        meaning = {
            "axes": list(self.layout.axes),
            "shape": list(self.layout.shape),
            "ranks": str(ranks) if isinstance(ranks, range) else f"{some(ranks, 64)} ({_word(ranks)})",
        }
        mend = "Make the mesh alike on every rank; where ranks mean to have different meshes, name each."
        agree(c10d._get_default_store(), self._key, Card(self.rank, meaning, self.words, mend))
        self._agreed = True

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
        with self.lock:
            before, by, line = self._configured.get((ranks, tag), (GroupOptions(), spelling, ""))
            after = before.but(options)
            if after.keywords() == before.keywords():
                return
            for key, made in self._cache.items():
                if (key.ranks, key.tag) == (ranks, tag):
                    raise OptionsError(
                        f"{made.words} was made at {made.line}, so it is too late to configure it.\n\n"
                        f"  {_call('configure', axes, '...')}   # before the first {_call('group', axes)}\n"
                        f"  {_call('release', axes)}   # or let go of it first"
                    )
            kept = {name: value for name, value in before.keywords().items() if value is not None}
            if by != spelling and any(after.keywords()[name] != value for name, value in kept.items()):
                apart = _call("configure", axes, "tag='...'", "...")
                raise OptionsError(
                    f"{spelling} and {by} are the same ranks here ({some(ranks)}), and so one group, but {by} was "
                    f"configured with {before} at {line}, and {spelling} now with {given}.\n\n"
                    f"  {apart}   # a communicator of its own; else the same options for both"
                )
            self._configured[ranks, tag] = (after, by, _caller())

    # -- ending -------------------------------------------------------------------------------------------------

    def release(self, ranks: tuple[int, ...]) -> None:
        """Destroy the groups of these ranks; asked for again, they are made anew under new names."""
        self.check()
        with self.lock:
            self._drop(
                [key for key in self._cache if key.ranks == ranks],
                f"was released at {_caller()}; ask its mesh for it anew.",
            )
            self._generations[ranks] += 1

    def close(self, reason: str | None = None, *, at_exit: bool = False) -> None:
        """Destroy every group of the family; it makes no more."""
        with self.lock:
            if self.ended is not None:
                return
            self.ended = reason or f"was closed at {_caller()}."
            self._drop(list(self._cache), self.ended, at_exit=at_exit)
            if self._agreed and not at_exit:
                _delete([self._key])
            self._registry.open.discard(self)

    def _drop(self, keys: Iterable[_Key], reason: str, *, at_exit: bool = False) -> None:
        self._forget_hits()
        for key in keys:
            made = self._cache.pop(key)
            if made.by == "others" or made.group not in c10d._world.pg_map:
                continue
            _tear_down(made, reason, abort=at_exit)
            if not at_exit:
                _take_back(made)

    def forget(self, group: Any) -> None:
        """torch destroyed one of our groups: drop it, and never use its name again."""
        with self.lock:
            for key, made in list(self._cache.items()):
                if made.group is group:
                    del self._cache[key]
                    self._forget_hits()
                    self._generations[key.ranks] += 1
                    _take_back(made)
                    _released[group] = f"{made.words} was destroyed; ask its mesh for it anew."
                    c10d._world.tags_to_pg.pop(c10d._world.pg_to_tag.get(group), None)

    def _forget_hits(self) -> None:
        self._device_meshes.clear()
        for mesh in list(self.meshes):
            mesh.forget()

    def end(self, reason: str) -> None:
        """The groups went without us: with their world, or with the process that was forked."""
        self.ended = reason
        self._forget_hits()
        for made in self._cache.values():
            _released[made.group] = f"{made.words} {reason}"
            c10d._world.pg_map.pop(made.group, None)

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
                _mark(whole, tuple(group.group_name for group in made))
                self._device_meshes[layout] = whole
            return whole if names == whole.mesh_dim_names else whole[names]

    # -- others' groups -----------------------------------------------------------------------------------------

    def adopt(self, layout: Layout, axes: tuple[Axis, ...], group: dist.ProcessGroup) -> None:
        """Take a group made elsewhere for the one along these axes. It is never destroyed from here."""
        self.check()
        block, members = layout.block_of(self.rank, *axes), tuple(dist.get_process_group_ranks(group))
        words = f"group {', '.join(map(str, axes))} of {self.words}"
        if members != block:
            raise PlaceError(f"{words} has ranks {some(block)}; the group to adopt has {some(members)}.")
        with self.lock:
            self._open()
            self._cache.setdefault(_Key(block, self._registry.options, ""), Made(group, words, _caller(), by="others"))


def _check_honoured(options: GroupOptions, words: str) -> None:
    for option, value in (("high_priority", options.high_priority), ("nccl", options.nccl)):
        if value and "nccl" not in backends_of(options.backend).names:
            raise OptionsError(f"{words}: backend {options.backend} cannot honour {option}={value!r}; NCCL alone can.")


def _word(ranks: range | tuple[int, ...]) -> str:
    """Ranks in their order as a short word: "0-7", "1-7:2", or a digest."""
    straight = progression(ranks)
    if straight is None:
        return _digest(array("q", ranks).tobytes())
    return f"{straight[0]}-{straight[-1]}" + (f":{straight.step}" if straight.step != 1 and len(straight) > 1 else "")


def _set_word(ranks: range | tuple[int, ...]) -> str:
    """Ranks in no order as a short word."""
    return _word(ranks if isinstance(ranks, range) and ranks.step > 0 else tuple(sorted(ranks)))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _call(verb: str, axes: Iterable[Axis], *more: str) -> str:
    return f"{verb}({', '.join([*map(repr, axes), *more])})"


def _take_back(made: Made) -> None:
    """Let nobody wait for a group any more, and take what was written for it out of the store."""
    for store in made.stores:
        store.close()
    _delete([*made.keys, *itertools.chain(*(store.written for store in made.stores))])


def _delete(keys: Iterable[str]) -> None:
    """Take our keys out of the world's store; where it is gone, so are they."""
    with contextlib.suppress(Exception):
        store = c10d._get_default_store()
        for key in keys:
            store.delete_key(key)


_HERE = os.path.dirname(__file__) + os.sep


def _caller() -> str:
    """The line outside this package that is being run: where the user asked."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def find_family(name: str | None, number: int, layout: Layout, call: str, rank: int) -> Family:
    """The family of a mesh that travelled: the one it left where that lives here, else one made anew.

    Outside any world it is a family that knows the rank it left, and makes no groups.
    """
    if not dist.is_initialized():
        return Family(name, layout, call, outside=rank)
    for family in _registry().living():
        if family.origin == (name, number, layout):
            return family
    family = Family(name, layout, call)
    family.origin = (name, number, layout)
    return family


# -- what ends without being asked --------------------------------------------------------------------------------


def _all_families() -> list[Family]:
    return [family for registry in list(_registries.values()) for family in registry.families]


def close_all() -> None:
    """Close every mesh of this process."""
    for family in _all_families():
        family.close()


def _forget(group: Any) -> None:
    for family in _all_families():
        family.forget(group)


def _end_world(reason: str) -> None:
    for family in _all_families():
        if family.ended is None:
            family.end(f"ended when {reason}.")


def _at_exit() -> None:
    """Let go of our groups while Python still runs: their threads would outlive it."""
    for family in _all_families():
        family.close("ended with its process.", at_exit=True)


def _in_child() -> None:
    """In a forked child: the threads behind the groups are not there, so neither use nor destroy any.

    torch's own groups are kept from their destructors too, which would wait for those threads for ever.
    """
    for group in list(c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    for family in _all_families():
        family.lock = threading.RLock()
        for made in family._cache.values():
            _disarm(made.group)
        family.end("was made before this process was forked.")


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
