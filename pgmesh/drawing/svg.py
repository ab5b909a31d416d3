"""SVG of figures. It has no scripts; each cell has a tooltip with its rank, coord, group and host.

All sizes are whole pixels. Text is in a monospace font, so that its width is known: see ``width_of``. ``_Grid`` has
the measures that all panels of a figure share, ``_panel`` draws a panel, and ``_figure`` arranges the panels in lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from pgmesh.drawing import palette
from pgmesh.drawing.figures import Cell, Figure, Panel, make_figure

if TYPE_CHECKING:
    from pgmesh.drawing.drawable import Axis, Drawable

FONT_NAMES = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"

LETTER = 0.62
"""The width of a letter as a part of the size of the font, in the widest of these fonts."""

MAX_WIDTH = 1380
"""Pixels of a drawing; more panels wrap to another line."""

MARGIN = 20
PAD = 8
"""Pixels between the parts of a panel."""

GUTTER = 12
"""Pixels between panels."""

TITLE_FONT = 16
FONT = 12
LINE = 18
"""Pixels from one note to the next."""

MIN_CELL_WIDTH, CELL_HEIGHT, GAP_OF_CELLS = 32, 24, 6
ROW = CELL_HEIGHT + GAP_OF_CELLS


def draw(layout: Drawable, *others: Drawable, along: Sequence[Axis] = (), mark: int | None = None) -> str:
    """Layouts as one SVG, next to each other, such as two meshes over the same ranks.

    Args:
        along: the axes whose groups have a colour each. Default: the innermost axis.
        mark: a rank to highlight.

    Raises:
        AxisError: a layout has no such axis.

    >>> draw(layout, layout.view(edp=2, ep=4)).count('<rect class="cell"')
    16
    """
    return render([make_figure(each, *along, mark=mark) for each in (layout, *others)])


def render(figures: Sequence[Figure]) -> str:
    """Figures as one SVG, next to each other."""
    room = MAX_WIDTH // len(figures)
    parts = []
    x, height = MARGIN, 0
    for figure in figures:
        content, part_width, part_height = _figure(figure, room)
        parts.append(moved(x, MARGIN, content))
        x += part_width + 3 * GUTTER
        height = max(height, part_height)
    width, height = x - 3 * GUTTER + MARGIN, height + 2 * MARGIN
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT_NAMES}" fill="{palette.TEXT}" role="img">',
        f'<rect class="ground" width="{width}" height="{height}" rx="10" fill="{palette.BACKGROUND}"/>',
        *parts,
        "</svg>\n",
    ]
    return "\n".join(lines)


# -- elements ----------------------------------------------------------------------------------------------------------


def moved(x: int, y: int, parts: Iterable[str]) -> str:
    """Elements with their origin at x and y."""
    content = "\n".join(parts)
    return f'<g transform="translate({x} {y})">\n{content}\n</g>'


def text(kind: str, x: int, y: int, words: str, anchor: str = "start", size: int = FONT) -> str:
    """One line of text with its baseline at y; ``anchor`` is the part of it at x: start, middle or end."""
    fill = palette.TEXT if kind in ("title", "panel", "rank") else palette.MUTED
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}" pointer-events="none"'
    return f'<text class="{kind}" x="{x}" y="{y}" {style}>{escape(words)}</text>'


def width_of(size: int, texts: Iterable[str]) -> int:
    """The width in pixels of the longest of these texts."""
    letters = max(map(len, texts), default=0)
    return math.ceil(letters * size * LETTER)


# -- one figure --------------------------------------------------------------------------------------------------------


class _Grid:
    """The measures in pixels that all panels of a figure share, so that their cells are aligned."""

    def __init__(self, figure: Figure) -> None:
        first = figure.panels[0]
        rows = [row for panel in figure.panels for row in panel.rows]
        texts = [*first.columns, *(cell.text for row in rows for cell in row.cells)]
        self.host = figure.host
        self.column = max(MIN_CELL_WIDTH, width_of(FONT, texts) + 4) + GAP_OF_CELLS
        self.left = 2 * PAD + width_of(FONT, (row.name for row in rows))  # of the first cell
        self.right = self.left + len(first.rows[0].cells) * self.column  # of the last cell
        self.title = PAD + FONT if first.title else 0
        self.top = self.title + 2 * PAD + (FONT if first.columns else 0)  # of the first cell
        hosts = PAD + width_of(FONT, (row.hosts for row in rows))
        titles = PAD + width_of(FONT, (panel.title for panel in figure.panels))
        self.width = max(self.right + hosts, titles) + PAD
        self.height = self.top + len(first.rows) * ROW + PAD

    def x(self, column: int) -> int:
        return self.left + column * self.column

    def y(self, row: int) -> int:
        return self.top + row * ROW


def _figure(figure: Figure, room: int) -> tuple[list[str], int, int]:
    """The heading of a figure and its panels, in lines of at most ``room`` pixels; their width and their height."""
    grid = _Grid(figure)
    hosts = f"a line around each {figure.host}" if figure.host else ""
    notes = [note for note in (figure.legend, hosts, figure.note) if note]
    parts, y = [], 0
    if figure.title:
        parts.append(text("title", 0, TITLE_FONT, figure.title, size=TITLE_FONT))
        y += TITLE_FONT + GUTTER
    for note in notes:
        parts.append(text("note", 0, y + FONT, note))
        y += LINE
    y += GUTTER
    width = max(width_of(TITLE_FONT, [figure.title]), width_of(FONT, notes))
    for line in figure.lines_of_panels(max(1, (room + GUTTER) // (grid.width + GUTTER))):
        for number, panel in enumerate(line):
            parts.append(moved(number * (grid.width + GUTTER), y, _panel(panel, grid)))
        width = max(width, len(line) * (grid.width + GUTTER) - GUTTER)
        y += grid.height + GUTTER
    return parts, width, y - GUTTER


def _panel(panel: Panel, grid: _Grid) -> Iterator[str]:
    """One panel: its frame, its title, the names of columns, rows and hosts, and the cells."""
    size = f'width="{grid.width}" height="{grid.height}"'
    yield f'<rect class="panel" {size} rx="8" fill="{palette.PANEL}" stroke="{palette.PANEL_FRAME}"/>'
    yield text("panel", PAD, grid.title, panel.title)
    for number, name in enumerate(panel.columns):
        yield text("axis", grid.x(number) + grid.column // 2, grid.top - PAD // 2, name, "middle")
    for number, row in enumerate(panel.rows):
        baseline = grid.y(number) + (ROW + FONT) // 2 - 2
        yield text("axis", grid.left - PAD // 2, baseline, row.name, "end")
        yield text("host", grid.right + PAD // 2, baseline, row.hosts)
        for column, cell in enumerate(row.cells):
            if cell.rank is not None:
                yield _cell(cell, grid.x(column), grid.y(number), grid)
            yield text("rank", grid.x(column) + grid.column // 2, baseline, cell.text, "middle")
    if grid.host:
        yield _host_lines(panel, grid)


def _cell(cell: Cell, left: int, top: int, grid: _Grid) -> str:
    """The box of a rank in its place of the grid, with its tooltip."""
    inset = GAP_OF_CELLS // 2
    host = f"{grid.host} {cell.host:,}" if cell.host is not None else ""
    words = [f"rank {cell.rank:,}", cell.label, cell.group and f"group {cell.group}", host]
    content = "\n".join(filter(None, words))
    title = f"<title>{escape(content)}</title>"  # shown next to the pointer
    size = f'width="{grid.column - GAP_OF_CELLS}" height="{CELL_HEIGHT}"'
    edge = palette.TEXT if cell.is_marked else "none"
    style = f'fill="{palette.colour(cell.colour)}" stroke="{edge}" stroke-width="2"'
    return f'<rect class="cell" x="{left + inset}" y="{top + inset}" {size} rx="3" {style}>{title}</rect>'


def _host_lines(panel: Panel, grid: _Grid) -> str:
    """The lines around the cells of each host."""
    hosts = {}
    for row, cells in enumerate(panel.rows):
        for column, cell in enumerate(cells.cells):
            if cell.rank is not None:
                hosts[row, column] = cell.host
    lines = ""
    for (row, column), host in hosts.items():
        left, top = grid.x(column), grid.y(row)
        for neighbour, side in (
            ((row - 1, column), f"M{left} {top}h{grid.column}"),
            ((row + 1, column), f"M{left} {top + ROW}h{grid.column}"),
            ((row, column - 1), f"M{left} {top}v{ROW}"),
            ((row, column + 1), f"M{left + grid.column} {top}v{ROW}"),
        ):
            if hosts.get(neighbour) != host:
                lines += side
    return f'<path class="hosts" d="{lines}" fill="none" stroke="{palette.FRAME}"/>'
