"""The private names of torch that pgmesh uses, each with its reason.

No other file uses one. ``_util/torch_versions.py`` has the versions of torch on which all were tried. Loading this
module changes torch for good in three places:

- its table of group names: ``_Names``;
- the check of every group that it is given: ``_check_group``;
- the equality of DeviceMeshes: ``_groups_of``.

Other files add functions to the hooks ``on_destroy`` and ``on_world_end``.

The parts, each under a heading: what is needed and replaced in torch; the world; a group, from torch's tables and its
backends to its end; DeviceMesh; modules; pipeline stages.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.device_mesh import DeviceMesh

from pgmesh.errors import LifetimeError, OptionsError, WorldError
from pgmesh.options import GroupOptions

c10d: Any = _c10d  # its tables are read and written here as torch itself does, whatever its stubs declare


# -- the private names --------------------------------------------------------------------------------------------

# In distributed_c10d:
#   _world.pg_map, .pg_group_ranks, .pg_backend_config, .pg_coalesce_state, .pg_to_tag, .tags_to_pg: where torch looks
#     groups up
#   _pg_names: its length is part of the names of groups with local synchronisation
#   _rank_not_in_group: torch calls it for every group: a destroyed one, or a mesh, raises here
#   _get_default_store: the world's store
#   _get_default_timeout: the timeout of a world whose backend has none
#   _register_process_group, _resolve_process_group, _unregister_process_group: functional collectives and compiled
#     operators look groups up by name, and torch keeps them alive
#   _use_torchcomms_enabled, Backend._ensure_backend_registered (newer torch): which backends there are
# ProcessGroup._set_default_backend, ._register_backend: a group that is built directly
# ProcessGroup._get_backend, ._device_types: the backends of a group, and their timeout
# ProcessGroup._set_group_name, ._set_group_desc: torch names only groups of new_group
# ProcessGroupGloo._get_sequence_number_for_group: how many operations this process has entered in a group
# ProcessGroupGloo._Options._devices, ._threads, ._timeout, .create_device: a device that connects at its first use
# ProcessGroupNCCL._group_start, ._group_end (newer torch): the abort of several communicators in one call
# _C._distributed_c10d.FakeProcessGroup, ._create_internal: fake worlds
# _C._distributed_c10d._ProcessGroupWrapper: the checks of TORCH_DISTRIBUTED_DEBUG=DETAIL
# DeviceMesh._thread_id, ._dim_group_names: meshes with different groups must be unequal
# DeviceMesh._pg_registry, _mesh_layout (newer torch): DeviceMeshes that torch combines
# DistributedDataParallel._set_params_and_buffers_to_ignore_for_model: excludes parameters
# Tensor._post_accumulate_grad_hooks: some pipeline schedules would skip these hooks
# Optimizer._optimizer_step_pre_hooks, ._optimizer_step_post_hooks: none runs in a step that a checkpoint takes
# fsdp._fully_shard._fsdp_collectives: DefaultAllGather and DefaultReduceScatter, which are told of what they do
# PipelineStage._send_meta, ._recv_meta and others (torch 2.12): the shapes of a stage are exchanged once

# -- the names of pgmesh's groups, and the hooks ------------------------------------------------------------------

PREFIX = "pgmesh/"
"""Start of the names of all groups and store keys of pgmesh."""

BESIDE = f"{PREFIX}/"
"""Start of the names of groups in worlds beside torch's default one."""

on_destroy: list[Callable[[Any], None]] = []
"""Hooks called with each group that torch destroys."""

on_world_end: list[Callable[[str], None]] = []
"""Hooks called with the reason when torch destroys the world."""

destroyed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Groups that were destroyed, each with the error message for later uses. ``_check_group`` reads it."""

beside: weakref.WeakSet[Any] = weakref.WeakSet()
"""Groups in worlds beside torch's default one."""

not_groups: dict[type, Callable[[Any], str]] = {}
"""Types whose objects callers pass in the place of a group, each with the function that returns the error message."""


# -- what is replaced in torch ------------------------------------------------------------------------------------


class _Names(dict[Any, str]):
    """torch's table of group names. Its length does not count groups of pgmesh.

    torch names the groups of its local synchronisation by this length. A rank that holds more groups of pgmesh than
    another would name them differently. torch's own destroy calls the hooks from here.
    """

    def __len__(self) -> int:
        return sum(not name.startswith(PREFIX) for name in list(self.values()))  # another thread may add one

    def __iter__(self) -> Iterator[Any]:
        """Without the groups of worlds beside the default one: torch shuts down what it finds as that ends."""
        return iter([group for group, name in list(self.items()) if not name.startswith(BESIDE)])

    def __delitem__(self, group: Any) -> None:
        super().__delitem__(group)
        for hook in on_destroy:
            hook(group)

    def clear(self) -> None:
        super().clear()
        for hook in on_world_end:
            hook("torch.distributed was destroyed")


