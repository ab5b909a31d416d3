"""docs/names.md: every public name with how it is called and what one gets, as the code says it of itself.

``GOLDEN=write`` writes the page anew.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pgmesh
from pgmesh import parallel
from pgmesh._util import missing_attributes
from tests.support import golden_files

PAGE = Path(__file__).parents[2] / "docs" / "names.md"

HEAD = """# Names

What a program may call, each with one line of what it gets. `help(pgmesh.ProcessGroupMesh.group)` has the arguments,
the errors and an example; [groups](groups.md), [methods](parallel.md), [recipes](recipes.md), [launchers](launchers.md)
and [faults](faults.md) have the rest. `mesh.layout` is the mesh's layout, and `print` draws both. A timeout is a
timedelta or a number of seconds.

Sizes are keywords (`dp=2, tp=4`), numbers (`2, 4`) or one mapping (`{"dp": 2, "tp": 4}`), as from a configuration
file. In a mapping an axis may have any name. Keywords that mean something else in pgmesh or torch (`timeout`,
`backend`, `device`, `mesh_dim_names`, `rank`, `tag`, ...) are never axes: the error shows the right call. True and
False are no sizes, indices or ranks.
"""

INSIDE = {"of", "spell", "describe", "is_slice", "ranks_in_order"}
"""Methods that have no underscore since other files of pgmesh call them."""

GIVEN = {"Arrangement", "Family", "Composition", "Level", "Routes", "Moved", "RankPlan", "Transfer"}
"""What a program is given, and never makes."""

MODULES = {
    "pgmesh": ("plan", "GroupOptions", "meshes"),
    "pgmesh.launch": tuple(pgmesh.launch.__all__),
    "pgmesh.interop": ("from_device_mesh",),
    "pgmesh.interop.megatron": ("process_groups", "published"),
    "pgmesh.interop.colossalai": ("ColossalMesh",),
    "pgmesh.recipes": tuple(pgmesh.recipes.__all__),
    "pgmesh.parallel": tuple(parallel.__all__),
    "pgmesh.resharding": tuple(pgmesh.resharding.__all__),
}


def page() -> str:
    own = [getattr(pgmesh, name) for name in pgmesh.__all__]
    errors = [each for each in own if isinstance(each, type) and issubclass(each, pgmesh.PgmeshError)]
    parts = [
        HEAD,
        table("A mesh", methods(pgmesh.ProcessGroupMesh, "mesh")),
        table("A layout: the same places, with no processes and no torch", methods(pgmesh.Layout, "layout")),
        *(table(f"`{name}`", members(name, names)) for name, names in MODULES.items()),
        table("Errors, all of them a `PgmeshError`", {f"`{each.__name__}`": line(each) for each in errors[1:]}),
    ]
    return "\n".join(parts)


def table(title: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {what} | {gets} |" for what, gets in rows.items()]
    return "\n".join([f"## {title}\n", "| call | what you get |", "|---|---|", *lines]) + "\n"


def methods(kind: type, who: str) -> dict[str, str]:
    rows = {called(kind, kind.__name__): line(kind)}
    for name, member in vars(kind).items():
        if name in missing_attributes.public_names(kind) - INSIDE and inspect.getdoc(member):
            what = f"`{who}.{name}`" if isinstance(member, property) else called(getattr(kind, name), f"{who}.{name}")
            rows[what] = line(member)
    return rows


def members(module: str, names: tuple[str, ...]) -> dict[str, str]:
    found = importlib.import_module(module)
    return {called(getattr(found, name), name): line(getattr(found, name)) for name in names}


def called(what: Any, name: str) -> str:
    """How it is called, without the kinds of its arguments."""
    if name in GIVEN:
        return f"`{name}`"
    plain = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(what).parameters.values()
        if each.name != "self" and not each.name.startswith("_")
    ]
    return f"`{name}{inspect.Signature(plain)}`".replace("datetime.", "")


def line(what: Any) -> str:
    text = (inspect.getdoc(what) or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("``", "`")


def test_the_page_of_names_is_what_the_code_says():
    golden_files.check(PAGE, page())


def test_dir_shows_public_names_alone():
    import_all = [getattr(pgmesh, name) for name in dir(pgmesh)]
    assert len(import_all) == len(dir(pgmesh))
    shown = {name for name in dir(pgmesh) if not name.startswith("__")}
    assert shown == {*pgmesh.__all__, *pgmesh._MODULES}
    assert not {"Any", "annotations", "TYPE_CHECKING", "importlib", "sizes"} & shown
    assert {"__version__", "__all__", "__doc__", "__file__"} <= {*dir(pgmesh)}


def test_every_public_name_has_a_line():
    public = {*pgmesh.__all__, *pgmesh.launch.__all__, *pgmesh.recipes.__all__, *parallel.__all__}
    for kind in (pgmesh.ProcessGroupMesh, pgmesh.Layout):
        public.update(missing_attributes.public_names(kind) - INSIDE)
    there = set(re.findall(r"^\| `(?:\w+\.)?(\w+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert public - there == {"PgmeshError", "layout"}  # which the page tells of in its own words
