"""SVG of figures. The output has no scripts; each cell has a tooltip with its rank, coord, group and host.

It is made in two steps. ``drawing`` computes a position in pixels for every box and every text, and returns a
``Drawing``. ``Drawing.svg`` writes these as XML. The tests check positions on the ``Drawing``.

``_Grid`` has the measures that all panels of a figure share, from the widest text of each kind.
Only the names of hosts inside boxes are abbreviated, or left out, if they do not fit.
``_panel`` positions the cells, the axis names and the host boxes of one panel. ``_figure`` arranges the panels in
lines, as many side by side as fit. The origin of each part is its top left corner; ``moved`` shifts a part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from pgmesh.drawing import figures
from pgmesh.drawing.figures import Cell, Figure, Panel, Place
from pgmesh.drawing.plain_text import GAP

if TYPE_CHECKING:
    from pgmesh.drawing.drawable import Axis, Drawable
    from pgmesh.topology.hosts import HostLevel

FONT = "ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif"


class Colours:
    """The colours of everything but the groups."""

    text: str = "#0f172a"
    muted: str = "#64748b"  # the text of axes, hosts and notes
    frame: str = "#94a3b8"  # around hosts
    background: str = "#ffffff"
    panel: str = "#f8fafc"
    panel_frame: str = "#e2e8f0"  # around a panel with host boxes inside


class Spacing:
    """Distances in pixels."""

    max_width: float = 1380  # of a drawing; more panels wrap to another line
    min_width: float = 480  # of one of several figures
    margin: float = 20.0  # around a drawing
    between_figures: float = 36.0
    between_panels: float = 12.0
    ellipsis: float = 36.0  # the width of the ellipsis between panels


@dataclass(frozen=True)
class Box:
    """A rounded rectangle."""

    kind: str  # ground, panel, host, cell
    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = ""
    thick: float = 1
    round: float = 4
    title: str = ""
    outline: tuple[tuple[tuple[float, float], ...], ...] = ()  # the loops of corners of a host that is no rectangle

    def moved(self, x: float, y: float) -> Box:
        """The box shifted by x and y."""
        outline = tuple(tuple((across + x, down + y) for across, down in loop) for loop in self.outline)
        return replace(self, x=self.x + x, y=self.y + y, outline=outline)


@dataclass(frozen=True)
class Text:
    """One line of text with its baseline at y; ``anchor`` is the part of it at x: start, middle or end."""

    kind: str  # title, note, panel, axis, host, rank, gap
    x: float
    y: float
    text: str
    size: float
    anchor: str = "start"
    fill: str = Colours.text
    bold: bool = False

    @property
    def span(self) -> tuple[float, float]:
        """The leftmost and the rightmost x of the text, in the widest of the usual fonts."""
        wide = width_of(self.text, self.size, self.bold)
        start = {"start": self.x, "middle": self.x - wide / 2, "end": self.x - wide}[self.anchor]
        return start, start + wide


@dataclass(frozen=True)
class Line:
    """A curve from the left to the right."""

    kind: str  # near, far
    x: float
    y: float
    to_x: float
    to_y: float
    stroke: str
    thick: float
    title: str
    dashes: str = ""


@dataclass(frozen=True)
class Drawing:
    """The boxes, lines and texts with their positions, in the order in which they are drawn."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    texts: tuple[Text, ...]
    lines: tuple[Line, ...] = ()

    def svg(self) -> str:
        """The SVG document.

        >>> drawing(figures.make_figure(layout)).svg().startswith('<svg xmlns="http://www.w3.org/2000/svg"')
        True
        """
        size = f'width="{_n(self.width)}" height="{_n(self.height)}" viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">']
        lines += map(_box_element, self.boxes)
        lines += map(_line_element, self.lines)
        lines += [*map(_text_element, self.texts), "</svg>"]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Scale:
    """Sizes in pixels, which depend on the number of cells."""

    rank_font: float
    label_font: float  # of axes and hosts
    cell_height: float
    min_cell_width: float
    gap: float  # between cells

    @classmethod
    def for_cells(cls, cells: int) -> Scale:
        """The sizes for a figure with this number of cells: the fewer, the larger."""
        if cells <= 32:
            return cls(15, 11, 34, 46, 8)
        return cls(11, 9, 22, 28, 6) if cells <= 256 else cls(8, 7.5, 14, 20, 4)


