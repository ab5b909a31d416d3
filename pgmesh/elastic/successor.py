"""The layout of the mesh that replaces another one: without the lost ranks, or with spares in their places."""

from __future__ import annotations

from pgmesh._util.formatting import as_range, name_ranks
from pgmesh.elastic.records import Outcome
from pgmesh.errors import MissingRanksError
from pgmesh.layout import Layout


def successor(layout: Layout, outcome: Outcome) -> Layout:
    """The layout with spares in the places of lost ranks, and without the indices of the other lost ranks.

    Args:
        layout: the layout of the mesh that lost ranks.
        outcome: the decision on it.

    Raises:
        MissingRanksError: no rank would be left, or ranks that are not replaced would have to be dropped without an
            axis.

    >>> layout = Layout(dp=3, tp=2)
    >>> successor(layout, Outcome(lost={3: "it has ended"}, axis="dp"))
    Layout(dp=2, tp=2, ranks=(0, 1, 4, 5))
    >>> successor(layout, Outcome(lost={3: "it has ended"}, replaced={3: 6}))
    Layout(dp=3, tp=2, ranks=(0, 1, 2, 6, 4, 5))
    """
    lost, replaced, axis = outcome.lost, outcome.replaced, outcome.axis
    left_out = [rank for rank in lost if rank not in replaced]
    if left_out and axis is None:
        raise MissingRanksError(
            f"lost: {name_ranks([*lost])}. Spares that came: {len(replaced)}. Name an axis whose indices may be "
            f"dropped, as in mesh.shrink({layout.axes[0]!r}), or more spares."
        )
    if left_out and axis is not None:
        position = layout.axes.index(axis)
        dropped = {layout.coord_of(rank)[position] for rank in left_out}
        kept = [index for index in range(layout.shape[position]) if index not in dropped]
        if not kept:
            raise MissingRanksError(
                f"lost: {name_ranks([*lost])}. Each of the {layout.shape[position]} indices of axis {axis!r} has lost "
                f"a rank, so nothing is left. Spares that came: {len(replaced)}."
            )
        layout = layout.at({axis: kept})
    ranks = tuple(replaced.get(rank, rank) for rank in layout.ranks())
    return Layout.of(dict(zip(layout.axes, layout.shape)), as_range(ranks) or ranks)
