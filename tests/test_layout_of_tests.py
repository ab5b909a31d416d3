"""Rules for the files of tests: no test imports another test, and the list of the longest files names files."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conftest import LONGEST, TESTS


def imported_tests(path: Path, source: str) -> list[str]:
    """Names of the test modules that a file imports, relative imports resolved."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ("tests", *path.parent.parts)[: len(path.parts) - node.level + 1] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found += [name for name in names if is_test_module(name)]
    return found


def is_test_module(name: str) -> bool:
    first, *parts = name.split(".")
    return first == "tests" and bool(parts) and parts[-1].startswith("test_") and (TESTS.joinpath(*parts[:-1])).is_dir()


def test_no_file_imports_a_test_file():
    files = [path.relative_to(TESTS) for path in TESTS.rglob("*.py")]
    found = {str(path): imported_tests(path, (TESTS / path).read_text(encoding="utf-8")) for path in files}
    assert len(found) > 100
    assert {path: names for path, names in found.items() if names} == {}


def test_each_longest_file_exists():
    assert [name for name in LONGEST if not (TESTS / f"{name}.py").is_file()] == []
