"""Figures: their content against the layout, their positions, and how a browser renders them."""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings, strategies as st

from pgmesh import Layout, ProcessGroupMesh, plan
from pgmesh.drawing import figures, styled_text, svg, terminal
from pgmesh.drawing.figures import Cell, Panel
from pgmesh.drawing.svg import Box, Drawing
from pgmesh.planning import html
from pgmesh.planning.rank_report import rank_report_of
from pgmesh.topology.hosts import HostLevel, parse_topology
from tests.support import browser, golden_files as golden
from tests.support.fake_world import fake_rank
from tests.support.layout_strategies import layouts

EIGHT = Layout(pp=2, dp=2, tp=2)
SIXTY_FOUR = Layout(pp=2, dp=4, cp=2, tp=4)


def hosts(spelled: str) -> HostLevel:
    return parse_topology(spelled)[0]


DRAWINGS = {
    "8-ranks": lambda: svg.drawing(figures.make_figure(EIGHT, "tp", host=hosts("2x4"), mark=5)),
    "8-ranks-no-hosts": lambda: svg.drawing(figures.make_figure(EIGHT, "dp", "tp")),
    "64-ranks": lambda: svg.drawing(figures.make_figure(SIXTY_FOUR, "tp", host=hosts("8x8"))),
    "64-ranks-hosts-of-rows": lambda: svg.drawing(figures.make_figure(SIXTY_FOUR, "dp", host=hosts("16x4"))),
    "64-ranks-hosts-of-half-rows": lambda: svg.drawing(figures.make_figure(SIXTY_FOUR, "dp", host=hosts("32x2"))),
    "uneven-hosts": lambda: svg.drawing(figures.make_figure(Layout(dp=5, tp=4), host=hosts("8,6,6"))),
    "uneven-hosts-over-panels": lambda: svg.drawing(figures.make_figure(Layout(pp=2, dp=2, tp=5), host=hosts("8,8,4"))),
    "4096-ranks": lambda: svg.drawing(figures.make_figure(Layout(pp=8, dp=16, cp=4, tp=8), host=hosts("512x8"))),
    "hosts-of-one": lambda: svg.drawing(figures.make_figure(Layout(dp=2, tp=4), host=hosts("8x1"))),
    "1024-ranks": lambda: svg.drawing(figures.make_figure(Layout(pp=4, dp=16, cp=2, tp=8), "dp", host=hosts("128x8"))),
    "a-million-ranks": lambda: svg.drawing(
        figures.make_figure(Layout(pp=16, dp=512, cp=8, tp=16), host=hosts("131072x8"), mark=77777)
    ),
    "two-meshes": lambda: svg.drawing(
        *html.figures(plan(SIXTY_FOUR, nodes="8x8", views={"moe": {"pp": 2, "edp": 4, "ep": 8}}))
    ),
    "one-axis": lambda: svg.drawing(figures.make_figure(Layout(dp=300))),
    "one-rank": lambda: svg.drawing(figures.make_figure(Layout(dp=1))),
    "no-axis": lambda: svg.drawing(figures.make_figure(EIGHT.at(pp=1, dp=0, tp=1))),
    "long-names": lambda: svg.drawing(
        figures.make_figure(Layout(pipeline_stage=2, data_replicate=3, tensor_model=2), host=hosts("3x4"))
    ),
}


@pytest.mark.parametrize("name", ["8-ranks", "64-ranks", "64-ranks-hosts-of-rows", "uneven-hosts", "two-meshes"])
def test_a_drawing_is_this(name):
    golden.check(f"{name}.svg", DRAWINGS[name]().svg())


# ---- where things stand ----


def overlap(one: Box, other: Box) -> bool:
    return (
        one.x < other.x + other.width
        and other.x < one.x + one.width
        and one.y < other.y + other.height
        and other.y < one.y + one.height
    )


def within(inner: tuple[float, float, float, float], outer: Box) -> bool:
    x, y, right, bottom = inner
    return outer.x <= x and outer.y <= y and right <= outer.x + outer.width and bottom <= outer.y + outer.height


