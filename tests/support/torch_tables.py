"""Access to torch's tables of groups, and a record of the operations on the world's store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from pgmesh.rendezvous.operations import Board, Operation, Read, Result
from pgmesh.rendezvous.statuses import status_key
from pgmesh.rendezvous.world_name import WORLD_KEY
from pgmesh.rendezvous.world_store import underlying
from tests.support.board import use_board

c10d: Any = _c10d

TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)


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


class _Recorder(Board):
    """Appends the names of torch's operations to ``done``, without those of the heartbeats."""

    def __init__(self, done: list[str]) -> None:
        self.done, self.requested = done, dict[int, Operation]()

    def request(self, operations: Sequence[Operation], ask: Callable[[], Result]) -> Result:
        self.requested |= {id(each): each for each in operations}
        return ask()

    def perform(self, store: dist.Store, operation: Operation) -> Any:
        recorded = self.requested.get(id(operation)) is operation
        return super().perform(RecordingStore(store, self.done) if recorded else store, operation)


@contextmanager
def record_operations() -> Iterator[list[str]]:
    """Record the operations of this process on the world's store, without those of its heartbeats."""
    done: list[str] = []
    current_world().store_thread()  # the thread keeps the store that it starts with
    store = RecordingStore(c10d._get_default_store(), done)
    with (
        mock.patch.object(c10d, "_get_default_store", return_value=store),
        mock.patch.object(current_world(), "store", store),
        use_board(_Recorder(done)),
    ):
        yield done


def pgmesh_store() -> dist.Store:
    """The world's store under pgmesh's prefix."""
    store = c10d._get_default_store()
    if not store.check([WORLD_KEY]):  # the first operation of a store thread sets it
        current_world().store_thread().run(Read(status_key(0)), seconds=30.0)
    return dist.PrefixStore(f"pgmesh.{store.get(WORLD_KEY).decode()}", underlying(store))


def address_is_published(group: dist.ProcessGroup) -> bool:
    """True if this rank's address in a Gloo group is in the store. The options of the group are there before it."""
    record = find_group(group.group_name)
    assert record is not None
    assert record.gloo is not None
    keys = [key for key in tuple(record.gloo.written) if not key.endswith("/options")]
    return bool(keys) and pgmesh_store().check(keys)
