"""A report about one rank of a layout: its coord, its groups, its neighbours and its host."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pgmesh.drawing.styled_text import Line, columns_with_ranks
from pgmesh.layout import Axis, Layout
from pgmesh.planning.text_report import sample_of
from pgmesh.topology.hosts import HostLevel, Topology


@dataclass(frozen=True)
class AxisReport:
    """The group and the neighbours of a rank along one axis."""

    axis: Axis
    index: int
    size: int
    group: tuple[int, ...]  # all its ranks, or the first seven and the last
    units: tuple[int, ...]  # the number of hosts, domains, ... that it spans
    before: int | None  # the neighbours; None at the end of the axis
    after: int | None


@dataclass(frozen=True)
class PlaceReport:
    """The unit of a level that a rank is on, such as its host."""

    level: str
    unit: int
    place: int  # the index of the rank among the ranks of the unit
    size: int  # the number of ranks of the unit


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
    units: tuple[PlaceReport, ...]  # one for each level, innermost first
    along: tuple[AxisReport, ...]

    def data(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {"format": 1, **asdict(self)}

    def lines(self, width: int = 80) -> list[Line]:
        """The report as styled text.

        >>> from pgmesh.drawing import styled_text
        >>> print(styled_text.plain(rank_report_of(layout, 5).lines()))
        rank 5 of 8: pp1-dp0-tp1
        <BLANKLINE>
        axis   index  before  after  group
        pp    1 of 2       1      -  1, 5
        dp    0 of 2       -      7  5, 7
        tp    1 of 2       4      -  4, 5
        """
        title = f"rank {self.rank:,} of {self.ranks:,}: {self.label}"
        for each in self.units:
            title += f", {each.level} {each.unit:,} ({each.place} of {each.size})"
        head = ["axis", "index", "before", "after", *(f"{each.level}s" for each in self.units)]
        rows = [[(word, "dim") for word in head]]
        for along in self.along:
            words = [f"{along.index:,} of {along.size:,}"]
            words += ["-" if rank is None else str(rank) for rank in (along.before, along.after)]
            words += [f"{units:,}" for units in along.units]
            rows.append([(str(along.axis), "bold"), *((word, "") for word in words)])
        right = [False, *([True] * (len(head) - 1))]
        groups = [(along.group, along.size) for along in self.along]
        return [[(title, "bold")], [], *columns_with_ranks(rows, right, "group", groups, width)]


def rank_report_of(layout: Layout, rank: int, topology: Topology = ()) -> RankReport:
    """The report about a rank.

    Args:
        topology: the levels, innermost first; empty if the hosts are unknown.

    Raises:
        RankError: the rank is not in this layout.
    """
    return RankReport(
        rank,
        len(layout),
        layout.label_of(rank),
        layout.coord_of(rank),
        tuple(_place_of(rank, level) for level in topology),
        tuple(_axis_report(layout, rank, axis, topology) for axis in layout.axes),
    )


def _place_of(rank: int, level: HostLevel) -> PlaceReport:
    unit = level.unit_of(rank)
    ranks = level.ranks_of(unit)
    return PlaceReport(level.name, unit, ranks.index(rank), len(ranks))


def _axis_report(layout: Layout, rank: int, axis: Axis, topology: Topology) -> AxisReport:
    group = layout.along(rank, axis).ranks_in_order()
    return AxisReport(
        axis=axis,
        index=layout.index_of(rank, axis),
        size=len(group),
        group=sample_of(group),
        units=tuple(len({level.unit_of(other) for other in group}) for level in topology),
        before=layout.neighbor_of(rank, axis, -1),
        after=layout.neighbor_of(rank, axis, +1),
    )
