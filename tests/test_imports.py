"""Imports between the modules of pgmesh point down only. Imports for type checkers alone are not counted."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pgmesh"

FLOORS = [
    "__init__",
    "errors",
    "options",
    "sizes",
    "hints",
    "ink",
    "machine",
    "draw",
    "picture",
    "svg",
    "seen",
    "layout",
    "locality",
    "traffic",
    "costs",
    "wording",
    "page",
    "plans",
    "place",
    "console",
    "slurm",
    "pbs",
    "launchers",
    "rendezvous",
    "polling",
    "groups",
    "heart",
    "family",
    "placement",
    "connecting",
    "report",
    "launch",
    "mesh",
    "rollcall",
    "probes",
    "measured",
    "diagnosis",
    "preflight",
    "interop",
    "recipes",
    "parallel",
    "commands",
    "__main__",
]
"""A file, or a folder of them, imports only from those that stand above it in this list."""

NEVER = {
    **dict.fromkeys([*FLOORS[: FLOORS.index("rendezvous") + 1], "commands", "__main__"], "torch"),
    "mesh": "pgmesh.launch",
}
"""What a file does without, though the list would let it."""

SEAM = "groups"
"""The one file that may use private names of torch."""

NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}


def offences(path: str, source: str) -> list[str]:
    """What is wrong with what a file imports, given its path inside pgmesh/."""
    floor = Path(path).parts[0].removesuffix(".py")
    if floor not in FLOORS:
        return [f"{path} has no floor: give {floor} its place in FLOORS"]
    tree = Executed().visit(ast.parse(source))
    imports = [(line, whole) for line, _, whole in names_imported(path, tree)]
    found = {(line, f"imports {name}, which is not above it") for line, name in imports if not may_import(floor, name)}
    found |= {(line, f"imports {name}") for line, name in imports if is_in(NEVER.get(floor, "-"), name)}
    if floor != SEAM:
        private = [*private_names(path, tree), *foreign_names(path, tree, ours() | defined_names(source))]
        found |= {(line, f"uses {name}, which is private") for line, name in private}
    return [f"{path}:{line} {what}" for line, what in sorted(found)]


class Executed(ast.NodeTransformer):
    """Leaves out what only a type checker sees."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") else node


