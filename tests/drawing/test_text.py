"""Layouts drawn as text: whole drawings, and the position of every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from pgmesh import Layout
from pgmesh.drawing import text
from pgmesh.drawing.figures import GAP
from tests.support import golden_files as golden
from tests.support.layout_strategies import layouts

LAYOUTS = {
    "three-axes": Layout(pp=2, dp=2, tp=2),
    "two-axes": Layout(dp=3, tp=2, ranks=range(8, 14)),
    "one-axis": Layout(dp=4, ranks=[3, 1, 2, 0]),
    "no-axis": Layout(pp=2, tp=2).at(pp=1, tp=0),
    "numbered-axes": Layout(2, 2, 2),
    "four-axes": Layout(pp=2, cp=2, dp=1, tp=2),
    "title-wider-than-its-panel": Layout(pipeline=1, context=1, d=1, t=1),
    "panels-on-two-lines": Layout(pp=7, dp=2, tp=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_drawn_as_text(name):
    drawn = text.draw(LAYOUTS[name])
    assert str(LAYOUTS[name]) == drawn
    golden.check(f"layout-{name}.txt", drawn + "\n")


def test_marked_rank_has_brackets():
    layout = Layout(pp=2, dp=2, tp=2)
    assert text.draw(layout, mark=5) == str(layout).replace("   5│", " [5]│")
    assert text.draw(layout, mark=99) == str(layout)


@pytest.mark.parametrize(("width", "fit"), [(1, 1), (29, 1), (30, 2), (80, 5), (200, 8)])
def test_as_many_panels_as_fit_share_a_line(width, fit):
    lines = text.draw(Layout(pp=8, dp=2, tp=2), width=width).splitlines()
    assert max(map(len, lines)) == 16 * fit - 2


def cells(drawing: str) -> Iterator[tuple[list[str], str]]:
    """What stands in each cell of a picture, with its labels: those of its panel, its row and its column."""
    for line in drawing.splitlines():
        if line.startswith("┌"):
            panels = [(found.span(), found[0].strip("┌─┐ ").split()) for found in re.finditer("┌.*?┐", line)]
            columns: list[str] = []
        elif line.startswith("│"):
            rows = [(title, line[start + 1 : end - 1].split()) for (start, end), title in panels]
            for title, words in rows if columns else ():
                row, ranks = words[: -len(columns)], words[-len(columns) :]
                yield from (([*title, *row, column], rank) for column, rank in zip(columns, ranks))
            columns = columns or rows[0][1]


@settings(max_examples=40)
@given(layouts(), st.data())
def test_each_rank_is_drawn_at_its_labels(layout, data):
    mark = data.draw(st.sampled_from(layout.ranks()))
    shown = {}
    for labels, cell in cells(text.draw(layout, mark=mark, width=999)):
        assert (cell == GAP) == any(word.endswith(GAP) for word in labels)
        if cell != GAP:
            rank = int(cell.strip("[]"))
            assert cell == (f"[{rank}]" if rank == mark else f"{rank}")
            coord = zip(layout.axes, layout.coord_of(rank))
            assert labels == [f"{axis}:{i}" if isinstance(axis, int) else f"{axis}{i}" for axis, i in coord]
            shown[rank] = labels
    assert mark in shown
    if len(layout) <= text.MAX_CELLS:
        assert shown.keys() == set(layout.ranks())
