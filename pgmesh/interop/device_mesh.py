"""Conversion of torch's DeviceMesh to a ProcessGroupMesh. ``mesh.device_mesh()`` is the reverse."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from pgmesh.mesh import ProcessGroupMesh


def from_device_mesh(device_mesh: DeviceMesh, *, name: str | None = None) -> ProcessGroupMesh:
    """A mesh of the same ranks and axes that uses torch's groups along single axes.

    pgmesh creates other groups on first use: along several axes, with a tag, or on another backend. It never destroys
    the groups of torch.

    Args:
        device_mesh: a DeviceMesh whose groups exist.
        name: as for ``ProcessGroupMesh``.

    Raises:
        NameTakenError: another open mesh has this name.
        RankError: the ranks of a group of torch are in another order than in the DeviceMesh, since torch sorts them.

    >>> again = from_device_mesh(mesh.device_mesh(), name="again")
    >>> again, again.group("tp") is mesh.group("tp")
    (ProcessGroupMesh(pp=2, dp=2, tp=2, name='again'), True)
    """
    ranks = device_mesh.mesh.flatten().tolist()
    names = device_mesh.mesh_dim_names
    if names is None or all(name.isdecimal() for name in names):  # the names that pgmesh gives to numbered axes
        mesh = ProcessGroupMesh(*device_mesh.shape, ranks=ranks, name=name)
    else:
        mesh = ProcessGroupMesh(dict(zip(names, device_mesh.shape)), ranks=ranks, name=name)
    if mesh.rank in mesh:
        try:
            seen: set[tuple[int, ...]] = set()  # axes with the same ranks share a group
            for i, axis in enumerate(mesh.axes):
                if mesh.ranks(axis) not in seen:
                    mesh.adopt(axis, device_mesh.get_group(i))
                seen.add(mesh.ranks(axis))
        except BaseException:
            mesh.close()
            raise
    return mesh
