"""A figure: one thing measured on several sides, and what is asked of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.sides import SIDES

SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "B": ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")),
}
BEST = "best peer"
OURS = "pgmesh"
PEERS = [side for side in SIDES if side != OURS]


@dataclass(frozen=True)
class Wish:
    """What a figure is to reach.

    Args:
        times: at least so many times less than another side, if above 0.
        against: which; ``BEST`` for the best of the peers.
        most: or at most so many times what that side takes, or at most so much where no side is named.
    """

    times: float = 0.0
    against: str = ""
    most: float = 0.0

    def met(self, values: Mapping[str, float]) -> bool | None:
        """None where the other side is not there."""
        if not self.against:
            return values[OURS] <= self.most
        other = best(values) if self.against == BEST else values.get(self.against)
        if other is None:
            return None
        return values[OURS] * self.times <= other if self.times else values[OURS] <= other * self.most

    def say(self, unit: str) -> str:
        if not self.against:
            return f"<= {say(self.most, unit)}"
        return f"{self.times:g}x {self.against}" if self.times else f"<= {self.most:.3g} {self.against}"


@dataclass(frozen=True)
class Figure:
    """One line of a table. Less is better on all sides.

    Args:
        what: what every side did.
        values: by side, the median, in seconds, bytes or a count; all taken in turn in the same run.
        unit: "s", "B", "" for a count, or "x" for how many times.
        wishes: what is asked of ours; none where nothing is.
        left_out: by side, why there is no value.
    """

    what: str
    values: Mapping[str, float]
    unit: str = "s"
    wishes: tuple[Wish, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def met(self) -> dict[str, bool]:
        """What is asked for, and whether it is reached; nothing where the other side is not there."""
        met = {wish.say(self.unit): wish.met(self.values) for wish in self.wishes}
        return {wish: each for wish, each in met.items() if each is not None}

    def ratio(self, side: str) -> float | None:
        """How many times less ours is than a side's, or than the best peer's."""
        other = best(self.values) if side == BEST else self.values.get(side)
        ours = self.values[OURS]
        return None if other is None or ours <= 0 or self.unit == "x" else other / ours

    def cell(self, side: str) -> str:
        return say(self.values[side], self.unit) if side in self.values else self.left_out.get(side, "")

    def record(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "unit": self.unit,
            "values": dict(self.values),
            "left out": dict(self.left_out),
            "times less than the best peer": self.ratio(BEST),
            "times less than DeviceMesh": self.ratio("DeviceMesh"),
            "asked for, and met": self.met,
        }


def best(values: Mapping[str, float]) -> float | None:
    """The best of the peers."""
    return min((values[side] for side in PEERS if side in values), default=None)


def medians(values: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each side that was measured."""
    return {side: median(each) for side, each in values.items() if each}


def table(title: str, figures: Iterable[Figure]) -> str:
    """The figures of a part, a line each."""
    figures = list(figures)
    columns = list(dict.fromkeys(side for figure in figures for side in [*SIDES, *figure.values, *figure.left_out]))
    columns = [side for side in columns if any(figure.cell(side) for figure in figures)]
    ratios = [side for side in (BEST, "DeviceMesh") if any(figure.ratio(side) for figure in figures)]
    head = (title, *columns, *(f"{side}/{OURS}" for side in ratios), "asked for", "met")
    rows = [
        (
            figure.what,
            *map(figure.cell, columns),
            *("" if (ratio := figure.ratio(side)) is None else f"{_three(ratio)}x" for side in ratios),
            ", ".join(figure.met),
            ", ".join("yes" if met else "NO" for met in figure.met.values()),
        )
        for figure in figures
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = [head, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def verdict(figures: Iterable[Figure]) -> str:
    """What is asked for and not reached."""
    wishes = [(figure.what, wish, met) for figure in figures for wish, met in figure.met.items()]
    missed = [f"\n  {what}: {wish}" for what, wish, met in wishes if not met]
    if not missed:
        return f"all {len(wishes)} that are asked for are met"
    return f"not met, {len(missed)} of {len(wishes)}:{''.join(missed)}"


def say(value: float, unit: str) -> str:
    """A value in words."""
    if unit == "x":
        return f"{_three(value)}x"
    if not unit:
        return f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"
    scale, word = next((scale for scale in SCALES[unit] if abs(value) >= scale[0]), SCALES[unit][-1])
    return f"{_three(value / scale)} {word}"


def _three(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"
