"""Imports point down only: read from the sources with ast, functions included, what only a type checker sees left out."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pgmesh"

FLOORS = [
    "__init__",
    "errors",
    "sizes",
    "draw",
    "layout",
    "options",
    "rendezvous",
    "groups",
    "launch",
    "mesh",
    "interop",
    "recipes",
    "parallel",
    "__main__",
]
"""From the bottom up: a file, or a folder of them, imports only what stands before it here."""

NEVER = {**dict.fromkeys(FLOORS[: FLOORS.index("options") + 1], "torch"), "mesh": "pgmesh.launch"}
"""What a file must not import, though its floor would let it."""

SEAM = "groups"
"""The one file that may name what is private to torch."""


def offences(path: str, source: str) -> list[str]:
    """What is wrong with the imports of a file, by its path inside pgmesh/."""
    floor = Path(path).parts[0].removesuffix(".py")
    if floor not in FLOORS:
        return [f"{path}: has no floor; give {floor!r} its place in FLOORS"]
    tree = _Seen().visit(ast.parse(source))
    imported = [(line, name) for line, names in _imports(path, tree) for name in names]
    wrong = [(line, f"imports {name}, which is not below") for line, name in imported if _is_above(name, floor)]
    wrong += [(line, f"imports {name}") for line, name in imported if _is_in(name, NEVER.get(floor, "-"))]
    if floor != SEAM:
        wrong += [(line, f"names {name}; only {SEAM}.py may") for line, name in _private(path, tree)]
    return [f"{path}:{line}: {what}" for line, what in sorted(set(wrong))]


class _Seen(ast.NodeTransformer):
    """Takes away what only a type checker sees."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:  # noqa: N802
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") else node


def _imports(path: str, tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Each import's line and the whole names that it may load."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield node.lineno, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = _home(path, node)
            yield node.lineno, [home if _is_file(home) else f"{home}.{alias.name}" for alias in node.names]


def _home(path: str, node: ast.ImportFrom) -> str:
    """The whole name of what ``from ... import`` imports from."""
    here = ["pgmesh", *Path(path).parts[:-1]]
    start = here[: len(here) - node.level + 1] if node.level else []
    return ".".join([*start, *filter(None, [node.module])])


def _is_file(name: str) -> bool:
    """Whether a name is that of a file of ours, so that what is imported from it is no file again."""
    return name.startswith("pgmesh.")


def _is_in(name: str, whole: str) -> bool:
    return f"{name}.".startswith(f"{whole}.")


def _is_above(name: str, floor: str) -> bool:
    root, _, rest = name.partition(".")
    if root != "pgmesh" or not rest:
        return False
    target = rest.split(".")[0]
    return target not in FLOORS or FLOORS.index(target) > FLOORS.index(floor)


def _private(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where torch's private names are imported or reached for as attributes."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known.update({a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names})
        elif isinstance(node, ast.ImportFrom):
            known.update({a.asname or a.name: f"{_home(path, node)}.{a.name}" for a in node.names})
    names = [(line, name) for line, names in _imports(path, tree) for name in names]
    for node in ast.walk(tree):
        root, *rest = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
        if root in known:
            names.append((node.lineno, ".".join([known[root], *rest])))
    return ((line, name) for line, name in names if _is_in(name, "torch") and _has_private_part(name))


def _has_private_part(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