_is_outside = c10d._rank_not_in_group


def _check_group(group: Any) -> Any:
    """torch's check of every group that it is given. A destroyed group, or what is no group, raises a better error."""
    if type(group) in not_groups:
        raise OptionsError(not_groups[type(group)](group))
    if destroyed and group in destroyed:
        raise LifetimeError(destroyed[group])
    if beside and group in beside and sys._getframe(1).f_code.co_name == "get_rank":  # it looks up another world's rank
        raise WorldError(
            f"torch.distributed.get_rank knows the ranks of torch's default world only. {group.group_desc} is in "
            "another.\n\n  group.rank()   # the rank in the group; mesh.rank is that in its world"
        )
    return _is_outside(group)


def _groups_of(mesh: DeviceMesh) -> Any:
    """The names of a DeviceMesh's groups if they are groups of pgmesh, otherwise what torch has set."""
    names = tuple(mesh.__dict__.get("_dim_group_names") or ())
    return names if any(name.startswith(PREFIX) for name in names) else mesh.__dict__.get("_thread_id")


def _set_thread_id(mesh: DeviceMesh, value: Any) -> None:
    mesh.__dict__["_thread_id"] = value


# torch treats DeviceMeshes of the same shape as equal even if their groups differ. DTensor would then use cached data
# of one mesh with the groups of another. torch does compare this field, made for tests that run ranks as threads.
DeviceMesh._thread_id = property(_groups_of, _set_thread_id)  # type: ignore[assignment]
c10d._pg_names = _Names(c10d._pg_names)
c10d._rank_not_in_group = _check_group


# -- the world ----------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """The store of the default group."""
    return c10d._get_default_store()


def default_timeout(backend: str) -> timedelta:
    """torch's default timeout for the groups of a backend."""
    timeout: timedelta = c10d._get_default_timeout(c10d.Backend(backend))
    return timeout


def uses_torchcomms() -> bool:
    """True if torch creates its groups through torchcomms."""
    return bool(getattr(c10d, "_use_torchcomms_enabled", bool)())


# -- torch's tables of groups -------------------------------------------------------------------------------------


def all_groups() -> list[Any]:
    """All groups that torch knows, with the world's."""
    return list(c10d._world.pg_map)


def group_named(name: str) -> Any:
    """The group of this name."""
    return c10d._resolve_process_group(name)


def is_known(group: Any) -> bool:
    """True if torch still knows a group."""
    return group in c10d._world.pg_map


def backend_name(group: Any) -> str:
    """The backend of a group as it was given, such as ``cpu:gloo,cuda:nccl``."""
    return str(c10d._world.pg_map[group][0])


class _Places(Mapping[int, int]):
    """The group rank of each member. Its table is made at its first use, since groups may have many members."""

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


def register(
    group: Any, name: str, description: str, backend: str | None, config: str, store: Any, ranks: Sequence[int]
) -> None:
    """Enter a group into torch's tables, as ``new_group`` does.

    Args:
        config: the backend of each device, such as ``cpu:gloo,cuda:nccl``.
        store: the group's part of the world's store.
        ranks: the members' ranks in the world, in group order.
    """
    group._set_group_name(name)
    group._set_group_desc(description)
    if name.startswith(BESIDE):
        beside.add(group)
    world, tag = c10d._world, f"user:{name}"
    c10d._register_process_group(name, group)
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = _Places(ranks)
    world.pg_backend_config[group] = config
    world.pg_to_tag[group] = tag
    world.tags_to_pg[tag] = [group]


def unregister(group: Any) -> None:
    """Remove a group from torch's tables, without the hooks."""
    world, name = c10d._world, group.group_name
    for table in (world.pg_map, world.pg_group_ranks, world.pg_backend_config, world.pg_coalesce_state):
        table.pop(group, None)
    dict.pop(world.pg_names, group, None)
    world.tags_to_pg.pop(world.pg_to_tag.pop(group, None), None)
    c10d._unregister_process_group(name)


def unregister_tag(group: Any) -> None:
    """Remove the tag of a group from torch's tables: torch's own destroy leaves it there."""
    c10d._world.tags_to_pg.pop(c10d._world.pg_to_tag.get(group), None)


# -- a group's devices and timeout --------------------------------------------------------------------------------


