"""Process groups along any axes of an N-D mesh of ranks, created on first use by their members alone.

A script for torchrun, srun or mpirun::

    import torch
    from pgmesh import ProcessGroupMesh, launch

    launch.join()
    mesh = ProcessGroupMesh(dp=-1, tp=2)
    total = torch.tensor(2.0**mesh.rank)
    torch.distributed.all_reduce(total, group=mesh.group("tp"))

Names of the package, each with its own help, such as ``help(pgmesh.ProcessGroupMesh.group)``:

- ``ProcessGroupMesh``: the ranks of a job in a box; ``group``, ``connect``, ``at``, ``view``, ``close``
- ``Layout``: the same places, without processes and without torch
- ``plan``: groups, hosts and costs of a shape before anything runs
- ``meshes``: the open meshes of this process
- ``GroupOptions``: timeout, backend, device and options of groups
- ``from_device_mesh``: a mesh over the groups of a DeviceMesh

Modules:

- ``launch``: ``join``, ``spawn``, ``fake_world``
- ``parallel``: data, sharded, tensor, pipeline, context and expert parallelism
- ``resharding``, with ``reshard`` and ``Resharder``: tensors moved between meshes
- ``recipes``: the arrangements of Megatron, OLMo-core, fairscale and OSLO
- ``interop``: DeviceMesh, Megatron-Core and ColossalAI
- ``drawing``, ``svg``, ``planning``, ``topology``, ``errors``, ``options``, ``layout``, ``mesh``

Errors, each a ``PgmeshError``: ``ShapeError``, ``AxisError``, ``RankError``, ``OptionsError``, ``MembershipError``,
``WorldError``, ``NameTakenError``, ``LifetimeError``, ``MismatchError``, ``MissingRanksError``, ``CircleError``,
``MethodError``, ``UnsupportedTorchError``, ``LaunchError``.

Command line: ``pgmesh plan``, ``show``, ``check`` and ``doctor``.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

# The public names and the module of each. Modules are imported on first access, so layouts, plans and figures never
# import torch.
_HOME = {
    "ProcessGroupMesh": "mesh",
    "meshes": "mesh",
    "Layout": "layout",
    "plan": "planning.plan",
    "GroupOptions": "options",
    "from_device_mesh": "interop",
    **dict.fromkeys(
        (
            "PgmeshError",
            "ShapeError",
            "AxisError",
            "RankError",
            "OptionsError",
            "MembershipError",
            "WorldError",
            "NameTakenError",
            "LifetimeError",
            "MismatchError",
            "MissingRanksError",
            "CircleError",
            "MethodError",
            "UnsupportedTorchError",
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
    # pydoc expands each name that it gets, which takes 2,000 lines and loads torch: help(pgmesh) is the text above.
    caller = sys._getframe().f_back
    while caller is not None and caller.f_globals["__name__"] == "inspect":
        caller = caller.f_back
    if caller is not None and caller.f_globals["__name__"] == "pydoc":
        return ["__doc__", "__file__", "__name__", "__path__", "__version__"]
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
        RankError as RankError,
        ShapeError as ShapeError,
        UnsupportedTorchError as UnsupportedTorchError,
        WorldError as WorldError,
    )
    from pgmesh.interop import from_device_mesh as from_device_mesh
    from pgmesh.layout import Layout as Layout
    from pgmesh.mesh import ProcessGroupMesh as ProcessGroupMesh, meshes as meshes
    from pgmesh.options import GroupOptions as GroupOptions
    from pgmesh.planning.plan import plan as plan
