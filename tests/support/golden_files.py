"""Golden files: expected outputs, kept for review. ``GOLDEN=write`` rewrites them; review the diff before a commit."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def check(name: str | Path, text: str) -> None:
    """Assert that the text equals a file: one in ``tests/golden``, or at an absolute path."""
    file = FOLDER / name
    if os.environ.get("GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"{name} has changed; GOLDEN=write rewrites it"
