"""Process groups: the one file that makes and destroys them, and that knows torch's private names.

A group is built by its members alone, without waiting for anyone: directly, not split off the world's communicator,
and its backend connects when it is first used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger as _c10d_logger, distributed_c10d as _c10d
from torch.distributed.device_mesh import DeviceMesh

from pgmesh.errors import (
    LifetimeError,
    MissingRanksError,
    OptionsError,
    PgmeshError,
    SeamError,
    WorldError,
)
from pgmesh.options import GroupOptions
from pgmesh.rendezvous import polling_store
from pgmesh.rendezvous.polling_store import PollingStore, underlying
from pgmesh.rendezvous.protocol import Card

c10d: Any = _c10d  # its tables are read and written here as torch itself does, whatever their stubs say
c10d_logger: Any = _c10d_logger

# What follows changes torch's tables for good, and what it changed leads to the names in this very module.
if loaded := getattr(c10d, "_changed_by_pgmesh", None):
    raise SeamError(
        f"pgmesh.groups.building was loaded in this process already, from {loaded}, and torch's tables lead there. "
        f"It can neither be reloaded nor stand beside another copy, here {__file__}: start a new process, with one copy."
    )

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
    "nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model": "others' weights are not DDP's",
    "nn.Module._buffers": "a pipeline's first pass with a shape runs on copies of the buffers",
    "Tensor._post_accumulate_grad_hooks": "hooks that some schedules of a pipeline would skip",
    "ProcessGroup._set_default_backend": "a group built directly is told what it runs on",
    "ProcessGroup._register_backend": "the same, device by device",
    "ProcessGroup._get_backend": "the world's timeout is kept by its backend",
    "ProcessGroup._device_types": "the devices a group answers for",
    "ProcessGroup._set_group_name": "torch names only what new_group makes",
    "ProcessGroup._set_group_desc": "profiles and flight records show this",
    "ProcessGroupGloo._Options._devices": "a lazy device can be handed over in no other way",
    "ProcessGroupGloo._Options._threads": "how many threads a group takes",
    "ProcessGroupGloo._Options._timeout": "options of ours carry their timeout",
    "ProcessGroupGloo.create_device": "a device that connects when it is first used",
    "_C._distributed_c10d.FakeProcessGroup._create_internal": "dry runs",
    "_C._distributed_c10d.FakeProcessGroup.Options.error_on_collective": "what a released group answers with",
}
"""Private names of torch that this file stands on, each with what it is needed for."""


def missing_names(torch: Any = torch) -> dict[str, str]:
    """The names of the seam that this torch does not have, with what each is needed for."""

    def there(path: str) -> bool:
        root, *names = path.split(".")
        place = getattr(torch if root in ("_C", "nn", "Tensor") else torch.distributed, root, None)
        for name in names:
            place = getattr(place, name, getattr(place, "__annotations__", {}).get(name))
        return place is not None

    optional = {name for name in SEAM if name.startswith("ProcessGroupGloo") and not dist.is_gloo_available()}
    return {name: reason for name, reason in SEAM.items() if name not in optional and not there(name)}


if _gone := missing_names():
    raise SeamError(
        f"torch {torch.__version__} lacks what pgmesh, tried on torch {', '.join(TRIED_ON)}, makes groups with:"
        + "".join(f"\n  {name}: {reason}" for name, reason in _gone.items())
    )

_FakeBackend: Any = torch._C._distributed_c10d.FakeProcessGroup
PREFIX = "pgmesh/"


on_destroy: list[Callable[[Any], None]] = []
"""Called with each group that torch destroys."""

on_world_end: list[Callable[[str], None]] = []
"""Called with the reason when torch destroys the world."""


class _Names(dict[Any, str]):
    """torch's table of group names, whose length does not count ours.

    torch names the groups of its local synchronisation by this length, so a rank that holds more groups of ours
    than another would name them otherwise than the other does. And torch's own destroy tells us here.
    """

    def __len__(self) -> int:
        return sum(not name.startswith(PREFIX) for name in self.values())

    def __delitem__(self, group: Any) -> None:
        super().__delitem__(group)
        for tell in on_destroy:
            tell(group)

    def clear(self) -> None:
        super().clear()
        for tell in on_world_end:
            tell("torch.distributed was destroyed")


released: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

gloo_stores: weakref.WeakKeyDictionary[Any, PollingStore | None] = weakref.WeakKeyDictionary()
"""The groups that were made here, each with the store that Gloo reads through."""

_is_outside = c10d._rank_not_in_group
_describe_failure = c10d_logger._get_msg_dict


def _check_and_tell_outside(group: Any) -> Any:
    """What torch asks of every group it is given: for one that was let go of, the answer is which it was."""
    if released and group in released:
        raise LifetimeError(released[group])
    return _is_outside(group)


def _explain_failure(function: str, *args: Any, **kwargs: Any) -> Any:
    """What torch logs of a collective that raised: the moment to raise what we know in place of what torch says."""
    error = sys.exc_info()[1]
    group = next((each for each in (*args, *kwargs.values()) if isinstance(each, dist.ProcessGroup)), None)
    store = None if group is None else gloo_stores.get(group)
    failure = None if store is None else store.failure
    if isinstance(error, PgmeshError):
        if failure is not None and str(error) == str(failure):
            # The collective keeps the error that ended it. Were that raised to the user, it would keep the user's
            # frames and this collective's, and so the collective itself: a circle that Python cannot see.
            raise polling_store.without_frames(error.with_traceback(None))
        return {"func_name": function}
    if store is not None and isinstance(error, RuntimeError):
        if failure is not None:
            raise polling_store.without_frames(failure) from error
        missing = store.missing() if re.search("time(d )?out", str(error), re.IGNORECASE) else None
        if missing:
            raise MissingRanksError(f"{missing}\nOr they came, and let go of it since.") from error
    return _describe_failure(function, *args, **kwargs)


def _mark_of(mesh: DeviceMesh) -> Any:
    """What tells DeviceMeshes of one shape apart: the mark of the one that this was cut from."""
    root = mesh.__dict__.get("_root_mesh")
    return (mesh if root is None else root).__dict__.get("_thread_id")


def mark(mesh: DeviceMesh, mark: Any) -> None:
    mesh.__dict__["_thread_id"], mesh.__dict__["_hash"] = mark, None


def keep_from_ddp(module: torch.nn.Module, names: Sequence[str]) -> None:
    """Have DDP leave these weights alone."""
    ignore: Any = torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(module, names)


def buffer_table(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers of a module by name, those that are None too: to replace them and to put them back."""
    return module._buffers


