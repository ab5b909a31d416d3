"""Figures of the benchmarks: a measurement on several sides, and the targets for pgmesh."""

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
class Target:
    """A target for pgmesh.

    Args:
        times: the other side's value must be at least this multiple of pgmesh's, if above 0.
        against: the other side; ``BEST`` is the best of the peers; empty for an absolute limit.
        most: otherwise, the limit as a multiple of the other side's value, or the absolute limit.
    """

    times: float = 0.0
    against: str = ""
    most: float = 0.0

    def met(self, values: Mapping[str, float]) -> bool | None:
        """True if the target is met; None if the other side was not measured."""
        if not self.against:
            return values[OURS] <= self.most
        other = best(values) if self.against == BEST else values.get(self.against)
        if other is None:
            return None
        return values[OURS] * self.times <= other if self.times else values[OURS] <= other * self.most

    def format(self, unit: str) -> str:
        if not self.against:
            return f"<= {format_value(self.most, unit)}"
        return f"{self.times:g}x {self.against}" if self.times else f"<= {self.most:.3g} {self.against}"


@dataclass(frozen=True)
class Figure:
    """One row of a table. Smaller values are better.

    Args:
        what: the measured operation.
        values: the median of each side, all measured in the same run.
        unit: "s", "B", "" for a count, or "x" for a ratio.
        targets: the targets for pgmesh.
        left_out: the reason for each side without a value.
    """

    what: str
    values: Mapping[str, float]
    unit: str = "s"
    targets: tuple[Target, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def met(self) -> dict[str, bool]:
        """Each target as text, and True if it is met. Without targets whose other side was not measured."""
        met = {target.format(self.unit): target.met(self.values) for target in self.targets}
        return {target: each for target, each in met.items() if each is not None}

    def ratio(self, side: str) -> float | None:
        """The value of a side, or of the best peer, divided by that of pgmesh."""
        other = best(self.values) if side == BEST else self.values.get(side)
        ours = self.values[OURS]
        return None if other is None or ours <= 0 or self.unit == "x" else other / ours

    def cell(self, side: str) -> str:
        return format_value(self.values[side], self.unit) if side in self.values else self.left_out.get(side, "")

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
    """The best value of the peers."""
    return min((values[side] for side in PEERS if side in values), default=None)


def medians(values: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each measured side."""
    return {side: median(each) for side, each in values.items() if each}


def table(title: str, figures: Iterable[Figure]) -> str:
    """The figures of a part as a table, one row each."""
    figures = list(figures)
    columns = list(dict.fromkeys(side for figure in figures for side in [*SIDES, *figure.values, *figure.left_out]))
    columns = [side for side in columns if any(figure.cell(side) for figure in figures)]
    ratios = [side for side in (BEST, "DeviceMesh") if any(figure.ratio(side) for figure in figures)]
    head = (title, *columns, *(f"{side}/{OURS}" for side in ratios), "asked for", "met")
    rows = [
        (
            figure.what,
            *map(figure.cell, columns),
            *("" if (ratio := figure.ratio(side)) is None else f"{_three_digits(ratio)}x" for side in ratios),
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


def summary(figures: Iterable[Figure]) -> str:
    """The targets that are not met, as text."""
    targets = [(figure.what, target, met) for figure in figures for target, met in figure.met.items()]
    missed = [f"\n  {what}: {target}" for what, target, met in targets if not met]
    if not missed:
        return f"all {len(targets)} targets are met"
    return f"not met, {len(missed)} of {len(targets)}:{''.join(missed)}"


def format_value(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "x":
        return f"{_three_digits(value)}x"
    if not unit:
        return f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"
    scale, word = next((scale for scale in SCALES[unit] if abs(value) >= scale[0]), SCALES[unit][-1])
    return f"{_three_digits(value / scale)} {word}"


def _three_digits(value: float) -> str:
    """A number with three digits, or all digits before the decimal point."""
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"
