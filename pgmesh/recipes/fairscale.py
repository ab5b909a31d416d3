"""The arrangement of fairscale and ezpz: data x pipeline x context x tensor."""

from __future__ import annotations

from typing import Any

from pgmesh.layout import Layout
from pgmesh.options import GroupOptions, Timeout
from pgmesh.recipes.arguments import fill_sizes, parse_world, recipe
from pgmesh.recipes.arrangement import Along, Arrangement, build


@recipe
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
    >>> recipes.fairscale(8, tp=2, of=Layout).partition("data")
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """
    ranks = parse_world(world)
    sizes = fill_sizes({"dp": -1, "tp": tp, "cp": cp, "pp": pp}, len(ranks))
    mesh = Layout({axis: sizes[axis] for axis in ("dp", "pp", "cp", "tp")}, ranks=ranks)
    axes = {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "dp"}
    names = {word: Along(mesh, (axis,)) for word, axis in axes.items()}
    backends = {"tp": tp_backend, "cp": cp_backend, "pp": pp_backend, "dp": dp_backend}
    options = {axis: GroupOptions(backend, timeout) for axis, backend in backends.items()}
    arrangement = build(Arrangement(mesh, names), of, name)
    if of is not Layout:
        for axis, each in options.items():
            arrangement.dense.configure(axis, **each.keywords())
    return arrangement