def has_gradient_hooks(weight: torch.Tensor) -> bool:
    """Whether hooks wait for the gradient of a weight."""
    return bool(weight._post_accumulate_grad_hooks)


# torch takes DeviceMeshes of one shape for equal whatever their groups are, so that what DTensor remembers of one mesh
# would run on the groups of another. It does compare this field, made for tests that run ranks as threads.
DeviceMesh._thread_id = property(_mark_of, mark)  # type: ignore[assignment]
c10d._changed_by_pgmesh = __file__
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
    world: Any = dist.group.WORLD
    return world.rank(), world.size()


def world_options() -> GroupOptions:
    """What the default group was made with: what a group of ours inherits."""
    group: Any = dist.group.WORLD
    backend = str(c10d._world.pg_map[group][0]).lower()
    if backend == "undefined":
        backend = str(c10d.BackendConfig(c10d.Backend(backend)))
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):
            return GroupOptions(backend=backend, timeout=group._get_backend(device).options._timeout)
    return GroupOptions(backend=backend, timeout=c10d._get_default_timeout(c10d.Backend(backend)))


def world_store() -> Any:
    """The world's store, where members agree and backends meet."""
    return c10d._get_default_store()


def store_address() -> str:
    """Where the world's store is, for messages."""
    store = underlying(world_store())
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return f"{host}:{port}" if host else type(store).__name__


class Backends(NamedTuple):
    """What a backend's name means to torch."""

    by_device: dict[str, str]
    slots: tuple[tuple[Any, Any, str], ...]  # the same as a group takes them: device, type, name
    config: str  # the same as torch spells it
    names: frozenset[str]
    default: Any  # the type of the one that a group calls its own
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
    by_device = {device: str(backend) for device, backend in table.items()}
    names = frozenset(by_device.values())
    return Backends(
        by_device,
        tuple((torch.device(device), _type_of(backend), backend) for device, backend in by_device.items()),
        ",".join(f"{device}:{backend}" for device, backend in by_device.items()),
        names,
        _type_of("nccl" if "nccl" in names else next(iter(by_device.values()))),
        direct=names <= {*_DIRECT} and not c10d._use_torchcomms_enabled(),
        dry=names == {"fake"},
    )


