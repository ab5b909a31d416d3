"""The arrangement of fairscale and ezpz: data x pipeline x context x tensor."""

from __future__ import annotations

from typing import Any

from pgmesh.options import Timeout
from pgmesh.recipes.arguments import RecipeCall, parse_recipe_sizes
from pgmesh.recipes.arrangement import Arrangement


def fairscale(
    world: int,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    tp_backend: str | None = None,
    pp_backend: str | None = None,
    cp_backend: str | None = None,
    dp_backend: str | None = None,
    timeout: Timeout | None = None,
    of: Any = None,
    name: str | None = None,
) -> Arrangement:
    """fairscale's and ezpz's arrangement, outermost axis first: data, pipeline, context, tensor, which varies fastest.

    Args:
        world: number of ranks. The size of data parallelism is the world divided by the other sizes.
        tp, pp, cp: sizes of tensor, pipeline and context parallelism.
        tp_backend, pp_backend, cp_backend, dp_backend: backend of the groups along that axis, also if its size is 1.
            Default: the backend of the world.
        timeout: timeout of their collectives, as a timedelta or a number of seconds. Default: that of the world.
        of: class of the mesh; ``Layout`` returns a plan. Default: ProcessGroupMesh.
        name: as for ``ProcessGroupMesh``.

    Raises:
        ShapeError: the sizes do not divide the world.
        OptionsError: a backend or a timeout has the wrong type.

    >>> from pgmesh import Layout, recipes
    >>> recipes.fairscale(8, tp=2, of=Layout)["data"].partition()
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """
    who = "recipes.fairscale"
    given = parse_recipe_sizes(who, dp=-1, tp=tp, cp=cp, pp=pp)
    call = RecipeCall.of(who, world, **{axis: size for axis, size in given.items() if size not in (1, -1)})
    sizes = call.fill_sizes(given)
    backends = {"tensor": tp_backend, "context": cp_backend, "pipeline": pp_backend, "data": dp_backend}

    def arrange(mesh: Any) -> Arrangement:
        arrangement = Arrangement.of(
            str(call),
            "the last axis varies fastest: dp, pp, cp, tp",
            [(mesh, {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "dp"})],
            list(backends),
        )
        for family, backend in backends.items():
            if backend is not None or timeout is not None:
                arrangement.configure(family, backend=backend, timeout=timeout)
        return arrangement

    return call.arrange(of, name, {axis: sizes[axis] for axis in ("dp", "pp", "cp", "tp")}, arrange)
