"""Creation of one process group: by its members only, without waiting for them, or by torch's ``new_group``.

A group of the first kind is built directly, not split from the world's communicator. Its backend connects at its first
use, through the store of ``rendezvous/polling_store.py``.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from pgmesh import torch_private
from pgmesh._util.call_sites import call_site
from pgmesh.errors import OptionsError
from pgmesh.groups.backends import CONSTRUCTORS, backends_of
from pgmesh.groups.connections import Endpoints, endpoints_of
from pgmesh.groups.world import world_rank_and_size
from pgmesh.options import GroupOptions
from pgmesh.rendezvous.polling_store import PollingStore
from pgmesh.rendezvous.records import Fingerprint


@dataclass(eq=False)
class GroupRecord:
    """A group, its texts for messages, and the data needed to end it.

    Args:
        group_label: the group in messages, such as "group dp, tp".
        mesh_label: its mesh in messages, such as "mesh 'actor'".
        call_site: the line of code that asked for it.
        path: identifies the group in its mesh; "" for groups of ``new_group`` and adopted ones. Its name in torch is
            the mesh's and this, with a number behind it if an earlier group of this path broke.
        stores: by backend, the store that was given to it.
        created_by: "new_group" for a group of torch's ``new_group``, "adopted" for a group of the user.
        ranks: its members in group order.
        fingerprint: the group's fingerprint on this rank; None if there are no other members.
        finding: the time until which it is valid, and why a collective of the group does not end.
        on_abort: called when another rank has aborted the mesh, with the text of that error.
    """

    group: dist.ProcessGroup
    group_label: str
    mesh_label: str
    call_site: str
    path: str = ""
    stores: Mapping[str, PollingStore] = field(default_factory=dict)
    created_by: Literal["pgmesh", "new_group", "adopted"] = "pgmesh"
    ranks: tuple[int, ...] = ()
    fingerprint: Fingerprint | None = None
    finding: tuple[float, str] = (-math.inf, "")
    on_abort: Callable[[str], object] = lambda text: None

    @property
    def label(self) -> str:
        """The group in messages, such as "group dp, tp of mesh 'actor'"."""
        return f"{self.group_label} of {self.mesh_label}"

    @property
    def name(self) -> str:
        """The group's name in torch."""
        return str(self.group.group_name)

    @property
    def gloo(self) -> PollingStore | None:
        """The store of the Gloo backend, if there is one."""
        return self.stores.get("gloo")

    def endpoints(self) -> Endpoints:
        """The listeners of the group's Gloo backend."""
        return endpoints_of(self.gloo)

    def cancel_waits(self, reason: str) -> list[str]:
        """Cancel pending waits; return the store keys to delete."""
        return [key for store in self.stores.values() for key in store.close(f"{self.label} {reason}")]


class _GroupRanks(Mapping[int, int]):
    """A table from rank to group rank, for torch. It is built at the first lookup."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    @functools.cached_property
    def _table(self) -> dict[int, int]:
        return {rank: i for i, rank in enumerate(self._ranks)}

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
    """Build a process group and register it with torch.distributed.

    Args:
        name: the group's name in torch.
        ranks: the members' ranks in the world, in group order.
        me: this process's rank in the world.
        store: the world's store. torch returns it as the store of the group.
        stores: the store that each backend reads through.
        description: text for profiles and flight records.
    """
    rank, size, backends = ranks.index(me), len(ranks), backends_of(options.backend)
    built: dict[str, Any] = {}
    slots = []
    for device, variant, backend in backends.slots:
        if backend not in built:
            inner = dist.PrefixStore(device.type, stores[backend])
            built[backend] = CONSTRUCTORS[backend](inner, rank, size, name, options, ranks)
        slots.append((device, variant, built[backend]))
    prefixed = dist.PrefixStore(f"{name}/", store)
    group = torch_private.new_group_object(prefixed, rank, size, backends.default, slots)
    torch_private.register(group, name, description, options.backend, backends.config, prefixed, _GroupRanks(ranks))
    return group


def build_collectively(
    label: str, mesh_label: str, options: GroupOptions, blocks: Sequence[tuple[int, ...]], description: str
) -> GroupRecord:
    """Create this rank's group of a partition through ``new_group``. Every rank of the world has to call it.

    Args:
        label: the group in messages.
        mesh_label: its mesh in messages.
        blocks: all blocks of the partition.
        description: text for profiles and flight records.

    Raises:
        OptionsError: the blocks are not a partition of the whole world, or torch would sort their ranks.
    """
    rank, world_size = world_rank_and_size()
    if sum(map(len, blocks)) != world_size:
        raise OptionsError(
            f"{label} of {mesh_label}: groups of backend {options.backend} are created through torch's new_group, "
            f"which all {world_size} ranks of the world must call for every block. This partition has "
            f"{sum(map(len, blocks))} ranks. Use a mesh of the whole world, and a group along its axes."
        )
    if any(list(block) != sorted(block) for block in blocks) and not torch_private.KEEPS_ORDER:
        raise OptionsError(
            f"{label} of {mesh_label}: groups of backend {options.backend} are created through torch's new_group, "
            f"which sorts ranks in torch {torch.__version__}, but the ranks of some blocks are not ascending. Use "
            "torch 2.12 or later, or a mesh with ascending ranks."
        )
    mine: Any = None
    ranks: tuple[int, ...] = ()
    for block in blocks:
        group = dist.new_group(
            list(block),
            timeout=options.timeout,
            backend=options.backend,
            group_desc=description,
            **torch_private.KEEPS_ORDER,
        )
        if rank in block:
            mine, ranks = group, block
    return GroupRecord(mine, label, mesh_label, call_site(), created_by="new_group", ranks=ranks)


def set_timeout(record: GroupRecord, timeout: timedelta) -> None:
    """Change the timeout of a group's collectives, from the next one on."""
    if not backends_of(torch_private.backend_name(record.group)).fake:  # a fake backend never waits
        record.group.set_timeout(timeout)
        for store in record.stores.values():  # Gloo connects with the timeout of its creation
            store.new_timeout = timeout


_records: weakref.WeakKeyDictionary[Any, weakref.ref[GroupRecord]] = weakref.WeakKeyDictionary()


def remember(record: GroupRecord) -> None:
    """Let ``record_of`` find the record of a group for as long as its cache keeps it."""
    _records[record.group] = weakref.ref(record)


def record_of(group: Any) -> GroupRecord | None:
    """The record of a group of pgmesh that has not ended."""
    found = _records.get(group)
    return None if found is None else found()
