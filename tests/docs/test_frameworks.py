"""docs/frameworks.md: each example runs on four ranks, and rank 0 prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.worlds import fresh_world

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n\n```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def run_example(program: str) -> str:
    printed = io.StringIO()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        exec(program, names)
    return printed.getvalue()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 combines these DeviceMeshes from torch 2.13 on")
@pytest.mark.parametrize(("program", "shown"), EXAMPLES, ids=["adopt", "give"])
def test_example_prints_what_the_page_shows(program: str, shown: str):
    with fresh_world(4) as own:
        assert own.run(run_example, program)[0] == shown


def test_each_program_on_the_page_has_its_output():
    assert PAGE.count("```python") == len(EXAMPLES) == 2
