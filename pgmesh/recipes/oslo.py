"""OSLO's five sizes."""

from __future__ import annotations

import re
from typing import Any

from pgmesh._util.validation import fill_sizes, parse_sizes
from pgmesh.errors import ShapeError
from pgmesh.layout import Axis
from pgmesh.recipes.arguments import arranged, call, take_order, take_world
from pgmesh.recipes.arrangement import Arrangement, Family

AXES: dict[str, Axis] = {"pipeline": "pp", "data": "dp", "expert": "ep", "sequence": "sp", "tensor": "tp"}
"""The axis of each mode, outermost first."""

ORDER = "-".join(AXES)


def oslo(
    world: int,
    *,
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    sequence: int = 1,
    expert: int = 1,
    order: str = ORDER,
    of: Any = None,
    name: str | None = None,
) -> Arrangement:
    """OSLO's parallel context; ``order`` names the outermost axis first, and the last one varies fastest.

    Its modes are families by name: "global", "data", "tensor", "pipeline", "sequence", "expert". OSLO's page gives no
    order; its code counts data outermost: ``order="data-pipeline-expert-sequence-tensor"``.

    Args:
        world: how many ranks.
        data, tensor, pipeline, sequence, expert: sizes that multiply to the world; at most one is -1, what is left.
        order: the modes, the outermost first, joined by ``-``. What has size 1 may be left out.
        of: what the mesh is made with; ``Layout`` makes a plan. ProcessGroupMesh unless given.
        name: as for ``ProcessGroupMesh``.

    Raises:
        ShapeError: sizes that do not hold the world, or an order that does not name them.

    >>> from pgmesh import Layout, recipes
    >>> context = recipes.oslo(8, data=2, tensor=2, pipeline=2, of=Layout).seen_by(5)
    >>> context["tensor"].ranks, context["data"].index, context["global"].size
    ((4, 5), 0, 8)
    """
    given = {"data": data, "tensor": tensor, "pipeline": pipeline, "sequence": sequence, "expert": expert}
    who, ranks = "recipes.oslo", take_world("oslo", world)
    try:
        sizes = fill_sizes(who, parse_sizes(who, (), given), world, f"the world has {world}", pick=False)
    except ShapeError as error:  # whose calls have sizes alone
        more = "" if order == ORDER else f", order={order!r}"
        raise ShapeError(re.sub(rf"{re.escape(who)}\(([^()]*)\)", rf"{who}({world}, \1{more})", str(error))) from None
    sized = {mode: size for mode, size in given.items() if size != 1}
    spelled = call("oslo", world, **sized, order=None if order == ORDER else order)
    asked = take_order(spelled, order, ORDER, "outermost axis first", {"": {mode: sizes[mode] for mode in AXES}})
    outermost_first = [*asked, *(mode for mode in AXES if mode not in asked)]
    return arranged(
        "oslo",
        of,
        {str(AXES[mode]): sizes[mode] for mode in outermost_first},
        ranks,
        name,
        lambda mesh: Arrangement.of(
            spelled,
            f"the last axis varies fastest: {', '.join(map(str, mesh.axes))}",
            [(mesh, AXES)],
            [Family("global", mesh, ()), "data", "tensor", "pipeline", "sequence", "expert"],
        ),
    )
