"""The identity of a mesh: its name, its numbers, and the prefix of its store keys.

A mesh has a name, or the set of its ranks instead, and three numbers:

- The *local number* counts the meshes of that name in this process, from 0. It is part of the names of groups in torch.
- The *shared number* counts the meshes of that name on this rank, in all processes that have had the rank. It is part
  of the store keys, under which the ranks meet. It is the local number plus an offset, which is 0 except in a process
  that replaces another one. Each rank derives it when it *registers* the mesh, at its first use of the store
  (``registration.py``).
- The *generation* counts how often ``shrink`` has replaced the mesh that the program created.

For example, ranks 0 to 3 create the mesh "train", close it, and create it again. Then rank 3 is lost, and a new process
takes its place. The program may close the mesh and create the next one, or call ``shrink``:

                                                     names in torch, on                    store keys,
                                                     ranks 0 to 2       rank 3             on all ranks
    all create "train"                               pgmesh/train.0     pgmesh/train.0     pgmesh/train.0
    all close it and create it again                 pgmesh/train.1     pgmesh/train.1     pgmesh/train.1
    rank 3 is lost, and a new process takes its place; then either
      the others close it, and all create the next   pgmesh/train.2     pgmesh/train.0     pgmesh/train.2
    or
      the new process creates it, and stands by      pgmesh/train.1     pgmesh/train.0     pgmesh/train.1
      the others shrink it, with rank 3 as a spare   pgmesh/train.1~1   pgmesh/train.0~1   pgmesh/train.1~1

The first mesh of a name has the shared number 0, except in a process that replaces another one, its *predecessor*. Each
rank publishes its last shared number of each name. The new process reads that of its predecessor, which is 1 in the
example. If it *rejoins* the mesh that the predecessor was in, its first shared number is 1 too. Otherwise it is 2, the
next one; or the last one of another rank, if that is higher.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pgmesh import torch_private
from pgmesh.groups.naming import describe_ranks, encode_rank_set
from pgmesh.rendezvous.records import Fingerprint

if TYPE_CHECKING:
    from pgmesh.layout import Layout


class MeshIdentity:
    """The identity of a mesh on one rank.

    Args:
        name: name of the mesh, the same on every rank; None for an unnamed mesh.
        layout: layout of the root mesh, the same on every rank.
        call: the call that created the root mesh, for messages. Default: derived from the layout.
        rank: this process's rank.
        world_size: number of ranks of the world.
        pickled: the local number in the process that pickled the mesh; None if the mesh was not unpickled.
    """

    def __init__(
        self, name: str | None, layout: Layout, call: str | None, rank: int, world_size: int, pickled: int | None = None
    ) -> None:
        self.name, self.layout, self.rank, self.world_size = name, layout, rank, world_size
        self.pickled_number = pickled
        self.generation = 0
        # Set by ``registration.py``, in this order:
        self.number = 0  # the local number
        self.counted = False  # the local number is reserved; until then it may change
        self.shared_number: int | None = None  # None until it is derived
        self.rejoined = False  # it is the mesh that the predecessor was in
        self.registered = False  # this rank has published the fingerprint, which equals the first one
        if call is not None:
            self.call = call

    @functools.cached_property
    def call(self) -> str:
        """The call that created the root mesh."""
        named = {"name": self.name} if self.name else {}
        return self.layout.spell("ProcessGroupMesh", world=self.world_size, **named)

    @property
    def label(self) -> str:
        """Name of the mesh in messages."""
        label = f"mesh {self.name!r}" if self.name else self.call
        if self.pickled_number in (None, self.number):
            return label
        return f"{label} (unpickled as number {self.number} of its name; number {self.pickled_number} was taken here)"

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

    @functools.cached_property
    def prefix(self) -> str:
        """The part of the names and keys without numbers, such as "pgmesh/train". Names have no "/"."""
        name = self.name if self.name is not None else f"ranks/{encode_rank_set(self.layout.ranks_in_order())}"
        return f"{torch_private.PREFIX}{name}"

    def group_name(self, path: str) -> str:
        """The name of a group in torch."""
        return f"{self._with_number(self.number)}/{path}"

    def _with_number(self, number: int) -> str:
        return f"{self.prefix}.{number}" + (f"~{self.generation}" if self.generation else "")

    @property
    def key(self) -> str:
        """Prefix of the store keys; "" until the shared number is known."""
        return "" if self.shared_number is None else self._with_number(self.shared_number)

    @property
    def refusal_key(self) -> str:
        """Store key under which a rank publishes why the mesh cannot be used: a mismatch, or that it was aborted."""
        return f"{self.key}/mismatch"

    def store_keys(self) -> list[str]:
        """The store keys of the fingerprints; none until the shared number is known."""
        return [self.key, f"{self.key}/fingerprints"] if self.key else []

    def successor(self, layout: Layout) -> MeshIdentity:
        """The identity of the mesh with which ``shrink`` replaces this one. Its store keys are known at once."""
        identity = MeshIdentity(self.name, layout, None, self.rank, self.world_size)
        identity.prefix, identity.number, identity.shared_number = self.prefix, self.number, self.shared_number
        identity.generation, identity.counted = self.generation + 1, True  # it has the number of this one
        return identity
