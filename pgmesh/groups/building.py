"""Creation of one process group: by its members only, without waiting for them, or by torch's ``new_group``.

A group of the first kind is built directly, not split from the world's communicator.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pgmesh import torch_private
from pgmesh._util.formatting import call_site
from pgmesh.errors import OptionsError
from pgmesh.groups.backends import CONSTRUCTORS, GLOO, backends_of, new_gloo
from pgmesh.groups.connecting import GroupStore
from pgmesh.groups.default_world import world_rank_and_size
from pgmesh.groups.group import Group
from pgmesh.groups.world import World

_DEBUGGED = (GLOO, "nccl")
"""The backends that torch checks with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""


def make_by_members(group: Group, key: str, world: World) -> None:
    """Make a group without the other ranks of the world.

    Args:
        key: the key of its mesh.
    """
    name = world.name_in_torch(f"{key}/{group.path}") + ("" if group.attempt is None else f".{group.attempt}")
    backends = backends_of(group.options.backend)
    prefixed = dist.PrefixStore(f"{name}/", world.root_store)  # torch returns it as the store of the group
    store = None
    if group.fingerprint is not None and (GLOO in backends.names or any(map(_is_debugged, backends.names))):
        timeout = group.options.timeout or timedelta()
        store = GroupStore(name, group.fingerprint, group.ranks, world.rank, timeout, world.store)
    made, gloo, checking = _build(group, name, prefixed, world, store)
    try:
        config = group.options.backend, backends.config, prefixed, group.ranks
        group.register = functools.partial(torch_private.register, made, name, group.label, *config)
        group.register()
        group.make(made, call_site(), store, [*gloo, *checking])
        if store is not None:
            with world.raising_errors():
                store.publish()  # only now: others would connect to a group that could not be made
            # It would count as an operation, of which torch's checks compare the numbers.
            world.connector.add(store, functools.partial(torch_private.start_pairs, checking or gloo))
    except BaseException:  # such as an interrupt
        torch_private.unregister(made)
        group.take_process_group()
        raise


def _is_debugged(backend: str) -> bool:
    """True if torch's checks of each collective are asked for, and exist for this backend."""
    return backend in _DEBUGGED and dist.get_debug_level() == dist.DebugLevel.DETAIL


def _build(
    group: Group, name: str, prefixed: Any, world: World, store: GroupStore | None
) -> tuple[Any, list[Any], list[Any]]:
    """Build a process group, which torch.distributed does not know yet.

    Args:
        name: its name in torch.
        prefixed: what torch returns as its store.
        store: what its Gloo backends read through, if they have other members.

    Returns:
        The process group, its Gloo backends, and those that compare each operation for torch.
    """
    backends, ranks, rank = backends_of(group.options.backend), group.ranks, group.ranks.index(world.rank)
    built: dict[str, Any] = {}
    gloo, checking, slots = [], [], []
    for device, variant, backend in backends.slots:
        if backend not in built:
            if group.fingerprint is None:
                inner: Any = dist.HashStore()
            else:
                inner = store if backend == GLOO else dist.PrefixStore(name, world.waiting_store())
            arguments = rank, name, group.options, ranks
            made = CONSTRUCTORS[backend](dist.PrefixStore(device.type, inner), *arguments)
            gloo += [made] if backend == GLOO else []
            if _is_debugged(backend):
                helper = new_gloo(dist.PrefixStore(f"{device.type}/checks", store or inner), *arguments)
                checking.append(helper)
                made = torch_private.checked(made, helper)
            built[backend] = made
        slots.append((device, variant, built[backend]))
    return torch_private.new_group_object(prefixed, rank, len(ranks), backends.default_type, slots), gloo, checking


def make_collectively(group: Group, blocks: Sequence[tuple[int, ...]]) -> None:
    """Make a group, and the others of its partition, through ``new_group``. Every rank of the world has to call it.

    Args:
        blocks: all blocks of the partition.

    Raises:
        OptionsError: the blocks are not a partition of the whole world, or torch would sort their ranks.
    """
    backend, (rank, world_size) = group.options.backend, world_rank_and_size()
    if sum(map(len, blocks)) != world_size:
        raise OptionsError(
            f"{group.label}: groups of backend {backend} are created through torch's new_group, which all "
            f"{world_size} ranks of the world must call for every block. This partition has "
            f"{sum(map(len, blocks))} ranks. Use a mesh of the whole world, and a group along its axes."
        )
    if any(list(block) != sorted(block) for block in blocks) and not torch_private.KEEPS_ORDER:
        raise OptionsError(
            f"{group.label}: groups of backend {backend} are created through torch's new_group, which sorts ranks in "
            f"torch {torch.__version__}, but the ranks of some blocks are not ascending. Use torch 2.12 or later, or a "
            "mesh with ascending ranks."
        )
    mine: Any = None
    try:
        for block in blocks:
            made = dist.new_group(
                list(block),
                timeout=group.options.timeout,
                backend=backend,
                group_desc=group.label,
                **torch_private.KEEPS_ORDER,
            )
            mine = made if rank in block else mine
        group.created_by = "new_group"
        group.make(mine, call_site())
    except BaseException:  # such as an interrupt, while it waits for all ranks of the world
        if mine is not None and not group.is_made:
            torch_private.unregister(mine)
        raise


def set_timeout(group: Group, timeout: timedelta) -> None:
    """Change the timeout of a group's collectives, from the next one on."""
    process_group: Any = group.process_group
    if not backends_of(torch_private.backend_name(process_group)).fake:  # a fake backend never waits
        process_group.set_timeout(timeout)
        group.options = group.options.but({"timeout": timeout})
        if group.store is not None:
            group.store.limit = timeout