def of(layout: Drawable, *axes: Axis, host: HostLevel | None = None, mark: int | None = None) -> str:
    """A layout as SVG; each group along the axes has its colour.

    >>> of(layout, "tp").count("<title>")
    8
    """
    return drawing(figures.make_figure(layout, *axes, host=host, mark=mark)).svg()


def beside(*layouts: Drawable, host: HostLevel | None = None) -> str:
    """Several layouts as one SVG, next to each other, such as two meshes over the same ranks.

    >>> beside(layout, layout.view(edp=2, ep=4)).count('<rect class="cell"')
    16
    """
    return drawing(*(figures.make_figure(layout, host=host) for layout in layouts)).svg()


def drawing(*figures: Figure) -> Drawing:
    """The drawing of figures, next to each other."""
    room = max(Spacing.max_width / len(figures), Spacing.min_width)
    cells = max(sum(len(panel.cells) for panel in figure.panels) for figure in figures)
    parts = [_figure(figure, Scale.for_cells(cells), room) for figure in figures]
    edge = Spacing.margin
    boxes: list[Box] = []
    texts: list[Text] = []
    x = edge
    for part in parts:
        boxes += [box.moved(x, edge) for box in part.boxes]
        texts += [replace(text, x=text.x + x, y=text.y + edge) for text in part.texts]
        x += part.width + Spacing.between_figures
    width, height = x - Spacing.between_figures + edge, max(part.height for part in parts) + 2 * edge
    ground = Box("ground", 0, 0, width, height, Colours.background, round=10)
    return Drawing(width, height, (ground, *boxes), tuple(texts))


PALETTE = (
    *("#a5dbff", "#ffbfbb", "#a3e6c1", "#dac9ff", "#f5cd95", "#90e4f5", "#ffbedc", "#c5dfa3", "#b9d4ff", "#ffc3a8"),
    *("#bef1e6", "#f4dafd", "#f0e5bc", "#c1ecff", "#ffd6dc", "#cdefd0", "#e0e0ff", "#ffddc0", "#baf0f3", "#fed7f2"),
    *("#bbc671", "#8ac2ff", "#fca393", "#6fd5b0", "#ceacf7", "#e0b767", "#60ceef", "#f7a0be", "#9fce86", "#a6b9ff"),
)
"""Colours of groups: OKLCH hues that advance by the golden angle from 245 degrees, and another shade on each line.

The lines have lightness 0.87, 0.92 and 0.80. Black text can be read on each colour, and neighbours differ clearly."""


def colour(number: int) -> str:
    """The colour of a group. Colours repeat after 30 groups.

    >>> colour(0), colour(1)
    ('#a5dbff', '#ffbfbb')
    """
    return PALETTE[number % len(PALETTE)]


def width_of(text: str, size: float, bold: bool = False) -> float:
    """The width of text in pixels, in the widest of the usual fonts."""
    return sum(_WIDE.get(letter, 0.64) for letter in text) * size * (1.1 if bold else 1)


def _widest(size: float, texts: Iterable[str], bold: bool = False) -> float:
    return max((width_of(text, size, bold) for text in texts), default=0.0)


_WIDE = {**dict.fromkeys("iljI.,:;'| ", 0.36), **dict.fromkeys("mwMW…", 1.0)}


# -- one figure ---------------------------------------------------------------------------------------------------


