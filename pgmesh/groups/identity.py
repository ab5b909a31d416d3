"""The identity of a mesh: its name, number, fingerprint and the prefix of its store keys.

A mesh is identified by its name, or by the set of its ranks, and by a number: how many meshes of that name this process
had created before. Processes that run the same program derive the same number without communication. A process that
replaces one of a lost rank counts from 0. It reads from the store which number the others use.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pgmesh import torch_private
from pgmesh.groups.naming import describe_ranks, encode_rank_set
from pgmesh.groups.registry import Registry
from pgmesh.rendezvous.operations import Raw, Read
from pgmesh.rendezvous.protocol import check_mesh, register_mesh
from pgmesh.rendezvous.records import Fingerprint, decode_fingerprint

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
    """

    def __init__(self, name: str | None, layout: Layout, call: str | None, rank: int, world_size: int) -> None:
        self.name, self.layout, self.rank, self.world_size = name, layout, rank, world_size
        self._call = call
        self.number = 0
        self.pickled_number: int | None = None  # of an unpickled mesh where it was created
        self.registered = False  # this rank has published the fingerprint
        self.key = ""  # prefix of the store keys, once the mesh is registered

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
        return f"{self.prefix}.{self.number}/{path}"

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the mesh on this rank."""
        fields = {
            "axes": list(self.layout.axes),
            "shape": list(self.layout.shape),
            "ranks": describe_ranks(self.layout.ranks_in_order()),
            "size of the world": self.world_size,
        }
        hint = "Create the same mesh on every rank, or give different meshes different names."
        return Fingerprint(self.rank, fields, self.label, hint)

    @property
    def mismatch_key(self) -> str:
        """Store key under which a rank publishes a mismatch of the mesh."""
        return f"{self.key}/mismatch"

    def register(self, registry: Registry, seconds: float) -> None:
        """Publish the fingerprint of the mesh in the store, and compare it with the first one; once per rank.

        Raises:
            MismatchError: the fingerprints differ.
            WorldError: the store does not answer.
        """
        if self.registered:
            return
        run = functools.partial(registry.store_thread().run, seconds=seconds)
        latest_key = f"{self.prefix}.latest"
        (text,) = run(Read(latest_key))
        latest = None if text is None else int(text)
        number = self.number
        if latest is not None and registry.store_thread().replaces_process:
            (seen,) = run(Read(f"{self.prefix}.{latest}/fingerprints"))
            ranks = {(decode_fingerprint(line) or (-1,))[0] for line in (seen or b"").splitlines()}
            # The others close a mesh that the lost process was in, and create the next one.
            number = max(number, latest + (not ranks or self.rank in ranks))
        self.key = f"{self.prefix}.{number}"
        operations = register_mesh(self.key, self.fingerprint)
        if latest is None or latest < number:
            run(Raw("set", (latest_key, str(number))))
            registry.world_keys.add(latest_key)
        *_, first = run(*operations)
        check_mesh(run, self.key, self.fingerprint, first)
        self.registered = True
