"""A drawing of a transfer: the ranks that send on the left, those that receive on the right, and a line for each pair.

A rank that is on both sides is drawn twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pgmesh.drawing import palette, svg
from pgmesh.drawing.svg import FONT

BETWEEN = 260
"""Pixels between the two columns."""

CELL_WIDTH, CELL_HEIGHT = 46, 28
ROW = 36
"""Pixels from one rank to the next."""


class Side(NamedTuple):
    """The source or the target: its name, and for each rank that is shown its label, such as dp0-tp1."""

    name: str
    labels: Mapping[int, str]


class Sent(NamedTuple):
    """What one rank sends to another: the number of bytes, and if they leave the host."""

    amount: int
    leaves: bool


def drawing(title: str, notes: Sequence[str], source: Side, target: Side, sent: Mapping[tuple[int, int], Sent]) -> str:
    """The drawing of a transfer, as SVG.

    Args:
        title: the first line.
        notes: the lines below it.
        source: the ranks that send.
        target: the ranks that receive.
        sent: what each rank sends, by sender and receiver. Pairs with a rank that is not shown are left out.

    >>> drawn = drawing("", [], Side("source", {0: "tp0"}), Side("target", {1: "tp0"}), {(0, 1): Sent(8, False)})
    >>> "<title>rank 0 sends 8 bytes to rank 1</title>" in drawn
    True
    """
    parts, top = svg.heading(title, notes)
    top += 2 * FONT
    x = svg.width_of(FONT, source.labels.values()) + 8
    to_x = x + CELL_WIDTH + BETWEEN
    right = to_x + CELL_WIDTH + 8 + svg.width_of(FONT, target.labels.values())
    for left, beside, anchor, side in ((x, x - 6, "end", source), (to_x, to_x + CELL_WIDTH + 6, "start", target)):
        parts.append(svg.text("panel", left + CELL_WIDTH // 2, top - FONT, side.name, "middle"))
        for number, (rank, label) in enumerate(side.labels.items()):
            y = top + number * ROW
            parts.append(_cell(rank, label, left, y, palette.colour(number) if side is source else palette.PANEL))
            parts.append(svg.text("axis", beside, y + FONT + 7, label, anchor))
    parts += _lines(source, target, (x + CELL_WIDTH, to_x), top + CELL_HEIGHT // 2, sent)
    width = max(right, svg.width_of(svg.TITLE_FONT, [title]), svg.width_of(FONT, notes))
    height = top + ROW * max(len(source.labels), len(target.labels))
    return svg.document(width + 2 * svg.MARGIN, height + 2 * svg.MARGIN, [svg.moved(svg.MARGIN, svg.MARGIN, parts)])


def _cell(rank: int, label: str, x: int, y: int, fill: str) -> str:
    """A rank in its cell."""
    title = svg.tooltip(f"rank {rank:,}", label)
    place = f'x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" rx="4"'
    number = svg.text("rank", x + CELL_WIDTH // 2, y + FONT + 7, str(rank), "middle")
    return f'<rect class="cell" {place} fill="{fill}" stroke="{palette.PANEL_FRAME}">{title}</rect>\n{number}'


def _lines(
    source: Side, target: Side, ends: tuple[int, int], top: int, sent: Mapping[tuple[int, int], Sent]
) -> Iterator[str]:
    """A curve for each pair of ranks that are shown, thicker for more bytes, dashed if they leave the host.

    Args:
        ends: the x of its two ends.
        top: the y of the first rank of each side.
    """
    row_of_sender, row_of_receiver = ({rank: row for row, rank in enumerate(side.labels)} for side in (source, target))
    most = max((each.amount for each in sent.values()), default=1)
    x, to_x = ends
    middle = (x + to_x) // 2
    for (sender, receiver), each in sent.items():
        if sender not in row_of_sender or receiver not in row_of_receiver:
            continue
        number = row_of_sender[sender]
        y, to_y = top + number * ROW, top + row_of_receiver[receiver] * ROW
        curve = f"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}"
        stroke = f'stroke="{palette.colour(number)}" stroke-width="{1 + 9 * each.amount / most:.1f}"'
        kind, dashes, away = ("far", "8 5", ", on another host") if each.leaves else ("near", "none", "")
        title = svg.tooltip(f"rank {sender:,} sends {each.amount:,} bytes to rank {receiver:,}{away}")
        yield f'<path class="{kind}" d="{curve}" fill="none" {stroke} stroke-dasharray="{dashes}">{title}</path>'
