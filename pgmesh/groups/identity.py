"""The identity of a mesh: its name, numbers, fingerprint and the prefix of its store keys.

A mesh is identified by its name, or by the set of its ranks, and by two numbers:

- The *local number* is how many meshes of that name this process had created before. It is in the names of the groups
  in torch.
- The *shared number* is in the store keys, where the ranks meet. It is the local number and an offset: the number of
  meshes of that name that this rank had before this process.

Processes that run the same program derive the same local number without communication, and their offset is 0. A
process that replaces one of a lost rank counts from 0. So it reads from the store which shared number the others use
next, and that is its offset.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pgmesh import torch_private
from pgmesh.groups.naming import describe_ranks, encode_rank_set
from pgmesh.groups.registry import Registry
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Raw, Read
from pgmesh.rendezvous.protocol import check_mesh, register_mesh
from pgmesh.rendezvous.records import Fingerprint, pack, unpack
from pgmesh.rendezvous.store_thread import meshes_key

if TYPE_CHECKING:
    from pgmesh.layout import Layout


_REGISTERED_NAMES = 256
"""The number of names of meshes that a rank publishes for a process that replaces it."""


class MeshIdentity:
    """The identity of a mesh on one rank.

    Args:
        name: name of the mesh, the same on every rank; None for an unnamed mesh.
        layout: layout of the root mesh, the same on every rank.
        call: the call that created the root mesh, for messages. Default: derived from the layout.
        rank: this process's rank.
        world_size: number of ranks of the world.
    """

    def __init__(self, name: str | None, layout: Layout, call: str | None, rank: int, world_size: int) -> None:
        self.name, self.layout, self.rank, self.world_size = name, layout, rank, world_size
        self._call = call
        self.number = 0  # the local number
        self.pickled_number: int | None = None  # the local number in the process that pickled the mesh
        self.registered = False  # this rank has published the fingerprint
        self.key = ""  # prefix of the store keys, with the shared number; known once registered
        self.rejoined = False  # registered in the place of a former process of this rank, which was in the mesh
        self.generation = 0  # how often shrink has replaced the mesh that the program created
        self._first_key = ""  # the key of that mesh, once registered

    @property
    def call(self) -> str:
        """The call that created the root mesh."""
        if self._call is None:
            named = {"name": self.name} if self.name else {}
            self._call = self.layout.spell("ProcessGroupMesh", world=self.world_size, **named)
        return self._call

    @property
    def label(self) -> str:
        """Name of the mesh in messages."""
        label = f"mesh {self.name!r}" if self.name else self.call
        if self.pickled_number in (None, self.number):
            return label
        return f"{label} (unpickled as number {self.number} of its name; number {self.pickled_number} was taken here)"

    @functools.cached_property
    def prefix(self) -> str:
        """The part of the name that meshes of the same name or ranks have in common. Names have no "/"."""
        name = self.name if self.name is not None else f"ranks/{encode_rank_set(self.layout.ranks_in_order())}"
        return f"{torch_private.PREFIX}{name}"

    def group_name(self, path: str) -> str:
        """The name of a group in torch."""
        return f"{self.prefix}.{self.number}{self._suffix}/{path}"

    @property
    def _suffix(self) -> str:
        return f"~{self.generation}" if self.generation else ""

    def successor(self, layout: Layout) -> MeshIdentity:
        """The identity of the mesh that replaces this one, which is registered. It is the same on all ranks."""
        identity = MeshIdentity(self.name, layout, None, self.rank, self.world_size)
        identity.prefix, identity.number, identity.generation = self.prefix, self.number, self.generation + 1
        identity._first_key = self._first_key
        identity.key = f"{identity._first_key}{identity._suffix}"
        return identity

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the mesh on this rank."""
        fields = {
            "axes": list(self.layout.axes),
            "shape": list(self.layout.shape),
            "ranks": describe_ranks(self.layout.ranks_in_order()),
            "size of the world": self.world_size,
        }
        hint = "Close it on every rank and create the same mesh on all, or give different meshes different names."
        return Fingerprint(self.rank, fields, self.label, hint)

    @property
    def mismatch_key(self) -> str:
        """Store key under which a rank publishes a mismatch of the mesh."""
        return f"{self.key}/mismatch"

    def store_keys(self) -> list[str]:
        """The keys of the mesh in the store; none before its ranks have agreed on an epoch."""
        return [self.key, f"{self.key}/fingerprints"] if self.key else []

    def register(self, registry: Registry, seconds: float, *, rejoin: bool = False) -> None:
        """Publish the fingerprint of the mesh in the store, and compare it with the first one; once per rank.

        Args:
            rejoin: in a process that replaces a lost one, this is the mesh that the lost one was in. By default it is
                the next one of that name.

        Raises:
            MismatchError: the fingerprints differ.
            WorldError: the store does not answer.
        """
        if self.registered:
            return
        thread = registry.store_thread()
        run = functools.partial(thread.run, seconds=seconds)
        if registry.predecessor is None:
            (text,) = run(Read(meshes_key(self.rank)))
            registry.predecessor = _numbers(text) if thread.replaces_process else {}
            registry.registered.update(registry.predecessor)  # for the process that replaces this one
        if self.prefix not in registry.offsets:
            last = registry.predecessor.get(self.prefix, 0)
            registry.offsets[self.prefix] = last if rejoin else self._offset_after(registry.predecessor, run)
            self.rejoined = rejoin and thread.replaces_process
        shared_number = self.number + registry.offsets[self.prefix]
        self._first_key = f"{self.prefix}.{shared_number}"
        self.key = f"{self._first_key}{self._suffix}"
        registry.registered[self.prefix] = max(shared_number, registry.registered.pop(self.prefix, 0))  # at the end
        record = pack(numbers=dict([*registry.registered.items()][-_REGISTERED_NAMES:]))
        *_, first = run(Raw("set", (meshes_key(self.rank), record)), *register_mesh(self.key, self.fingerprint))
        check_mesh(run, self.key, self.fingerprint, first)
        self.registered = True

    def _offset_after(self, predecessor: Mapping[str, int], run: Callable[..., list[Any]]) -> int:
        """The shared number of the first mesh of this name in a process that replaced a lost one; otherwise 0.

        The other ranks close the mesh that the lost process was in, and create the next one. They may have done this
        already.

        Args:
            predecessor: the shared number of the last mesh that the lost process registered, by key prefix.
            run: performs operations on the store.
        """
        if not predecessor:
            return 0
        others = [rank for rank in self.layout.ranks_in_order() if rank != self.rank][: timing.LIMITS.statuses]
        texts = run(*(Read(meshes_key(rank)) for rank in others)) if others else []
        return max([predecessor.get(self.prefix, -1) + 1, *(_numbers(text).get(self.prefix, 0) for text in texts)])


def _numbers(text: bytes | None) -> dict[str, int]:
    """The shared number of the last mesh that a rank has registered, by key prefix."""
    record = unpack(text or b"", numbers=dict) or {"numbers": {}}
    return {prefix: number for prefix, number in record["numbers"].items() if type(number) is int}
