"""Creation of one process group: by its members only, without waiting for them, or by torch's ``new_group``.

A group of the first kind is built directly, not split from the world's communicator. Its backend connects at its first
use, through the store of ``rendezvous/polling_store.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pgmesh import torch_private
from pgmesh._util.call_sites import call_site
from pgmesh.errors import OptionsError
from pgmesh.groups.backends import CONSTRUCTORS, backends_of
from pgmesh.groups.default_world import world_rank_and_size
from pgmesh.groups.group import Group
from pgmesh.groups.identity import MeshIdentity
from pgmesh.groups.world import World
from pgmesh.options import GroupOptions
from pgmesh.rendezvous.gloo_store import GlooStore
from pgmesh.rendezvous.missing import ASKED_FOR
from pgmesh.rendezvous.polling_store import PollingStore
from pgmesh.rendezvous.records import Fingerprint
from pgmesh.rendezvous.refusals import RefusalKeys, Refusals


def set_options(group: Group, rank: int, options: GroupOptions, differing: Mapping[str, Any]) -> None:
    """Set the options of a group that is about to be made, and its fingerprint.

    Args:
        rank: this process's rank.
        differing: the options of the call that differ from those configured.
    """
    group.options, group.fingerprint = options, None  # the options of a failed attempt may have been others
    backends = backends_of(options.backend)
    if len(group.ranks) > 1 and backends.by_members and not backends.fake:
        hint = "On every rank, configure its axes with the same options or pass the same options in the call."
        asked_for = ", ".join(f"{name}={value!r}" for name, value in differing.items())
        subject = f"{group.label}{ASKED_FOR}{asked_for})" if differing else group.label
        group.fingerprint = Fingerprint(rank, options.given, subject, hint)


def make_by_members(group: Group, identity: MeshIdentity, world: World, description: str) -> None:
    """Make a group without the other ranks of the world.

    Args:
        identity: its mesh.
        description: text for profiles and flight records.
    """
    # The number is the same on all members, so the new name is too.
    path_in_name = group.path if group.broken is None else f"{group.path}.{group.broken}"
    stores: dict[str, Any] = {}
    if group.fingerprint is not None:
        names = backends_of(group.options.backend).names
        stores = {each: _polling_store(each, group, path_in_name, identity, world) for each in names}
    make(group, identity.group_name(path_in_name), world, stores, description)


def make(group: Group, name: str, world: World, stores: Mapping[str, Any], description: str) -> None:
    """Make a group: build its process group, and register that with torch.distributed.

    Args:
        name: the name in torch.
        stores: the store that each backend reads through; none for a group without other members.
        description: text for profiles and flight records.
    """
    backends = backends_of(group.options.backend)
    prefixed = dist.PrefixStore(f"{name}/", world.store)  # torch returns it as the store of the group
    made, places = _build(group, name, prefixed, world.rank, stores), {rank: i for i, rank in enumerate(group.ranks)}
    try:
        torch_private.register(made, name, description, group.options.backend, backends.config, prefixed, places)
        group.make(made, call_site(), stores)
    except BaseException:  # such as an interrupt
        if not group.is_made:
            torch_private.unregister(made)
        raise


def _build(group: Group, name: str, store: Any, own_rank: int, stores: Mapping[str, Any]) -> Any:
    """Build a process group, which torch.distributed does not know yet. Arguments are as in ``make``.

    Args:
        store: what torch returns as its store.
        own_rank: this process's rank.
    """
    backends, ranks, alone = backends_of(group.options.backend), group.ranks, dist.HashStore()
    rank = ranks.index(own_rank)
    built: dict[str, Any] = {}
    slots = []
    for device, variant, backend in backends.slots:
        if backend not in built:
            inner = dist.PrefixStore(device.type, stores.get(backend, alone))
            built[backend] = CONSTRUCTORS[backend](inner, rank, name, group.options, ranks)
        slots.append((device, variant, built[backend]))
    return torch_private.new_group_object(store, rank, len(ranks), backends.default_type, slots)


def _polling_store(backend: str, group: Group, path_in_name: str, identity: MeshIdentity, world: World) -> PollingStore:
    """The store that one backend of a group reads through.

    Args:
        path_in_name: the group's path, with a number behind it if an earlier process group of this path broke.
    """
    assert group.fingerprint is not None
    timeout = group.options.timeout or timedelta()
    store_key = functools.partial(world.registration.store_key, identity)

    def use_key(seconds: float) -> str:
        return f"{store_key(path_in_name, seconds)}/use"

    def refusal_keys() -> RefusalKeys:
        # A mismatch is one of the group, whichever of its process groups found it.
        return RefusalKeys(store_key(f"{group.path}/mismatch", timeout.total_seconds()), identity.refusal_key)

    kind = GlooStore if backend == "gloo" else PollingStore
    compares = group.options != world.options
    return kind(
        world.store_thread,
        use_key,
        group.fingerprint,
        group.ranks,
        timeout,
        compares=compares,
        refusals=Refusals(refusal_keys),
    )


def make_collectively(group: Group, blocks: Sequence[tuple[int, ...]], description: str) -> None:
    """Make a group, and the others of its partition, through ``new_group``. Every rank of the world has to call it.

    Args:
        blocks: all blocks of the partition.
        description: text for profiles and flight records.

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
                group_desc=description,
                **torch_private.KEEPS_ORDER,
            )
            mine = made if rank in block else mine
        group.created_by = "new_group"
        group.make(mine, call_site(), {})
    except BaseException:  # such as an interrupt, while it waits for all ranks of the world
        if mine is not None and not group.is_made:
            torch_private.unregister(mine)
        raise


def set_timeout(group: Group, timeout: timedelta) -> None:
    """Change the timeout of a group's collectives, from the next one on."""
    process_group: Any = group.process_group
    if not backends_of(torch_private.backend_name(process_group)).fake:  # a fake backend never waits
        process_group.set_timeout(timeout)
        group.new_timeout = timeout
        for store in group.stores.values():  # Gloo connects with the timeout of its creation
            store.new_timeout = timeout
