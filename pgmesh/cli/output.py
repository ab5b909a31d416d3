"""Output of the commands: files, and JSON or text on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pgmesh.cli.arguments import UsageError
from pgmesh.drawing import styled_text
from pgmesh.drawing.styled_text import Line


def write(
    args: argparse.Namespace, data: Callable[[], Any], lines: Callable[[int], list[Line]], svg: Callable[[], str]
) -> None:
    """Write the requested outputs.

    Args:
        data: returns the report as JSON data.
        lines: returns the report as lines of a given width.
        svg: returns the picture.

    Raises:
        UsageError: a file cannot be written, or both JSON and SVG go to standard output.
    """
    if args.json and args.svg == "-":
        raise UsageError("standard output takes one output; write the other to a file.")
    if args.svg == "-":
        sys.stdout.write(svg())
        return
    saved: list[Line] = []
    if args.svg:
        try:
            Path(args.svg).write_text(svg(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {args.svg}: {error.strerror}.") from None
        saved = [[], [(f"SVG written to {args.svg}", "")]]
    report(args, data, lambda width: [*lines(width), *saved])


def report(args: argparse.Namespace, data: Callable[[], Any], lines: Callable[[int], list[Line]]) -> None:
    """Print the report, as JSON or as text of the terminal's width."""
    if args.json:
        print(json.dumps(data(), indent=2))
    else:
        styled_text.write(lines(styled_text.width_of(sys.stdout)), sys.stdout)
    sys.stdout.flush()
