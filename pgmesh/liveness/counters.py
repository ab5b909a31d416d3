"""How many operations each rank has entered in each of its groups. Only reports read that, as it may be long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh.groups.group import find_group
from pgmesh.liveness import timing
from pgmesh.liveness.records import pack, unpack


class GroupCounter(NamedTuple):
    """How many operations a rank has entered in a group.

    Args:
        name: the group's name in torch, the same on all members.
        label: the group in messages.
        ranks: its first members; none if pgmesh does not know them.
        operations: their number.
    """

    name: str
    label: str
    ranks: Sequence[int]
    operations: int


def counters_key(rank: int) -> str:
    """The store key of the counters of a rank."""
    return f"pgmesh/counters/{rank}"


def own_counters() -> tuple[GroupCounter, ...]:
    """The counters of this process; those of its newest groups, if it has many."""
    found = []
    for name, operations in [*torch_private.operations_entered().items()][-timing.LIMITS.counters :]:
        group = find_group(name)
        ranks = () if group is None else group.ranks[: timing.LIMITS.statuses]
        store = None if group is None else group.store
        found.append(GroupCounter(name, label_of(name), ranks, operations - (store.own_operations if store else 0)))
    return tuple(found)


def pack_counters(counters: Sequence[GroupCounter]) -> str:
    """Encode counters for the store."""
    return pack(counters=counters)


def unpack_counters(text: bytes | None) -> tuple[GroupCounter, ...]:
    """Decode counters; none for another value."""
    record = unpack(text or b"", counters=list) or {"counters": ()}
    return tuple(GroupCounter(*each) for each in record["counters"])


def label_of(name: str) -> str:
    """A group in messages, from its name in torch."""
    group, default = find_group(name), dist.group.WORLD
    is_default = default is not None and default.group_name == name
    return group.label if group else "the default group" if is_default else f"torch's group {name}"
