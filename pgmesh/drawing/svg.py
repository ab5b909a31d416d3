"""A picture as SVG: where each box and each word stands, then the text of it. No scripts; hovering tells more.

Places are counted in pixels. A cell is as wide as the widest word that has to stand in it, so no word is cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pgmesh.drawing import figures
from pgmesh.drawing.figures import Cell, Figure, Panel
from pgmesh.drawing.plain_text import GAP

if TYPE_CHECKING:
    from pgmesh.drawing.drawable import Axis, Drawable
    from pgmesh.topology.hosts import HostLevel

WIDTH = 1380
"""How wide a drawing gets before panels go on another line."""

INK, QUIET, FRAME, GROUND, CARD = "#0f172a", "#64748b", "#94a3b8", "#ffffff", "#f8fafc"
FONT = "ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif"


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
    parts: tuple[Box, ...] = ()  # the rectangles that it is made of, where it is none itself
    outline: tuple[tuple[tuple[float, float], ...], ...] = ()  # the corners around these

    def moved(self, x: float, y: float) -> Box:
        """The same at another place."""
        parts = tuple(part.moved(x, y) for part in self.parts)
        outline = tuple(tuple((across + x, down + y) for across, down in loop) for loop in self.outline)
        return replace(self, x=self.x + x, y=self.y + y, parts=parts, outline=outline)


@dataclass(frozen=True)
class Words:
    """Text, which stands on a line at y and begins, is centred or ends at x."""

    kind: str  # title, note, panel, axis, host, rank, gap
    x: float
    y: float
    text: str
    size: float
    anchor: str = "start"
    fill: str = INK
    bold: bool = False

    @property
    def span(self) -> tuple[float, float]:
        """From where to where it goes at most, in the widest of the usual fonts."""
        wide = width_of(self.text, self.size, self.bold)
        start = {"start": self.x, "middle": self.x - wide / 2, "end": self.x - wide}[self.anchor]
        return start, start + wide


@dataclass(frozen=True)
class Drawing:
    """All boxes and words of a picture, in the order they are laid down."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    words: tuple[Words, ...]

    def svg(self) -> str:
        """The text of it.

        >>> drawing(figures.make_figure(layout)).svg().startswith('<svg xmlns="http://www.w3.org/2000/svg"')
        True
        """
        size = f'width="{_n(self.width)}" height="{_n(self.height)}" viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">']
        lines += [*map(_box, self.boxes), *map(_words, self.words), "</svg>"]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Sizes:
    """How large things are: the fewer ranks, the larger."""

    rank: float  # of its text
    small: float  # of the text of axes and hosts
    tall: float  # a cell
    wide: float  # a cell at least
    gap: float  # between cells

    @classmethod
    def fitting(cls, cells: int) -> Sizes:
        if cells <= 32:
            return cls(15, 11, 34, 46, 8)
        return cls(11, 9, 22, 28, 6) if cells <= 256 else cls(8, 7.5, 14, 20, 4)


def of(layout: Drawable, *axes: Axis, host: HostLevel | None = None, mark: int | None = None) -> str:
    """A layout as SVG, a colour to each group along some axes.

    >>> of(layout, "tp").count("<title>")
    8
    """
    return drawing(figures.make_figure(layout, *axes, host=host, mark=mark)).svg()


def beside(*layouts: Drawable, host: HostLevel | None = None) -> str:
    """Layouts side by side as SVG, such as two meshes over the same ranks.

    >>> beside(layout, layout.view(edp=2, ep=4)).count('<rect class="cell"')
    16
    """
    return drawing(*(figures.make_figure(layout, host=host) for layout in layouts)).svg()


