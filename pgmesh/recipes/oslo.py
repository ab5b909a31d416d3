"""OSLO's five sizes."""

from __future__ import annotations

from typing import Any

from pgmesh.errors import ShapeError
from pgmesh.layout import Axis
from pgmesh.recipes.arrangement import Arrangement, Family
from pgmesh.recipes.given import arranged, call, take_world
from pgmesh.sizes import fill, take_sizes

AXES: dict[str, Axis] = {"pipeline": "pp", "data": "dp", "expert": "ep", "sequence": "sp", "tensor": "tp"}
"""The axis of each mode, outermost first."""


def oslo(
    world: int,
    *,
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    sequence: int = 1,
    expert: int = 1,
    of: Any = None,
    name: str | None = None,
) -> Arrangement:
    """OSLO's parallel context, outermost axis first: pipeline, data, expert, sequence, tensor, which varies fastest.

    Its modes are families by name: "global", "data", "tensor", "pipeline", "sequence", "expert".

    Args:
        world: how many ranks.
        data, tensor, pipeline, sequence, expert: sizes that multiply to the world; at most one is -1, what is left.
        of: what the mesh is made with; ``Layout`` makes a plan. ProcessGroupMesh unless given.
        name: as for ``ProcessGroupMesh``.

    Raises:
        ShapeError: sizes that do not hold the world.

    >>> from pgmesh import Layout, recipes
    >>> context = recipes.oslo(8, data=2, tensor=2, pipeline=2, of=Layout).seen_by(5)
    >>> context["tensor"].ranks, context["data"].index, context["global"].size
    ((4, 5), 0, 8)
    """
    given = {"data": data, "tensor": tensor, "pipeline": pipeline, "sequence": sequence, "expert": expert}
    who, ranks = "recipes.oslo", take_world("oslo", world)
    try:
        sizes = fill(who, take_sizes(who, (), given), world, f"the world has {world}", pick=False)
    except ShapeError as error:  # whose calls have sizes alone
        raise ShapeError(str(error).replace(f"{who}(", f"{who}({world}, ")) from None
    return arranged(
        "oslo",
        of,
        {str(axis): sizes[mode] for mode, axis in AXES.items()},
        ranks,
        name,
        lambda mesh: Arrangement.of(
            call("oslo", world, **{mode: size for mode, size in given.items() if size != 1}),
            f"the last axis varies fastest: {', '.join(map(str, mesh.axes))}",
            [(mesh, AXES)],
            [Family("global", mesh, ()), "data", "tensor", "pipeline", "sequence", "expert"],
        ),
    )
