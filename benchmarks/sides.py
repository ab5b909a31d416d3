"""The two sides of every comparison: pgmesh, and torch's DeviceMesh as near to it as its API comes.

Each side makes the same mesh, dp x pp x cp x tp, and on it the six families of groups that large training uses. The
two that run along a pair of axes are a call of pgmesh's; DeviceMesh needs its private ``_flatten`` for them.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pgmesh import ProcessGroupMesh

FAMILIES = (("tp",), ("cp",), ("pp",), ("dp",), ("dp", "cp"), ("cp", "tp"))


class Ours:
    """A mesh of pgmesh and the groups of the six families."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.mesh = ProcessGroupMesh(name=name, **sizes)
        self.groups = [self.mesh.group(*axes) for axes in FAMILIES]

    def close(self) -> None:
        self.mesh.close()


class Theirs:
    """A DeviceMesh and the groups of the six families."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        parts = [self.mesh[axes]._flatten("_".join(axes)) if len(axes) > 1 else self.mesh[axes] for axes in FAMILIES]
        self.groups = [part.get_group() for part in parts]

    def close(self) -> None:
        for group in self.groups:
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        del self.mesh, self.groups


SIDES: dict[str, type[Ours] | type[Theirs]] = {"ours": Ours, "theirs": Theirs}
