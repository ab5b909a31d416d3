"""What a picture shows, before it is text, SVG or HTML: cells, panels of them, a colour to each group, hosts.

The last axis runs across, the one before it runs down, and each place on the axes outside these is a panel: small
multiples, as in the text of ``draw``. A mesh of more ranks than can be looked at is shown by the ends of its axes.
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
"""How many cells a picture has before it shows a sample."""

MAX_COLUMNS = 64
"""How many cells stand side by side in a panel at most."""


@dataclass(frozen=True)
class Cell:
    """One rank, or a gap where ranks are left out."""

    row: int
    column: int
    rank: int | None
    label: str = ""  # pp0-dp1-tp1
    colour: int = 0  # the number of its group among those shown
    group: str = ""  # pp=0, dp=1, tp=*
    host: int | None = None
    marked: bool = False


@dataclass(frozen=True)
class Panel:
    """The cells at one place on the outer axes."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    skipped: tuple[str, ...] = ()  # what is left out just before it: pp0 dp8 to dp14
    follows: bool = True  # nothing is left out there but on the innermost of the outer axes

    @property
    def host(self) -> int | None:
        """The one host that all of it is on, if there is one."""
        hosts = {cell.host for cell in self.cells if cell.rank is not None}
        return hosts.pop() if len(hosts) == 1 else None

    def boxes(self) -> list[tuple[int, range, range]]:
        """Each host with the rows and the columns of a rectangle of its cells; a ragged host has several.

        >>> from pgmesh.topology.hosts import HostLevel
        >>> make_figure(layout, host=HostLevel("host", ((4, 2),))).panels[0].boxes()
        [(0, range(0, 1), range(0, 2)), (1, range(1, 2), range(0, 2))]
        """
        boxes: list[tuple[int, range, range]] = []
        for row in range(max(1, len(self.rows))):
            for host, across in _runs([cell for cell in self.cells if cell.row == row]):
                above = (host, range(row - 1, row), across)
                for i, (other, down, columns) in enumerate(boxes):
                    if (other, range(down.stop - 1, down.stop), columns) == above:
                        boxes[i] = (host, range(down.start, row + 1), across)
                        break
                else:
                    boxes.append((host, range(row, row + 1), across))
        return boxes

    def regions(self) -> list[tuple[int, list[tuple[range, range]]]]:
        """Each host with the rectangles of its cells that touch; a host in several pieces has several.

        >>> from pgmesh.topology.hosts import HostLevel
        >>> make_figure(layout, host=HostLevel("host", ((1, 3), (1, 5)))).panels[0].regions()
        [(0, [(range(0, 1), range(0, 2)), (range(1, 2), range(0, 1))]), (1, [(range(1, 2), range(1, 2))])]
        """
        regions: dict[int, list[list[tuple[range, range]]]] = {}
        for host, down, across in self.boxes():
            mine = regions.setdefault(host, [])
            near = [parts for parts in mine if any(_share_edge((down, across), part) for part in parts)]
            mine[:] = [parts for parts in mine if parts not in near]
            mine.append([*(part for parts in near for part in parts), (down, across)])
        return [(host, parts) for host, mine in regions.items() for parts in mine]


def _share_edge(one: tuple[range, range], other: tuple[range, range]) -> bool:
    """Whether two rectangles that do not overlap have a part of an edge in common."""
    (down, across), (other_down, other_across) = one, other
    rows = min(down.stop, other_down.stop) - max(down.start, other_down.start)
    columns = min(across.stop, other_across.stop) - max(across.start, other_across.start)
    return min(rows, columns) == 0 and max(rows, columns) > 0


def _runs(cells: Sequence[Cell]) -> list[tuple[int, range]]:
    """The hosts along one row, and the columns that each has in one go."""
    runs: list[tuple[int, range]] = []
    for cell in cells:
        if cell.host is None:
            continue
        if runs and runs[-1] == (cell.host, range(runs[-1][1].start, cell.column)):
            runs[-1] = (cell.host, range(runs[-1][1].start, cell.column + 1))
        else:
            runs.append((cell.host, range(cell.column, cell.column + 1)))
    return runs


@dataclass(frozen=True)
class Figure:
    """A whole mesh as a picture shows it."""

    title: str
    legend: str
    note: str  # that it is a sample; "" if it is not
    panels: tuple[Panel, ...]
    across: int  # how many panels the innermost of the outer axes has
    colours: int  # how many groups are shown
    host: str  # what holds ranks: host, domain; "" if that is not known


