"""The public names of pgmesh and their signatures, as users reach them, compared with a listing of them.

The listing holds documented paths and calls, and does not say in which file a class lives. ``GOLDEN=write`` writes it
anew, where a public name was renamed on purpose. CHANGELOG.md records that.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pgmesh
from pgmesh.__main__ import COMMANDS
from tests.support import golden_files

MODULES: dict[str, tuple[str, ...]] = {
    "pgmesh": (),
    "pgmesh.launch": (),
    "pgmesh.interop": ("from_device_mesh",),
    "pgmesh.interop.megatron": ("process_groups", "published"),
    "pgmesh.interop.colossalai": ("ColossalMesh",),
    "pgmesh.recipes": (),
    "pgmesh.resharding": (),
    "pgmesh.parallel": (),
    "pgmesh.parallel.checkpoint": ("async_save", "load", "save"),
    "pgmesh.svg": ("draw",),
}
"""The modules that the documentation imports from, and their documented names. Without names: those of ``__all__``."""


def reach(path: str) -> Any:
    """The value at a path that begins with a package, such as ``pgmesh.launch.join``, or a module."""
    package, *names = path.split(".")
    value: Any = importlib.import_module(package)
    for name in names:
        value = getattr(value, name) if hasattr(value, name) else importlib.import_module(f"{value.__name__}.{name}")
    return value


def signature(what: Any) -> str:
    """The parameters with their defaults, without annotations; "" for what is no function of ours."""
    if not inspect.isfunction(what):
        return ""
    empty = inspect.Parameter.empty
    plain = [each.replace(annotation=empty) for each in inspect.signature(what).parameters.values()]
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.Signature(plain)))


def lines_of(path: str, value: Any, public: set[Any]) -> Iterator[str]:
    """A line for a function; and for a class, its constructor and each public member that no class in public has."""
    yield f"{path}{signature(value)}"
    if isinstance(value, type):
        ours = [each for each in value.__mro__ if each.__module__.startswith("pgmesh")]
        makes = next((vars(each)["__init__"] for each in ours if "__init__" in vars(each)), None)
        yield f"{path}{signature(makes)}"
        own = [vars(each) for each in ours if each is value or each not in public]
        members = {name: each for each in reversed(own) for name, each in each.items() if name[0] != "_"}
        yield from (f"{path}.{name}{signature(inspect.unwrap(each))}" for name, each in members.items())


def test_public_surface_equals_the_golden_listing():
    values = {
        f"{path}.{name}": reach(f"{path}.{name}") for path in MODULES for name in MODULES[path] or reach(path).__all__
    }
    public = {each for each in values.values() if isinstance(each, type)}
    found = {line for path, value in values.items() for line in lines_of(path, value, public)}
    found |= {f"command {name}" for name in COMMANDS}
    golden_files.check("public-surface.txt", "".join(f"{line}\n" for line in sorted(found)))


def test_docstring_names_every_public_name():
    for name in (*pgmesh.__all__, *pgmesh._MODULES):
        assert f"``{name}``" in pgmesh.__doc__, name


def test_dir_shows_only_public_names():
    import_all = [getattr(pgmesh, name) for name in dir(pgmesh)]
    assert len(import_all) == len(dir(pgmesh))
    shown = {name for name in dir(pgmesh) if not name.startswith("__")}
    assert shown == {*pgmesh.__all__, *pgmesh._MODULES}
    assert not {"Any", "annotations", "TYPE_CHECKING", "importlib", "sizes"} & shown
    assert {"__version__", "__all__", "__doc__", "__file__"} <= {*dir(pgmesh)}
