"""Figures: their content against the layout, and their positions."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings, strategies as st

from pgmesh import AxisError, Layout, ProcessGroupMesh, plan
from pgmesh.drawing import figures, palette, styled_text, svg, text
from pgmesh.topology.hosts import HostLevel, parse_topology
from tests.support import golden_files as golden
from tests.support.fake_world import fake_rank
from tests.support.layout_strategies import layouts

EIGHT = Layout(pp=2, dp=2, tp=2)
SIXTY_FOUR = Layout(pp=2, dp=4, cp=2, tp=4)


def hosts(spelled: str) -> HostLevel:
    return parse_topology(spelled)[0]


def draw(layout: Layout, *axes: str, **more) -> str:
    return svg.render([figures.make_figure(layout, *axes, **more)])


DRAWINGS = {
    "8-ranks": lambda: draw(EIGHT, "tp", host=hosts("2x4"), mark=5),
    "64-ranks": lambda: draw(SIXTY_FOUR, "tp", host=hosts("8x8")),
    "64-ranks-hosts-of-rows": lambda: draw(SIXTY_FOUR, "dp", host=hosts("16x4")),
    "uneven-hosts": lambda: draw(Layout(dp=5, tp=4), host=hosts("8,6,6")),
    "uneven-hosts-over-panels": lambda: draw(Layout(pp=2, dp=2, tp=5), host=hosts("8,8,4")),
    "a-million-ranks": lambda: draw(Layout(pp=16, dp=512, cp=8, tp=16), host=hosts("131072x8"), mark=77777),
    "two-meshes": lambda: plan(SIXTY_FOUR, nodes="8x8", views={"moe": {"pp": 2, "edp": 4, "ep": 8}}).svg(),
    "no-axis": lambda: draw(EIGHT.at(pp=1, dp=0, tp=1)),
    "long-names": lambda: draw(Layout(pipeline_stage=2, data_replicate=3, tensor_model=2), host=hosts("3x4")),
}


@pytest.mark.parametrize("name", ["8-ranks", "64-ranks", "64-ranks-hosts-of-rows", "uneven-hosts", "two-meshes"])
def test_drawing_equals_golden_file(name):
    golden.check(f"{name}.svg", DRAWINGS[name]())


@dataclass(frozen=True)
class Area:
    """A box, or a line of text, of a drawing, in pixels of the drawing."""

    kind: str
    x: float
    y: float
    right: float
    bottom: float
    words: str = ""

    def holds(self, other: Area) -> bool:
        return self.x <= other.x and self.y <= other.y and other.right <= self.right and other.bottom <= self.bottom

    def overlaps(self, other: Area) -> bool:
        return self.x < other.right and other.x < self.right and self.y < other.bottom and other.y < self.bottom


def areas(drawn: str) -> tuple[list[Area], list[Area]]:
    boxes, texts = [], []

    def walk(node: ElementTree.Element, left: float, top: float) -> None:
        if moved := re.fullmatch(r"translate\((\d+) (\d+)\)", node.get("transform", "")):
            left, top = left + int(moved[1]), top + int(moved[2])
        x, y = left + int(node.get("x", 0)), top + int(node.get("y", 0))
        kind = node.get("class", "")
        if node.tag.endswith("rect"):
            boxes.append(Area(kind, x, y, x + int(node.get("width")), y + int(node.get("height"))))
        elif node.tag.endswith("text") and node.text:
            size = int(node.get("font-size"))
            wide = svg.width_of(size, [node.text])
            start = x - {"start": 0, "middle": wide / 2, "end": wide}[node.get("text-anchor")]
            texts.append(Area(kind, start, y - size * 0.75, start + wide, y, node.text))
        for child in node:
            walk(child, left, top)

    walk(ElementTree.fromstring(drawn), 0, 0)
    return boxes, texts


def check_geometry(boxes: list[Area], texts: list[Area]) -> None:
    """No two cells overlap, no text is cut or overlaps another text, and each rank is in its cell."""
    by_kind = {kind: [box for box in boxes if box.kind == kind] for kind in ("cell", "panel", "ground")}
    (ground,) = by_kind["ground"]
    assert all(ground.holds(area) for area in [*boxes, *texts])
    for kind in ("cell", "panel"):
        crowd = sorted(by_kind[kind], key=lambda box: (box.y, box.x))
        for i, one in enumerate(crowd):
            assert not any(one.overlaps(other) for other in crowd[i + 1 : i + 80]), one
    for cell in by_kind["cell"]:
        assert any(panel.holds(cell) for panel in by_kind["panel"])
    ranks = [words for words in texts if words.kind == "rank" and words.words != figures.GAP]
    assert len(ranks) == len(by_kind["cell"])
    for words, cell in zip(ranks, by_kind["cell"]):
        assert cell.holds(words), (words, cell)
    for words in texts:
        if words.kind in ("panel", "axis", "host"):
            assert any(panel.holds(words) for panel in by_kind["panel"]), words
    lines: dict[float, list[Area]] = {}
    for words in texts:
        lines.setdefault(words.bottom, []).append(words)
    for line in lines.values():
        line.sort(key=lambda words: words.x)
        assert all(before.right <= after.x for before, after in itertools.pairwise(line)), line


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing_has_no_overlap_and_no_cut_text(name):
    check_geometry(*areas(DRAWINGS[name]()))


@settings(max_examples=60)
@given(layouts(), st.data())
def test_any_drawing_has_no_overlap(layout, data):
    last = max(layout.ranks())
    size = data.draw(st.integers(1, 12))
    host = data.draw(st.sampled_from([None, HostLevel("host", ((-(-(last + 1) // size), size),))]))
    axes = data.draw(st.lists(st.sampled_from(layout.axes), unique=True))
    mark = data.draw(st.sampled_from(layout.ranks()))
    check_geometry(*areas(draw(layout, *axes, host=host, mark=mark, max_cells=200, max_columns=12)))


def cells_of(figure):
    return [cell for panel in figure.panels for row in panel.rows for cell in row.cells]


@settings(max_examples=60)
@given(layouts(), st.data())
def test_cells_have_rank_label_group_and_host(layout, data):
    axes = data.draw(st.lists(st.sampled_from(layout.axes), unique=True, min_size=1))
    host = HostLevel("host", ((max(layout.ranks()) // 4 + 1, 4),))
    mark = data.draw(st.sampled_from(layout.ranks()))
    drawn = figures.make_figure(layout, *axes, host=host, mark=mark, max_cells=10_000, max_columns=10_000)
    assert [cell.rank for cell in cells_of(drawn)] == list(layout.ranks())
    assert [cell.rank for cell in cells_of(drawn) if cell.is_marked] == [mark]
    blocks = {}
    for cell in cells_of(drawn):
        assert cell.label == layout.label_of(cell.rank)
        assert cell.host == cell.rank // 4
        blocks.setdefault(cell.colour, []).append(cell.rank)
    assert sorted(map(sorted, blocks.values())) == sorted(map(sorted, layout.partition(*axes)))
    assert sorted(blocks) == list(range(len(blocks)))
    for panel in drawn.panels:
        for row in panel.rows:
            numbers = {cell.host for cell in row.cells}
            first, last = min(numbers), max(numbers)
            assert row.hosts == (f"host {first:,}" if first == last else f"hosts {first:,} … {last:,}")


@pytest.mark.parametrize("layout", [Layout(dp=1 << 20), Layout(a=2, b=1 << 19), Layout(pp=16, dp=512, cp=8, tp=16),
                                    Layout(a=9, b=9, c=9, d=9, e=9, f=9)])  # fmt: skip
def test_large_layouts_are_sampled(layout):
    mark = len(layout) // 3
    drawn = figures.make_figure(layout, mark=mark)
    assert len(cells_of(drawn)) <= figures.MAX_CELLS
    ranks = [cell.rank for cell in cells_of(drawn) if cell.rank is not None]
    assert mark in ranks
    assert drawn.note == f"a sample: {len(ranks):,} of {len(layout):,} ranks, from the ends of the axes"


def words(drawn: str, kind: str = "text") -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(drawn).iter(f"{{http://www.w3.org/2000/svg}}{kind}")]


def test_markup_in_titles_and_names_is_escaped():
    layout = Layout({"<b>&": 2, "'\"": 2})
    assert "<b>" not in layout._repr_html_() + plan(layout).svg()
    drawn = draw(EIGHT, title='<b> & "x"')
    assert '<b> & "x"' in words(drawn)
    assert "rank 5\npp1-dp0-tp1\ngroup pp=1, dp=0, tp=*" in words(drawn, "title")
    assert "<script" not in drawn


def test_layouts_are_drawn_next_to_each_other():
    drawn = svg.draw(SIXTY_FOUR, Layout(dp=64), along=["dp"], mark=13)
    assert [word for word in words(drawn) if "=" in word] == ["pp=2 dp=4 cp=2 tp=4", "dp=64"]
    assert drawn.count('<rect class="cell"') == 128
    assert drawn.count(f'stroke="{palette.TEXT}"') == 2
    with pytest.raises(AxisError, match="no axis 'tp'"):
        svg.draw(SIXTY_FOUR, Layout(dp=64), along=["tp"])


def test_notebooks_show_layouts_meshes_and_plans_as_svg():
    assert EIGHT._repr_html_() == svg.draw(EIGHT)
    assert "1,048,576 ranks" in Layout(dp=1 << 20)._repr_html_()
    with fake_rank(5, 8):
        assert ProcessGroupMesh(pp=2, dp=2, tp=2)._repr_html_() == svg.draw(EIGHT, mark=5)
    planned = plan(EIGHT, nodes="2x4")
    assert planned._repr_html_() == planned.svg() == draw(EIGHT, "tp", host=hosts("2x4"))


TEXTS = {
    "hosts-of-panels": lambda **more: text.lines(SIXTY_FOUR, host=hosts("8x8"), mark=13, **more),
    "hosts-of-rows": lambda **more: text.lines(SIXTY_FOUR, host=hosts("16x4"), **more),
    "ragged-hosts": lambda **more: text.lines(SIXTY_FOUR, host=hosts("6x8,4x4"), **more),
    "a-million-ranks": lambda **more: text.lines(
        Layout(pp=16, dp=512, cp=8, tp=16), host=hosts("131072x8"), mark=77777, **more
    ),
    "one-axis": lambda **more: text.lines(Layout(dp=300), **more),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_equals_golden_file(name):
    golden.check(f"terminal-{name}.txt", styled_text.plain(TEXTS[name]()) + "\n")


@pytest.mark.parametrize("name", TEXTS)
def test_no_line_is_wider_than_the_terminal(name):
    for width, coloured in itertools.product([40, 60, 80, 132], [False, True]):
        assert max(len(styled_text.plain([line])) for line in TEXTS[name](width=width, coloured=coloured)) <= width
