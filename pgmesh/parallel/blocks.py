"""Blocks of ranks along axes of several layouts: views and slices of a mesh are compared by ranks, not by names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pgmesh.errors import AxisError
from pgmesh.layout import Axis, Layout
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.divisibility import format_sizes

Blocks = Sequence[tuple[Layout, tuple[Axis, ...]]]
"""Layouts, and axes of each. Each pair divides the ranks of its layout into blocks."""


def connected_ranks(rank: int, blocks: Blocks) -> list[int]:
    """The ranks that are connected with a rank by blocks, sorted: those of its blocks, of their blocks, and so on."""
    found, new, seen = {rank}, [rank], set[tuple[int, tuple[int, ...]]]()
    while new:
        each = new.pop()
        for number, (layout, axes) in enumerate(blocks):
            if each in layout and (key := (number, block := tuple(layout.block_of(each, *axes)))) not in seen:
                seen.add(key)
                new += set(block) - found
                found.update(block)
    return sorted(found)


def spanning_axes(mesh: ProcessGroupMesh, ranks: Iterable[int], what: str) -> tuple[Axis, ...]:
    """The axes of a mesh along which this rank's block is exactly these ranks.

    Args:
        mesh: the mesh.
        ranks: the ranks, with this one.
        what: begin of the error message, such as "DataParallel along dp averages gradients of".

    Raises:
        AxisError: they are no block.
    """
    members = set(ranks)
    axes = tuple(axis for axis in mesh.axes if members.issuperset(mesh.ranks(axis)))
    if len(members) != (mesh.size(*axes) if axes else 1):
        block = sorted(mesh.ranks(*axes)) if axes else [mesh.rank]
        raise AxisError(
            f"{what} the ranks {sorted(members)}, which read different tokens, but along axes of its mesh "
            f"({format_sizes(mesh, mesh.axes)}) only {block} of them are in one block.\n\n"
            "  Put all methods that split rows or positions on one mesh, or on one view of it."
        )
    return axes