def names_imported(path: str, tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """The line of each import, the name it binds and the whole name behind it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            package = ["pgmesh", *Path(path).parent.parts]
            home = (
                [*package[: len(package) + 1 - node.level], *filter(None, [node.module])]
                if node.level
                else [node.module]
            )
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, ".".join([*home, alias.name])


def may_import(floor: str, name: str) -> bool:
    package, _, file = name.partition(".")
    file = file.split(".")[0]
    return package != "pgmesh" or (file in FLOORS and FLOORS.index(file) <= FLOORS.index(floor))


def private_names(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Torch's private names, imported or reached through what was imported."""
    imports = list(names_imported(path, tree))
    behind = {bound: whole for _, bound, whole in imports}
    used = [(line, whole) for line, _, whole in imports]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *rest = dotted(node)
            used.append((node.lineno, ".".join([behind.get(root, root), *rest])))
    for line, name in used:
        parts = name.split(".")
        private = [i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
        if is_in("torch", name) and private:
            yield line, ".".join(parts[: private[0] + 1])


def foreign_names(path: str, tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Private names, asked of an object, that nobody in pgmesh defines: they are somebody else's, most likely torch's.

    Names of modules are not looked at, which ``private_names`` knows, nor the public ones of a named tuple. What is
    called alike here and there goes unseen.
    """
    modules = {bound for _, bound, _ in names_imported(path, tree)}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Attribute)):
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        if private and node.attr not in ours | NAMED_TUPLE and dotted(node)[0] not in modules:
            yield node.lineno, ".".join(dotted(node))


@functools.cache
def ours() -> set[str]:
    return set().union(*(defined_names(file.read_text()) for file in PACKAGE.rglob("*.py")))


def defined_names(source: str) -> set[str]:
    """The names that a file gives to something: functions, classes, what is assigned to, and slots."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else "(an expression)"]


def is_in(package: str, name: str) -> bool:
    return name == package or name.startswith(f"{package}.")


# ---- the package ----


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down_only(file):
    assert offences(str(file.relative_to(PACKAGE)), file.read_text()) == []


# ---- the checker can fail ----


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        (
            "layout.py",
            "from pgmesh.mesh import ProcessGroupMesh",
            "imports pgmesh.mesh.ProcessGroupMesh, which is not above it",
        ),
        ("layout.py", "from pgmesh import mesh", "imports pgmesh.mesh, which is not above it"),
        ("layout.py", "import pgmesh.mesh as m", "imports pgmesh.mesh, which is not above it"),
        ("layout.py", "from . import mesh", "imports pgmesh.mesh, which is not above it"),
        ("layout.py", "from .mesh import x", "imports pgmesh.mesh.x, which is not above it"),
        ("interop/megatron.py", "from ..recipes import x", "imports pgmesh.recipes.x, which is not above it"),
        ("mesh.py", "import pgmesh", "imports pgmesh, which is not above it"),
        ("mesh.py", "from pgmesh import Layout", "imports pgmesh.Layout, which is not above it"),
        ("mesh.py", "from pgmesh.parallel.data import x", "imports pgmesh.parallel.data.x, which is not above it"),
        ("mesh.py", "from pgmesh.interop import x", "imports pgmesh.interop.x, which is not above it"),
        ("mesh.py", "from pgmesh.recipes import x", "imports pgmesh.recipes.x, which is not above it"),
        ("mesh.py", "from pgmesh.launch import join", "imports pgmesh.launch.join"),
        ("draw.py", "import torch", "imports torch"),
        ("options.py", "from torch import distributed", "imports torch.distributed"),
        ("mesh.py", "import torch\ntorch._C", "uses torch._C, which is private"),
        ("mesh.py", "import torch\ntorch.distributed._x.y()", "uses torch.distributed._x, which is private"),
        (
            "mesh.py",
            "import torch.distributed as dist\ndist.c10d._x",
            "uses torch.distributed.c10d._x, which is private",
        ),
        (
            "launch.py",
            "from torch.distributed import c10d as c\nc._world.a",
            "uses torch.distributed.c10d._world, which is private",
        ),
        ("parallel/data.py", "from torch._C import x", "uses torch._C, which is private"),
        (
            "parallel/data.py",
            "from torch.distributed.c10d import _x",
            "uses torch.distributed.c10d._x, which is private",
        ),
        ("parallel/data.py", "def f(module):\n    return module._modules", "uses module._modules, which is private"),
        (
            "parallel/data.py",
            "for a in b():\n    a.c()._parameters",
            "uses (an expression)._parameters, which is private",
        ),
    ],
)
def test_a_wrong_import_is_seen(path, source, complaint):
    last_line = source.count("\n") + 1
    assert offences(path, source) == [f"{path}:{last_line} {complaint}"]


def test_imports_inside_functions_are_seen():
    source = "def f():\n    if True:\n        from pgmesh.mesh import x"
    assert offences("draw.py", source) == ["draw.py:3 imports pgmesh.mesh.x, which is not above it"]


def test_imports_for_a_type_checker_are_let_pass_but_not_their_else():
    source = "if TYPE_CHECKING:\n    from pgmesh.mesh import x\n    import torch\nelse:\n    import pgmesh.groups"
    assert offences("draw.py", source) == ["draw.py:5 imports pgmesh.groups, which is not above it"]


def test_a_new_file_has_to_be_given_a_floor():
    assert offences("misc.py", "") == ["misc.py has no floor: give misc its place in FLOORS"]
    assert offences("extra/__init__.py", "") == ["extra/__init__.py has no floor: give extra its place in FLOORS"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "mesh.py",
            "from pgmesh import draw, groups\nfrom pgmesh.layout import Layout\nimport torch.distributed as dist",
        ),
        ("interop/__init__.py", "from pgmesh.interop.device_mesh import x\nfrom .device_mesh import y"),
        ("groups.py", "import torch\ntorch._C\nfrom torch.distributed.c10d import _x"),
        ("launch.py", "import os, torch\nos._exit(1)\ntorch.__version__\nself._torch = 1\ntorch.f(self._torch).y"),
        ("__main__.py", "import pgmesh.parallel"),
        ("parallel/data.py", "a._mine = b\nc(d)._mine\nmesh._family\nmesh.stats()._replace(e=f)"),
    ],
)
def test_a_right_import_is_let_pass(path, source):
    assert offences(path, source) == []
