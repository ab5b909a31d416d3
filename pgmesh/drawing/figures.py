"""Figures: the content of a drawing of a mesh, independent of the output format (SVG, terminal).

A figure consists of panels, and a panel of cells. A cell is one rank with the colour of its group and its host. The
last axis runs across a panel and the one before it runs down; each combination of indices on the other axes has its
panel. A mesh of more than ``MAX_CELLS`` ranks is shown as a sample: the first and the last indices of its axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from pgmesh.drawing.plain_text import GAP, ShownCoord, coord_text, shown_indices

if TYPE_CHECKING:
    from pgmesh.drawing.drawable import Axis, Drawable
    from pgmesh.topology.hosts import HostLevel

MAX_CELLS = 1024
"""The default limit on the cells of a figure. A larger mesh is shown as a sample."""

MAX_COLUMNS = 64
"""The default limit on the columns of a panel."""


Place = tuple[int, int]
"""The row and the column of a cell."""


@dataclass(frozen=True)
class Cell:
    """One rank, or a gap (``rank=None``) in place of ranks that are left out."""

    row: int
    column: int
    rank: int | None
    label: str = ""  # pp0-dp1-tp1
    colour: int = 0  # the index of its group among those shown
    group: str = ""  # pp=0, dp=1, tp=*
    host: int | None = None
    marked: bool = False

    @property
    def text(self) -> str:
        """The rank, or the sign of a gap."""
        return GAP if self.rank is None else str(self.rank)


@dataclass(frozen=True)
class Panel:
    """The cells with the same indices on the outer axes: all axes but the last two."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    skipped: tuple[str, ...] = ()  # the panels left out just before it: pp0 dp8 to dp14
    follows: bool = True  # False if panels are left out on an axis other than the innermost outer one

    @property
    def host(self) -> int | None:
        """The host of all its ranks; None if they are on several hosts."""
        hosts = {cell.host for cell in self.cells if cell.rank is not None}
        return hosts.pop() if len(hosts) == 1 else None

    def regions(self) -> list[tuple[int, list[Place]]]:
        """Each host with its adjacent cells, in the order of their rows. A host in several pieces has several entries.

        >>> from pgmesh.topology.hosts import HostLevel
        >>> make_figure(layout, host=HostLevel("host", ((1, 3), (1, 5)))).panels[0].regions()
        [(0, [(0, 0), (0, 1), (1, 0)]), (1, [(1, 1)])]
        """
        left = {(cell.row, cell.column): cell.host for cell in self.cells if cell.host is not None}
        regions = []
        while left:
            start = next(iter(left))
            host, region = left.pop(start), [start]
            for row, column in region:  # it grows during the loop
                for near in ((row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column)):
                    if left.get(near) == host:
                        del left[near]
                        region.append(near)
            regions.append((host, sorted(region)))
        return regions


