"""Figures: the content of a drawing of a mesh, without its format. ``text`` and ``svg`` write figures.

A figure consists of panels, a panel of rows, and a row of cells. A cell is one rank with the colour of its group and
its host. The last axis runs across a panel and the one before it runs down. Each combination of indices on the other
axes has its panel. A mesh of more than ``MAX_CELLS`` ranks is shown as a sample: the ends of its axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from pgmesh.drawing.drawable import Axis, Drawable
    from pgmesh.topology.hosts import HostLevel

MAX_CELLS = 1024
"""The default limit on the cells of a figure."""

MAX_COLUMNS = 64
"""The default limit on the columns of a panel."""

GAP = "…"
"""The sign for indices, ranks or panels that are left out."""

ShownCoord = tuple[Union[int, str], ...]
"""One index for each of some axes, or ``GAP``."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One rank, or a gap (``rank=None``) in place of ranks that are left out."""

    rank: int | None = None
    label: str = ""  # pp0-dp1-tp1
    group: str = ""  # pp=0, dp=1, tp=*
    colour: int = 0  # the index of its group among those shown
    host: int | None = None
    is_marked: bool = False

    @property
    def text(self) -> str:
        """The rank, or the sign of a gap."""
        return GAP if self.rank is None else str(self.rank)


@dataclass(frozen=True)
class Row:
    """The cells with the same index on the last axis but one."""

    name: str  # dp1; "" if there is one axis
    cells: tuple[Cell, ...]
    hosts: str  # host 3, hosts 0 … 3; "" if they are unknown


@dataclass(frozen=True)
class Panel:
    """The rows with the same indices on the outer axes: all axes but the last two."""

    title: str  # pp0 cp1
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Figure:
    """The content of the drawing of one mesh."""

    title: str
    legend: str  # the meaning of the colours
    note: str  # a sentence if it is a sample; else ""
    panels: tuple[Panel, ...]
    panels_across: int  # the number of panels along the innermost outer axis
    host: str  # the name of the level: host, domain, or ""

    def lines_of_panels(self, fit: int) -> list[tuple[Panel, ...]]:
        """The panels in lines of at most ``fit``. A line has whole runs of the innermost outer axis if they fit."""
        across = fit // self.panels_across * self.panels_across or fit
        return [self.panels[i : i + across] for i in range(0, len(self.panels), across)]


def make_figure(
    layout: Drawable,
    *axes: Axis,
    host: HostLevel | None = None,
    mark: int | None = None,
    title: str | None = None,
    max_cells: int = MAX_CELLS,
    max_columns: int = MAX_COLUMNS,
) -> Figure:
    """The figure of a layout.

    Args:
        axes: the groups along these are coloured; by default the innermost axis.
        host: the level of hosts, which are named.
        mark: a rank to highlight.
        title: by default the sizes of the axes.
        max_cells: the limit on the number of cells, which is kept approximately.
        max_columns: the limit on the columns of a panel.

    >>> drawn = make_figure(layout, "dp", "tp")
    >>> [[(cell.rank, cell.colour) for cell in row.cells] for row in drawn.panels[1].rows]
    [[(4, 1), (5, 1)], [(6, 1), (7, 1)]]
    """
    axes = axes or layout.axes[-1:]
    shown = _indices_to_show(layout, mark, max_cells, max_columns)
    cut = max(0, len(shown) - 2)  # the number of outer axes
    seen = math.prod(len(_without_gaps(indices)) for indices in shown)
    sizes = " ".join(f"{axis}={size}" for axis, size in zip(layout.axes, layout.shape))
    return Figure(
        title=sizes if title is None else title,
        legend=f"one colour: one {' x '.join(map(str, axes))} group" if axes else "",
        note=f"a sample: {seen:,} of {len(layout):,} ranks, from the ends of the axes" if seen < len(layout) else "",
        panels=tuple(_panels(layout.axes, shown, cut, _CellMaker(layout, axes, host, mark))),
        panels_across=len(_without_gaps(shown[cut - 1])) if cut else 1,
        host=host.name if host else "",
    )


# -- the sample --------------------------------------------------------------------------------------------------------


