"""Styled text: lines of pieces, each with a style. Written in colour on a terminal if rich is installed, else plain."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TextIO

Line = list[tuple[str, str]]
"""Pieces of text, each with a style of rich, such as ``"bold red"``; ``""`` is plain."""


def plain(lines: Iterable[Line]) -> str:
    """The text without styles and without trailing spaces.

    >>> plain([[("tp", "bold"), ("  ", ""), ("4 ", "")]])
    'tp  4'
    """
    texts = ["".join(text for text, _ in line) for line in lines]
    return "\n".join(text.rstrip() for text in texts)


def length(line: Line) -> int:
    """The characters of a line."""
    return sum(len(text) for text, _ in line)


def columns(rows: Sequence[Line], right: Sequence[bool], gap: str = "  ") -> list[Line]:
    """Rows of cells as aligned lines. ``right`` is True for each column that is right-aligned.

    >>> print(plain(columns([[("tp", ""), ("4", "")], [("data", ""), ("16", "")]], right=[False, True])))
    tp     4
    data  16
    """
    widths = [max(len(text) for text, _ in column) for column in zip(*rows)]
    lines: list[Line] = []
    for row in rows:
        line: Line = []
        for (text, style), width, to_right in zip(row, widths, right):
            padded = text.rjust(width) if to_right else text.ljust(width)
            line += [(padded, style), (gap, "")]
        lines.append(line[:-1])
    return lines


def columns_with_ranks(
    rows: Sequence[Line],
    right: Sequence[bool],
    title: str,
    groups: Iterable[tuple[Sequence[int], int]],
    width: int,
) -> list[Line]:
    """``columns`` with another column: the ranks of each group, shortened to fit in ``width``, if there is room.

    Args:
        rows: the cells, the header first.
        right: as for ``columns``.
        title: the header of the other column.
        groups: for each row but the header, the two arguments of ``ranks_in``.
    """
    room = width - 2 - length(columns(rows, right)[0])
    if room < len(title):
        return columns(rows, right)
    ranks = [title, *(ranks_in(room, *group) for group in groups)]
    return columns([[*row, (text, "dim")] for row, text in zip(rows, ranks)], [*right, False])


def ranks_in(room: int, ranks: Sequence[int], size: int) -> str:
    """The ranks of a group in at most ``room`` characters: the first ones that fit, and the last.

    Args:
        ranks: all ranks of the group, or the first ones and the last.
        size: the number of ranks in the group.

    >>> ranks_in(9, (0, 4, 8, 12), 4), ranks_in(12, (0, 4, 8, 12), 4)
    ('0, …, 12', '0, 4, 8, 12')
    """
    words = [str(rank) for rank in ranks]
    for count in range(len(words), min(size, 2) - 1, -1):
        shown = words if count == size else [*words[: count - 1], "…", words[-1]]
        if len(", ".join(shown)) <= room:
            return ", ".join(shown)
    return "…"


def wrapped(text: str, width: int, style: str = "", indent: str = "") -> list[Line]:
    """Wrap a text between words, to lines of ``width``. Any space between words becomes one blank."""
    words = " ".join(text.split())
    lines = textwrap.wrap(words, width - len(indent), break_long_words=False, break_on_hyphens=False)
    return [[(f"{indent}{line}", style)] for line in lines]


MARKS = {"ok": "green", "warn": "yellow", "bad": "bold red", "--": "dim"}
"""The marks of a finding, with their styles."""


def marked(mark: str, text: str, width: int = 80) -> list[Line]:
    """A finding, as wrapped lines with its mark in front.

    >>> print(plain(marked("ok", "all ranks joined")))
    ok    all ranks joined
    """
    first, *rest = wrapped(text, width, indent=" " * 6)
    return [[(mark, MARKS[mark]), (first[0][0][len(mark) :], "")], *rest]


def is_terminal(stream: TextIO) -> bool:
    """True if a stream is a terminal of the user.

    Open MPI connects each rank to a pseudo-terminal even if its output is piped. Such a terminal does not count.
    """
    return stream.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ


def width_of(stream: TextIO) -> int:
    """The width of a line in characters: that of the terminal, at least 40; 80 if the stream is not a terminal."""
    return max(40, shutil.get_terminal_size().columns) if is_terminal(stream) else 80


def is_coloured(stream: TextIO) -> bool:
    """True if lines are written in colour: the stream is a terminal, and rich is installed."""
    return is_terminal(stream) and find_spec("rich") is not None


def write(lines: Sequence[Line], stream: TextIO) -> None:
    """Write lines to a stream, in colour if ``is_coloured``."""
    if not is_coloured(stream):
        stream.write(plain(lines) + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, soft_wrap=True)
    for line in lines:
        text = Text.assemble(*line)
        text.rstrip()
        console.print(text)
