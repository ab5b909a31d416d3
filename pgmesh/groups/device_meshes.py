"""torch's DeviceMesh over the groups of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pgmesh import torch_private
from pgmesh._util.formatting import format_call, is_keyword_name
from pgmesh.errors import AxisError
from pgmesh.groups.default_world import default_device
from pgmesh.layout import Axis, Layout

Dimensions = Mapping[str, tuple[Axis, ...]]
"""The axes of each dimension of a DeviceMesh, by its name."""


def dimensions_of(layout: Layout) -> Dimensions:
    """A dimension for each axis of a layout."""
    return {str(axis): (axis,) for axis in layout.axes}


def parse_dimensions(layout: Layout, rank: int, axes: tuple[Axis, ...], merged: Mapping[str, Any]) -> Dimensions:
    """The dimensions of a call: one for each axis, in mesh order, and then the merged ones.

    Args:
        axes: axes of a dimension each. If there are none and nothing is merged, all.
        merged: by name, one axis or a sequence of axes.

    Raises:
        AxisError: there is no such axis, an axis or a name is given twice, axes are not in mesh order, or a dimension
            has no axis.
    """
    dimensions = dict(dimensions_of(layout.along(rank, *axes))) if axes or not merged else {}
    named = {str(axis): axis for each in axes for axis in layout.along(rank, each).axes}
    if axes and [*named] != [*dimensions]:  # placements are by position
        are_words = all(map(is_keyword_name, named))
        call = format_call("mesh.device_mesh", {}, **named) if are_words else f"mesh.device_mesh(**{named})"
        raise AxisError(
            f"device_mesh: the order of these axes is {', '.join(dimensions)} in the mesh, and so in a DeviceMesh."
            f"\n\n  {call}   # for another order, name the dimensions"
        )
    for name, given in merged.items():
        along = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if not along or name in dimensions:
            problem = f"device_mesh: dimension {name!r} needs an axis, and a name that no other dimension has."
            raise AxisError(f"{problem}\n\n  mesh.device_mesh({name}={layout.axes!r})   # for example: all axes")
        dimensions[name] = layout.along(rank, *along).axes
    layout.size(*chain(*dimensions.values()))  # raises if an axis is in two dimensions
    return dimensions


DeviceMeshKey = tuple[Layout, tuple[Any, ...]]
"""A layout, and the axes of each dimension along it."""


class DeviceMeshes:
    """The DeviceMeshes of one mesh, on one rank. ``MeshGroups.lock`` guards them.

    Args:
        rank: this rank.
        root: layout of the root mesh.
    """

    def __init__(self, rank: int, root: Layout) -> None:
        self._rank, self._root = rank, root
        self._made: dict[DeviceMeshKey, DeviceMesh] = {}

    def find(
        self,
        layout: Layout,
        dimensions: Dimensions,
        group: Callable[[Layout, tuple[Axis, ...]], dist.ProcessGroup],
    ) -> DeviceMesh:
        """The DeviceMesh of groups along axes of a layout. It is made at its first use.

        Args:
            group: returns this rank's group along axes of a layout.
        """
        # If each dimension is one axis under its own name, in mesh order: a slice of the DeviceMesh of all axes.
        single, built = dimensions_of(layout), dimensions
        if [*dimensions.items()] == [item for item in single.items() if item in dimensions.items()]:
            built = single
        key = layout, tuple(built.items())
        made = self._made.get(key)
        if made is None:
            groups = {name: group(layout, axes) for name, axes in built.items()}
            made = _build(layout, self._rank, built, groups, self._root.ranks())
            torch_private.device_meshes[id(made)] = made
            self._made[key] = made
        return made[tuple(dimensions)]

    def clear(self) -> None:
        """Drop all that were made."""
        self._made.clear()


def _build(
    layout: Layout, rank: int, dimensions: Dimensions, groups: Mapping[str, Any], mesh_ranks: tuple[int, ...]
) -> DeviceMesh:
    """A DeviceMesh of this rank's block along the axes of its dimensions.

    Args:
        groups: this rank's group of each dimension.
        mesh_ranks: the ranks of the whole mesh. torch combines DeviceMeshes that index the same ranks.
    """
    axes, device = [*chain(*dimensions.values())], default_device()
    block = layout.along(rank, *axes)
    table = torch.tensor(block.ranks(), dtype=torch.int, device="cpu").view(block.shape)
    table = table.permute([block.axes.index(axis) for axis in axes])
    table = table.reshape([layout.size(*each) for each in dimensions.values()])
    is_whole = tuple(table.flatten().tolist()) == mesh_ranks
    part = None if is_whole else torch_private.strided_device_mesh(device, mesh_ranks, table, groups)
    return part or DeviceMesh.from_group([*groups.values()], device, table, mesh_dim_names=tuple(groups))
