"""torch's DeviceMesh over the groups of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from pgmesh.groups.world import default_device

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout


def build_device_mesh(layout: Layout, group_along: Callable[[Axis], Any]) -> DeviceMesh:
    """A DeviceMesh with the ranks and axes of a layout.

    Args:
        group_along: returns this rank's group along an axis.
    """
    groups = [group_along(axis) for axis in layout.axes]
    table = torch.tensor(layout.ranks(), dtype=torch.int).view(layout.shape)
    return DeviceMesh.from_group(
        groups[0] if len(groups) == 1 else groups,
        default_device(),
        None if len(groups) == 1 else table,
        mesh_dim_names=tuple(map(str, layout.axes)),
    )
