"""A figure: one thing measured on both sides, how many times better ours is, and how many times is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "B": ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")),
}


@dataclass(frozen=True)
class Figure:
    """One line of the table. Less is better on both sides.

    Args:
        what: what both sides did.
        ours: pgmesh's median, in seconds, bytes or a count.
        theirs: DeviceMesh's, taken in turn with ours in the same run; None where only pgmesh was asked.
        unit: "s", "B", or "" for a count.
        asked: the least ratio of theirs to ours that pgmesh sets itself; None where it sets none.
        limit: or the most that ours may be.
    """

    what: str
    ours: float
    theirs: float | None
    unit: str = "s"
    asked: float | None = None
    limit: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times less ours is."""
        return self.theirs / self.ours if self.theirs is not None and self.ours > 0 else None

    @property
    def met(self) -> bool | None:
        """Whether what is asked for is reached; None where nothing is."""
        if self.limit is not None:
            return self.ours <= self.limit
        return None if self.asked is None else self.ratio is not None and self.ratio >= self.asked

    def cells(self) -> tuple[str, ...]:
        ratio = "" if self.ratio is None else f"{_three(self.ratio)}x"
        asked = f"{self.asked:g}x" if self.asked else "" if self.limit is None else f"<= {_say(self.limit, self.unit)}"
        met = {True: "yes", False: "NO", None: ""}[self.met]
        theirs = "" if self.theirs is None else _say(self.theirs, self.unit)
        return self.what, _say(self.ours, self.unit), theirs, ratio, asked, met

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


def medians(values: dict[str, list[float]]) -> tuple[float, float]:
    """The medians of both sides, ours first."""
    return median(values["ours"]), median(values["theirs"])


def table(figures: Iterable[Figure]) -> str:
    """The figures, a line each, and then those that are not met."""
    figures = list(figures)
    head = ("what", "pgmesh", "DeviceMesh", "ratio", "asked for", "met")
    rows = [figure.cells() for figure in figures]
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = [head, tuple("-" * width for width in widths), *rows]
    text = "\n".join(
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths)))
        for line in lines
    )
    missed = [figure for figure in figures if figure.met is False]
    asked = sum(figure.met is not None for figure in figures)
    if missed:
        return f"{text}\n\nnot met, {len(missed)} of {asked}:\n" + "\n".join(f"  {figure.what}" for figure in missed)
    return f"{text}\n\nall {asked} that are asked for are met"


def _say(value: float, unit: str) -> str:
    if not unit:
        return f"{value:g}"
    scale, word = next((scale for scale in SCALES[unit] if abs(value) >= scale[0]), SCALES[unit][-1])
    return f"{_three(value / scale)} {word}"


def _three(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"
