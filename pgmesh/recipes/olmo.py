"""The world mesh of OLMo-core, and the groups that its functions return."""

from __future__ import annotations

from typing import Any

from pgmesh.layout import Axis, Layout
from pgmesh.recipes.arguments import Refused, fill_sizes, parse_world, recipe
from pgmesh.recipes.arrangement import Along, Arrangement, build

AXIS_OF_WORD: dict[str, Axis] = {
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "expert": "dp_shard",
    "context": "cp",
    "tensor": "tp",
    "pipeline": "pp",
}


@recipe
def olmo(
    world: int,
    *,
    pp: int | None = None,
    dp: int | None = None,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    ep: int | None = None,
    cp: int | None = None,
    tp: int | None = None,
    of: Any = None,
    name: str | None = None,
) -> Arrangement:
    """OLMo-core's world mesh, outermost axis first: pp, dp or dp_replicate x dp_shard, cp, tp, which varies fastest.

    The mesh has only the axes that are given. Without any size, it has the axis dp alone. The groups of "model", for
    gradients, include cp, since context parallel ranks have copies of the model. Those of "loader", for loading data,
    do not.

    Args:
        world: number of ranks.
        pp, cp, tp: sizes of pipeline, context and tensor parallelism. One size can be -1, the remaining size.
        dp: size of data parallelism. Required if any other size is given, unless
            dp_replicate or dp_shard is.
        dp_replicate, dp_shard: instead of dp, the number of copies of the model, and of the ranks that share one copy.
            If one is omitted, it is the remaining size.
        ep: size of expert parallelism, which uses the axis dp_shard: that axis's size, or -1.
        of: class of the mesh; ``Layout`` returns a plan. Default: ProcessGroupMesh.
        name: as for ``ProcessGroupMesh``.

    Raises:
        ShapeError: the sizes are incompatible.

    >>> from pgmesh import Layout, recipes
    >>> olmo = recipes.olmo(8, dp=-1, cp=2, tp=2, of=Layout)
    >>> olmo.partition("model"), olmo.partition("loader")
    (((0, 2, 4, 6), (1, 3, 5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)))
    """
    ranks = parse_world(world)
    is_hybrid = dp_replicate is not None or dp_shard is not None
    no_data = "data parallelism is dp, or dp_replicate x dp_shard."
    if is_hybrid and dp is not None:
        raise Refused(no_data, dp=None)
    if not is_hybrid and dp is None and ep is not None:
        raise Refused(no_data, dp_shard=ep, dp_replicate=-1)
    if not is_hybrid and dp is None and (pp, cp, tp) != (None, None, None):
        raise Refused(no_data, dp=-1)
    given = {"dp_replicate": dp_replicate, "dp_shard": dp_shard} if is_hybrid else {"dp": dp}
    data = {axis: -1 if size is None else size for axis, size in given.items()}
    box = fill_sizes({"pp": pp, **data, "cp": cp, "tp": tp}, len(ranks), ep=None if ep is None else -1)
    if ep is not None and not (is_hybrid and tp is None and ep in (-1, box["dp_shard"])):
        problem = "experts are split along dp_shard, which is ep, without tp."
        raise Refused(problem, dp=None, tp=None, dp_shard=ep, dp_replicate=-1)
    mesh = Layout(box, ranks=ranks)
    names = dict.fromkeys(("model", "loader"), Along(mesh, tuple(data)))
    if cp is not None:
        names["model"] = _with_context(mesh, tuple(data))
    names |= {word: Along(mesh, (axis,)) for word, axis in AXIS_OF_WORD.items() if axis in box}
    if pp is not None:
        names["stage"] = Along(mesh, mesh.axes[1:])
    return build(Arrangement(mesh, names), of, name)


def _with_context(mesh: Layout, data: tuple[Axis, ...]) -> Along:
    """The groups for gradients: the last data axis and cp, which follows it, are one axis of a view."""
    *outer, last = data
    sizes = {axis: mesh.size(axis) for axis in mesh.axes}
    merged = {"dp_cp" if axis == last else axis: size for axis, size in sizes.items() if axis != "cp"}
    merged["dp_cp"] *= sizes["cp"]
    return Along(mesh.view(merged), (*outer, "dp_cp"))


@recipe
def olmo_experts(world: int, *, ep: int = -1, of: Any = None, name: str | None = None) -> Arrangement:
    """OLMo-core's mesh for experts alone, outermost axis first: ep_replicate, ep_shard, which varies fastest.

    Args:
        world: number of ranks.
        ep: number of ranks that experts are split over; -1 is all ranks.
        of: class of the mesh; ``Layout`` returns a plan. Default: ProcessGroupMesh.
        name: as for ``ProcessGroupMesh``.

    Raises:
        ShapeError: the size does not divide the world.

    >>> from pgmesh import Layout, recipes
    >>> recipes.olmo_experts(8, ep=4, of=Layout).partition("expert")
    ((0, 1, 2, 3), (4, 5, 6, 7))
    """
    ranks = parse_world(world)
    sizes = fill_sizes({"ep_replicate": 1 if ep == -1 else -1, "ep": ep}, len(ranks))
    mesh = Layout(ep_replicate=sizes["ep_replicate"], ep_shard=sizes["ep"], ranks=ranks)
    names = dict.fromkeys(("model", "loader"), Along(mesh.view(dp=len(mesh)), ("dp",)))
    names |= {"expert": Along(mesh, ("ep_shard",)), "replicate": Along(mesh, ("ep_replicate",))}
    return build(Arrangement(mesh, names), of, name)
