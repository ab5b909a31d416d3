"""The interface of ColossalAI's ``ProcessGroupMesh`` over a mesh of pgmesh.

    from pgmesh.interop.colossalai import ColossalMesh as ProcessGroupMesh   # in place of colossalai.cluster

Names, arguments and results are those of hpcaitech/ColossalAI, ``colossalai/cluster/process_group_mesh.py``.
Intended differences:

- Only the members of a group create it, in any order. No method waits for another rank, with NCCL and Gloo.
- Different values of ``backend=`` give different groups. In ColossalAI, the first call determines the backend.
- After ``destroy_mesh_process_groups``, a group raises LifetimeError. ColossalAI still returns it, destroyed.
- Coords contain plain ints, never ``np.int64``. A negative axis counts from the end in all methods. A negative index
  is an error, as in ColossalAI, except in ``ravel`` with "wrap" or "clip".
- Two meshes with the same ranks and shape each need a ``name=``, so that their communicators stay separate.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Union

import torch.distributed as dist

from pgmesh.errors import AxisError, MembershipError, RankError, ShapeError
from pgmesh.layout import Layout
from pgmesh.mesh import ProcessGroupMesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Axes = Union[int, Sequence[int]]
"""The number of an axis, or several numbers."""

Indices = Union[Sequence[int], Sequence[Sequence[int]]]
"""Indices along an axis; for several axes, a list of indices for each."""


class ColossalMesh:
    """A mesh of pgmesh with the interface of ColossalAI's ``ProcessGroupMesh``.

    Args:
        size: sizes of the axes, outermost first. Their product is the size of the world.
        mesh: an existing mesh, instead of sizes. Its axes are numbered from 0.
        name: name of the new mesh, the same on every rank.

    Raises:
        ShapeError: the product of the sizes is not the size of the world, or a mesh is given with sizes or a name.

    >>> theirs = ColossalMesh(mesh=mesh)
    >>> theirs.shape, theirs.rank, theirs.coordinate(), theirs.size(2)
    ((2, 2, 2), 5, (1, 0, 1), 2)
    >>> theirs.get_group_along_axis(2) is mesh.group("tp")
    True
    """

    mesh: ProcessGroupMesh

    def __init__(self, *size: int, mesh: ProcessGroupMesh | None = None, name: str | None = None) -> None:
        if mesh is not None and (size or name is not None):
            raise ShapeError("ColossalMesh takes sizes and an optional name, or a mesh, but not both.")
        self.mesh = ProcessGroupMesh(*size, name=name) if mesh is None else mesh
        self._owns_mesh = mesh is None
        self._returned: set[tuple[int, ...]] = set()

    # -- properties ---------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, outermost first.

        >>> ColossalMesh(mesh=mesh).shape
        (2, 2, 2)
        """
        return self.mesh.shape

    @property
    def rank(self) -> int:
        """This process's rank in the world.

        >>> ColossalMesh(mesh=mesh).rank
        5
        """
        return self.mesh.rank

    def size(self, dim: int | None = None) -> Any:
        """The size of an axis; without an argument, the shape.

        Raises:
            AxisError: there is no such axis.

        >>> ColossalMesh(mesh=mesh).size(0), ColossalMesh(mesh=mesh).size()
        (2, (2, 2, 2))
        """
        return self.shape if dim is None else self.shape[_to_axis(dim, len(self.shape))]

    def coordinate(self, dim: int | None = None) -> Any:
        """This rank's index along an axis; without an argument, its coord.

        Raises:
            AxisError: there is no such axis.
            MembershipError: this rank is not in the mesh.

        >>> ColossalMesh(mesh=mesh).coordinate(0), ColossalMesh(mesh=mesh).coordinate()
        (1, (1, 0, 1))
        """
        coord = self.mesh.coord
        if coord is None:
            raise MembershipError(f"rank {self.rank} is not in {self.mesh!r}, so it has no coord.")
        return coord if dim is None else coord[_to_axis(dim, len(coord))]

    # -- rank <-> coord of a shape, without a mesh --------------------------------------------------------------

    @staticmethod
    def unravel(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The coord of a rank in a shape; the inverse of ``ravel``.

        Raises:
            RankError: the shape holds no such rank.

        >>> ColossalMesh.unravel(5, (2, 2, 2))
        (1, 0, 1)
        """
        return Layout(*shape).coord_of(rank)

    @staticmethod
    def ravel(coord: Sequence[int], shape: Sequence[int], mode: str = "raise") -> int:
        """The rank at a coord of a shape; the inverse of ``unravel``.

        Args:
            coord: an index for each axis.
            shape: the sizes of the axes, outermost first.
            mode: treatment of an index outside its axis: "raise" an error, "wrap" around, or "clip" to the nearest.

        Raises:
            RankError: an index is outside its axis, or the mode does not exist.

        >>> ColossalMesh.ravel((1, 0, 1), (2, 2, 2)), ColossalMesh.ravel((2, 0, 1), (2, 2, 2), "wrap")
        (5, 1)
        """
        if mode not in ("raise", "wrap", "clip"):
            raise RankError(f"mode is 'raise', 'wrap' or 'clip', not {mode!r}.")
        layout, coord = Layout(*shape), _to_ints("a coord", coord)
        if mode != "raise" and len(coord) == len(layout.shape):
            coord = tuple(
                index % size if mode == "wrap" else min(max(index, 0), size - 1)
                for index, size in zip(coord, layout.shape)
            )
        _check_indices(
            coord,
            layout.shape,
            f"\n\n  ColossalMesh.ravel({coord}, {layout.shape}, 'wrap')   # wraps around; or 'clip'",
        )
        return layout.rank_of(coord)

    @staticmethod
    def get_coords_along_axis(base_coord: Sequence[int], axis: Axes, indices_at_axis: Indices) -> list[tuple[int, ...]]:
        """The coords with all combinations of indices along some axes. The last axis varies fastest.

        Args:
            base_coord: the coord that determines the indices along the other axes.
            axis: one axis, or several.
            indices_at_axis: the indices along the axis; for several axes, a list of indices for each.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            RankError: the number of lists of indices is not the number of axes.

        >>> ColossalMesh.get_coords_along_axis((1, 0, 1), [0, 2], [[0, 1], [0]])
        [(0, 0, 0), (1, 0, 0)]
        """
        base = _to_ints("a coord", base_coord)
        axes, lists = _to_axes(axis, len(base)), list[Any](indices_at_axis if _is_sequence(axis) else [indices_at_axis])
        if len(lists) != len(axes):
            raise RankError(f"axes {axes} need a list of indices each, but there are {len(lists)}: {lists!r}.")
        along = [_to_ints(f"the list of indices along axis {number}", each) for number, each in zip(axes, lists)]
        coords = []
        for indices in itertools.product(*along):
            at = dict(zip(axes, indices))
            coords.append(tuple(at.get(number, index) for number, index in enumerate(base)))
        return coords

    # -- groups -------------------------------------------------------------------------------------------------

    def get_group(self, ranks_in_group: Iterable[int], backend: str | None = None) -> Any:
        """The group of these ranks, in the order of the mesh. Only members need to call it.

        On a rank that is not a member, it returns ``GroupMember.NON_GROUP_MEMBER``, as ``new_group`` of torch does.

        Raises:
            RankError: a rank is not in the mesh, or is named twice.

        >>> ColossalMesh(mesh=mesh).get_group([4, 5]) is mesh.group("tp")
        True
        """
        ranks = _to_ints("a group", ranks_in_group)
        for rank in ranks:
            self.mesh.coord_of(rank)
        if self.rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        group = self.mesh.group_of(ranks, backend=backend)
        self._returned.add(tuple(sorted(ranks)))
        return group

    def get_ranks_in_group(self, group: ProcessGroup) -> list[int]:
        """The ranks of a process group, in the order of the group.

        Raises:
            LifetimeError: the group was closed or released.
            MembershipError: this rank is not in the group.

        >>> ColossalMesh(mesh=mesh).get_ranks_in_group(mesh.group("pp"))
        [1, 5]
        """
        if group is None or dist.get_rank(group) < 0:
            raise MembershipError(
                f"rank {self.rank} is not a member of {group!r}.\n\n"
                "  colossal.get_ranks_in_group(colossal.get_group_along_axis(0))   # a group of this rank"
            )
        return list(map(int, dist.get_process_group_ranks(group)))

    def create_group_along_axis(
        self, axis: Axes, indices_at_axis: Indices | None = None, backend: str | None = None
    ) -> ProcessGroup | None:
        """The group of the ranks at these indices along axes, with this rank's indices along the other axes.

        Ranks can pass different indices; only members of the same group must pass the same ones.

        Args:
            axis: one axis, or several.
            indices_at_axis: the indices along the axis; for several axes, a list of indices for each. Default: all.
            backend: the backend of the group. Each backend has a separate group.

        Returns:
            The group; None if this rank is not a member. torch treats None as the group of the world, so check for it.

        Raises:
            AxisError: the axis does not exist, or is named twice.
            RankError: an index does not exist or is negative, or the number of lists is not the number of axes.

        >>> ColossalMesh(mesh=mesh).create_group_along_axis([1, 2]) is mesh.group("dp", "tp")
        True
        >>> ColossalMesh(mesh=mesh).create_group_along_axis(0, [0]) is None
        True
        """
        coord, indices = self.coordinate(), indices_at_axis
        if indices is None or len(indices) == 0:
            axis = _to_axes(axis, len(coord))
            indices = [range(self.shape[number]) for number in axis]
        places = self.get_coords_along_axis(coord, axis, indices)
        for place in places:
            _check_indices(place, self.shape)
        ranks = [self.mesh.rank_of(place) for place in places]
        return self.get_group(ranks, backend=backend) if self.rank in ranks else None

    get_group_along_axis = create_group_along_axis  # the group exists already, or its members create it

    def destroy_mesh_process_groups(self) -> None:
        """Close the mesh if this object created it, else release all groups that were returned.

        Every member must call it, as ``close`` and ``release``.

        >>> theirs, group = ColossalMesh(mesh=mesh), mesh.group("tp")
        >>> theirs.get_group_along_axis(2) is group
        True
        >>> theirs.destroy_mesh_process_groups()
        >>> theirs.get_group_along_axis(2) is group
        False
        """
        if self._owns_mesh:
            self.mesh.close()
        elif not self.mesh.is_closed:
            for ranks in sorted(self._returned):
                self.mesh.release(ranks=ranks)
        self._returned.clear()

    def __repr__(self) -> str:
        return f"ColossalMesh(mesh={self.mesh!r})"


def _check_indices(coord: Sequence[int], shape: Sequence[int], hint: str = "") -> None:
    """Raise RankError if an axis does not have an index. Negative ones do not count from the end."""
    for axis, (index, size) in enumerate(zip(coord, shape)):
        if not 0 <= index < size:
            raise RankError(f"axis {axis} of shape {shape} has indices 0 to {size - 1}; there is no {index}.{hint}")


def _to_axis(axis: Any, count: int) -> int:
    """The number of an axis, counted from the start."""
    try:
        return int(range(count)[axis])  # a negative axis counts from the end
    except (IndexError, TypeError):
        raise AxisError(f"axes are numbers from 0 to {count - 1}; there is no axis {axis!r}.") from None


def _to_axes(axis: Any, count: int) -> list[int]:
    """The numbers of axes, counted from the start."""
    axes = [_to_axis(each, count) for each in (axis if _is_sequence(axis) else [axis])]
    if len(set(axes)) != len(axes):
        raise AxisError(f"each axis is named once, but {axes} names one twice.")
    return axes


def _is_sequence(axis: Any) -> bool:
    return isinstance(axis, Iterable) and not isinstance(axis, str)


def _to_ints(what: str, numbers: Iterable[Any]) -> tuple[int, ...]:
    """Integers of any type as plain ints."""
    try:
        return tuple(map(operator.index, numbers))
    except TypeError:
        raise RankError(f"{what} consists of whole numbers, not {numbers!r}.") from None
