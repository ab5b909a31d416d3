"""Output of the commands: files, and JSON or text on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pgmesh.cli.arguments import UsageError, spell
from pgmesh.drawing import styled_text
from pgmesh.drawing.styled_text import Line


def check(args: argparse.Namespace) -> None:
    """Raise UsageError if more than one output goes to standard output."""
    kinds = [kind for kind in ("svg", "html") if getattr(args, kind) == "-"]
    if len(kinds) + args.json > 1:
        for kind in kinds[not args.json :]:
            setattr(args, kind, f"{args.command}.{kind}")
        raise UsageError("standard output takes one output; write the others to files.", (spell(args), ""))


def write(
    args: argparse.Namespace,
    data: Callable[[], Any],
    lines: Callable[[int], list[Line]],
    **files: Callable[[], str],
) -> None:
    """Write the requested files, then the report.

    Args:
        data: returns the report as JSON data.
        lines: returns the report as lines of a given width.
        files: functions that return the SVG and the HTML.
    """
    saved: list[Line] = []
    for kind, text in files.items():
        file = getattr(args, kind)
        if file == "-":
            sys.stdout.write(text())
        elif file:
            try:
                Path(file).write_text(text(), encoding="utf-8")
            except OSError as error:
                raise UsageError(f"cannot write {file}: {error.strerror}.") from None
            saved += [[]] * (not saved) + [[(f"{kind.upper()} written to {file}", "")]]
    if args.json or "-" not in (args.svg, args.html):
        report(args, data, lambda width: [*lines(width), *saved])


def report(args: argparse.Namespace, data: Callable[[], Any], lines: Callable[[int], list[Line]]) -> None:
    """Print the report, as JSON or as text of the terminal's width."""
    if args.json:
        print(json.dumps(data(), indent=2))
    else:
        styled_text.write(lines(styled_text.width_of(sys.stdout)), sys.stdout)
    sys.stdout.flush()