def _indices_to_show(layout: Drawable, mark: int | None, max_cells: int, max_columns: int) -> list[ShownCoord]:
    """The indices of each axis to show, for about ``max_cells`` cells. The outermost axes are shortened first."""
    most = [*[max_cells] * (len(layout.shape) - 1), min(max_cells, max_columns)]
    limits = [*map(min, layout.shape, most)]
    for i, limit in enumerate(limits):
        room = max_cells * limit // math.prod(limits)  # how many fit beside the limits of the other axes
        limits[i] = max(min(limit, 3), min(limit, room))  # three are two ends and a gap
    marked = layout.coord_of(mark) if mark is not None and mark in layout else [0] * len(limits)
    return [_shortened(*each) for each in zip(layout.shape, limits, marked)]


def _shortened(size: int, limit: int, marked: int) -> ShownCoord:
    """All indices of an axis; above the limit the first ones, the marked one and the last.

    >>> _shortened(4, 4, 0), _shortened(9, 4, 0), _shortened(9, 6, 5), _shortened(9, 6, 7)
    ((0, 1, 2, 3), (0, 1, '…', 8), (0, 1, '…', 5, '…', 8), (0, 1, '…', 7, 8))
    """
    if size <= limit:
        return tuple(range(size))
    kept = {*range(limit - 2), size - 1}
    if marked not in kept:
        kept = {*range(limit - 4), marked, size - 1}
    shown: list[int | str] = []
    for index in sorted(kept):
        if index > 0 and index - 1 not in kept:
            shown.append(GAP)
        shown.append(index)
    return tuple(shown)


def _without_gaps(shown: ShownCoord) -> list[int]:
    return [index for index in shown if isinstance(index, int)]


# -- panels ------------------------------------------------------------------------------------------------------------


class _CellMaker:
    """Makes the cells of one figure. Groups get the next colour when they are first seen."""

    def __init__(self, layout: Drawable, axes: Sequence[Axis], host: HostLevel | None, mark: int | None) -> None:
        self.layout, self.axes, self.host, self.mark = layout, axes, host, mark
        self.colours: dict[str, int] = {}

    def cell_at(self, shown: ShownCoord) -> Cell:
        coord = _without_gaps(shown)
        if len(coord) < len(shown):
            return Cell()
        rank = self.layout.rank_of(coord)
        group = self.layout.describe(rank, *self.axes) if self.axes else ""
        return Cell(
            rank,
            self.layout.label_of(rank),
            group,
            self.colours.setdefault(group, len(self.colours)),
            self.host.unit_of(rank) if self.host else None,
            rank == self.mark,
        )

    def hosts_of(self, cells: Sequence[Cell]) -> str:
        """``host 3``, or ``hosts 0 … 3`` for the first and the last; "" if they are unknown."""
        numbers = {cell.host for cell in cells if cell.host is not None}
        if self.host is None or not numbers:
            return ""
        name, first, last = self.host.name, min(numbers), max(numbers)
        return f"{name} {first:,}" if first == last else f"{name}s {first:,} {GAP} {last:,}"


def _panels(axes: Sequence[Axis], shown: Sequence[ShownCoord], cut: int, maker: _CellMaker) -> Iterator[Panel]:
    """The panels of a figure.

    Args:
        shown: the indices of each axis to show.
        cut: the number of outer axes.
    """
    columns = list(product(*shown[cut:][-1:]))
    column_names = tuple(_coord_text(axes[-1:], column) for column in columns if column)
    for outer in product(*map(_without_gaps, shown[:cut])):
        rows = []
        for row in product(*shown[cut:-1]):
            cells = tuple(maker.cell_at((*outer, *row, *column)) for column in columns)
            rows.append(Row(_coord_text(axes[cut:-1], row), cells, maker.hosts_of(cells)))
        yield Panel(_coord_text(axes[:cut], outer), column_names, tuple(rows))


def _coord_text(axes: Sequence[Axis], coord: ShownCoord) -> str:
    """Indices with the names of their axes: ``pp0 dp1``."""
    return " ".join(f"{axis}:{i}" if isinstance(axis, int) else f"{axis}{i}" for axis, i in zip(axes, coord))