def drawing(*figures: Figure) -> Drawing:
    """Where everything of some figures stands, side by side where there is room for them."""
    room = max(WIDTH / len(figures), 480)
    cells = max(sum(len(panel.cells) for panel in figure.panels) for figure in figures)
    parts = [_figure(figure, Sizes.fitting(cells), room) for figure in figures]
    edge, between = 20.0, 36.0
    boxes: list[Box] = []
    words: list[Words] = []
    x = edge
    for part in parts:
        boxes += [box.moved(x, edge) for box in part.boxes]
        words += [replace(word, x=word.x + x, y=word.y + edge) for word in part.words]
        x += part.width + between
    width, height = x - between + edge, max(part.height for part in parts) + 2 * edge
    ground = Box("ground", 0, 0, width, height, GROUND, round=10)
    return Drawing(width, height, (ground, *boxes), tuple(words))


def colour(number: int, of_all: int) -> str:
    """The colour of one group of so many: all as light as one another, neighbours far apart, later turns a shade off.

    >>> colour(0, 2), colour(1, 2)
    ('#a5dbff', '#fcc999')
    """
    turn = number * 0.38196601 if of_all > 6 else number / of_all  # the golden angle: no two turns meet
    light, strong = SHADES[number // 10 % 3]
    return _oklch(light, strong, math.radians(245 + 360 * turn))


SHADES = ((0.87, 0.085), (0.92, 0.055), (0.80, 0.11))


def width_of(text: str, size: float, bold: bool = False) -> float:
    """How wide text is at most, in the widest of the usual fonts."""
    return sum(_WIDE.get(letter, 0.64) for letter in text) * size * (1.1 if bold else 1)


_WIDE = {**dict.fromkeys("iljI.,:;'| ", 0.36), **dict.fromkeys("mwMW…", 1.0)}


# -- one figure ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """The measures that all panels of a figure share, so that they line up."""

    sizes: Sizes
    stub: float  # left of the cells, for the names of rows
    head: float  # above the cells, for the title and the names of columns
    cell: float  # the width of a cell
    pitch: float  # from one row to the next
    pad: float  # inside the frame
    boxed: bool  # whether hosts have boxes of their own inside panels
    side: float  # right of the cells, for the names of hosts where each has whole rows
    titled: bool  # whether panels have a line for a title
    across: int  # how many cells stand side by side
    titles: float  # how wide the widest title is

    def x(self, column: int) -> float:
        return self.pad + self.stub + column * (self.cell + self.sizes.gap)

    def y(self, row: int) -> float:
        return self.pad + self.head + row * self.pitch

    @property
    def width(self) -> float:
        """How wide a panel is."""
        return max(self.x(self.across) - self.sizes.gap + self.side, self.pad + self.titles) + self.pad


def _figure(figure: Figure, sizes: Sizes, room: float) -> Drawing:
    grid = _grid(figure, sizes)
    panels = [_panel(panel, figure, grid) for panel in figure.panels]
    wide, tall, between = max(p.width for p in panels), max(p.height for p in panels), 12.0
    gutter = GUTTER * any(panel.skipped and panel.follows for panel in figure.panels)
    fit = max(1, int((room - gutter + between) // (wide + between)))
    across = _across(len(panels), figure.across, fit)
    words = [Words("title", 0, 16, figure.title, 16, bold=True)] if figure.title else []
    top = 26.0 if figure.title else 0.0
    for line in filter(None, (figure.legend, figure.note)):
        words.append(Words("note", 0, top + 10, line, 11.5, fill=QUIET))
        top += 17
    top += 10
    width = max((word.span[1] for word in words), default=0.0)
    boxes: list[Box] = []
    x, y, count = 0.0, top, 0  # where the next panel stands, and how many stand left of it
    for panel, drawn in zip(figure.panels, panels):
        if count == across or (count and not panel.follows):
            x, y, count = 0.0, y + tall + between, 0
        if panel.skipped and count:
            words.append(Words("gap", x + GUTTER / 2 - between / 2, y + tall / 2, GAP, GUTTER / 2, "middle", QUIET))
            x += GUTTER
        elif panel.skipped:
            says = f"{GAP} {', '.join(panel.skipped)}"
            words.append(Words("gap", 0, y + 10, says, 11.5, fill=QUIET))
            width, y = max(width, words[-1].span[1]), y + 17 + between / 2
        boxes += [box.moved(x, y) for box in drawn.boxes]
        words += [replace(word, x=word.x + x, y=word.y + y) for word in drawn.words]
        width = max(width, x + wide)
        x, count = x + wide + between, count + 1
    return Drawing(width, y + tall, tuple(boxes), tuple(words))


GUTTER = 36.0
"""How wide the place is where panels are left out."""


def _across(panels: int, inner: int, fit: int) -> int:
    """How many panels stand side by side: all, or whole turns of the inner axis, or an even part of one."""
    if panels <= fit:
        return panels
    if inner <= fit:
        return fit // inner * inner
    return max(n for n in range(1, fit + 1) if inner % n == 0 or n == max(1, fit * 2 // 3))


def _grid(figure: Figure, sizes: Sizes) -> _Grid:
    ranks = [_text(cell) for panel in figure.panels for cell in panel.cells]
    columns = [word for panel in figure.panels for word in panel.columns]
    rows = [word for panel in figure.panels for word in panel.rows]
    boxed = bool(figure.host) and any(panel.host is None for panel in figure.panels)
    cell = max(
        sizes.wide,
        max(width_of(word, sizes.rank, True) for word in ranks) + sizes.rank * 0.6,
        max((width_of(word, sizes.small) for word in columns), default=0) - sizes.gap + 3,
    )
    stub = max((width_of(word, sizes.small) for word in rows), default=0)
    titled = any(panel.title for panel in figure.panels) or (bool(figure.host) and not boxed)
    head = (
        (sizes.small * 1.9 if titled else 0) + (sizes.small * 1.5 if columns else 0) + (sizes.gap / 2 if boxed else 0)
    )
    boxes = [(host, len(across) == max(1, len(p.columns))) for p in figure.panels for host, _, across in p.boxes()]
    aside = boxed and all(whole for _, whole in boxes)
    side = max(width_of(f"{figure.host} {host:,}", sizes.small) for host, _ in boxes) + sizes.gap if aside else 0
    label = sizes.small + 3 if boxed and not aside else 0
    return _Grid(
        sizes,
        stub + sizes.gap + 3 if stub else 0,
        head + label,
        math.ceil(cell),
        sizes.tall + sizes.gap + label + (sizes.gap / 2 if boxed else 0),
        sizes.gap + 4,
        boxed,
        side,
        titled,
        max(1, len(figure.panels[0].columns)),
        max(_title_width(panel, figure, boxed, sizes) for panel in figure.panels),
    )


def _where(panel: Panel, figure: Figure, boxed: bool) -> str:
    """The host of a panel, where each panel has one."""
    return f"{figure.host} {panel.host:,}" if figure.host and not boxed and panel.host is not None else ""


def _title_width(panel: Panel, figure: Figure, boxed: bool, sizes: Sizes) -> float:
    where = width_of(_where(panel, figure, boxed), sizes.small)
    return width_of(panel.title, sizes.small + 1, True) + (where + sizes.small if where else 0)


def _panel(panel: Panel, figure: Figure, grid: _Grid) -> Drawing:
    sizes, pad = grid.sizes, grid.pad
    height = grid.y(max(1, len(panel.rows)) - 1) + sizes.tall + pad
    words: list[Words] = []
    line = pad + sizes.small
    bold = sizes.small + 1
    if panel.title:
        words.append(Words("panel", pad, line, panel.title, bold, bold=True))
    if where := _where(panel, figure, grid.boxed):
        words.append(Words("host", grid.width - pad, line, where, sizes.small, "end", QUIET))
    if grid.titled:
        line += sizes.small * 1.9
    for column, word in enumerate(panel.columns):
        middle = grid.x(column) + grid.cell / 2
        words.append(Words("axis", middle, line, word, sizes.small, "middle", QUIET))
    for row, word in enumerate(panel.rows):
        middle = grid.y(row) + sizes.tall / 2 + sizes.small * 0.35
        words.append(Words("axis", grid.x(0) - sizes.gap - 2, middle, word, sizes.small, "end", QUIET))
    plain = not grid.boxed and bool(figure.host)
    boxes = [Box("panel", 0, 0, grid.width, height, CARD, FRAME if plain else "#e2e8f0", 1.5 if plain else 1, 8)]
    if grid.boxed:
        boxes += _hosts(panel, figure, grid, words)
    for cell in panel.cells:
        box, rank = _cell(cell, figure, grid)
        boxes.append(box)
        words.append(rank)
    return Drawing(grid.width, height, tuple(boxes), tuple(words))


def _hosts(panel: Panel, figure: Figure, grid: _Grid, words: list[Words]) -> list[Box]:
    sizes, boxes = grid.sizes, []
    around, label = sizes.gap / 2 - 1 + (1 if grid.side else 0), 0 if grid.side else sizes.small + 3
    for host, parts in panel.regions():
        name = f"{figure.host} {host:,}"
        each = []
        for down, across in parts:
            x, y = grid.x(across.start) - around, grid.y(down.start) - (label or around)
            width = len(across) * (grid.cell + sizes.gap) - sizes.gap + 2 * around
            height = grid.y(down.stop - 1) + sizes.tall + around - y
            each.append(Box("host", x, y, width, height, GROUND, FRAME, 1.2, 5, name))
        first = each[0]
        boxes.append(_joined(each, parts, grid, around, label or around) if len(each) > 1 else first)
        if grid.side:
            middle = first.y + first.height / 2 + sizes.small * 0.35
            words.append(Words("host", first.x + first.width + sizes.gap / 2, middle, name, sizes.small, fill=QUIET))
            continue
        for short in (name, f"{figure.host[0]}{host}", f"{host}"):
            if width_of(short, sizes.small - 0.5) <= first.width - 4:
                words.append(Words("host", first.x + 3, first.y + sizes.small, short, sizes.small - 0.5, fill=QUIET))
                break
    return boxes


def _joined(each: Sequence[Box], parts: Sequence[tuple[range, range]], grid: _Grid, around: float, above: float) -> Box:
    """One box for a host whose cells make no rectangle, with an outline around all of them."""

    def x_of(column: int, is_left: bool) -> float:
        return grid.x(column) - around if is_left else grid.x(column - 1) + grid.cell + around

    def y_of(row: int, is_top: bool) -> float:
        return grid.y(row) - above if is_top else grid.y(row - 1) + grid.sizes.tall + around

    loops = outline({(row, column) for down, across in parts for row in down for column in across})
    placed = tuple(tuple((x_of(*column), y_of(*row)) for row, column in loop) for loop in loops)
    xs, ys = zip(*(corner for loop in placed for corner in loop))
    box = replace(each[0], x=min(xs), y=min(ys), width=max(xs) - min(xs), height=max(ys) - min(ys))
    return replace(box, parts=tuple(each), outline=placed)


Side = tuple[int, bool]
"""A line between rows or columns, by the number of the one after it; whether it is above or left of the cells."""


def outline(cells: Collection[tuple[int, int]]) -> list[list[tuple[Side, Side]]]:
    """The corners around cells, each by the lines that meet there: clockwise, around holes the other way.

    Args:
        cells: the row and the column of each.

    >>> outline({(0, 0), (0, 1)})
    [[((0, True), (2, False)), ((1, False), (2, False)), ((1, False), (0, True)), ((0, True), (0, True))]]
    """
    edges: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}  # from a corner, by direction: right, down, left, up
    for row, column in sorted(cells):
        corners = [(row, column), (row, column + 1), (row + 1, column + 1), (row + 1, column)]
        beside = [(row - 1, column), (row, column + 1), (row + 1, column), (row, column - 1)]
        for way, other in enumerate(beside):
            if other not in cells:
                edges.setdefault(corners[way], {})[way] = corners[(way + 1) % 4]
    loops = []
    while edges:
        start, ways = next(iter(edges.items()))
        at, way = start, min(ways)
        loop: list[tuple[Side, Side]] = []
        first = way
        while not loop or (at, way) != (start, first):
            to = edges[at].pop(way)
            if not edges[at]:
                del edges[at]
            at = to
            there = {*edges.get(at, ()), *([first] if at == start else [])}
            turned = next(turn % 4 for turn in (way + 1, way, way + 3) if turn % 4 in there)
            if turned != way:
                across, down = (way, turned) if way % 2 == 0 else (turned, way)
                loop.append(((at[0], across == 0), (at[1], down == 3)))
            way = turned
        loops.append(loop)
    return loops


def _cell(cell: Cell, figure: Figure, grid: _Grid) -> tuple[Box, Words]:
    sizes = grid.sizes
    x, y = grid.x(cell.column), grid.y(cell.row)
    word = Words(
        "rank", x + grid.cell / 2, y + sizes.tall / 2 + sizes.rank * 0.36, _text(cell), sizes.rank, "middle",
        QUIET if cell.rank is None else INK, cell.marked,
    )  # fmt: skip
    if cell.rank is None:
        return Box("cell", x, y, grid.cell, sizes.tall, "none"), word
    title = f"rank {cell.rank:,}\n{cell.label}"
    title += f"\ngroup {cell.group}" * bool(cell.group)
    title += f"\n{figure.host} {cell.host:,}" if cell.host is not None else ""
    fill = colour(cell.colour, figure.colours)
    edge = INK if cell.marked else ""
    return Box("cell", x, y, grid.cell, sizes.tall, fill, edge, 2, sizes.tall / 7, title), word


def _text(cell: Cell) -> str:
    return GAP if cell.rank is None else str(cell.rank)


# -- text ---------------------------------------------------------------------------------------------------------


def _box(box: Box) -> str:
    kind = "path" if box.outline else "rect"
    place = f'x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.width)}" height="{_n(box.height)}" rx="{_n(box.round)}"'
    if box.outline:
        lines = (" L".join(f"{_n(x)} {_n(y)}" for x, y in loop) for loop in box.outline)
        place = f'd="{" ".join(f"M{line} Z" for line in lines)}" stroke-linejoin="round"'
    edge = f' stroke="{box.stroke}" stroke-width="{_n(box.thick)}"' if box.stroke else ""
    start = f'<{kind} class="{box.kind}" {place} fill="{box.fill}"{edge}'
    return f"{start}><title>{safe(box.title)}</title></{kind}>" if box.title else f"{start}/>"


def _words(words: Words) -> str:
    anchor = f' text-anchor="{words.anchor}"' if words.anchor != "start" else ""
    bold = ' font-weight="600"' if words.bold else ""
    quiet = ' pointer-events="none"' if words.kind == "rank" else ""
    place = f'x="{_n(words.x)}" y="{_n(words.y)}" font-size="{_n(words.size)}"'
    return f'<text class="{words.kind}" {place}{anchor}{bold}{quiet} fill="{words.fill}">{safe(words.text)}</text>'


def safe(text: str) -> str:
    """Text as it stands in XML and HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _oklch(light: float, strong: float, hue: float) -> str:
    """A colour by how light and how strong it looks, as sRGB; the OKLab matrices are Björn Ottosson's."""
    a, b = strong * math.cos(hue), strong * math.sin(hue)
    long = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (light - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(1.0, max(0.0, part)))):02x}" for part in linear)


def _gamma(part: float) -> float:
    return 12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055