@dataclass(frozen=True)
class Figure:
    """The content of the drawing of one mesh."""

    title: str
    legend: str
    note: str  # a sentence if it is a sample; else ""
    panels: tuple[Panel, ...]
    panels_across: int  # the number of shown indices of the innermost outer axis
    host: str  # the name of the level: host, domain, or ""


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
        host: the level of hosts; each host is drawn as a box.
        mark: a rank to highlight.
        title: by default the sizes of the axes.
        max_cells: the limit on the number of cells, which is kept approximately.
        max_columns: the limit on the columns of a panel.

    >>> drawn = make_figure(layout, "dp", "tp")
    >>> [(cell.rank, cell.colour) for cell in drawn.panels[1].cells]
    [(4, 1), (5, 1), (6, 1), (7, 1)]
    """
    axes = axes or layout.axes[-1:]
    chosen = layout.along(layout.rank_of([0] * len(layout.axes)), *axes).axes if axes else ()
    shown = _indices_to_show(layout, mark, max_cells, max_columns)
    cut = max(0, len(layout.axes) - 2)
    colours: dict[int, int] = {}
    panels = tuple(
        _panel(layout, outer, shown[cut:], chosen, colours, host, mark, _skipped(layout.axes, shown[:cut], outer))
        for outer in product(*shown[:cut])
        if GAP not in outer
    )
    seen = sum(cell.rank is not None for panel in panels for cell in panel.cells)
    sizes = " ".join(f"{axis}={size}" for axis, size in zip(layout.axes, layout.shape))
    legend = [f"one colour: one {' x '.join(map(str, chosen))} group"] * bool(chosen)
    if host:
        boxed = [number for panel in panels for number, _ in panel.regions()]
        legend.append(f"{'one box' if len(boxed) == len({*boxed}) else 'boxes of the same name'}: one {host.name}")
    return Figure(
        title=sizes if title is None else title,
        legend="; ".join(legend),
        note=f"a sample: {seen:,} of {len(layout):,} ranks, from the ends of the axes" if seen < len(layout) else "",
        panels=panels,
        panels_across=len(shown[cut - 1]) - shown[cut - 1].count(GAP) if cut else 1,
        host=host.name if host else "",
    )


def _indices_to_show(layout: Drawable, mark: int | None, max_cells: int, max_columns: int) -> list[ShownCoord]:
    """The indices of each axis to show, for about ``max_cells`` cells. The outermost axes are shortened first."""
    limits = [
        min(size, least) for size, least in zip(layout.shape, [max_cells] * (len(layout.axes) - 1) + [max_columns])
    ]
    for i, limit in enumerate(limits):
        room = max_cells * limit // math.prod(limits)
        limits[i] = max(min(limit, 3), min(limit, room))
    return shown_indices(layout, mark, limits)


def _skipped(axes: Sequence[Axis], shown: Sequence[ShownCoord], outer: ShownCoord) -> tuple[str, ...]:
    """The panels left out just before a panel: for each outer axis a text, or "" if none are left out on it.

    Args:
        axes: the outer axes.
        shown: the indices of each outer axis that are shown.
        outer: the panel's index on each outer axis.

    >>> _skipped(("pp", "dp"), [(0, GAP, 7), (0, 1, GAP, 15)], (7, 0)), _skipped(("pp",), [(GAP, 3)], (3,))
    (('pp1 to pp6', ''), ('pp0 to pp2',))
    """
    texts = []
    for k, (indices, index) in enumerate(zip(shown, outer)):
        at = indices.index(index)
        is_first_inside = all(
            other == next(i for i in more if i != GAP) for other, more in zip(outer[k + 1 :], shown[k + 1 :])
        )
        before = indices[at - 2] if at > 1 else -1
        missing = range(int(before) + 1, int(index)) if at and indices[at - 1] == GAP and is_first_inside else ()
        ends = " to ".join(coord_text((axes[k],), (end,)) for end in dict.fromkeys([*missing[:1], *missing[-1:]]))
        texts.append(" ".join(filter(None, (coord_text(tuple(axes[:k]), outer[:k]), ends))) if missing else "")
    return tuple(texts)


def _panel(
    layout: Drawable,
    outer: ShownCoord,
    shown: list[ShownCoord],
    chosen: tuple[Axis, ...],
    colours: dict[int, int],
    host: HostLevel | None,
    mark: int | None,
    skipped: tuple[str, ...],
) -> Panel:
    """The panel at the indices ``outer`` of the outer axes. Groups get the next colour when they are first seen."""
    axes = layout.axes[len(outer) :]
    columns = list(product(*shown[-1:]))
    rows = list(product(*shown[:-1]))
    others = [axis for axis in layout.axes if axis not in chosen]
    cells = []
    for (i, row), (j, column) in product(enumerate(rows), enumerate(columns)):
        coord = [index for index in (*outer, *row, *column) if isinstance(index, int)]
        if len(coord) < len(layout.axes):
            cells.append(Cell(i, j, None))
            continue
        rank = layout.rank_of(coord)
        colour = colours.setdefault(layout.index_of(rank, *others) if others else 0, len(colours))
        group = layout.describe(rank, *chosen) if chosen else ""
        unit = host.unit_of(rank) if host else None
        cells.append(Cell(i, j, rank, layout.label_of(rank), colour, group, unit, rank == mark))
    return Panel(
        coord_text(layout.axes, outer),
        tuple(coord_text(axes[:-1], row) for row in rows) if len(axes) > 1 else (),
        tuple(coord_text(axes[-1:], column) for column in columns) if axes else (),
        tuple(cells),
        tuple(filter(None, skipped)),
        not any(skipped[:-1]),
    )