class _Grid:
    """The measures in pixels that all panels of a figure share, so that their cells are aligned."""

    def __init__(self, figure: Figure, scale: Scale) -> None:
        font, gap, panels = scale.label_font, scale.gap, figure.panels
        regions = [region for panel in panels for region in panel.regions()]
        self.scale = scale
        self.columns = max(1, len(panels[0].columns))
        self.pad = gap + 4  # inside the frame
        # True if a panel has several hosts, which then have boxes inside it
        self.boxed = bool(figure.host) and any(panel.host is None for panel in panels)
        # True if panels have a line for a title
        self.titled = any(panel.title for panel in panels) or (bool(figure.host) and not self.boxed)
        # Each host has whole rows, so that its name is right of the cells; else it is above them.
        aside = self.boxed and all(len(cells) == len({row for row, _ in cells}) * self.columns for _, cells in regions)
        names = [width_of(f"{figure.host} {host:,}", font) for host, _ in regions]
        self.host_names = max(names) + gap if aside else 0.0  # width right of the cells
        name_height = font + 3 if self.boxed and not aside else 0
        box_gap = gap / 2 if self.boxed else 0
        row_names = _widest(font, (name for panel in panels for name in panel.rows))
        column_names = _widest(font, (name for panel in panels for name in panel.columns))
        ranks = _widest(scale.rank_font, (cell.text for panel in panels for cell in panel.cells), bold=True)
        self.row_names = row_names + gap + 3 if row_names else 0.0  # width left of the cells
        self.cell = math.ceil(max(scale.min_cell_width, ranks + scale.rank_font * 0.6, column_names - gap + 3))
        # height above the cells, for the title and the names of columns
        self.header = (font * 1.9 if self.titled else 0) + (font * 1.5 if column_names else 0) + box_gap + name_height
        self.pitch = scale.cell_height + gap + name_height + box_gap  # from one row to the next
        titles = max(_title_width(panel, figure, self.boxed, scale) for panel in panels)
        cells = self.x(self.columns) - gap + self.host_names
        self.width = max(cells, self.pad + titles) + self.pad  # of a panel

    def x(self, column: int) -> float:
        return self.pad + self.row_names + column * (self.cell + self.scale.gap)

    def y(self, row: int) -> float:
        return self.pad + self.header + row * self.pitch


