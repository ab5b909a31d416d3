"""Output files of the commands, and standard output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pgmesh.cli.arguments import CommandLine, UsageError


def check(args: argparse.Namespace, command_line: CommandLine) -> None:
    """Raise UsageError if more than one output goes to standard output."""
    if sum(file == "-" for file in (args.svg, args.html)) + args.json < 2:
        return
    words, room = list(command_line.words), not args.json
    for i, word in enumerate(words):
        if word == "-" and words[i - 1] in ("--svg", "--html"):
            words[i] = word if room else f"{words[0]}.{words[i - 1][2:]}"
            room = False
    better = CommandLine(tuple(words))
    suggestions = [] if better == command_line else [(better.with_changes({}), "")]
    raise UsageError("standard output takes one output; write the others to files.", *suggestions)


def save(text: str, file: str) -> bool:
    """Write to a file, or to standard output for ``-``; return True for a file."""
    if file == "-":
        sys.stdout.write(text)
        return False
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}.") from None
    return True