def device_types(group: Any) -> list[torch.device]:
    """The devices that a group serves."""
    return list(group._device_types)


def timeout_of(group: Any) -> timedelta | None:
    """The timeout of a group's collectives, where its backend has one."""
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(device)
            options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)
            if timeout := getattr(options, "_timeout", None):
                return timeout  # type: ignore[no-any-return]
    return None


# -- new groups and their backends --------------------------------------------------------------------------------

KEEPS_ORDER: dict[str, Any] = {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
"""Keeps torch's ``new_group`` from sorting the ranks. torch 2.9 to 2.11 always sort them."""

_FakeBackend: Any = torch._C._distributed_c10d.FakeProcessGroup
_new_fake: Any = getattr(_FakeBackend, "_create_internal", _FakeBackend)  # torch 2.9 has a public constructor


def new_group_object(
    store: Any, rank: int, size: int, default: Any, backends: Iterable[tuple[torch.device, Any, Any]]
) -> Any:
    """A process group with these backends, not yet registered.

    Args:
        default: the type of the group's default backend.
        backends: device, type and object of each backend.
    """
    group: Any = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(default)
    for device, kind, backend in backends:
        group._register_backend(device, kind, backend)
    return group


def gloo_backend(
    store: Any,
    rank: int,
    name: str,
    options: GroupOptions,
    ranks: Sequence[int],
    *,
    devices: Sequence[Mapping[str, str]],
) -> Any:
    """A Gloo backend that connects when it is first used.

    Args:
        ranks: the members' ranks in the world.
        devices: an ``interface`` or a ``hostname`` for each device.
    """
    gloo: Any = dist.ProcessGroupGloo
    settings = gloo._Options()
    settings._devices = [gloo.create_device(**device, lazy_init=True) for device in devices]
    settings._threads = 1  # collectives of one group run one after another, as on NCCL's stream
    _set_up(settings, name, options, ranks)
    return gloo(store, rank, len(ranks), settings)


def keep_for_ever(kept: Any) -> None:
    """Raise the reference count of an object by one, so that its destructor never runs, also when Python exits."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


_nothing, _empty = torch.zeros(1, device="cpu"), torch.zeros(0, device="cpu")
"""What operations get whose data does not matter. They outlive Python, as the backends' threads may."""
keep_for_ever(_nothing)
keep_for_ever(_empty)

_RESERVED_TAG = 1 << 30
"""The first of the tags of receives that no rank sends to."""


def start_pairs(gloo: Iterable[Any]) -> None:
    """Start the connections of Gloo backends to all members, and wait for none.

    A receive from any rank starts all pairs of one device, which its tag decides. It is dropped.
    """
    for backend in gloo:
        for device in range(len(backend.options._devices)):
            backend.recv_anysource([_nothing], _RESERVED_TAG + device)


def drain(gloo: Iterable[Any], deadline: float) -> bool:
    """Wait until Gloo backends are done with what was begun before.

    Each backend's thread works in order, so the wait for one more operation is enough: one without data, which needs no
    other member.

    Args:
        deadline: on the monotonic clock.

    Returns:
        False after the deadline.
    """
    for backend in gloo:
        work = backend.allreduce([_empty], dist.AllreduceOptions())
        while not work.is_completed():  # ``wait`` would raise its error, whose frames would keep the work
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.0005)
    return True


def checked(backend: Any, helper: Any) -> Any:
    """A backend that compares each operation with those of the other members first, as torch wraps its own.

    Args:
        helper: a Gloo backend of the same members.
    """
    return torch._C._distributed_c10d._ProcessGroupWrapper(backend, helper)


def _set_up(settings: Any, name: str, options: GroupOptions, ranks: Sequence[int]) -> None:
    """Set what the options of Gloo and of NCCL have in common."""
    settings._timeout = options.timeout
    settings.global_ranks_in_group = list(ranks)
    settings.group_name = name


def register_backend(name: str) -> None:
    """Let torch load a backend that another package or a later torch defines, if it has not done so."""
    getattr(c10d.Backend, "_ensure_backend_registered", lambda name: None)(name)


