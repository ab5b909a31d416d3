"""Keywords that are never axes, because they have another meaning in pgmesh or torch, and the sizes that they mean.

Validation refuses them with the call that the user meant. A mapping of sizes may use them as names of axes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

OPTION_KEYWORDS = ("backend", "timeout", "high_priority", "nccl")
"""The options of groups."""

TORCH_OPTION_KEYWORDS = ("options", "pg_options", "backend_override")
"""Keywords by which torch takes options of groups."""

GROUP_KEYWORDS = (*OPTION_KEYWORDS, *TORCH_OPTION_KEYWORDS, "tag")
"""The keywords of groups, which meshes and layouts do not take."""

SHAPE_KEYWORDS = ("mesh_shape", "shape", "sizes", "dims")
"""Keywords by which other libraries take all sizes."""

NAME_KEYWORDS = ("mesh_dim_names", "dim_names", "axis_names", "names", "axes")
"""Keywords by which other libraries take the names of all axes."""

RESERVED = {
    **dict.fromkeys(OPTION_KEYWORDS, "is an option of groups: see mesh.configure"),
    **dict.fromkeys(TORCH_OPTION_KEYWORDS, "stands for options of groups: see mesh.configure"),
    "tag": "tells groups on the same ranks apart: see mesh.group",
    **dict.fromkeys(("device", "device_type", "device_id"), "follows from the backend of a group"),
    **dict.fromkeys(SHAPE_KEYWORDS, "stands for all sizes"),
    **dict.fromkeys((*NAME_KEYWORDS, "axis", "dim", "ndim"), "stands for the axes"),
    **dict.fromkeys(("mesh", "device_mesh"), "is an argument of interop.from_device_mesh"),
    **dict.fromkeys(("world_size", "store", "init_method", "rank", "local_rank"), "belongs to the world"),
    **dict.fromkeys(("group", "process_group"), "is made by the mesh, or given to mesh.adopt"),
    "ranks": "is left out: a view keeps the ranks of its mesh",
    "world": "is an argument of ProcessGroupMesh: a view is in the world of its mesh",
    "name": "is an argument of ProcessGroupMesh: a view has the name of its mesh",
    "layout": "is made from the sizes",
}
"""Keywords that are never axes, each with the end of the sentence "it ..."."""


def meant_sizes(shape: Sequence[Any], sizes: Mapping[str, Any]) -> Any:
    """The sizes in a call with reserved keywords: a mapping, a sequence or one number, which may be invalid.

    They are the sizes of axes; without them the argument ``mesh_shape`` or the like, or torch's list of sizes after a
    device type. Torch's list of names makes a mapping of a list of sizes.

    >>> meant_sizes((), {"device_type": "cuda", "mesh_shape": (2, 4), "mesh_dim_names": ("dp", "tp")})
    {'dp': 2, 'tp': 4}
    """
    last = shape[-1] if shape and isinstance(shape[-1], (Mapping, tuple, list)) else shape
    axes = {axis: size for axis, size in sizes.items() if axis not in RESERVED}
    given = next((sizes[word] for word in SHAPE_KEYWORDS if word in sizes), axes or last)
    names: Any = next((sizes[word] for word in NAME_KEYWORDS if word in sizes), None)
    with contextlib.suppress(TypeError, ValueError):  # no sequences, or of different lengths
        return dict(zip(names, given, strict=True))
    return given