def rectangles(box: Box) -> list[Box]:
    """The rectangles that a box consists of: between two heights of corners, what every second upright edge ends."""
    corners = [(start, end) for loop in box.outline for start, end in zip(loop, [*loop[1:], loop[0]])]
    heights = sorted({y for (_, y), _ in corners})
    found = []
    for top, bottom in itertools.pairwise(heights):
        upright = [a[0] for a, b in corners if min(a[1], b[1]) <= top and bottom <= max(a[1], b[1]) and a[0] == b[0]]
        for left, right in zip(sorted(upright)[::2], sorted(upright)[1::2]):
            found.append(replace(box, x=left, y=top, width=right - left, height=bottom - top, outline=()))
    return found or [box]


def check_geometry(drawing: Drawing) -> None:
    """No two cells overlap, boxes overlap only where one is in the other, no text is cut or stands on other text."""
    by_kind = {kind: [box for box in drawing.boxes if box.kind == kind] for kind in ("cell", "host", "panel", "ground")}
    (ground,) = by_kind["ground"]
    for kind in ("cell", "host", "panel"):
        crowd = sorted((part for box in by_kind[kind] for part in rectangles(box)), key=lambda box: (box.y, box.x))
        for i, one in enumerate(crowd):
            for other in crowd[i + 1 : i + 80]:
                assert not overlap(one, other), (one, other)
    for box in drawing.boxes:
        assert within((box.x, box.y, box.x + box.width, box.y + box.height), ground)
    for kind, holder in (("cell", "panel"), ("host", "panel")):
        for box in by_kind[kind]:
            whole = (box.x, box.y, box.x + box.width, box.y + box.height)
            assert any(within(whole, panel) for panel in by_kind[holder])
    ranks = [words for words in drawing.texts if words.kind == "rank"]
    assert len(ranks) == len(by_kind["cell"])
    for words, cell in zip(ranks, by_kind["cell"]):
        start, end = words.span
        assert within((start, words.y - words.size * 0.75, end, words.y), cell), (words, cell)
    rest = [words for words in drawing.texts if words.kind != "rank"]
    for words in rest:
        start, end = words.span
        area = (start, words.y - words.size * 0.75, end, words.y)
        assert within(area, ground), words
        if words.kind in ("panel", "axis", "host"):
            assert any(within(area, panel) for panel in by_kind["panel"]), words
    lines: dict[tuple[float, str], list[tuple[float, float]]] = {}
    for words in drawing.texts:
        lines.setdefault((round(words.y, 3), ""), []).append(words.span)
    for spans in lines.values():
        spans.sort()
        assert all(before[1] <= after[0] + 0.01 for before, after in itertools.pairwise(spans)), spans


@pytest.mark.parametrize("name", DRAWINGS)
def test_nothing_overlaps_and_no_text_is_cut(name):
    check_geometry(DRAWINGS[name]())


