"""docs/frameworks.md: its example runs on four ranks, and rank 0 prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from tests.support.worlds import fresh_world

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
((PROGRAM, SHOWN),) = re.findall(r"^```python\n(.*?)^```\n\n```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def run_example(program: str) -> str:
    printed = io.StringIO()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        exec(program, names)
    return printed.getvalue()


def test_example_prints_what_the_page_shows():
    assert PAGE.count("```python") == 1
    with fresh_world(4) as own:
        assert own.run(run_example, PROGRAM)[0] == SHOWN
