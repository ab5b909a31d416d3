"""Process groups along any axes of an N-D mesh of ranks, created on first use by their members alone.

A script for torchrun, srun or mpirun:

.. code-block:: python

    import torch
    from pgmesh import ProcessGroupMesh, launch

    launch.join()
    mesh = ProcessGroupMesh(dp=-1, tp=2)
    total = torch.tensor(2.0**mesh.rank)
    torch.distributed.all_reduce(total, group=mesh.group("tp"))

Names of the package, each with its own help, such as ``help(pgmesh.ProcessGroupMesh.group)``:

- ``ProcessGroupMesh``: the ranks of a job in a box; ``group``, ``connect``, ``at``, ``view``, ``close``
- ``Layout``: the same places, without processes and without torch
- ``plan``: groups and hosts of a shape before anything runs
- ``meshes``: the open meshes of this process
- ``GroupOptions``: timeout, backend and options of groups
- ``from_device_mesh``: a mesh over the groups of a DeviceMesh
- what calls return: ``Report``, ``Held``, ``Shrunk``, ``Locality``, ``Partition``,
  ``RankView``, ``Plan``, ``CombinationPlan``, ``Finding``, ``HostLevel``

Modules:

- ``launch``: ``join``, ``spawn``, ``fake_world``
- ``parallel``: data, sharded, tensor, pipeline, context and expert parallelism
- ``resharding``: ``reshard`` and ``Resharder`` move tensors between meshes
- ``recipes``: the arrangements of Megatron, OLMo-core, fairscale and OSLO
- ``interop``: DeviceMesh, Megatron-Core and ColossalAI
- ``svg``: pictures of layouts

Errors, each a ``PgmeshError``, also in the module ``errors``: ``ShapeError``, ``AxisError``, ``RankError``,
``OptionsError``, ``MembershipError``, ``WorldError``, ``NameTakenError``, ``LifetimeError``, ``MismatchError``,
``MissingRanksError``, ``MethodError``, ``UnsupportedTorchError``, ``LaunchError``.

Command line: ``pgmesh plan``, ``show``, ``check``, ``report`` and ``doctor``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Modules are imported on first access, so layouts, plans and figures never import torch.
_NAMES = {
    "mesh": "ProcessGroupMesh meshes",
    "layout": "Layout Partition RankView",
    "planning.plan": "plan Plan",
    "planning.data": "CombinationPlan Finding",
    "topology.hosts": "HostLevel",
    "topology.locality": "Locality",
    "report.report": "Report Held",
    "elastic.shrinking": "Shrunk",
    "options": "GroupOptions",
    "interop": "from_device_mesh",
    "errors": "PgmeshError ShapeError AxisError RankError OptionsError MembershipError WorldError NameTakenError "
    "LifetimeError MismatchError MissingRanksError MethodError UnsupportedTorchError LaunchError",
}
"""The public names of each module."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
# Modules, by the names under which they are attributes of the package.
_MODULES = {name: name for name in ("launch", "interop", "recipes", "parallel", "resharding", "errors")} | {
    "svg": "drawing.svg"
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
    from pgmesh.elastic.shrinking import Shrunk as Shrunk
    from pgmesh.errors import *  # noqa: F403
    from pgmesh.interop import from_device_mesh as from_device_mesh
    from pgmesh.layout import Layout as Layout, Partition as Partition, RankView as RankView
    from pgmesh.mesh import ProcessGroupMesh as ProcessGroupMesh, meshes as meshes
    from pgmesh.options import GroupOptions as GroupOptions
    from pgmesh.planning.data import CombinationPlan as CombinationPlan, Finding as Finding
    from pgmesh.planning.plan import Plan as Plan, plan as plan
    from pgmesh.report.report import Held as Held, Report as Report
    from pgmesh.topology.hosts import HostLevel as HostLevel
    from pgmesh.topology.locality import Locality as Locality
