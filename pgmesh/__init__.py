"""Process groups along any axes of an N-D mesh of ranks, created on first use by their members alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# The public names and the module of each. Modules are imported on first access, so layouts, plans and figures never
# import torch.
_HOME = {
    "ProcessGroupMesh": "mesh",
    "meshes": "mesh",
    "Layout": "layout",
    "plan": "planning.plan",
    "GroupOptions": "options",
    **dict.fromkeys(("reshard", "Resharder"), "resharding"),
    "from_device_mesh": "interop",
    **dict.fromkeys(
        (
            "PgmeshError",
            "ShapeError",
            "AxisError",
            "PlaceError",
            "OptionsError",
            "MembershipError",
            "WorldError",
            "NameTakenError",
            "LifetimeError",
            "MismatchError",
            "MissingRanksError",
            "CircleError",
            "MethodError",
            "SeamError",
            "LaunchError",
        ),
        "errors",
    ),
}
# Modules, by the names under which they are attributes of the package.
_MODULES = {
    **{name: name for name in ("launch", "interop", "recipes", "parallel", "resharding")},
    **{name: name for name in ("drawing", "planning", "topology")},
    **{name: name for name in ("errors", "options", "layout", "mesh")},
    "svg": "drawing.svg",
}

__all__ = [*_HOME]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"pgmesh.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"pgmesh.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'pgmesh' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOME, *_MODULES, *(name for name in globals() if name.startswith("__"))])


if TYPE_CHECKING:
    from pgmesh.errors import (
        AxisError as AxisError,
        CircleError as CircleError,
        LaunchError as LaunchError,
        LifetimeError as LifetimeError,
        MembershipError as MembershipError,
        MethodError as MethodError,
        MismatchError as MismatchError,
        MissingRanksError as MissingRanksError,
        NameTakenError as NameTakenError,
        OptionsError as OptionsError,
        PgmeshError as PgmeshError,
        PlaceError as PlaceError,
        SeamError as SeamError,
        ShapeError as ShapeError,
        WorldError as WorldError,
    )
    from pgmesh.interop import from_device_mesh as from_device_mesh
    from pgmesh.layout import Layout as Layout
    from pgmesh.mesh import ProcessGroupMesh as ProcessGroupMesh, meshes as meshes
    from pgmesh.options import GroupOptions as GroupOptions
    from pgmesh.planning.plan import plan as plan
    from pgmesh.resharding import Resharder as Resharder, reshard as reshard
