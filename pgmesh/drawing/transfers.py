"""A drawing of a transfer: the ranks that send on the left, those that receive on the right, and a line for each pair.

A rank that is on both sides is drawn twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pgmesh.drawing.svg import Box, Colours, Drawing, Line, Scale, Spacing, Text, colour, width_of

BETWEEN = 260.0
"""Pixels between the two columns."""

THICKEST = 10.0
"""Pixels of the thickest line."""


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
) -> Drawing:
    """The drawing of a transfer.

    Args:
        title: the first line.
        notes: the lines below it.
        sides: for the source and for the target, the name and the ranks that are shown.
        sent: what each rank sends, by sender and receiver. Pairs with a rank that is not shown are left out.

    >>> ends = [End(0, "tp0", "sends 8 bytes")], [End(1, "tp0", "receives 8 bytes")]
    >>> drawn = drawing("a tensor", [], (("source", ends[0]), ("target", ends[1])), {(0, 1): Sent(8, False)})
    >>> [line.title for line in drawn.lines]
    ['rank 0 sends 8 bytes to rank 1']
    """
    scale, edge = Scale.for_cells(max(len(ends) for _, ends in sides)), Spacing.margin
    font, cell, pitch = scale.label_font, scale.min_cell_width, scale.cell_height + scale.gap
    texts = [Text("title", edge, edge + 16, title, 16, bold=True)]
    texts += [Text("note", edge, edge + 36 + 17 * i, note, 11.5, fill=Colours.muted) for i, note in enumerate(notes)]
    top = edge + 36 + 17 * len(notes) + 2 * font
    beside = [max((width_of(word, font) for end in ends for word in end[1:]), default=0.0) + 6 for _, ends in sides]
    left = edge + beside[0]
    columns = left, left + cell + BETWEEN
    boxes, middles = [], []
    for x, (name, ends), is_source in zip(columns, sides, (True, False)):
        texts.append(Text("panel", x + cell / 2, top - font, name, font + 1, "middle", bold=True))
        aside, anchor = (x - 6, "end") if is_source else (x + cell + 6, "start")
        middles.append({end.rank: top + i * pitch + scale.cell_height / 2 for i, end in enumerate(ends)})
        for i, (rank, label, text) in enumerate(ends):
            y, fill = middles[-1][rank], colour(i) if is_source else Colours.panel
            edge_of = "" if is_source else Colours.frame
            tooltip = f"rank {rank:,}\n{label}\n{text}"
            boxes.append(
                Box("cell", x, y - scale.cell_height / 2, cell, scale.cell_height, fill, edge_of, title=tooltip)
            )
            texts.append(Text("rank", x + cell / 2, y + scale.rank_font * 0.36, str(rank), scale.rank_font, "middle"))
            texts.append(Text("axis", aside, y - 2, label, font, anchor, Colours.muted))
            texts.append(Text("axis", aside, y + font, text, font, anchor, Colours.muted))
    colours = {end.rank: colour(i) for i, end in enumerate(sides[0][1])}
    shown = {pair: each for pair, each in sent.items() if pair[0] in middles[0] and pair[1] in middles[1]}
    most = max((each.amount for each in shown.values()), default=1)
    lines = [
        Line(
            "far" if each.leaves else "near",
            columns[0] + cell,
            middles[0][sender],
            columns[1],
            middles[1][receiver],
            colours[sender],
            1 + (THICKEST - 1) * each.amount / most,
            f"rank {sender:,} sends {each.amount:,} bytes to rank {receiver:,}" + ", on another host" * each.leaves,
            "8 5" if each.leaves else "",
        )
        for (sender, receiver), each in shown.items()
    ]
    width = max(columns[1] + cell + beside[1], *(text.span[1] for text in texts)) + edge
    height = top + pitch * max(len(ends) for _, ends in sides) + edge
    ground = Box("ground", 0, 0, width, height, Colours.background, round=10)
    return Drawing(width, height, (ground, *boxes), tuple(texts), tuple(lines))
