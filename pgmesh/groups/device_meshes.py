"""torch's DeviceMesh over the groups of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from pgmesh import torch_private
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
        AxisError: there is no such axis, an axis or a name is given twice, or a dimension has no axis.
    """
    dimensions = dict(dimensions_of(layout.along(rank, *axes))) if axes or not merged else {}
    for name, given in merged.items():
        along = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if not along or name in dimensions:
            problem = f"device_mesh: dimension {name!r} needs an axis, and a name that no other dimension has."
            raise AxisError(f"{problem}\n\n  mesh.device_mesh({name}={layout.axes!r})   # for example: all axes")
        dimensions[name] = layout.along(rank, *along).axes
    layout.size(*chain(*dimensions.values()))  # raises if an axis is in two dimensions
    return dimensions


def build_device_mesh(
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
