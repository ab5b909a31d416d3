"""The parallel context of OSLO, with five modes of parallelism."""

from __future__ import annotations

import re
from typing import Any

from pgmesh._util.validation import fill_sizes, parse_sizes
from pgmesh.errors import ShapeError
from pgmesh.layout import Axis
from pgmesh.recipes.arguments import build_arrangement, format_recipe_call, parse_order, parse_world
from pgmesh.recipes.arrangement import Arrangement, Family

AXIS_OF_MODE: dict[str, Axis] = {"pipeline": "pp", "data": "dp", "expert": "ep", "sequence": "sp", "tensor": "tp"}
"""The axis of each mode, outermost first."""

DEFAULT_ORDER = "-".join(AXIS_OF_MODE)


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

    The families are "global", the whole mesh, and one for each mode: "data", "tensor", "pipeline", "sequence",
    "expert". OSLO's documentation gives no order. In its code, data is outermost:
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
    >>> context["tensor"].ranks, context["data"].index, context["global"].size
    ((4, 5), 0, 8)
    """
    given = {"data": data, "tensor": tensor, "pipeline": pipeline, "sequence": sequence, "expert": expert}
    function, ranks = "recipes.oslo", parse_world("oslo", world)
    try:
        sizes = fill_sizes(
            function, parse_sizes(function, (), given), world, f"the world has {world}", suggest_ranks=False
        )
    except ShapeError as error:  # its calls have only sizes, so add the other arguments
        more = "" if order == DEFAULT_ORDER else f", order={order!r}"
        call = rf"{re.escape(function)}\(([^()]*)\)"
        raise ShapeError(re.sub(call, rf"{function}({world}, \1{more})", str(error))) from None
    sized = {mode: size for mode, size in given.items() if size != 1}
    call_text = format_recipe_call("oslo", world, **sized, order=None if order == DEFAULT_ORDER else order)
    of_modes = {"": {mode: sizes[mode] for mode in AXIS_OF_MODE}}
    asked = parse_order(call_text, order, DEFAULT_ORDER, "outermost axis first", of_modes)
    outermost_first = [*asked, *(mode for mode in AXIS_OF_MODE if mode not in asked)]
    return build_arrangement(
        "oslo",
        of,
        {str(AXIS_OF_MODE[mode]): sizes[mode] for mode in outermost_first},
        ranks,
        name,
        lambda mesh: Arrangement.of(
            call_text,
            f"the last axis varies fastest: {', '.join(map(str, mesh.axes))}",
            [(mesh, AXIS_OF_MODE)],
            [Family("global", mesh, ()), "data", "tensor", "pipeline", "sequence", "expert"],
        ),
    )
