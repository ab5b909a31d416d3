"""Imports point down only and form no circle. Imports inside functions and for a type checker count."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

from pgmesh import ProcessGroupMesh

PACKAGE = Path(__file__).parent.parent / "pgmesh"
SOURCES = {str(file.relative_to(PACKAGE)): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
"""The source of each file, by its path in the package."""

FLOORS = [
    # 1
    *("errors", "_util", "topology/hosts", "drawing"),
    # 2
    *("options", "layout", "topology/locality"),
    # 3
    *("torch_private", "launch/launcher", "launch/slurm", "launch/detect"),
    # 4
    *("groups/naming", "groups"),
    # 5
    *("liveness/timing", "liveness/operations", "liveness/records", "liveness/statuses", "liveness"),
    "launch",  # ``join`` starts the liveness thread, if the environment asks for it
    # 6
    *("connect/decisions", "connect/rounds", "connect/group_rounds", "connect", "topology", "report", "elastic"),
    # 7
    "mesh",
    # 8
    *("resharding/sharding", "resharding/plan", "planning", "preflight"),
    *("resharding", "parallel", "recipes", "interop"),
    # 9
    *("cli", "__main__", "__init__"),
]
"""From the bottom to the top. A file imports only from its own entry and those before it in this list.

An entry is a file, or a folder without the files that have an entry of their own. ``pgmesh/__init__.py`` stands on
top: it exports names of all others, and none of them imports it."""

PLAIN = (
    *(each for each in FLOORS[: FLOORS.index("launch/detect") + 1] if each != "torch_private"),
    *("groups/naming", "liveness/timing", "liveness/operations", "liveness/records", "liveness/statuses"),
    *("connect/decisions", "connect/rounds", "connect/group_rounds", "resharding/sharding", "resharding/plan"),
    *("planning", "cli", "__main__"),
)
"""Entries that never import torch, although it is below them."""

SEAM = "torch_private"
"""The one file that may use private names of torch."""

NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}


def offences(path: str, source: str) -> list[str]:
    """What is wrong with what a file imports, given its path inside pgmesh/."""
    floor = floor_of(path.removesuffix(".py").removesuffix("/__init__"))
    if floor is None:
        return [f"{path} has no floor: give {Path(path).parts[0].removesuffix('.py')} its place in FLOORS"]
    tree = parsed(source)
    imports = [(line, whole) for line, _, whole in names_imported(path, tree)]
    found = {(line, f"imports {name}, which is above it") for line, name in imports if not may_import(floor, name)}
    found |= {(line, f"imports {name}") for line, name in imports if floor in PLAIN and is_in("torch", name)}
    if floor != SEAM:
        private = [*private_names(path, tree), *foreign_names(path, tree, ours() | defined_names(source))]
        found |= {(line, f"uses {name}, which is private") for line, name in private}
    return [f"{path}:{line} {what}" for line, what in sorted(found)]


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    return [*ast.walk(tree)]


def floor_of(module: str) -> str | None:
    """The entry of FLOORS for a module given as a path: its own, else that of its folder."""
    return next((each for each in (module, module.partition("/")[0]) if each in FLOORS), None)


def names_imported(path: str, tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """The line of each import, the name it binds and the whole name behind it."""
    for node in nodes_of(tree):
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
    package, *inside = name.split(".")
    if package != "pgmesh":
        return True
    target = floor_of("/".join(inside[:2])) or "__init__"
    return FLOORS.index(target) <= FLOORS.index(floor)


def private_names(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Torch's private names, imported or reached through what was imported."""
    imports = list(names_imported(path, tree))
    behind = {bound: whole for _, bound, whole in imports}
    used = [(line, whole) for line, _, whole in imports]
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute):
            root, *rest = dotted(node)
            used.append((node.lineno, ".".join([behind.get(root, root), *rest])))
    for line, name in used:
        parts = name.split(".")
        private = [i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
        if is_in("torch", name) and private:
            yield line, ".".join(parts[: private[0] + 1])


def foreign_names(path: str, tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Private names, asked of an object, that no file of pgmesh defines: they are most likely those of torch.

    Names of modules are not looked at, which ``private_names`` knows, nor the public ones of a named tuple. What is
    called alike here and there goes unseen.
    """
    modules = {bound for _, bound, _ in names_imported(path, tree)}
    for node in (node for node in nodes_of(tree) if isinstance(node, ast.Attribute)):
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        if private and node.attr not in ours | NAMED_TUPLE and dotted(node)[0] not in modules:
            yield node.lineno, ".".join(dotted(node))


@functools.cache
def ours() -> set[str]:
    return set().union(*map(defined_names, SOURCES.values()))


def defined_names(source: str) -> set[str]:
    """The names that a file gives to something: functions, classes, what is assigned to, and slots."""
    found = set()
    for node in nodes_of(parsed(source)):
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


def test_imports_point_down_only():
    assert [offence for path, source in SOURCES.items() for offence in offences(path, source)] == []


def imported_files(path: str) -> set[str]:
    """The other files of the package that a file imports."""
    found = set()
    for _, _, name in names_imported(path, parsed(SOURCES[path])):
        parts = name.split(".")[1:] if name.startswith("pgmesh.") else []
        homes = ("/".join(parts[:end]) + ".py" for end in range(len(parts), 0, -1))
        found.add(next((each for each in homes if each in SOURCES), path))
    return found - {path}


def test_imports_form_no_circle():
    graphlib.TopologicalSorter({path: imported_files(path) for path in SOURCES}).prepare()  # raises CycleError


class WithoutTexts(ast.NodeTransformer):
    """Removes docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def test_one_small_file_touches_sockets_of_backends():
    """Such a socket is opened a second time, from its descriptor."""
    found = {path for path, source in SOURCES.items() if "fileno=" in source or "torch_private.gloo_endpoint" in source}
    assert found == {"elastic/sockets.py"}
    code = ast.unparse(WithoutTexts().visit(ast.parse(SOURCES["elastic/sockets.py"])))
    assert len([*filter(None, code.splitlines())]) <= 60


def test_layers_above_mesh_read_no_private_attributes():
    slots = {name for name in ProcessGroupMesh.__slots__ if name[0] == "_"}
    found = []
    for path, source in SOURCES.items():
        floor = floor_of(path.removesuffix(".py").removesuffix("/__init__"))
        if floor is not None and FLOORS.index(floor) > FLOORS.index("mesh"):
            uses = (node for node in nodes_of(parsed(source)) if isinstance(node, ast.Attribute) and node.attr in slots)
            found += [f"{path}:{each.lineno}" for each in uses if ast.unparse(each.value) != "self"]
    assert found == []


MAKERS = {"ProcessGroup", "new_group", "new_subgroups", "split_group"}
"""What creates a process group of torch, by the last part of its name."""


def groups_made(path: str, source: str) -> list[str]:
    """Calls that create or destroy a process group, in a file that may not. The end of the world is no such call."""
    if path.startswith("groups/") or path.removesuffix(".py") == SEAM:
        return []
    found = []
    for node in (node for node in nodes_of(parsed(source)) if isinstance(node, ast.Call)):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in MAKERS or (name == "destroy_process_group" and (node.args or node.keywords)):
            found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    return found


def test_only_groups_folder_creates_or_destroys_groups():
    assert [call for path, source in SOURCES.items() for call in groups_made(path, source)] == []
