"""The records of a decision on lost ranks: the arguments of ``shrink``, and the decision.

The layout of the mesh that replaces another one follows from its layout and the decision.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pgmesh._util.formatting import as_range, name_ranks
from pgmesh.connect.rounds import Round
from pgmesh.errors import MissingRanksError
from pgmesh.layout import Layout
from pgmesh.liveness.records import pack


@dataclass(frozen=True)
class Request:
    """The arguments of ``shrink``, the same on all ranks that call it.

    Args:
        axis: the axis whose indices are dropped where a rank was lost; None to drop none.
        spares: ranks that may replace lost ones, in this order.
    """

    axis: Any
    spares: tuple[int, ...]

    def __str__(self) -> str:
        words = [] if self.axis is None else [repr(self.axis)]
        spares = (as_range(self.spares) if len(self.spares) > 8 else None) or [*self.spares]
        words += [f"spares={spares}"] if self.spares else []
        return f"shrink({', '.join(words)})"


@dataclass(frozen=True)
class Outcome:
    """The decision of an attempt.

    Args:
        failed: the error message, if the attempt failed.
        error: "missing" if ranks did not arrive or too many are lost, "mismatch" if ranks passed different arguments,
            "stopped" if a rank that had arrived stopped: the others then go on to the next attempt. "over" if no member
            is left, which a rank that stands by has found.
        lost: the members that are lost, each with the reason.
        replaced: for each lost rank that a spare replaces, that spare.
        axis: the axis whose indices are dropped where a rank is lost and not replaced.
        processes: the processes of these spares, in the same order.
    """

    failed: str = ""
    error: str = "missing"
    lost: dict[int, str] = field(default_factory=dict)
    replaced: dict[int, int] = field(default_factory=dict)
    axis: Any = None
    processes: tuple[str, ...] = ()

    def pack(self) -> str:
        pairs = {"lost": [*self.lost.items()], "replaced": [*self.replaced.items()]}  # keys of JSON are text
        return pack(**{**vars(self), **pairs})

    @classmethod
    def unpack(cls, text: bytes) -> Outcome:
        record = json.loads(text)
        plain = {"lost": dict(record["lost"]), "replaced": dict(record["replaced"])}
        return cls(**{**record, **plain, "processes": tuple(record["processes"])})

    def successor(self, layout: Layout) -> Layout:
        """The layout with spares in the places of lost ranks, and without the indices of the other lost ranks.

        Args:
            layout: the layout of the mesh that lost ranks.

        Raises:
            MissingRanksError: no rank would be left, or ranks that are not replaced would have to be dropped without an
                axis.

        >>> layout = Layout(dp=3, tp=2)
        >>> Outcome(lost={3: "it has ended"}, axis="dp").successor(layout)
        Layout(dp=2, tp=2, ranks=(0, 1, 4, 5))
        >>> Outcome(lost={3: "it has ended"}, replaced={3: 6}).successor(layout)
        Layout(dp=3, tp=2, ranks=(0, 1, 2, 6, 4, 5))
        """
        left_out = [rank for rank in self.lost if rank not in self.replaced]
        if left_out:
            layout = self._without(layout, left_out)
        ranks = tuple(self.replaced.get(rank, rank) for rank in layout.ranks())
        return Layout.of(dict(zip(layout.axes, layout.shape)), as_range(ranks) or ranks)

    def _without(self, layout: Layout, left_out: list[int]) -> Layout:
        """The layout without the indices of the axis that have these ranks."""
        who, came = f"lost: {name_ranks([*self.lost])}.", f"Spares that came: {len(self.replaced)}."
        if self.axis is None:
            raise MissingRanksError(
                f"{who} {came} Name an axis whose indices may be dropped, as in mesh.shrink({layout.axes[0]!r}), or "
                "more spares."
            )
        position = layout.axes.index(self.axis)
        dropped = {layout.coord_of(rank)[position] for rank in left_out}
        size = layout.shape[position]
        if len(dropped) == size:
            raise MissingRanksError(
                f"{who} Each of the {size} indices of axis {self.axis!r} has lost a rank, so nothing is left. {came}"
            )
        return layout.at({self.axis: [index for index in range(size) if index not in dropped]})


MeshRound = Round[Outcome]
"""One rank's part in the decision on a mesh's survivors."""
