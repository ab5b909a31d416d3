"""Answers, written where they are asked for."""

from __future__ import annotations

import sys
from pathlib import Path

from pgmesh.commands.given import UsageError


def save(text: str, file: str) -> bool:
    """Write to a file, or to standard output; whether it was a file."""
    if file == "-":
        sys.stdout.write(text)
        return False
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}.") from None
    return True
