"""The blocks along some axes of a mesh, each cut into pieces of consecutive ranks. A view has the pieces as axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from pgmesh.layout import Axis, Layout


class Pieces(NamedTuple):
    """The blocks along some axes of a mesh, each cut into pieces.

    Args:
        view: a view of the mesh.
        inside: the axes of the view inside a piece.
        between: the axes of the view from piece to piece of a block.
    """

    view: Layout
    inside: tuple[Axis, ...]
    between: tuple[Axis, ...]


def cut_blocks(mesh: Layout, axes: Sequence[Axis], size: int) -> Pieces | None:
    """Cut each block along some axes into pieces of ``size`` consecutive ranks; None if no view has such axes.

    The axes become two of the view: "instance" from piece to piece, and "member" inside a piece. If another axis is
    between them, they are several runs of neighbouring axes, and each run becomes two. The innermost run takes as much
    of ``size`` as it can, then the next one. A run that takes a part of it must be the last to take any.

    >>> cut_blocks(Layout(dp=8, tp=2), ["dp"], 4)
    Pieces(view=Layout(instance=2, member=4, tp=2), inside=('member',), between=('instance',))
    >>> cut_blocks(Layout(dp=4, tp=2, cp=2), ["dp", "cp"], 4).view
    Layout(instance1=2, member1=2, tp=2, instance=1, member=2)
    """
    sizes: dict[Axis, int] = {}  # of the view, innermost axis first
    inside: list[Axis] = []
    between: list[Axis] = []
    left = size  # the factor of ``size`` that the runs so far have not taken
    relevant = [axis for axis in reversed(mesh.axes) if axis in axes or mesh.size(axis) > 1]
    for is_cut, run in groupby(relevant, key=lambda axis: axis in axes):
        if not is_cut:
            sizes |= {axis: mesh.size(axis) for axis in run}
            continue
        count = mesh.size(*run)
        within = math.gcd(count, left)
        if within not in (count, left):
            return None
        number = len(inside) or ""
        inside.append(f"member{number}")
        between.append(f"instance{number}")
        sizes |= {inside[-1]: within, between[-1]: count // within}
        left //= within
    return Pieces(mesh.view(dict(reversed(sizes.items()))), tuple(inside), tuple(between))