def nccl_backend(store: Any, rank: int, name: str, options: GroupOptions, ranks: Sequence[int]) -> Any:
    """An NCCL backend with a communicator of its own.

    From torch 2.15 on, torch itself builds ``ProcessGroupNCCL2`` for "nccl", which connects to the other members in its
    constructor: creating a group would wait for them. ``ProcessGroupNCCL`` connects at its first collective.
    Source: https://github.com/pytorch/pytorch/pull/192895

    Args:
        ranks: the members' ranks in the world.

    Raises:
        OptionsError: this torch's NCCL lacks a setting.
    """
    settings: Any = dist.ProcessGroupNCCL.Options()
    settings.is_high_priority_stream = bool(options.high_priority)
    _set_up(settings, name, options, ranks)
    for field, value in (options.nccl or {}).items():
        if not hasattr(settings.config, field):
            known = ", ".join(each for each in dir(settings.config) if not each.startswith("_"))
            raise OptionsError(f"this torch's NCCL has no setting {field}; it has {known}.")
        setattr(settings.config, field, value)
    return dist.ProcessGroupNCCL(store, rank, len(ranks), settings)


def fake_backend(store: Any, rank: int, name: str, options: GroupOptions, ranks: Sequence[int]) -> Any:
    """A backend that moves nothing."""
    return _new_fake(rank, len(ranks), _FakeBackend.Options())


# -- the addresses of Gloo's listeners ----------------------------------------------------------------------------


def gloo_endpoint(address: bytes) -> tuple[str, int] | None:
    """Host and port of the listener in an address that Gloo publishes; None for another format.

    The address has the host's name after its length in 8 bytes, and after another length a ``sockaddr_storage``.
    """
    start = 16 + int.from_bytes(address[:8], sys.byteorder)
    listener = address[start:]
    family, port = listener[:2], int.from_bytes(listener[2:4], "big")
    if len(listener) < 40:
        return None
    if family == socket.AF_INET.to_bytes(2, sys.byteorder):
        return socket.inet_ntop(socket.AF_INET, listener[4:8]), port
    if family == socket.AF_INET6.to_bytes(2, sys.byteorder):
        return socket.inet_ntop(socket.AF_INET6, listener[8:24]), port
    return None


# -- the end of groups --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def aborting_together(groups: Iterable[Any]) -> Iterator[None]:
    """Let NCCL abort the communicators of these groups in one call: one after another, they may wait for each other.

    Untested on GPUs. Source: https://github.com/pytorch/pytorch/issues/173815
    """
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    first = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    if first is None:
        yield
        return
    first._group_start()
    try:
        yield
    finally:
        first._group_end()


def operations_entered() -> dict[str, int]:
    """By name of each group: how many operations this process has entered."""
    entered: dict[str, int] = {}
    for group in all_groups():
        with contextlib.suppress(RuntimeError):
            backends = {group._get_backend(device) for device in group._device_types}
            entered[group.group_name] = sum(each._get_sequence_number_for_group() for each in backends)
    return entered


# -- DeviceMesh ---------------------------------------------------------------------------------------------------


def strided_device_mesh(
    device: str, mesh_ranks: Sequence[int], table: torch.Tensor, groups: Mapping[str, Any]
) -> DeviceMesh | None:
    """A DeviceMesh of some ranks of a mesh that torch combines with others of the same mesh.

    torch combines DeviceMeshes that index one sequence of ranks, such as that of FSDP with that of tensor parallelism.
    ``DeviceMesh.from_group`` would index only the ranks of the table.

    Args:
        mesh_ranks: all ranks of the mesh.
        table: the ranks, with a dimension for each group.
        groups: the group of each dimension, by its name.

    Returns:
        None if torch cannot describe the ranks by strides, as before torch 2.13.
    """
    position = {rank: i for i, rank in enumerate(mesh_ranks)}
    lines = [table.movedim(i, 0).reshape(size, -1)[:, 0].tolist() for i, size in enumerate(table.shape)]
    strides = [_as_strides([position[rank] for rank in line]) for line in lines]
    with contextlib.suppress(AssertionError, AttributeError, ImportError, RuntimeError, TypeError):
        from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout

        layout = _MeshLayout([_FlatLayout(*each) for each in strides])
        ranks = torch.tensor(mesh_ranks, dtype=torch.int, device="cpu")
        mesh = DeviceMesh(device, _layout=layout, _rank_map=ranks, mesh_dim_names=tuple(groups), _init_backend=False)
        mesh._dim_group_names = [group.group_name for group in groups.values()]
        mesh._pg_registry.update({group.group_name: group for group in groups.values()})
        if torch.equal(mesh.mesh, table):
            return mesh
    return None


device_meshes: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()
"""The DeviceMeshes of pgmesh's groups, by ``id``. DTensor keeps each of them for good."""


def drop_from_device_meshes(name: str) -> None:
    """Let no DeviceMesh keep an ended group alive, and its threads. Only compiled code would find it there."""
    for mesh in [*device_meshes.values()]:
        getattr(mesh, "_pg_registry", {}).pop(name, None)


