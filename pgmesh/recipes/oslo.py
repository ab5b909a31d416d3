"""The parallel context of OSLO, with five modes of parallelism."""

from __future__ import annotations

from typing import Any

from pgmesh.layout import Layout
from pgmesh.recipes.arguments import fill_sizes, parse_order, parse_world, recipe
from pgmesh.recipes.arrangement import Along, Arrangement, build

AXIS_OF_MODE = {"pipeline": "pp", "data": "dp", "expert": "ep", "sequence": "sp", "tensor": "tp"}
"""The axis of each mode, outermost first."""

DEFAULT_ORDER = "-".join(AXIS_OF_MODE)


@recipe
def oslo(
    world: int,
    *,
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    sequence: int = 1,
    expert: int = 1,
    order: str = DEFAULT_ORDER,
    of: Any = None,
    name: str | None = None,
) -> Arrangement:
    """OSLO's parallel context; ``order`` names the outermost axis first, and the last one varies fastest.

    The names are "global", the whole mesh, and one for each mode: "data", "tensor", "pipeline", "sequence", "expert".
    OSLO's documentation gives no order. In its code, data is outermost:
    ``order="data-pipeline-expert-sequence-tensor"``.

    Args:
        world: number of ranks.
        data, tensor, pipeline, sequence, expert: sizes whose product is the world; one can be -1, the remaining size.
        order: the modes, outermost first, joined by ``-``. Modes of size 1 may be omitted.
        of: class of the mesh; ``Layout`` returns a plan. Default: ProcessGroupMesh.
        name: as for ``ProcessGroupMesh``.

    Raises:
        ShapeError: the product of the sizes is not the world, or the order omits a mode of a size above 1.

    >>> from pgmesh import Layout, recipes
    >>> context = recipes.oslo(8, data=2, tensor=2, pipeline=2, of=Layout).seen_by(5)
    >>> context["tensor"].ranks(), context["data"].index(), context["global"].size()
    ((4, 5), 0, 8)
    """
    ranks = parse_world(world)
    given = {"data": data, "tensor": tensor, "pipeline": pipeline, "sequence": sequence, "expert": expert}
    sizes = fill_sizes(given, len(ranks))
    outermost_first = parse_order(order, DEFAULT_ORDER, "outermost axis first", sizes)
    mesh = Layout({AXIS_OF_MODE[mode]: sizes[mode] for mode in outermost_first}, ranks=ranks)
    names = {"global": Along(mesh, mesh.axes), **{mode: Along(mesh, (AXIS_OF_MODE[mode],)) for mode in sizes}}
    return build(Arrangement(mesh, names), of, name)
