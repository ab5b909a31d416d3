"""The world mesh of OLMo-core, and the groups that its functions return."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pgmesh.errors import ShapeError
from pgmesh.layout import Axis, Layout
from pgmesh.recipes.arguments import RecipeCall
from pgmesh.recipes.arrangement import Along, Arrangement, build

AXIS_OF_WORD: dict[str, Axis] = {
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "expert": "dp_shard",
    "context": "cp",
    "tensor": "tp",
    "pipeline": "pp",
}


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
    call = RecipeCall.of(olmo, locals())
    hybrid = {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
    given = call.given.keys() - {"name"}
    data = hybrid if given & hybrid.keys() else {"dp": dp}
    if given and (data is hybrid) == (dp is not None):
        by_experts = {"dp_shard": ep, "dp_replicate": -1} if ep is not None else {"dp": -1}
        suggestion = _suggest(call, **({"dp": None} if data is hybrid else by_experts))
        raise ShapeError(f"{call}: data parallelism is dp, or dp_replicate x dp_shard.{suggestion}")
    free = {axis: -1 if size is None else size for axis, size in data.items()}
    sizes = call.parse_sizes(pp=pp, **free, cp=cp, tp=tp)
    box = call.fill_sizes(sizes, ep=ep and -1)  # experts use the axis dp_shard
    misfit = tp is not None or data is not hybrid or ep not in (-1, box["dp_shard"])
    if ep is not None and misfit:
        suggestion = _suggest(call, dp=None, tp=None, dp_shard=ep, dp_replicate=-1)
        raise ShapeError(f"{call}: experts are split along dp_shard, which is ep, without tp.{suggestion}")
    mesh = Layout(box, ranks=call.ranks)
    loader = tuple(data)
    names = dict.fromkeys(("model", "loader"), Along(mesh, loader))
    if cp is not None:  # for gradients, context parallel ranks have copies of the model
        merged = {"dp_cp" if axis == loader[-1] else axis: size for axis, size in box.items() if axis != "cp"}
        merged["dp_cp"] *= box["cp"]
        names["model"] = Along(mesh.view(merged), (*loader[:-1], "dp_cp"))
    names |= {word: Along(mesh, (axis,)) for word, axis in AXIS_OF_WORD.items() if axis in box}
    if pp is not None:
        names["stage"] = Along(mesh, mesh.axes[1:])
    return build(Arrangement(str(call), mesh, names), call, of, name)


def _suggest(call: RecipeCall, **changes: Any) -> str:
    """The end of a message with the changed call; empty if that call is refused too."""
    arguments: dict[str, Any] = {**call.given, **changes, "of": Layout}
    with suppress(ShapeError):
        olmo(len(call.ranks), **arguments)
        return f"\n\n  {call.with_changes(**changes)}"
    return ""


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
    call = RecipeCall.of(olmo_experts, locals())
    sizes = call.fill_sizes(call.parse_sizes(ep_replicate=1 if ep == -1 else -1, ep=ep))
    mesh = Layout(ep_replicate=sizes["ep_replicate"], ep_shard=sizes["ep"], ranks=call.ranks)
    names = dict.fromkeys(("model", "loader"), Along(mesh.view(dp=len(mesh)), ("dp",)))
    names |= {"expert": Along(mesh, ("ep_shard",)), "replicate": Along(mesh, ("ep_replicate",))}
    return build(Arrangement(str(call), mesh, names), call, of, name)