def _type_of(backend: str) -> Any:
    return c10d.Backend.backend_type_map[backend]


def default_device() -> str:
    """The type of the device that groups communicate from: an accelerator where the backend serves one that is here."""
    devices = list(backends_of(world_options().backend).by_device)
    accelerator = _accelerator()
    return accelerator.type if accelerator is not None and accelerator.type in devices else devices[0]


def device_of(group: Any) -> Any:
    """Where a group communicates from: an accelerator if it serves one that is here."""
    devices = group._device_types
    accelerator = _accelerator()
    here = [device for device in devices if accelerator is not None and device.type == accelerator.type]
    return here[0] if here else next(iter(sorted(devices, key=str)))


def _accelerator() -> torch.device | None:
    """What is here: unasked, torch names what it was built for, on a machine without a driver too."""
    return torch.accelerator.current_accelerator(check_available=True)


def connects_apart(group: Any) -> bool:
    """Whether a group connects in threads of its own, so that starting a collective on it does not wait."""
    return backends_of(c10d._world.pg_map[group][0]).names == {"gloo"}


# -- one group, built directly ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Made:
    """A group that was made here, with what it takes to let it go."""

    group: dist.ProcessGroup
    words: str  # "group dp, tp of mesh 'actor'"
    line: str  # where it was asked for
    stores: Mapping[str, PollingStore] = field(default_factory=dict)  # what its backends read through
    keys: list[str] = field(default_factory=list)  # what we wrote for it
    by: Literal["us", "torch", "others"] = "us"
    ranks: tuple[int, ...] = ()
    card: Card | None = None  # what this rank means by it, where there is anybody to meet

    @property
    def name(self) -> str:
        """What torch knows it by."""
        return str(self.group.group_name)

    @property
    def gloo(self) -> PollingStore | None:
        """What Gloo reads through, where it is among the backends."""
        return self.stores.get("gloo")

    def stop(self) -> list[str]:
        """Let nobody wait for the group any more, and say which keys were written for it."""
        for store in self.stores.values():
            store.close()
        return [*self.keys, *itertools.chain.from_iterable(store.written for store in self.stores.values())]