def make_figure(
    layout: Drawable,
    *axes: Axis,
    host: HostLevel | None = None,
    mark: int | None = None,
    title: str | None = None,
    max_cells: int = MAX_CELLS,
    max_columns: int = MAX_COLUMNS,
) -> Figure:
    """What a picture of a layout shows.

    Args:
        axes: the axes whose groups have a colour each; the innermost one unless given.
        host: what holds ranks, to draw boxes of.
        mark: a rank to point out.
        title: the sizes of the axes unless given.
        most: how many cells there are at most.
        wide: how many of them stand side by side in a panel at most.

    >>> drawn = make_figure(layout, "dp", "tp")
    >>> drawn.colours, [cell.rank for cell in drawn.panels[1].cells]
    (2, [4, 5, 6, 7])
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
        there = [number for panel in panels for number, _ in panel.regions()]
        legend.append(f"{'one box' if len(there) == len({*there}) else 'boxes of the same name'}: one {host.name}")
    return Figure(
        title=sizes if title is None else title,
        legend="; ".join(legend),
        note=f"a sample: {seen:,} of {len(layout):,} ranks, from the ends of the axes" if seen < len(layout) else "",
        panels=panels,
        across=len(shown[cut - 1]) - shown[cut - 1].count(GAP) if cut else 1,
        colours=len(colours),
        host=host.name if host else "",
    )


def _indices_to_show(layout: Drawable, mark: int | None, max_cells: int, max_columns: int) -> list[ShownCoord]:
    """The indices of each axis to show, of outer axes the fewest, so that there are about so many cells at most."""
    limits = [
        min(size, least) for size, least in zip(layout.shape, [max_cells] * (len(layout.axes) - 1) + [max_columns])
    ]
    for i, limit in enumerate(limits):
        room = max_cells * limit // math.prod(limits)
        limits[i] = max(min(limit, 3), min(limit, room))
    return shown_indices(layout, mark, limits)


def _skipped(axes: Sequence[Axis], shown: Sequence[ShownCoord], outer: ShownCoord) -> tuple[str, ...]:
    """What is left out just before the panel at a place on the outer axes: for each of them words, or "" for nothing.

    >>> _skipped(("pp", "dp"), [(0, GAP, 7), (0, 1, GAP, 15)], (7, 0)), _skipped(("pp",), [(GAP, 3)], (3,))
    (('pp1 to pp6', ''), ('pp0 to pp2',))
    """
    words = []
    for k, (indices, index) in enumerate(zip(shown, outer)):
        at = indices.index(index)
        begins = all(other == next(i for i in more if i != GAP) for other, more in zip(outer[k + 1 :], shown[k + 1 :]))
        before = indices[at - 2] if at > 1 else -1
        missing = range(int(before) + 1, int(index)) if at and indices[at - 1] == GAP and begins else ()
        ends = " to ".join(coord_text((axes[k],), (end,)) for end in dict.fromkeys([*missing[:1], *missing[-1:]]))
        words.append(" ".join(filter(None, (coord_text(tuple(axes[:k]), outer[:k]), ends))) if missing else "")
    return tuple(words)


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
    axes = layout.axes[len(outer) :]
    columns = list(product(*shown[-1:]))
    rows = list(product(*shown[:-1]))
    others = [axis for axis in layout.axes if axis not in chosen]
    cells = []
    for (i, row), (j, column) in product(enumerate(rows), enumerate(columns)):
        place = [index for index in (*outer, *row, *column) if isinstance(index, int)]
        if len(place) < len(layout.axes):
            cells.append(Cell(i, j, None))
            continue
        rank = layout.rank_of(place)
        number = layout.index_of(rank, *others) if others else 0
        cells.append(
            Cell(
                i,
                j,
                rank,
                layout.label_of(rank),
                colours.setdefault(number, len(colours)),
                layout.describe(rank, *chosen) if chosen else "",
                host.unit_of(rank) if host else None,
                rank == mark,
            )
        )
    return Panel(
        coord_text(layout.axes, outer),
        tuple(coord_text(axes[:-1], row) for row in rows) if len(axes) > 1 else (),
        tuple(coord_text(axes[-1:], column) for column in columns) if axes else (),
        tuple(cells),
        tuple(filter(None, skipped)),
        not any(skipped[:-1]),
    )
