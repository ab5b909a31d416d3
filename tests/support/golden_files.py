"""Answers as files to review. ``GOLDEN=write`` writes them anew; then look at the difference before it is committed."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"


def check(name: str | Path, text: str) -> None:
    """The text is that of the file: one of the folder, or at a path from the root of all files."""
    file = FOLDER / name
    if os.environ.get("GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"{name} is not what it was; GOLDEN=write writes it anew"