@functools.cache
def _own_address() -> str:
    """The address that Gloo takes by default: this host's first that can be bound, asked for by name only once."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as trial:
                trial.bind(address)
                return str(address[0])
    return "127.0.0.1"


def _gloo(store: dist.Store, rank: int, size: int, name: str, options: GroupOptions, ranks: Sequence[int]) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    settings = gloo._Options()
    # Devices of its own for each group: on a lazy one, pairs are told apart by the rank in the group alone.
    if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
        named = filter(None, interfaces.split(","))
        settings._devices = [gloo.create_device(interface=each, lazy_init=True) for each in named]
    else:
        settings._devices = [gloo.create_device(hostname=_own_address(), lazy_init=True)]
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


class _Places(Mapping[int, int]):
    """Each rank's place in a group, as torch asks for it. The table is made when one is first looked up."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    @functools.cached_property
    def _table(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self._ranks)}

    def __getitem__(self, rank: int) -> int:
        return self._table[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


def build(
    name: str,
    ranks: Sequence[int],
    me: int,
    options: GroupOptions,
    store: Any,
    stores: Mapping[str, Any],
    description: str,
) -> Any:
    """A process group of these ranks that torch.distributed knows as its own.

    Args:
        store: the world's, which torch hands out as the group's.
        stores: what each backend reads through.
    """
    rank, size, backends = ranks.index(me), len(ranks), backends_of(options.backend)
    prefixed = dist.PrefixStore(f"{name}/", store)
    group: Any = dist.ProcessGroup(prefixed, rank, size)
    group._set_default_backend(backends.default)
    built: dict[str, Any] = {}
    for device, kind, backend in backends.slots:
        if backend not in built:
            inner = dist.PrefixStore(f"{name}/{device.type}", stores[backend])
            built[backend] = _DIRECT[backend](inner, rank, size, name, options, ranks)
        group._register_backend(device, kind, built[backend])
    group._set_group_name(name)
    group._set_group_desc(description)
    world, tag = c10d._world, f"user:{name}"
    c10d._register_process_group(name, group)
    world.pg_map[group] = (options.backend, prefixed)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = _Places(ranks)
    world.pg_backend_config[group] = backends.config
    world.pg_to_tag[group] = tag
    world.tags_to_pg[tag] = [group]
    return group


def held() -> int:
    """How many groups this process holds beside the world's, torch's own among them."""
    return max(0, len(c10d._world.pg_map) - 1)


def set_timeout(made: Made, timeout: timedelta) -> None:
    """Change how long the collectives of a group may wait, from the next one on."""
    if not backends_of(c10d._world.pg_map[made.group][0]).dry:  # which never waits
        made.group.set_timeout(timeout)
        for store in made.stores.values():  # Gloo connects with the timeout that it was made with
            store.limit = timeout


def tear_down(made: Made, reason: str, *, abort: bool = False) -> None:
    """Take a group out of torch's tables, end its backend, and have it name itself to whoever still uses it."""
    group: Any = made.group
    released[group] = f"{made.words} {reason}"
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
    disarm(group)


def invalidate(made: Made, reason: str) -> None:
    """Have a group that torch destroyed name itself, and answer no more, to whoever still uses it."""
    released[made.group] = f"{made.words} {reason}"
    disarm(made.group)


_stranded: list[tuple[Any, Any]] = []


def strand(group: Any, work: Any) -> None:
    """Keep a group until a collective that hangs in it is over: to destroy it would wait for that, at exit too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _stranded.append((group, work))


def _is_forgotten(error: weakref.ref[PgmeshError]) -> bool:
    """Whether an error of a backend was raised to the user, and is held by nobody but the work that failed with it.

    A work keeps its error, and the error what it passed on its way to the user: the frames there, among them those that
    hold the work. That is a circle which Python cannot see. It can count: who asks holds the error, and one more does.
    That this is the work is told by the traceback with which the error came to it: the work holds that one, beside who
    asks, the list here and the traceback before it; those after it are held by one less.
    """
    if sys.getrefcount(error()) != 2:
        return False
    held = [*map(sys.getrefcount, _tracebacks(error()))]
    return held[:1] == [4] and {*held[1:]} == {3}


def _tracebacks(error: BaseException | None) -> list[Any]:
    """Where an error was before it came to the user; nothing if it never did."""
    found, each = [], error and error.__traceback__
    while each:
        found.append(each)
        each = each.tb_next
    ours = [i for i, place in enumerate(found) if place.tb_frame.f_code.co_filename == polling_store.__file__]
    return found[ours[0] :] if ours and ours[0] else []


def _let_frames_go(error: BaseException | None) -> None:
    if error is not None:
        error.__traceback__ = None


def sweep() -> None:
    """Let go of what was stranded and is over, and of what failed and is forgotten."""
    for error in list(polling_store.raised):
        if _is_forgotten(error):
            _let_frames_go(error())
    for stranded in [each for each in _stranded if each[1].is_completed()]:
        with contextlib.suppress(ValueError):  # another thread was here
            _stranded.remove(stranded)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(stranded[0]))


def disarm(group: Any) -> None:
    """Have a group answer every collective with an error: a destroyed Gloo group would go on working."""
    settings = _FakeBackend.Options()
    settings.error_on_collective = True
    refusal = _FakeBackend._create_internal(group.rank(), group.size(), settings)
    # torch keeps the first backend of each type, so the refusal goes by a type that no group of ours is made with.
    for device in group._device_types:
        group._register_backend(device, dist.ProcessGroup.BackendType.UNDEFINED, refusal)
    group._set_default_backend(dist.ProcessGroup.BackendType.UNDEFINED)


def is_known(group: Any) -> bool:
    """Whether torch still knows a group."""
    return group in c10d._world.pg_map


def disown(group: Any, words: str) -> None:
    """A group that ended without us: have it name itself, and leave nothing of ours in torch's tables."""
    released[group] = words
    c10d._world.tags_to_pg.pop(c10d._world.pg_to_tag.get(group), None)


def keep_from_destructors() -> None:
    """In a forked child: no group of torch's may be destroyed, since it would wait for threads that are not there."""
    for group in list(c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def strike(group: Any) -> None:
    """Have torch forget where a group is, as if it had destroyed it."""
    c10d._world.pg_map.pop(group, None)
