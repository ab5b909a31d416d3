"""A layout as plain text, with one framed panel for each combination of indices on the outer axes.

Inside a panel the last axis runs across and the one before it runs down. ``print(layout)`` shows this text.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product, repeat
from typing import TYPE_CHECKING, Union

from pgmesh.drawing.styled_text import Line, columns, framed, plain, side_by_side

if TYPE_CHECKING:
    from pgmesh.drawing.drawable import Drawable

MAX_INDICES = 8
"""The number of indices of one axis that are shown. Of a longer axis, the middle is left out."""

GAP = "…"
ShownCoord = tuple[Union[int, str], ...]
"""One index for each of some axes, or ``GAP`` where indices are left out."""


def draw(layout: Drawable, *, mark: int | None = None, width: int = 80) -> str:
    """Draw a layout as lines of text, with as many panels next to each other as fit in ``width``.

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
    shown = shown_indices(layout, mark, repeat(MAX_INDICES))
    cut = max(0, len(layout.axes) - 2)
    outers = list(product(*shown[:cut]))
    rows = [row for outer in outers for row in _table(layout, outer, shown[cut:], mark)]
    lines = columns(rows, [False, *repeat(True, len(rows[0]) - 1)], gap=" ")
    panels = framed([coord_text(layout.axes, outer) for outer in outers], lines)
    per_line = max(1, (width + 2) // (len(plain(panels[0][:1])) + 2))
    strips = [side_by_side(panels[i : i + per_line]) for i in range(0, len(panels), per_line)]
    return plain(line for strip in strips for line in strip)


def _table(layout: Drawable, outer: ShownCoord, shown: list[ShownCoord], mark: int | None) -> list[Line]:
    """The texts of one panel: a row with the names of its columns, then the rows of ranks."""
    axes = layout.axes[len(outer) :]
    inner = list(product(*shown[-1:]))
    table = [["", *(coord_text(axes[-1:], column) for column in inner)]] if axes else []
    for row in product(*shown[:-1]):
        ranks = [_rank_text(layout, (*outer, *row, *column), mark) for column in inner]
        table.append([coord_text(axes[:-1], row), *ranks])
    return [[(text, "") for text in texts] for texts in table]


def _rank_text(layout: Drawable, shown_coord: ShownCoord, mark: int | None) -> str:
    coord = [index for index in shown_coord if isinstance(index, int)]
    if len(coord) < len(shown_coord):
        return GAP
    rank = layout.rank_of(coord)
    return f"[{rank}]" if rank == mark else str(rank)


def shown_indices(layout: Drawable, mark: int | None, limits: Iterable[int]) -> list[ShownCoord]:
    """The indices of each axis to show: all of them up to the limit, else the first, the marked and the last."""
    coord = layout.coord_of(mark) if mark is not None and mark in layout else (0,) * len(layout.axes)
    return [
        tuple(range(size)) if size <= limit else _shortened(size, index, limit)
        for size, index, limit in zip(layout.shape, coord, limits)
    ]


def _shortened(size: int, index: int, limit: int) -> ShownCoord:
    if limit - 2 <= index < size - 1:
        return (*range(limit - 4), GAP, index, GAP, size - 1)
    return (*range(limit - 2), GAP, size - 1)


def coord_text(axes: tuple[str | int, ...], coord: ShownCoord) -> str:
    """Indices with the names of their axes: ``pp0 dp1``."""
    return " ".join(f"{axis}:{i}" if isinstance(axis, int) else f"{axis}{i}" for axis, i in zip(axes, coord))
