"""A figure as styled text for a terminal: framed panels, with a colour for each group and the names of the hosts."""

from __future__ import annotations

from itertools import product, repeat
from typing import TYPE_CHECKING

from pgmesh.drawing import figures, svg
from pgmesh.drawing.figures import Cell, Figure, Panel
from pgmesh.drawing.plain_text import GAP
from pgmesh.drawing.styled_text import Line, columns, framed, plain, side_by_side, wrapped

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
        if len(plain(panels[0][:1])) <= width:
            break
    fit = max(1, (width + 2) // (len(plain(panels[0][:1])) + 2))
    drawn: list[Line] = []
    strip: list[list[Line]] = []  # the panels of the current line
    for panel, lines_of_it in zip(figure.panels, panels):
        if len(strip) == fit or panel.skipped:
            drawn += side_by_side(strip)
            strip = []
        if panel.skipped:
            drawn += wrapped(f"{GAP} {', '.join(panel.skipped)}", width, "dim")
        strip.append(lines_of_it)
    drawn += side_by_side(strip)
    notes = [figure.note, figure.legend.split(";")[0] * coloured]
    return [*drawn, *(line for note in filter(None, notes) for line in wrapped(note, width, "dim"))]


def _panels(figure: Figure, coloured: bool) -> list[list[Line]]:
    """The lines of each panel. All panels have the same width."""
    across = max(1, len(figure.panels[0].columns))
    width = max(len(text) for panel in figure.panels for text in (*panel.columns, *map(_rank_text, panel.cells)))
    rows: list[Line] = []
    for panel in figure.panels:
        if panel.columns:
            rows.append([("", ""), *((name, "dim") for name in panel.columns), ("", "")])
        for row, name in enumerate(panel.rows or ("",)):
            cells = [_cell(cell, figure, width, coloured) for cell in panel.cells[row * across : (row + 1) * across]]
            rows.append([(name, "dim"), *cells, (f" {_host(figure, panel, row)}", "dim")])
    if not any(host.strip() for *_, (host, _) in rows):
        rows = [row[:-1] for row in rows]
    lines = columns(rows, [False, *repeat(True, len(rows[0]) - 1)], gap=" ")
    return framed([_title(figure, panel) for panel in figure.panels], lines)


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


def _cell(cell: Cell, figure: Figure, width: int, coloured: bool) -> tuple[str, str]:
    """The text and the style of a rank. The colour fills the width of the column."""
    styles = ["bold"] * cell.marked
    if coloured and cell.rank is not None:
        styles.append(f"{svg.Colours.text} on {svg.colour(cell.colour)}")
    return f"{_rank_text(cell):>{width}}", " ".join(styles)


def _rank_text(cell: Cell) -> str:
    return f"[{cell.text}]" if cell.marked else cell.text
