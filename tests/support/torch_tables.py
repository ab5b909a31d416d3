"""Access to torch's tables of groups, and a record of the operations on the world's store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d as _c10d
from torch.distributed.device_mesh import DeviceMesh

from pgmesh.groups.group import find_group
from pgmesh.groups.world import current_world

c10d: Any = _c10d

TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state")


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The DeviceMesh that a DeviceMesh is a slice of."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    return device_mesh._mesh_resources.get_root_mesh(mesh)  # torch 2.9


def table_sizes() -> dict[str, int]:
    """Number of entries of each of torch's tables of groups, with those of pgmesh."""
    return {name: dict.__len__(getattr(c10d._world, name)) for name in TABLES}


def count_new_groups(make: Callable[[], Any]) -> int:
    """Number of groups that a call adds to torch's tables, with those of pgmesh."""
    before = table_sizes()["pg_map"]
    make()
    return table_sizes()["pg_map"] - before


def timeout_of(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


class RecordingStore(dist.Store):
    """A wrapper of the world's store that appends the name of every operation to ``done``."""

    def __init__(self, inner: dist.Store, done: list[str]) -> None:
        super().__init__()
        self.inner, self.done = inner, done

    def clone(self) -> dist.Store:
        return self.inner.clone()


def _recorded(operation: str) -> Callable[..., Any]:
    def do(self: RecordingStore, *args: Any) -> Any:
        self.done.append(operation)
        return getattr(self.inner, operation)(*args)

    return do


for _operation in (
    "set",
    "get",
    "add",
    "check",
    "wait",
    "compare_set",
    "delete_key",
    "multi_get",
    "multi_set",
    "append",
):
    setattr(RecordingStore, _operation, _recorded(_operation))


@contextmanager
def record_operations() -> Iterator[list[str]]:
    """Record the operations of this process on its client of the world's store, which its threads do not use."""
    done: list[str] = []
    world = current_world()
    with mock.patch.object(world, "store", return_value=RecordingStore(world.store(), done)):
        yield done


def address_is_published(group: dist.ProcessGroup) -> bool:
    """True if this rank's address in a Gloo group is in the store."""
    record = find_group(group.group_name)
    assert record is not None
    assert record.store is not None
    return current_world().store().check([f"{record.store.name}/{key}" for key in record.store.own])


def is_connecting(group: dist.ProcessGroup) -> bool:
    """True until this rank has found the members of a Gloo group and started all its pairs."""
    record = find_group(group.group_name)
    assert record is not None
    assert record.store is not None
    return not (record.store.own_operations or record.store.has_started_pairs)