@settings(max_examples=60)
@given(layouts(), st.data())
def test_nothing_overlaps_and_no_text_is_cut_in_any_picture(layout, data):
    last = max(layout.ranks())
    size = data.draw(st.integers(1, 12))
    host = data.draw(st.sampled_from([None, HostLevel("host", ((-(-(last + 1) // size), size),))]))
    axes = data.draw(st.lists(st.sampled_from(layout.axes), unique=True))
    mark = data.draw(st.sampled_from(layout.ranks()))
    check_geometry(svg.drawing(figures.make_figure(layout, *axes, host=host, mark=mark, max_cells=200, max_columns=12)))


# ---- what they show ----


@settings(max_examples=60)
@given(layouts(), st.data())
def test_cells_tell_the_truth(layout, data):
    axes = data.draw(st.lists(st.sampled_from(layout.axes), unique=True, min_size=1))
    host = HostLevel("host", ((max(layout.ranks()) // 4 + 1, 4),))
    mark = data.draw(st.sampled_from(layout.ranks()))
    drawn = figures.make_figure(layout, *axes, host=host, mark=mark, max_cells=10_000, max_columns=10_000)
    cells = [cell for panel in drawn.panels for cell in panel.cells]
    assert [cell.rank for cell in cells] == list(layout.ranks())
    assert [cell.rank for cell in cells if cell.marked] == [mark]
    blocks = {}
    for cell in cells:
        assert cell.label == layout.label_of(cell.rank)
        assert cell.host == cell.rank // 4
        blocks.setdefault(cell.colour, []).append(cell.rank)
    assert sorted(map(sorted, blocks.values())) == sorted(map(sorted, layout.partition(*axes)))
    assert sorted(blocks) == list(range(len(blocks)))
    for panel in drawn.panels:
        boxed = {}
        for number, positions in panel.regions():
            for position in positions:
                assert position not in boxed
                boxed[position] = number
        assert boxed == {(cell.row, cell.column): cell.host for cell in panel.cells}


@pytest.mark.parametrize("layout", [Layout(dp=1 << 20), Layout(a=2, b=1 << 19), Layout(pp=16, dp=512, cp=8, tp=16),
                                    Layout(a=9, b=9, c=9, d=9, e=9, f=9)])  # fmt: skip
def test_more_ranks_than_can_be_looked_at_are_sampled(layout):
    mark = len(layout) // 3
    drawn = figures.make_figure(layout, mark=mark)
    cells = [cell for panel in drawn.panels for cell in panel.cells]
    assert len(cells) <= figures.MAX_CELLS
    ranks = [cell.rank for cell in cells if cell.rank is not None]
    assert mark in ranks
    assert drawn.note == f"a sample: {len(ranks):,} of {len(layout):,} ranks, from the ends of the axes"


def texts(drawn: str, kind: str = "text") -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(drawn).iter(f"{{http://www.w3.org/2000/svg}}{kind}")]


def test_panels_that_are_left_out_have_an_ellipsis():
    layout = Layout(pp=8, dp=16, cp=4, tp=8)
    words = [word for word in texts(svg.of(layout, host=hosts("512x8"))) if word.startswith(("pp", "…"))]
    turns = [[f"pp{pp} dp{dp}" for dp in range(8)] + ["…", f"pp{pp} dp15"] for pp in (0, 7)]
    assert words == ["pp=8 dp=16 cp=4 tp=8", *turns[0], "… pp1 to pp6", *turns[1]]
    lines = styled_text.plain(terminal.lines(layout, host=hosts("512x8"))).splitlines()
    heads = [line.strip("┌─┐ ") for line in lines if line.startswith(("┌", "…"))]
    assert heads == [
        "pp0 dp0",
        "… pp0 dp1 to dp14",
        "pp0 dp15",
        "… pp1 to pp6",
        "pp7 dp0",
        "… pp7 dp1 to dp14",
        "pp7 dp15",
    ]


@settings(max_examples=40)
@given(layouts(), st.data())
def test_what_is_left_out_is_said_and_nothing_else(layout, data):
    outer = Layout(**{f"axis{i}": size for i, size in enumerate(layout.shape[:-2])}) if layout.shape[2:] else None
    mark = data.draw(st.sampled_from(layout.ranks()))
    drawn = figures.make_figure(layout, mark=mark, max_cells=data.draw(st.integers(1, 60)))
    last = -1
    for panel in drawn.panels:
        first = next(cell.rank for cell in panel.cells if cell.rank is not None)
        outer_coord = layout.coord_of(first)[:-2]
        here = outer.rank_of(outer_coord) if outer is not None else 0
        assert bool(panel.skipped) == (here != last + 1)
        last = here
    assert last == (len(outer) - 1 if outer is not None else 0)


def test_a_host_whose_ranks_are_contiguous_has_one_box():
    drawn = svg.of(Layout(dp=5, tp=4), host=hosts("8,6,6"))
    titles = [title for title in texts(drawn, "title") if title.startswith("host")]
    assert titles == ["host 0", "host 1", "host 2"]
    assert "one box: one host" in drawn
    names = [word for word in texts(drawn) if word.startswith("host")]
    assert names == ["host 0", "host 1", "host 2"]
    parts = svg.of(Layout(pp=2, dp=2, tp=5), host=hosts("8,8,4"))  # host 1 is in both panels
    assert [word for word in texts(parts) if word.startswith("host")] == ["host 0", "host 1", "host 1", "host 2"]
    assert "boxes of the same name: one host" in parts
    assert "one box: one host" not in parts


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=4))
def test_regions_and_outlines_of_hosts_in_any_place(rows):
    cells = tuple(Cell(i, j, 4 * i + j, host=host) for i, row in enumerate(rows) for j, host in enumerate(row))
    panel = Panel("", tuple("abcd"[: len(rows)]), tuple("wxyz"), cells)
    left = {(cell.row, cell.column): cell.host for cell in cells}
    found = {}
    while left:  # by hand: whoever is reached step by step
        (row, column), host = left.popitem()
        reached, todo = {(row, column)}, [(row, column)]
        while todo:
            row, column = todo.pop()
            for step in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
                if left.get(step) == host:
                    del left[step]
                    reached.add(step)
                    todo.append(step)
        found[frozenset(reached)] = host
    regions = {frozenset(positions): host for host, positions in panel.regions()}
    assert regions == found
    for region in regions:
        area = 0
        for loop in svg.outline(region):
            corners = [(row[0], column[0]) for row, column in loop]
            assert all((a[0] == b[0]) != (a[1] == b[1]) for a, b in itertools.pairwise([*corners, corners[0]]))
            area += sum(a[1] * b[0] - b[1] * a[0] for a, b in itertools.pairwise([*corners, corners[0]]))
        assert area == 2 * len(region)


def test_colours_of_neighbours_differ_and_are_light_enough_for_text():
    for count in (1, 2, 5, 12, 128):
        colours = [svg.colour(number) for number in range(count)]
        assert len(set(colours)) == count or count > 30
        for colour in colours:
            red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
            light = sum(w * part**2.2 for w, part in ((0.2126, red), (0.7152, green), (0.0722, blue)))
            assert (light + 0.05) / (0.0085 + 0.05) > 4.5  # the contrast that text on it needs
        for one, other in itertools.pairwise(colours):
            assert math.dist(bytes.fromhex(one[1:]), bytes.fromhex(other[1:])) > 25


def test_the_text_of_an_svg_is_xml_whatever_axes_are_called():
    drawn = svg.drawing(figures.make_figure(EIGHT, title='<b> & "x"')).svg()
    root = ElementTree.fromstring(drawn)
    assert '<b> & "x"' in [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    titles = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "rank 5\npp1-dp0-tp1\ngroup pp=1, dp=0, tp=*" in titles
    assert "<script" not in drawn


def test_notebooks_show_a_layout_as_a_picture():
    assert EIGHT._repr_html_() == svg.of(EIGHT)
    assert "1,048,576 ranks" in Layout(dp=1 << 20)._repr_html_()


def test_notebooks_show_a_mesh_with_this_rank_and_a_plan_as_its_page():
    with fake_rank(5, 8):
        assert ProcessGroupMesh(pp=2, dp=2, tp=2)._repr_html_() == svg.of(EIGHT, mark=5)
    planned = plan(EIGHT, nodes="2x4")
    assert planned._repr_html_() in planned.html() == html.page([planned])
    drawn, (shown,) = planned.svg("dp"), re.findall("(?s)<svg.*?</svg>", planned.html("dp"))
    assert texts(shown, "title") == texts(drawn, "title")
    assert texts(shown) == texts(drawn)[1:]  # the page has the title in its headline
    viewed = plan(EIGHT, nodes="2x4", views={"moe": {"ep": 8}})
    assert viewed.svg("dp") in viewed.html("dp")


def test_a_page_has_numbers_pictures_and_no_scripts():
    text = html.page([plan(SIXTY_FOUR, nodes="8x8"), plan(Layout(tp=8, dp=8), nodes="8x8")])
    assert text.count("<svg") == 2
    assert "<script" not in text
    assert "src=" not in text
    assert "tp spans 8 hosts: every hop leaves the host." in text
    golden.check("page.html", html.page([plan(EIGHT, nodes="2x4")]))


def test_a_page_says_its_title_once_and_each_column_has_a_header():
    text = html.page([plan(EIGHT, nodes="2x4")])
    body = text[text.index("<body>") :]
    assert body.count("pp=2 dp=2 tp=2") == body.count("<h1>") == 1
    (head,) = re.findall("<table><tr>(.*)", body)
    assert re.findall("<th[^>]*>([^<]*)", head) == [
        *("family", "size", "groups", "stride", "hosts", "kind", "ring hops that leave", "one group")
    ]
    views = html.page([plan(EIGHT, nodes="2x4", views={"moe": {"ep": 8}})])  # two pictures, which are told apart
    assert [word in views for word in (">pp=2 dp=2 tp=2</text>", ">moe: ep=8</text>")] == [True, True]


# ---- in a terminal ----

TERMINAL = {
    "hosts-of-panels": lambda **more: terminal.lines(SIXTY_FOUR, host=hosts("8x8"), mark=13, **more),
    "hosts-of-rows": lambda **more: terminal.lines(SIXTY_FOUR, host=hosts("16x4"), **more),
    "ragged-hosts": lambda **more: terminal.lines(SIXTY_FOUR, host=hosts("6x8,4x4"), **more),
    "a-million-ranks": lambda **more: terminal.lines(
        Layout(pp=16, dp=512, cp=8, tp=16), host=hosts("131072x8"), mark=77777, **more
    ),
    "one-axis": lambda **more: terminal.lines(Layout(dp=300), **more),
}


@pytest.mark.parametrize("name", TERMINAL)
def test_a_picture_in_a_terminal_looks_like_this(name):
    text = styled_text.plain(TERMINAL[name]())
    assert max(map(len, text.splitlines())) <= 80
    golden.check(f"terminal-{name}.txt", text + "\n")


def test_without_hosts_it_is_the_picture_of_draw():
    for layout in (EIGHT, SIXTY_FOUR, Layout(dp=3), Layout(2, 2, 2), EIGHT.at(pp=0, dp=0, tp=0)):
        assert styled_text.plain(terminal.lines(layout)) == str(layout)


@pytest.mark.parametrize("width", [40, 60, 80, 132])
@pytest.mark.parametrize("name", TERMINAL)
def test_no_line_is_wider_than_the_terminal(name, width):
    for coloured in (False, True):
        assert max(len(styled_text.plain([line])) for line in TERMINAL[name](width=width, coloured=coloured)) <= width


# ---- in a browser ----

PAGES = {
    "8": lambda: html.page([plan(EIGHT, nodes="2x4")]),
    "64": lambda: html.page([plan(SIXTY_FOUR, nodes="8x8")]),
    "64-and-its-view": lambda: html.page([plan(SIXTY_FOUR, nodes="8x8", views={"moe": {"pp": 2, "edp": 4, "ep": 8}})]),
    "64-two-orders": lambda: html.page([plan(SIXTY_FOUR, nodes="8x8"), plan(Layout(tp=4, dp=16), nodes="8x8")]),
    "1024": lambda: html.page([plan(Layout(pp=4, dp=16, cp=2, tp=8), nodes="128x8")], "dp"),
    "domains": lambda: html.page([plan(Layout(pp=4, dp=9, tp=8), domains="4x18x4")]),
    "no-hosts": lambda: html.page([plan(Layout(dp=2, tp=2), families=[("dp", "tp")])]),
    "a-rank": lambda: html.rank_page(
        rank_report_of(SIXTY_FOUR, 13, parse_topology("8x8")),
        figures.make_figure(SIXTY_FOUR, host=hosts("8x8"), mark=13),
    ),
}


@pytest.fixture
def looked_at():
    """A browser is there."""
    if browser.find_browser() is None:
        pytest.skip(browser.ABSENT)


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("name", ["64-ranks", "two-meshes", "page"])
def test_a_browser_draws_it(name, tmp_path):
    if name == "page":
        source, width, height = tmp_path / "page.html", 1200, 900
        source.write_text(PAGES["64"](), encoding="utf-8")
        colours = {svg.colour(number) for number in range(16)}
    else:
        drawing = DRAWINGS[name]()
        source, width, height = tmp_path / "drawing.svg", math.ceil(drawing.width), math.ceil(drawing.height)
        source.write_text(drawing.svg(), encoding="utf-8")
        colours = {box.fill for box in drawing.boxes if box.kind == "cell"}
    assert colours <= pixels(browser.screenshot(source, width, height, tmp_path))


READABLE = 7.0
"""How tall letters are at least, in a browser's pixels."""


@pytest.mark.usefixtures("looked_at")
def test_in_a_browser_nothing_overlaps_or_is_cut(tmp_path):
    (seen,) = browser.measure_pages([whole(draw() for draw in DRAWINGS.values())], 4000, tmp_path)
    for name, drawing in zip(DRAWINGS, seen["drawings"], strict=True):
        assert drawing["faults"] == [], name
        assert drawing["held"] >= drawing["cells"] > 0, name
        assert drawing["smallest"] > READABLE - 0.01, name


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("width", [1440, 400])
def test_on_a_page_nothing_overlaps_or_is_cut_and_all_can_be_read(width, tmp_path):
    seen = browser.measure_pages([make() for make in PAGES.values()], width, tmp_path)
    for (name, make), page_ in zip(PAGES.items(), seen, strict=True):
        assert page_["faults"] == [], name
        assert page_["lines"] > 3, name
        assert len(page_["drawings"]) == make().count("<svg"), name
        for drawing in page_["drawings"]:
            assert drawing["faults"] == [], name
            assert drawing["held"] >= drawing["cells"] > 0, name
            assert drawing["smallest"] > READABLE - 0.01, name
        if name in ("8", "64", "no-hosts"):  # the numbers stand beside the picture where there is room for both
            assert page_["beside"] == (width > 1000), name
    cells = {name: sum(drawing["cells"] for drawing in page_["drawings"]) for name, page_ in zip(PAGES, seen)}
    assert (cells["8"], cells["64"], cells["64-and-its-view"], cells["1024"]) == (8, 64, 128, 1024)


@pytest.mark.usefixtures("looked_at")
def test_the_measuring_in_a_browser_can_fail(tmp_path):
    drawing = DRAWINGS["8-ranks"]()
    long = tuple(replace(words, text=words.text * 9) if words.kind == "rank" else words for words in drawing.texts)
    first = next(box for box in drawing.boxes if box.kind == "cell")
    near = tuple(replace(first, x=first.x + 3) if box.kind == "cell" else box for box in drawing.boxes)
    broken = [replace(drawing, texts=long), replace(drawing, width=drawing.width / 2), replace(drawing, boxes=near)]
    good = PAGES["64"]()
    shrunk = good.replace("</style>", "svg { max-width: 100%; height: auto }</style>")
    unscrolled = good.replace("overflow-x: auto", "overflow-x: hidden")
    raised = good.replace("</style>", ".wide { margin-top: -80px }</style>")
    tight = good.replace("</style>", "li { line-height: 5px }</style>")
    spilt = good.replace("</style>", "p { width: 1200px }</style>")
    seen = browser.measure_pages([whole(broken), good, shrunk, unscrolled, raised, tight, spilt], 400, tmp_path)
    wide, narrow, stacked = seen[0]["drawings"]
    assert wide["faults"]
    assert wide["held"] < wide["cells"]
    assert any(fault.startswith("cut: ") for fault in narrow["faults"])
    assert stacked["faults"]
    assert seen[1]["faults"] == []
    assert seen[2]["drawings"][0]["smallest"] < READABLE
    assert set(seen[3]["faults"]) == {"cut: what scrolls"}
    assert any(fault.endswith(" on a picture") for fault in seen[4]["faults"])
    assert any(fault.startswith("NCCL: ") for fault in seen[5]["faults"])
    assert "cut: P" in seen[6]["faults"]


def whole(drawings: Iterable[Drawing]) -> str:
    """A page of drawings alone."""
    return "<!doctype html><meta charset=utf-8>" + "".join(drawing.svg() for drawing in drawings)


def pixels(png: bytes) -> set[str]:
    """The colours that a PNG of 8 bits a part has."""
    width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
    depth, kind = png[24], png[25]
    assert depth == 8
    parts = {2: 3, 6: 4}[kind]
    data, at = b"", 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    raw, stride, above, seen = zlib.decompress(data), width * parts, bytearray(width * parts), set()
    for row in range(height):
        start = row * (stride + 1)
        line = unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), above, parts)
        seen |= {bytes(line[i : i + 3]) for i in range(0, stride, parts)}
        above = line
    return {f"#{colour.hex()}" for colour in seen}


def unfiltered(kind: int, line: bytearray, above: bytearray, parts: int) -> bytearray:
    """A line of a PNG as it is, from what it differs by from its neighbours."""
    if kind == 2:
        return bytearray((a + b) & 255 for a, b in zip(line, above))
    for i in range(len(line) if kind else 0):
        left, up = line[i - parts] if i >= parts else 0, above[i]
        corner = above[i - parts] if i >= parts else 0
        if kind == 4:
            near = left + up - corner
            guess = min((left, up, corner), key=lambda value: abs(near - value))
        else:
            guess = left if kind == 1 else (left + up) // 2
        line[i] = (line[i] + guess) & 255
    return line


def test_the_geometry_check_can_fail():
    drawing = DRAWINGS["8-ranks"]()
    cells = [box for box in drawing.boxes if box.kind == "cell"]
    near = replace(cells[1], x=cells[0].x + 3)
    with pytest.raises(AssertionError):
        check_geometry(replace(drawing, boxes=tuple(near if box is cells[1] else box for box in drawing.boxes)))
    long = tuple(replace(words, text=words.text * 9) if words.kind == "rank" else words for words in drawing.texts)
    with pytest.raises(AssertionError):
        check_geometry(replace(drawing, texts=long))
