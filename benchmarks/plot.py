"""Plot of cost against the size of the world as SVG, in plain Python, with logarithmic scales.

python -m benchmarks.plot runs.json speed.svg       # uses the last value of each figure in the file
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.report import format_value
from benchmarks.sides import FLOOR, SIDES

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 330, 62, 32, 34, 44
COLOURS = dict(zip((*SIDES, FLOOR), ("#c1121f", "#1d4e89", "#5a7d2a", "#b8860b", "#6b4c9a", "#2a9d8f", "#999999")))
PANELS = {
    "one rank, six combinations made": r"one rank of ([\d,]+)$",
    "gloo ranks, six combinations made": r"(\d+) gloo ranks: made \(",
    "gloo ranks, made and used": r"(\d+) gloo ranks: made and used",
}

Curves = dict[str, list[tuple[float, float]]]


def drawing(records: Iterable[Mapping[str, Any]]) -> str:
    """SVG of the panels that have figures, next to each other, with one legend."""
    last = {record["what"]: record for record in records}
    panels = {title: found for title, pattern in PANELS.items() if (found := _curves(last.values(), pattern))}
    sides = [side for side in COLOURS if any(side in curves for curves in panels.values())]
    parts = [_panel(title, curves, i * WIDTH) for i, (title, curves) in enumerate(panels.items())]
    width, height = max(WIDTH * len(panels), LEFT + 150 * len(sides)), HEIGHT + 30
    for i, side in enumerate(sides):
        x = LEFT + i * 150
        parts.append(f'<rect x="{x}" y="{HEIGHT + 6}" width="14" height="4" fill="{COLOURS[side]}"/>')
        parts.append(f'<text x="{x + 20}" y="{HEIGHT + 12}">{escape(side)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" fill="#222">\n'
        '<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _curves(records: Iterable[Mapping[str, Any]], pattern: str) -> Curves:
    curves: Curves = defaultdict(list)
    for record in records:
        if found := re.match(pattern, record["what"]):
            for side, value in record["values"].items():
                curves[side].append((float(found[1].replace(",", "")), value))
    return dict(curves)


def _panel(title: str, curves: Curves, at: float) -> str:
    points = [point for curve in curves.values() for point in curve]
    ranks, seconds = [math.log10(x) for x, _ in points], [math.log10(y) for _, y in points]
    low, high = math.floor(min(seconds)), math.ceil(max(seconds))
    first, last = min(ranks), max(max(ranks), min(ranks) + 0.1)

    def x(value: float) -> float:
        return at + LEFT + (math.log10(value) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    lines = [f'<text x="{at + LEFT}" y="18" font-weight="bold">{escape(title)}</text>']
    for power in range(low, high + 1):
        line = y(10.0**power)
        lines.append(f'<path d="M{at + LEFT} {line:.1f}H{at + WIDTH - RIGHT}" stroke="#ddd"/>')
        words = format_value(10.0**power, "s").replace(".00", "").replace(".0", "")
        lines.append(f'<text x="{at + LEFT - 6}" y="{line + 4:.1f}" text-anchor="end">{words}</text>')
    for value in sorted({x for x, _ in points}):
        lines.append(f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:,.0f}</text>')
    middle = at + (LEFT + WIDTH - RIGHT) / 2
    lines.append(f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 34}" text-anchor="middle">ranks</text>')
    for side, curve in curves.items():
        path = "L".join(f"{x(ranks):.1f} {y(took):.1f}" for ranks, took in sorted(curve))
        lines.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[side]}" stroke-width="2"/>')
        lines += [
            f'<circle cx="{x(ranks):.1f}" cy="{y(took):.1f}" r="3" fill="{COLOURS[side]}"/>' for ranks, took in curve
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    parts = [figures for run in json.loads(source.read_text()) for figures in run["figures"].values()]
    target.write_text(drawing([record for figures in parts for record in figures]))
