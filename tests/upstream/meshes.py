"""DeviceMeshes over the groups of pgmesh, in the place of those that torch's tests create."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pgmesh import ProcessGroupMesh

_meshes: dict[Any, ProcessGroupMesh] = {}
"""By ranks, shape and names: torch's tests create one DeviceMesh several times, and expect them to be equal."""


def mesh_of(device_mesh: DeviceMesh) -> ProcessGroupMesh:
    """The ProcessGroupMesh with the ranks, the shape and the names of a DeviceMesh."""
    table, names = device_mesh.mesh, device_mesh.mesh_dim_names
    key = tuple(table.flatten().tolist()), tuple(table.shape), names
    if key not in _meshes or _meshes[key].is_closed:
        ranks, sizes, _ = key
        _meshes[key] = ProcessGroupMesh(dict(zip(names or range(len(sizes)), sizes)), ranks=ranks)
    return _meshes[key]


def count(kind: str) -> None:
    """Count a DeviceMesh of this kind, for all processes."""
    with open(os.environ["PGMESH_UPSTREAM_COUNTS"], "a", encoding="utf-8") as file:
        file.write(f"{kind}\n")


def use_pgmesh() -> None:
    """Make the constructor of DeviceMesh take groups of pgmesh where it would create groups of torch.

    torch keeps: parts of another DeviceMesh, meshes with options of their own, and those of a device without a group.
    """
    build = DeviceMesh.__init__

    def init(self: Any, *args: Any, _init_backend: bool = True, **options: Any) -> None:
        device = args[0] if args else options.get("device_type")
        if not _init_backend or options.get("_root_mesh") is not None or options.get("backend_override"):
            build(self, *args, _init_backend=_init_backend, **options)
            return
        if not dist.is_initialized():
            dist.init_process_group()  # as torch does
        build(self, *args, _init_backend=False, **options)
        self._setup_world_group_and_device()
        mesh = mesh_of(self)
        if mesh.rank not in mesh:
            self._dim_group_names = []
            return
        made = mesh.device_mesh()
        if made.device_type != device:
            count(f"torch: {device}")
            build(self, *args, **options)
            return
        count("pgmesh")
        vars(self).update(vars(made))

    DeviceMesh.__init__ = init
