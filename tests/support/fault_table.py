"""The tests of each fault in docs/faults.md: ``python -m tests.support.fault_table`` prints them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]


def faults() -> list[str]:
    """The first cell of each row of the tables in docs/faults.md."""
    lines = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [first for first, *_ in cells if first != "what happens"]


def marked_faults(function: ast.FunctionDef) -> list[str]:
    """The texts of the markers ``pytest.mark.fault`` of a function."""
    calls = [each for each in function.decorator_list if isinstance(each, ast.Call)]
    return [ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "pytest.mark.fault"]


@functools.cache
def marked_tests() -> dict[str, list[str]]:
    """For each text of a marker, the functions that have it, such as ``tests/faults/test_faults.py::test_name``."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for fault in marked_faults(node) if isinstance(node, ast.FunctionDef) else ():
                found.setdefault(fault, []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


if __name__ == "__main__":
    tests = marked_tests()
    print("| fault | tests |\n|---|---|")
    for fault in faults():
        print(f"| {fault} | {', '.join(tests[fault])} |")
