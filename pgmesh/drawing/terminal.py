"""A figure as styled text for a terminal: framed panels, with a colour for each group and the names of the hosts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from pgmesh.drawing import figures, svg
from pgmesh.drawing.figures import Cell, Figure, Panel
from pgmesh.drawing.plain_text import GAP
from pgmesh.drawing.styled_text import Line, wrapped

if TYPE_CHECKING:
    from pgmesh.drawing.drawable import Axis, Drawable
    from pgmesh.topology.hosts import HostLevel

MAX_CELLS = 256
"""The limit on the cells of a figure in a terminal. A larger mesh is shown as a sample."""


def lines(
    layout: Drawable,
    *axes: Axis,
    host: HostLevel | None = None,
    mark: int | None = None,
    width: int = 80,
    coloured: bool = False,
) -> list[Line]:
    """A layout as lines of at most ``width`` characters.

    A layout that is too wide is shown with fewer columns, at least three. If that is not enough, the names of the hosts
    are left out and all columns are tried again.

    Args:
        host: the level of hosts, which are named.
        mark: a rank to put in brackets.
        coloured: True for a colour for each group along ``axes``, and the legend.

    >>> from pgmesh.drawing import styled_text
    >>> from pgmesh.topology.hosts import HostLevel
    >>> print(styled_text.plain(lines(layout, host=HostLevel("host", ((4, 2),)), mark=5)))
    ┌ pp0 ───────────────┐  ┌ pp1 ───────────────┐
    │     tp0 tp1        │  │     tp0 tp1        │
    │ dp0   0   1  host 0│  │ dp0   4 [5]  host 2│
    │ dp1   2   3  host 1│  │ dp1   6   7  host 3│
    └────────────────────┘  └────────────────────┘
    """
    whole = min(layout.shape[-1] if layout.shape else 1, figures.MAX_COLUMNS)
    tries = product((host, None) if host else (None,), range(whole, min(whole, 3) - 1, -1))
    for named, max_columns in tries:
        figure = figures.make_figure(layout, *axes, host=named, mark=mark, max_cells=MAX_CELLS, max_columns=max_columns)
        panels = _panels(figure, coloured)
        if _width(panels[0][0]) <= width:
            break
    fit = max(1, (width + 2) // (_width(panels[0][0]) + 2))
    drawn: list[Line] = []
    strip: list[list[Line]] = []  # the panels of the current line
    for panel, lines_of_it in zip(figure.panels, panels):
        if len(strip) == fit or panel.skipped:
            drawn += _join_panels(strip)
            strip = []
        if panel.skipped:
            drawn += wrapped(f"{GAP} {', '.join(panel.skipped)}", width, "dim")
        strip.append(lines_of_it)
    drawn += _join_panels(strip)
    notes = [figure.note, figure.legend.split(";")[0] * coloured]
    return [*drawn, *(line for note in filter(None, notes) for line in wrapped(note, width, "dim"))]


def _join_panels(panels: Sequence[list[Line]]) -> list[Line]:
    """The lines of panels of one height, next to each other."""
    drawn = []
    for row in zip(*panels):
        line: Line = []
        for part in row:
            line += [*([("  ", "")] if line else []), *part]
        drawn.append(line)
    return drawn


def _width(line: Line) -> int:
    return sum(len(text) for text, _ in line)


def _panels(figure: Figure, coloured: bool) -> list[list[Line]]:
    """The lines of each panel. All panels have the same width."""
    names = [[_host(figure, panel, row) for row in range(max(1, len(panel.rows)))] for panel in figure.panels]
    side = max(len(name) for panel in names for name in panel)
    rank = max(len(_rank_text(cell)) for panel in figure.panels for cell in panel.cells)
    column = max((len(word) for panel in figure.panels for word in panel.columns), default=0)
    stub = max((len(word) for panel in figure.panels for word in panel.rows), default=0)
    titles = [_title(figure, panel) for panel in figure.panels]
    across = max(1, len(figure.panels[0].columns))
    cells = 1 + stub + across * (1 + max(rank, column))
    room = max(cells + (2 + side if side else 0), *(len(title) + 3 for title in titles))
    panels = []
    for panel, title, hosts in zip(figure.panels, titles, names):
        head = f" {title} " if title else ""
        lines: list[Line] = [[("┌" + f"{head:─<{room}}" + "┐", "")]]
        if panel.columns:
            words = " " * (1 + stub) + "".join(f" {word:>{max(rank, column)}}" for word in panel.columns)
            lines.append([("│", ""), (f"{words:<{room}}", "dim"), ("│", "")])
        for row, host in enumerate(hosts):
            name = panel.rows[row] if panel.rows else ""
            line: Line = [("│", ""), (f" {name:<{stub}}", "dim")]
            for cell in panel.cells[row * across : (row + 1) * across]:
                line += _cell(cell, figure, max(rank, column), coloured)
            rest = f"{host:>{side}}" if side else ""
            line += [(f"{rest:>{room - cells}}", "dim"), ("│", "")]
            lines.append(line)
        lines.append([("└" + "─" * room + "┘", "")])
        panels.append(lines)
    return panels


def _title(figure: Figure, panel: Panel) -> str:
    if not figure.host or panel.host is None or any(other.host is None for other in figure.panels):
        return panel.title
    return f"{panel.title} on {figure.host} {panel.host:,}" if panel.title else f"{figure.host} {panel.host:,}"


def _host(figure: Figure, panel: Panel, row: int) -> str:
    """The hosts of a row; "" if every panel is on one host, which is then in its title."""
    if not figure.host or all(panel.host is not None for panel in figure.panels):
        return ""
    hosts = sorted({cell.host for cell in panel.cells if cell.row == row and cell.host is not None})
    if len(hosts) < 2:
        return f"{figure.host} {hosts[0]:,}" if hosts else ""
    are_consecutive = hosts == list(range(hosts[0], hosts[-1] + 1))
    return f"{figure.host}s {hosts[0]:,}-{hosts[-1]:,}" if are_consecutive else f"{len(hosts):,} {figure.host}s"


def _cell(cell: Cell, figure: Figure, width: int, coloured: bool) -> Line:
    text = f"{_rank_text(cell):>{width}}"
    if not coloured or cell.rank is None:
        return [(" ", ""), (text, "bold" if cell.marked else "")]
    bold = "bold " if cell.marked else ""
    return [(" ", ""), (text, f"{bold}{svg.COLOURS.text} on {svg.colour(cell.colour, figure.colours)}")]


def _rank_text(cell: Cell) -> str:
    if cell.rank is None:
        return GAP
    return f"[{cell.rank}]" if cell.marked else str(cell.rank)
