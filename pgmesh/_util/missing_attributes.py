"""Attribute names of other libraries and the call that does the same here, shown in the AttributeError.

The names are those of DeviceMesh, torch.distributed, Megatron and ColossalAI. ``add_hints`` puts a descriptor for each
on a class. The file knows layouts only by duck typing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from pgmesh._util.formatting import Text, format_call, shorten

_SIZES = {
    "mesh_dim_names": "{it}.axes",
    "ndim": "len({it}.axes)",
    "_unflatten": "{it}.view({sizes})",
    "get_world_size": "{it}.size()",
    "world_size": "{it}.size()",
}
_PLACE_OF_RANK = {
    "get_rank": "{it}.rank",
    "get_local_rank": "{it}.index({axis})",
    "get_coordinate": "{it}.coord",
    "coordinate": "{it}.coord",
    "get_process_group_ranks": "{it}.ranks({axis})",
    "get_ranks_in_group": "{it}.ranks({axis})",
    "neighbour": "{it}.neighbor({axis})",
}
_GROUPS = {
    **{name: f"{{made}}.{name}({{axis}})" for name in ("group", "connect", "locality", "release")},
    **{name: f"{{made}}.{name}()" for name in ("report", "stats", "device_mesh")},
    **dict.fromkeys(("configure", "set_timeout"), "{made}.configure({axis}, timeout=600)"),  # a new mesh has no groups
    "get_group": "{made}.group({axis})",
    "group_of": "{made}.group_of({it}.ranks())",
}

MESH = {
    **_SIZES,
    **_PLACE_OF_RANK,
    **dict.fromkeys(("get_group", "get_process_group", "get_group_along_axis"), "mesh.group({axis})"),
    **dict.fromkeys(("new_group", "create_group"), "mesh.group_of(mesh.ranks({axis}))"),
    "get_all_groups": "[mesh.group(axis) for axis in mesh.axes]",
    "device_type": "mesh.device_mesh().device_type",
    "mesh": "mesh.device_mesh().mesh",
    "_flatten": "mesh.group({axes})",
    "barrier": "torch.distributed.barrier(group=mesh.group())",
    "destroy": "mesh.close()",
}
"""Calls for names that a mesh does not have."""

RANK_VIEW = {**_SIZES, **_PLACE_OF_RANK, **_GROUPS, "mesh": "seen.ranks()"}
"""Calls for names that the result of ``Layout.seen_by`` does not have."""

LAYOUT = {
    **_SIZES,
    **_GROUPS,
    **dict.fromkeys(("rank", "get_rank"), "layout.seen_by({rank})"),
    **dict.fromkeys(("coord", "get_coordinate", "coordinate"), "layout.coord_of({rank})"),
    **dict.fromkeys(("index", "get_local_rank"), "layout.index_of({index})"),
    **dict.fromkeys(("neighbor", "neighbour", "neighbour_of"), "layout.neighbor_of({index})"),
    **dict.fromkeys(("get_process_group_ranks", "get_ranks_in_group"), "layout.block_of({index})"),
    "label": "layout.label_of({rank})",
    "mesh": "layout.ranks()",
}
"""Calls for names that a layout does not have. A layout has no rank of its own: methods of places take one."""


class _Absent:
    """A descriptor for an attribute that a class does not have. It raises an AttributeError that shows the right call.

    ``__getattr__`` would do the same, but makes every other attribute access of the class 50 % slower.
    """

    def __init__(self, it: str, name: str, call: str, for_torch: Callable[[Any], str] | None) -> None:
        self.it, self.name, self.call, self.for_torch = it, name, call, for_torch

    def __get__(self, of: Any, kind: type) -> Any:
        if of is None:
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {self.name!r}")
        if self.for_torch and sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            raise AttributeError(self.for_torch(of))
        layout: Any = getattr(of, "layout", of)
        box, axes = dict(zip(layout.axes, layout.shape)), [repr(axis) for axis in layout.axes]
        rank = str(layout.rank_of([0] * len(axes)))
        of_any_ranks = format_call("ProcessGroupMesh", box, ranks=Text(f"{self.it}.ranks()"))
        call = self.call.format(
            it=self.it,
            axis=", ".join(axes[-1:]),
            axes=", ".join(axes[-2:]),
            sizes=format_call("", box)[1:-1],
            rank=rank,
            index=", ".join([rank, *axes[-1:]]),
            made=shorten(layout.spell("ProcessGroupMesh"), of_any_ranks),
        )
        if "{ax" in self.call or "{index}" in self.call:
            call += "   # for example: name the axes that you mean"
        raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}.\n\n  {call}")


def add_hints(kind: Any, it: str, calls: Mapping[str, str], for_torch: Callable[[Any], str] | None = None) -> None:
    """Make instances of a class raise an error that shows the right call for each of these names.

    Args:
        kind: the class. An instance is a layout or has an attribute ``layout``.
        it: the variable for an instance in the calls.
        calls: the call by name. ``{it}`` is the variable, ``{made}`` a ``ProcessGroupMesh(...)`` with this layout,
            ``{axis}`` the last axis, ``{axes}`` the last two, ``{index}`` a rank and an axis. A name that the class
            defines is skipped.
        for_torch: returns the message for an instance if a function of torch reads the attribute: the caller gave it
            the instance.
    """
    for name, call in calls.items():
        if not hasattr(kind, name) and name not in getattr(kind, "__dataclass_fields__", ()):
            setattr(kind, name, _Absent(it, name, call, for_torch))
    kind.__dir__ = _dir


def public_names(kind: type) -> set[str]:
    """The public names that a class defines, without those that raise a hint."""
    return {name for name, what in vars(kind).items() if not (name.startswith("_") or isinstance(what, _Absent))}


def _dir(of: Any) -> list[str]:
    """The names for ``dir``, without those that raise a hint."""
    return [name for name in object.__dir__(of) if not isinstance(vars(type(of)).get(name), _Absent)]
