"""docs/coming_from/torchtitan.md: its script prints the same with torchtitan's class and with the page's."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.programs import run_ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming_from" / "torchtitan.md").read_text(encoding="utf-8")
BEFORE, CLASS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(SHOWN,) = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
IMPORTS, _, REST = BEFORE.partition("\n\n")
AFTER = f"{IMPORTS}\n\n{CLASS}\n\n{REST.replace('= ParallelDims(', '= Dims(')}"

needs_torchtitan = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
)


def test_page_shows_the_class_of_the_example():
    program = (ROOT / "examples" / "torchtitan_meshes.py").read_text(encoding="utf-8")
    assert CLASS[CLASS.index("class Dims") :] in program
    assert AFTER.count("= Dims(") == 1


@needs_torchtitan
@pytest.mark.long
@pytest.mark.parametrize("program", [BEFORE, AFTER], ids=["before", "after"])
def test_script_prints_what_the_page_shows(tmp_path: Path, program: str):
    assert run_ranks(tmp_path, program, 4) == SHOWN


@needs_torchtitan
@pytest.mark.long
def test_table_has_each_degree_and_mesh():
    from torchtitan.config.configs import ParallelismConfig
    from torchtitan.distributed import ParallelDims

    table = PAGE.partition("## Degrees and axes")[2]
    degrees = {field.name for field in dataclasses.fields(ParallelismConfig) if field.name.endswith("_degree")}
    assert set(re.findall(r"\w+_degree", table)) == degrees
    documented = set(re.findall(r"^ +(\w+):  ", str(ParallelDims.build_mesh.__doc__), re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", table)) >= documented