def _figure(figure: Figure, scale: Scale, room: float) -> Drawing:
    """The drawing of one figure: title, legend, note, then the panels in lines of at most ``room`` pixels."""
    grid = _Grid(figure, scale)
    panels = [_panel(panel, figure, grid) for panel in figure.panels]
    wide, tall, between = max(p.width for p in panels), max(p.height for p in panels), Spacing.between_panels
    gutter = Spacing.ellipsis * any(panel.skipped and panel.follows for panel in figure.panels)
    fit = max(1, int((room - gutter + between) // (wide + between)))
    across = _panels_in_line(len(panels), figure.panels_across, fit)
    texts = [Text("title", 0, 16, figure.title, 16, bold=True)] if figure.title else []
    top = 26.0 if figure.title else 0.0
    for line in filter(None, (figure.legend, figure.note)):
        texts.append(Text("note", 0, top + 10, line, 11.5, fill=Colours.muted))
        top += 17
    top += 10
    width = max((text.span[1] for text in texts), default=0.0)
    boxes: list[Box] = []
    x, y, count = 0.0, top, 0  # the next panel's position, and the number of panels left of it
    for panel, drawn in zip(figure.panels, panels):
        if count == across or (count and not panel.follows):
            x, y, count = 0.0, y + tall + between, 0
        if panel.skipped and count:
            middle = x + (Spacing.ellipsis - between) / 2
            texts.append(Text("gap", middle, y + tall / 2, GAP, Spacing.ellipsis / 2, "middle", Colours.muted))
            x += Spacing.ellipsis
        elif panel.skipped:
            left_out = f"{GAP} {', '.join(panel.skipped)}"
            texts.append(Text("gap", 0, y + 10, left_out, 11.5, fill=Colours.muted))
            width, y = max(width, texts[-1].span[1]), y + 17 + between / 2
        boxes += [box.moved(x, y) for box in drawn.boxes]
        texts += [replace(text, x=text.x + x, y=text.y + y) for text in drawn.texts]
        width = max(width, x + wide)
        x, count = x + wide + between, count + 1
    return Drawing(width, y + tall, tuple(boxes), tuple(texts))


def _panels_in_line(panels: int, inner: int, fit: int) -> int:
    """The number of panels in a line, at most ``fit``.

    All of them if they fit, else the largest multiple of ``inner``. If ``inner`` does not fit: the larger of its
    largest divisor that fits and two thirds of ``fit``.
    """
    if panels <= fit:
        return panels
    if inner <= fit:
        return fit // inner * inner
    return max(n for n in range(1, fit + 1) if inner % n == 0 or n == max(1, fit * 2 // 3))


def _host_name(panel: Panel, figure: Figure, boxed: bool) -> str:
    """The name of a panel's host, if every panel is on one host."""
    return f"{figure.host} {panel.host:,}" if figure.host and not boxed and panel.host is not None else ""


def _title_width(panel: Panel, figure: Figure, boxed: bool, scale: Scale) -> float:
    host = width_of(_host_name(panel, figure, boxed), scale.label_font)
    return width_of(panel.title, scale.label_font + 1, True) + (host + scale.label_font if host else 0)


def _panel(panel: Panel, figure: Figure, grid: _Grid) -> Drawing:
    """The drawing of one panel: title, axis names, host boxes and cells."""
    scale, pad = grid.scale, grid.pad
    height = grid.y(max(1, len(panel.rows)) - 1) + scale.cell_height + pad
    texts: list[Text] = []
    line = pad + scale.label_font
    bold = scale.label_font + 1
    if panel.title:
        texts.append(Text("panel", pad, line, panel.title, bold, bold=True))
    if host := _host_name(panel, figure, grid.boxed):
        texts.append(Text("host", grid.width - pad, line, host, scale.label_font, "end", Colours.muted))
    if grid.titled:
        line += scale.label_font * 1.9
    for column, word in enumerate(panel.columns):
        middle = grid.x(column) + grid.cell / 2
        texts.append(Text("axis", middle, line, word, scale.label_font, "middle", Colours.muted))
    for row, word in enumerate(panel.rows):
        middle = grid.y(row) + scale.cell_height / 2 + scale.label_font * 0.35
        texts.append(Text("axis", grid.x(0) - scale.gap - 2, middle, word, scale.label_font, "end", Colours.muted))
    is_host = not grid.boxed and bool(figure.host)  # the panel is one host
    frame, thick = (Colours.frame, 1.5) if is_host else (Colours.panel_frame, 1)
    boxes = [Box("panel", 0, 0, grid.width, height, Colours.panel, frame, thick, 8)]
    if grid.boxed:
        boxes += _hosts(panel, figure, grid, texts)
    for cell in panel.cells:
        box, rank = _cell(cell, figure, grid)
        boxes.append(box)
        texts.append(rank)
    return Drawing(grid.width, height, tuple(boxes), tuple(texts))


def _hosts(panel: Panel, figure: Figure, grid: _Grid, texts: list[Text]) -> list[Box]:
    """The boxes of the hosts in a panel; their names are added to ``texts``."""
    scale, boxes = grid.scale, []
    around = scale.gap / 2 if grid.host_names else scale.gap / 2 - 1
    above = around if grid.host_names else scale.label_font + 3  # names inside the boxes are above the cells

    def x_of(column: int, is_left: bool) -> float:
        return grid.x(column) - around if is_left else grid.x(column - 1) + grid.cell + around

    def y_of(row: int, is_top: bool) -> float:
        return grid.y(row) - above if is_top else grid.y(row - 1) + scale.cell_height + around

    for host, cells in panel.regions():
        name = f"{figure.host} {host:,}"
        loops = tuple(tuple((x_of(*column), y_of(*row)) for row, column in loop) for loop in outline(cells))
        xs, ys = zip(*(corner for loop in loops for corner in loop))
        x, y, width, height = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
        is_rectangle = sum(map(len, loops)) == 4
        shape = () if is_rectangle else loops
        boxes.append(Box("host", x, y, width, height, Colours.background, Colours.frame, 1.2, 5, name, outline=shape))
        if grid.host_names:
            middle = y + height / 2 + scale.label_font * 0.35
            right = x + width + scale.gap / 2
            texts.append(Text("host", right, middle, name, scale.label_font, fill=Colours.muted))
            continue
        row, left = cells[0]
        end = next(column for column in itertools.count(left) if (row, column) not in cells)
        x, width = x_of(left, True), x_of(end, False) - x_of(left, True)  # the first cells in the top row
        font = scale.label_font - 0.5
        for short in (name, f"{figure.host[0]}{host}", f"{host}"):
            if width_of(short, font) <= width - 4:
                texts.append(Text("host", x + 3, y + scale.label_font, short, font, fill=Colours.muted))
                break
    return boxes


Side = tuple[int, bool]
"""A grid line, as the number of the row or column after it, and True if it is above or left of the cells."""


def outline(cells: Collection[Place]) -> list[list[tuple[Side, Side]]]:
    """The loops of corners around cells: clockwise around the outside, counterclockwise around holes.

    An edge is drawn on each side of a cell without a neighbour. Following the edges from corner to corner, and always
    turning right first, gives one loop for each connected boundary.

    Returns:
        For each loop, its corners as pairs of a horizontal and a vertical grid line.

    >>> outline({(0, 0), (0, 1)})
    [[((0, True), (2, False)), ((1, False), (2, False)), ((1, False), (0, True)), ((0, True), (0, True))]]
    """
    inside, edges = set(cells), set()  # an edge: its first corner and its direction, 0 right, 1 down, 2 left, 3 up
    for row, column in inside:
        corners = [(row, column), (row, column + 1), (row + 1, column + 1), (row + 1, column)]
        neighbours = [(row - 1, column), (row, column + 1), (row + 1, column), (row, column - 1)]
        edges |= {(corners[i], i) for i in range(4) if neighbours[i] not in inside}
    loops = []
    while edges:
        first = (row, column), direction = min(edges)
        edge, loop = None, []
        while edge != first:
            row, column = row + (0, 1, 0, -1)[direction], column + (1, 0, -1, 0)[direction]
            turns = ((direction + turn) % 4 for turn in (1, 0, 3))  # right, straight, left
            turned = next(turn for turn in turns if ((row, column), turn) in edges)
            if turned != direction:
                across, down = (direction, turned) if direction % 2 == 0 else (turned, direction)
                loop.append(((row, across == 0), (column, down == 3)))
            edge, direction = ((row, column), turned), turned
            edges.remove(edge)
        loops.append(loop)
    return loops


def _cell(cell: Cell, figure: Figure, grid: _Grid) -> tuple[Box, Text]:
    """The box of a cell, with its tooltip, and the rank inside."""
    scale = grid.scale
    x, y = grid.x(cell.column), grid.y(cell.row)
    fill = Colours.muted if cell.rank is None else Colours.text
    baseline = y + scale.cell_height / 2 + scale.rank_font * 0.36
    rank = Text("rank", x + grid.cell / 2, baseline, cell.text, scale.rank_font, "middle", fill, cell.marked)
    if cell.rank is None:
        return Box("cell", x, y, grid.cell, scale.cell_height, "none"), rank
    title = f"rank {cell.rank:,}\n{cell.label}"
    title += f"\ngroup {cell.group}" * bool(cell.group)
    title += f"\n{figure.host} {cell.host:,}" if cell.host is not None else ""
    fill = colour(cell.colour)
    edge = Colours.text if cell.marked else ""
    return Box("cell", x, y, grid.cell, scale.cell_height, fill, edge, 2, scale.cell_height / 7, title), rank


# -- XML -------------------------------------------------------------------------------------------------------------


def _box_element(box: Box) -> str:
    kind = "path" if box.outline else "rect"
    place = f'x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.width)}" height="{_n(box.height)}" rx="{_n(box.round)}"'
    if box.outline:
        lines = (" L".join(f"{_n(x)} {_n(y)}" for x, y in loop) for loop in box.outline)
        place = f'd="{" ".join(f"M{line} Z" for line in lines)}" stroke-linejoin="round"'
    edge = f' stroke="{box.stroke}" stroke-width="{_n(box.thick)}"' if box.stroke else ""
    start = f'<{kind} class="{box.kind}" {place} fill="{box.fill}"{edge}'
    return f"{start}><title>{escape(box.title)}</title></{kind}>" if box.title else f"{start}/>"


def _line_element(line: Line) -> str:
    middle = _n((line.x + line.to_x) / 2)
    curve = (
        f"M{_n(line.x)} {_n(line.y)} C{middle} {_n(line.y)} {middle} {_n(line.to_y)} {_n(line.to_x)} {_n(line.to_y)}"
    )
    stroke = f'stroke="{line.stroke}" stroke-width="{_n(line.thick)}"'
    stroke += f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
    return f'<path class="{line.kind}" d="{curve}" fill="none" {stroke}><title>{escape(line.title)}</title></path>'


def _text_element(text: Text) -> str:
    anchor = f' text-anchor="{text.anchor}"' if text.anchor != "start" else ""
    bold = ' font-weight="600"' if text.bold else ""
    quiet = ' pointer-events="none"' if text.kind == "rank" else ""
    place = f'x="{_n(text.x)}" y="{_n(text.y)}" font-size="{_n(text.size)}"'
    return f'<text class="{text.kind}" {place}{anchor}{bold}{quiet} fill="{text.fill}">{escape(text.text)}</text>'


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
