"""A layout as text: framed panels, with the names of the hosts, and on a terminal with a colour for each group.

``print(layout)`` shows this text without hosts and colours.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

from pgmesh.drawing import palette
from pgmesh.drawing.figures import MAX_COLUMNS, Cell, Figure, make_figure
from pgmesh.drawing.styled_text import Line, columns, length, plain, wrapped

if TYPE_CHECKING:
    from pgmesh.drawing.drawable import Axis, Drawable
    from pgmesh.topology.hosts import HostLevel

MAX_CELLS = 256
"""The limit on the cells of a figure as text. A larger mesh is shown as a sample."""


def draw(layout: Drawable, mark: int | None = None, width: int = 80) -> str:
    """A layout as plain text, with as many panels next to each other as fit in ``width``.

    Args:
        mark: a rank to put in brackets.
        width: in characters.

    >>> print(draw(layout, mark=5))
    ┌ pp0 ───────┐  ┌ pp1 ───────┐
    │     tp0 tp1│  │     tp0 tp1│
    │ dp0   0   1│  │ dp0   4 [5]│
    │ dp1   2   3│  │ dp1   6   7│
    └────────────┘  └────────────┘
    """
    return plain(lines(layout, mark=mark, width=width))


_COLOURED = [f"{palette.TEXT} on {background}" for background in palette.GROUPS]
"""The styles of groups. A figure of many ranks holds each once."""


def lines(
    layout: Drawable,
    *axes: Axis,
    host: HostLevel | None = None,
    mark: int | None = None,
    width: int = 80,
    coloured: bool = False,
) -> list[Line]:
    """A layout as lines of at most ``width`` characters.

    A wide layout is shown with fewer columns, at least three. If that is not enough, hosts are not named.

    Args:
        host: the level of hosts, which are named.
        mark: a rank to put in brackets.
        coloured: True to add the meaning of the colours.

    >>> from pgmesh.topology.hosts import HostLevel
    >>> print(plain(lines(layout, host=HostLevel("host", ((4, 2),)), mark=5)))
    ┌ pp0 ───────────────┐  ┌ pp1 ───────────────┐
    │     tp0 tp1        │  │     tp0 tp1        │
    │ dp0   0   1  host 0│  │ dp0   4 [5]  host 2│
    │ dp1   2   3  host 1│  │ dp1   6   7  host 3│
    └────────────────────┘  └────────────────────┘
    """
    most = min([MAX_COLUMNS, *layout.shape[-1:]])
    for named, max_columns in product((host, None), range(most, min(most, 3) - 1, -1)):
        figure = make_figure(layout, *axes, host=named, mark=mark, max_cells=MAX_CELLS, max_columns=max_columns)
        panels = _framed(figure)
        panel_width = length(panels[0][0]) - 2
        if panel_width <= width:
            break
    drawn: list[Line] = []
    remaining = iter(panels)
    for strip in figure.lines_of_panels(max(1, (width + 2) // (panel_width + 2))):
        for parts in zip(*(next(remaining) for _ in strip)):
            drawn.append([piece for part in parts for piece in part])
    for note in (figure.note, figure.legend if coloured else ""):
        drawn += wrapped(note, width, "dim")
    return drawn


def _framed(figure: Figure) -> list[list[Line]]:
    """The lines of each panel in a frame with its title, and two spaces. All panels have the same size."""
    rows = list(_rows(figure))
    table = columns(rows, [number > 0 for number in range(len(rows[0]))], gap="")
    lengths = [length(line) + 1 for line in table]
    room = max(lengths + [len(panel.title) + 3 for panel in figure.panels])
    height = len(table) // len(figure.panels)
    panels = []
    for number, panel in enumerate(figure.panels):
        title = f" {panel.title} " if panel.title else ""
        lines: list[Line] = [[(f"┌{title:─<{room}}┐  ", "")]]
        for line in table[number * height : (number + 1) * height]:
            pad = " " * (room - 1 - length(line))
            lines.append([("│ ", ""), *line, (f"{pad}│  ", "")])
        panels.append([*lines, [(f"└{'─' * room}┘  ", "")]])
    return panels


def _rows(figure: Figure) -> Iterator[Line]:
    """The cells of the table of each panel: the names of the columns, then each row with its name and its hosts."""
    for panel in figure.panels:
        if panel.columns:
            yield [("", ""), *((f" {name}", "dim") for name in panel.columns), ("", "")]
        for row in panel.rows:
            yield [(row.name, "dim"), *map(_rank, row.cells), (f"  {row.hosts}" if row.hosts else "", "dim")]


def _rank(cell: Cell) -> tuple[str, str]:
    """The text of a cell and its style."""
    style = "" if cell.rank is None else _COLOURED[cell.colour % len(_COLOURED)]
    return (f" [{cell.text}]", f"bold {style}".rstrip()) if cell.is_marked else (f" {cell.text}", style)
