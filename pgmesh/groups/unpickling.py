"""The groups of an unpickled mesh."""

from __future__ import annotations

import torch.distributed as dist

from pgmesh.errors import RankError
from pgmesh.groups import world
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.groups.world import current_world
from pgmesh.layout import Layout


def find_mesh_groups(name: str | None, number: int, layout: Layout, call: str, rank: int) -> MeshGroups:
    """The groups of an unpickled mesh: those of the mesh it was pickled from, if it is open here, or new ones.

    Outside any world the new mesh is closed and has only the rank that pickled it.
    """
    if not dist.is_initialized() or current_world().forked:
        return MeshGroups(name, layout, call, outside=rank)
    here = current_world()
    highest = max(layout.ranks_in_order())
    if highest >= here.size:
        raise RankError(f"{call} was unpickled with rank {highest}, but the world's ranks are 0 to {here.size - 1}.")
    with world.registering:
        for mesh in here.open_meshes():
            identity = mesh.identity
            original = identity.number if identity.pickled_number is None else identity.pickled_number
            if (mesh.name, original, mesh.layout) == (name, number, layout):
                return mesh  # type: ignore[no-any-return]
        return MeshGroups(name, layout, call, pickled_number=number)
