"""Checks of ``compose``: an axis has one owner, also if methods are on different views and slices of a mesh."""

from __future__ import annotations

import itertools

from pgmesh.errors import AxisError
from pgmesh.layout import Axis, Layout
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method


def check_owners(one: Method, other: Method) -> None:
    """Check that two methods own different axes, and that only one of them averages gradients.

    Two methods on different views own the same axis if two ranks are in one block of both. Names do not matter.

    Raises:
        AxisError: an axis has two owners, or two methods average gradients.
    """
    experts = [each for each in (one, other) if each.differs == "experts"]
    alone = Level.PIPELINE in (one.level, other.level) or one.averages_later or other.averages_later
    if len(experts) == 1 and not alone:
        return  # experts are other weights than those of the other method, on the same ranks
    same_layout = one.mesh.layout == other.mesh.layout
    for axis, other_axis in itertools.product(one.owns, other.owns):
        if same_layout and axis == other_axis:
            raise AxisError(
                f"axis {axis} has two owners: {one}, and {other}. An axis has one owner.\n\n"
                f"  {type(other).__name__}(mesh, ...)   # another axis"
            )
        pair = None if same_layout else shared_pair(one.mesh.layout, axis, other.mesh.layout, other_axis)
        if pair:
            raise AxisError(
                f"ranks {pair[0]} and {pair[1]} have two owners: {one} owns both along {axis}, and {other} owns both "
                f"along {other_axis} of another view or slice. An axis has one owner, under any name. Only experts may "
                "lie on the ranks of other methods.\n\n"
                f"  mesh.view(...)   # with an axis {other_axis} that does not overlap {axis}"
            )
    if one.averages_gradients and other.averages_gradients:
        raise AxisError(
            f"{one} and {other} both average gradients. One method does it, for all axes.\n\n"
            f"  {type(one).__name__}(mesh, {', '.join(map(repr, (*one.owns, *other.owns)))})   # in place of both"
        )


def owns_axis(method: Method, mesh: ProcessGroupMesh, axis: Axis) -> bool:
    """Return True if a method owns an axis of the mesh, directly or as part of an axis of a view or slice.

    Experts on another layout never count as an owner: other methods own their ranks.
    """
    layout = method.mesh.layout
    if layout == mesh.layout:
        return axis in method.owns
    if method.differs == "experts":
        return False
    blocks = [block for block in mesh.layout.partition(axis) if any(rank in layout for rank in block)]
    return all(block[0] in layout and {*block} <= {*layout.block_of(block[0], *method.owns)} for block in blocks)


def shared_pair(layout: Layout, axis: Axis, other: Layout, other_axis: Axis) -> tuple[int, int] | None:
    """Two ranks that are in one block along ``axis`` and in one block along ``other_axis`` of another layout."""
    if layout == other:
        block = layout.block_of(layout.ranks()[0], axis)
        return (block[0], block[1]) if axis == other_axis and len(block) > 1 else None
    for block in other.partition(other_axis) if layout.size(axis) > 1 and other.size(other_axis) > 1 else ():
        seen: dict[tuple[int, ...], int] = {}  # ranks by their coord without ``axis``: equal coords share a block
        for rank in block:
            if rank in layout:
                coord = tuple(i for name, i in zip(layout.axes, layout.coord_of(rank)) if name != axis)
                if coord in seen:
                    return seen[coord], rank
                seen[coord] = rank
    return None
