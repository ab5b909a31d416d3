"""Keywords that are never axes, because they have another meaning in pgmesh or torch.

Validation refuses them with the call that the user meant. A mapping of sizes may use them as names of axes.
"""

from __future__ import annotations

OPTION_KEYWORDS = ("backend", "timeout", "high_priority", "nccl", "description")
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
    "name": "is an argument of ProcessGroupMesh: a view has the name of its mesh",
    "layout": "is made from the sizes",
}
"""Keywords that are never axes, each with the end of the sentence "it ..."."""
