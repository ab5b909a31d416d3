"""A mesh from torch's DeviceMesh; the way back is ``mesh.device_mesh()``."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from pgmesh.errors import PlaceError
from pgmesh.mesh import ProcessGroupMesh


def from_device_mesh(device_mesh: DeviceMesh, *, name: str | None = None) -> ProcessGroupMesh:
    """A mesh of the same ranks and axes that hands out the groups which torch made for the axes.

    Groups along several axes, tagged ones and twins are pgmesh's own, made when they are asked for. Those that
    torch made are never destroyed from here.

    Args:
        device_mesh: one of torch's, whose groups exist.
        name: as for ``ProcessGroupMesh``.

    Raises:
        NameTakenError: a living mesh has this name.
        PlaceError: torch sorted the ranks of a group that the DeviceMesh has in another order.

    >>> again = from_device_mesh(mesh.device_mesh(), name="again")
    >>> again, again.group("tp") is mesh.group("tp")
    (ProcessGroupMesh(pp=2, dp=2, tp=2, name='again'), True)
    """
    ranks = device_mesh.mesh.flatten().tolist()
    names = device_mesh.mesh_dim_names
    if names is None or all(name.isdecimal() for name in names):  # as numbered axes are called there
        mesh = ProcessGroupMesh(*device_mesh.shape, ranks=ranks, name=name)
    else:
        mesh = ProcessGroupMesh(dict(zip(names, device_mesh.shape)), ranks=ranks, name=name)
    if mesh.rank in mesh:
        try:
            seen: set[tuple[int, ...]] = set()  # axes of one rank have the same ranks, and so share a group here
            for i, axis in enumerate(mesh.axes):
                if mesh.ranks(axis) not in seen:
                    mesh.adopt(axis, device_mesh.get_group(i))
                seen.add(mesh.ranks(axis))
        except PlaceError:
            mesh.close()
            raise
        if names == tuple(map(str, mesh.axes)):  # else torch could not cut it by the names of the axes
            mesh.adopt_device_mesh(device_mesh)
    return mesh
