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


class End(NamedTuple):
    """A rank on one side.

    Args:
        rank: the rank.
        label: its place in the mesh, such as dp0-tp1.
        text: what it does, such as "sends 64 bytes".
    """

    rank: int
    label: str
    text: str


class Sent(NamedTuple):
    """What one rank sends to another: the number of bytes, and if they leave the host."""

    amount: int
    leaves: bool


def drawing(
    title: str,
    notes: Sequence[str],
    sides: tuple[tuple[str, Sequence[End]], tuple[str, Sequence[End]]],
    sent: Mapping[tuple[int, int], Sent],
) -> str:
    """The drawing of a transfer, as SVG.

    Args:
        title: the first line.
        notes: the lines below it.
        sides: for the source and for the target, the name and the ranks that are shown.
        sent: what each rank sends, by sender and receiver. Pairs with a rank that is not shown are left out.

    >>> ends = [End(0, "tp0", "sends 8 bytes")], [End(1, "tp0", "receives 8 bytes")]
    >>> drawn = drawing("a tensor", [], (("source", ends[0]), ("target", ends[1])), {(0, 1): Sent(8, False)})
    >>> "<title>rank 0 sends 8 bytes to rank 1</title>" in drawn
    True
    """
    parts, top = svg.heading(title, notes)
    top += 2 * FONT
    (source_name, senders), (target_name, receivers) = sides
    x = svg.width_of(FONT, [words for end in senders for words in end[1:]]) + 8
    to_x = x + CELL_WIDTH + BETWEEN
    right = to_x + CELL_WIDTH + 8 + svg.width_of(FONT, [words for end in receivers for words in end[1:]])
    for left, name in ((x, source_name), (to_x, target_name)):
        parts.append(svg.text("panel", left + CELL_WIDTH // 2, top - FONT, name, "middle"))
    for number, end in enumerate(senders):
        parts += _end(end, x, top + number * ROW, x - 6, "end", palette.colour(number))
    for number, end in enumerate(receivers):
        parts += _end(end, to_x, top + number * ROW, to_x + CELL_WIDTH + 6, "start", palette.PANEL)
    middle = top + CELL_HEIGHT // 2
    parts += _lines(senders, receivers, (x + CELL_WIDTH, to_x), middle, sent)
    width = max(right, svg.width_of(svg.TITLE_FONT, [title]), svg.width_of(FONT, notes))
    height = top + ROW * max(len(senders), len(receivers))
    return svg.document(width + 2 * svg.MARGIN, height + 2 * svg.MARGIN, [svg.moved(svg.MARGIN, svg.MARGIN, parts)])


def _end(end: End, x: int, y: int, beside: int, anchor: str, fill: str) -> Iterator[str]:
    """A rank in its cell, and its label and its text at ``beside``."""
    title = svg.tooltip(f"rank {end.rank:,}", end.label, end.text)
    place = f'x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" rx="4"'
    yield f'<rect class="cell" {place} fill="{fill}" stroke="{palette.PANEL_FRAME}">{title}</rect>'
    yield svg.text("rank", x + CELL_WIDTH // 2, y + FONT + 7, str(end.rank), "middle")
    yield svg.text("axis", beside, y + FONT, end.label, anchor)
    yield svg.text("axis", beside, y + 2 * FONT + 2, end.text, anchor)


def _lines(
    senders: Sequence[End],
    receivers: Sequence[End],
    ends: tuple[int, int],
    top: int,
    sent: Mapping[tuple[int, int], Sent],
) -> Iterator[str]:
    """A curve for each pair of ranks that are shown, thicker for more bytes, dashed if they leave the host.

    Args:
        ends: the x of its two ends.
        top: the y of the first rank of each side.
    """
    row_of_sender = {end.rank: number for number, end in enumerate(senders)}
    row_of_receiver = {end.rank: number for number, end in enumerate(receivers)}
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
