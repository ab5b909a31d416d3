"""Each row of docs/faults.md has a test, and each marker of a test names a row."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def faults() -> set[str]:
    """The first cell of each row of the tables in docs/faults.md."""
    lines = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    return {line.split("|")[1].strip() for line in lines if line.startswith("| ")} - {"what happens"}


def marked_faults() -> set[str]:
    """The texts of the markers ``pytest.mark.fault``."""
    files = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("*.py")]
    functions = [node for file in files for node in file.body if isinstance(node, ast.FunctionDef)]
    calls = [each for function in functions for each in function.decorator_list if isinstance(each, ast.Call)]
    return {ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "pytest.mark.fault"}


def test_faults_are_those_of_the_markers():
    assert marked_faults() == faults()
