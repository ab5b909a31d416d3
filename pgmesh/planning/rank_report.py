"""A report about one rank of a layout: its coord, its groups, its neighbours and its host."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pgmesh.drawing import styled_text
from pgmesh.drawing.styled_text import Line
from pgmesh.planning.text_report import sample_of

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout
    from pgmesh.topology.hosts import Topology


@dataclass(frozen=True)
class AxisReport:
    """The group and the neighbours of a rank along one axis."""

    axis: Axis
    index: int
    size: int
    group: tuple[int, ...]  # all its ranks, or the first seven and the last
    units: tuple[int | None, ...]  # the number of hosts, domains, ... that it spans; None for a very large group
    before: int | None  # the neighbours; None at the end of the axis
    after: int | None


@dataclass(frozen=True)
class RankReport:
    """The report about one rank.

    >>> rank_report_of(layout, 5).along[1]
    AxisReport(axis='dp', index=0, size=2, group=(5, 7), units=(), before=None, after=7)
    """

    rank: int
    ranks: int
    label: str
    coord: tuple[int, ...]
    units: tuple[tuple[str, int, int, int], ...]  # for each level: name, unit, index in the unit, ranks in the unit
    along: tuple[AxisReport, ...]

    def data(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {
            "format": 1,
            **asdict(self),
            "units": [dict(zip(("level", "unit", "place", "size"), u)) for u in self.units],
        }

    def lines(self, width: int = 80) -> list[Line]:
        """The report as styled text.

        >>> print(styled_text.plain(rank_report_of(layout, 5).lines()))
        rank 5 of 8: pp1-dp0-tp1
        <BLANKLINE>
        axis   index  before  after  group
        pp    1 of 2       1      -  1, 5
        dp    0 of 2       -      7  5, 7
        tp    1 of 2       4      -  4, 5
        """
        host_text = "".join(f", {name} {unit:,} ({at} of {size})" for name, unit, at, size in self.units)
        head = ["axis", "index", "before", "after", *(f"{name}s" for name, *_ in self.units)]
        rows = [[(word, "dim") for word in head]]
        for along in self.along:
            words = [f"{along.index:,} of {along.size:,}", _or_dash(along.before), _or_dash(along.after)]
            words += ["many" if units is None else f"{units:,}" for units in along.units]
            rows.append([(str(along.axis), "bold"), *((word, "") for word in words)])
        right = [False, *([True] * (3 + len(self.units)))]
        groups = [(along.group, along.size) for along in self.along]
        return [
            [(f"rank {self.rank:,} of {self.ranks:,}: {self.label}{host_text}", "bold")],
            [],
            *styled_text.columns_with_ranks(rows, right, "group", groups, width),
        ]


def rank_report_of(layout: Layout, rank: int, topology: Topology = ()) -> RankReport:
    """The report about a rank.

    Args:
        topology: the levels, innermost first; empty if the hosts are unknown.

    Raises:
        RankError: the rank is not in this layout.
    """
    coord = layout.coord_of(rank)
    units = tuple(
        (level.name, unit, level.ranks_of(unit).index(rank), len(level.ranks_of(unit)))
        for level, unit in ((level, level.unit_of(rank)) for level in topology)
    )
    along = tuple(_axis_report(layout, rank, axis, index, topology) for axis, index in zip(layout.axes, coord))
    return RankReport(rank, len(layout), layout.label_of(rank), coord, units, along)


def _axis_report(layout: Layout, rank: int, axis: Axis, index: int, topology: Topology) -> AxisReport:
    group = layout.along(rank, axis).ranks_in_order()
    size = len(group)
    return AxisReport(
        axis,
        index,
        size,
        sample_of(group),
        tuple(len({level.unit_of(other) for other in group}) if size <= 1 << 16 else None for level in topology),
        layout.neighbor_of(rank, axis, -1),
        layout.neighbor_of(rank, axis, +1),
    )


def _or_dash(rank: int | None) -> str:
    return "-" if rank is None else f"{rank}"