def _as_strides(positions: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of these positions relative to the first, outermost first, if they are regular.

    >>> _as_strides([2, 3, 10, 11])
    ((2, 2), (8, 1))
    """
    sizes, strides = tuple[int, ...](), tuple[int, ...]()
    while len(positions) > 1:
        step = positions[1] - positions[0]
        count = next((i for i, at in enumerate(positions) if at != positions[0] + i * step), len(positions))
        sizes, strides = (count, *sizes), (step, *strides)
        positions = positions[::count]
    return sizes or (1,), strides or (0,)


# -- gradients, and what DDP ignores ------------------------------------------------------------------------------


def exclude_from_ddp(module: torch.nn.Module, names: Sequence[str]) -> None:
    """Make DDP ignore these parameters and buffers of a module."""
    ignore: Any = torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(module, names)


def has_gradient_hooks(weight: torch.Tensor) -> bool:
    """True if hooks are registered for the gradient of a weight."""
    return bool(weight._post_accumulate_grad_hooks)


@contextlib.contextmanager
def without_step_hooks(optimizers: Iterable[Any]) -> Iterator[None]:
    """Let no hook of these optimizers run: a checkpoint takes a step of zeros with some."""
    tables = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    kept = [(each, table, getattr(each, table)) for each in optimizers for table in tables]
    for each, table, _ in kept:
        setattr(each, table, OrderedDict())
    try:
        yield
    finally:
        for each, table, hooks in kept:
            setattr(each, table, hooks)


# -- fully_shard --------------------------------------------------------------------------------------------------


def noting_collectives(gathers: Callable[[], None], reduces: Callable[[], None]) -> tuple[Any, Any]:
    """torch's all-gather and reduce-scatter for ``set_custom_all_gather`` and ``set_custom_reduce_scatter``.

    Args:
        gathers: called before each all-gather.
        reduces: called before each reduce-scatter or all-reduce, at least once.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives  # only sharded models load it

    class Gather(collectives.DefaultAllGather):
        def allocate(self, *size: Any, **kind: Any) -> torch.Tensor:
            gathers()
            return super().allocate(*size, **kind)

    class Reduce(collectives.DefaultReduceScatter):
        def allocate(self, *size: Any, **kind: Any) -> torch.Tensor:
            reduces()
            return super().allocate(*size, **kind)

    return Gather(), Reduce()


# -- pipeline stages ----------------------------------------------------------------------------------------------


def stages_are_supported(stage: type) -> bool:
    """True if torch's pipeline stages are those of torch 2.12 or later.

    On Gloo, the warm-up of those of torch 2.9 ends the process. Next to a frozen stage and under ``fully_shard`` some
    of their gradients were wrong.
    """
    needed = ("forward_recv_info", "forward_send_info", "backward_recv_info")
    return all(hasattr(stage, name) for name in ("_send_meta", "_recv_meta", *(f"_setup_{each}" for each in needed)))


def receive_stage_inputs(stage: Any) -> None:
    """Receive the shapes of a pipeline stage's inputs, which ``set_stage_outputs`` of the previous stage sends."""
    _allocate_stage_inputs(stage, stage._recv_meta(stage.stage_index - 1))


def set_stage_inputs(stage: Any, tensors: tuple[torch.Tensor, ...]) -> None:
    """Prepare a pipeline stage for inputs like these, of a previous stage on the same rank."""
    _allocate_stage_inputs(stage, _stage_utils().extract_tensor_metas(tensors))


def _allocate_stage_inputs(stage: Any, shapes: tuple[Any, ...]) -> None:
    stage._stage_meta.inputs, stage._stage_meta.input_grads = shapes, _stage_utils()._derive_grad_metas(shapes)
    stage._setup_forward_recv_info(len(stage.args_recv_info), stage.has_backward)


def set_stage_outputs(stage: Any, tensors: tuple[torch.Tensor, ...]) -> None:
    """Prepare a pipeline stage for outputs like these and for their gradients, and send their shapes to the next stage.

    It waits until the next stage receives the shapes, unless that is on the same rank.
    """
    shapes = _stage_utils().extract_tensor_metas(tensors)
    stage._stage_meta.outputs = shapes
    stage._stage_meta.output_grads = _stage_utils()._derive_grad_metas(shapes)
    stage._setup_forward_send_info()
    if stage.has_backward:
        stage._setup_backward_recv_info(stage.chunks)
    if not stage.is_last and not stage._is_same_rank(stage.stage_index + 1):
        stage._send_meta(shapes, stage.stage_index + 1)


def _stage_utils() -> Any:
    from torch.distributed.pipelining import _utils  # here, so that only pipelines load it

    return _utils
