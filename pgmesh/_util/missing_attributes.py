"""Attribute names of DeviceMesh and ColossalAI and the call of a mesh that does the same, shown in the AttributeError.

``add_hints`` puts a descriptor for each on the class of meshes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

CALLS = {
    "mesh_dim_names": "mesh.axes",
    "ndim": "len(mesh.axes)",
    "_unflatten": "mesh.view({sizes})",
    "_flatten": "mesh.group({axes})",
    "get_rank": "mesh.rank",
    "get_local_rank": "mesh.index({axis})",
    "get_coordinate": "mesh.coord",
    "neighbour": "mesh.neighbor({axis})",
    **dict.fromkeys(("get_group", "get_group_along_axis"), "mesh.group({axis})"),
    "get_all_groups": "[mesh.group(axis) for axis in mesh.axes]",
    "device_type": "mesh.device_mesh().device_type",
    "mesh": "mesh.device_mesh().mesh",
}
"""The call for each name. ``{axis}`` is the last axis, ``{axes}`` the last two, ``{sizes}`` all sizes."""


class _Absent:
    """A descriptor for an attribute that a mesh does not have. It raises an AttributeError that shows the right call.

    ``__getattr__`` would do the same, but makes every other attribute access of the class 50 % slower.
    """

    def __init__(self, name: str, call: str, for_torch: Callable[[Any], str]) -> None:
        self.name, self.call, self.for_torch = name, call, for_torch

    def __get__(self, mesh: Any, kind: type) -> Any:
        if mesh is None:
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {self.name!r}")
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            raise AttributeError(self.for_torch(mesh))
        axes = [repr(axis) for axis in mesh.axes]
        sizes = dict(zip(mesh.axes, mesh.shape))
        call = self.call.format(axis=", ".join(axes[-1:]), axes=", ".join(axes[-2:]), sizes=sizes)
        if "{ax" in self.call:
            call += "   # for example: name the axes that you mean"
        raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}.\n\n  {call}")


def add_hints(kind: Any, for_torch: Callable[[Any], str]) -> None:
    """Make meshes of a class raise an error that shows the right call for each of these names.

    Args:
        kind: the class.
        for_torch: returns the message for a mesh if a function of torch reads the attribute: the caller gave it the
            mesh.
    """
    for name, call in CALLS.items():
        setattr(kind, name, _Absent(name, call, for_torch))
    kind.__dir__ = lambda mesh: [name for name in object.__dir__(mesh) if name not in CALLS]
