"""The world mesh of OLMo-core, and the groups that its functions return."""

from __future__ import annotations

from typing import Any

from pgmesh.errors import ShapeError
from pgmesh.layout import Axis
from pgmesh.recipes.arguments import RecipeCall, parse_recipe_sizes
from pgmesh.recipes.arrangement import Arrangement, Family

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

    The mesh has only the axes that are given. Without any size, it has the axis dp alone. The family "model", for
    gradients, includes cp, since context parallel ranks have copies of the model. The family "loader", for loading
    data, does not.

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
    >>> olmo["model"].partition(), olmo["loader"].partition()
    (((0, 2, 4, 6), (1, 3, 5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)))
    """
    who = "recipes.olmo"
    given = {"pp": pp, "dp": dp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "ep": ep, "cp": cp, "tp": tp}
    call = RecipeCall.of(who, world, **given)
    hybrid = dp_replicate is not None or dp_shard is not None
    if dp is not None and hybrid:
        raise ShapeError(f"{call}: data parallelism is dp, or dp_replicate x dp_shard, not both.")
    if dp is None and not hybrid and any(size is not None for size in given.values()):
        suggestion = call.with_changes(dp=-1)
        raise ShapeError(f"{call}: pp, cp, tp and ep need a size of data parallelism.\n\n  {suggestion}")
    data = {"dp_replicate": dp_replicate, "dp_shard": dp_shard} if hybrid else {"dp": dp}
    free = {axis: -1 if size is None else size for axis, size in data.items()}
    sizes = parse_recipe_sizes(who, pp=pp, **free, cp=cp, tp=tp)
    box = call.fill_sizes(sizes, ep=None if ep is None else -1)  # experts use the axis dp_shard
    if ep is not None:
        _check_experts(call, ep, box)
    loader = tuple(data)
    words = {word: axis for word, axis in AXIS_OF_WORD.items() if axis in box}

    def arrange(mesh: Any) -> Arrangement:
        model, model_axes = mesh, loader
        if cp is not None:  # for gradients, context parallel ranks have copies of the model
            model_axes = (*loader[:-1], "dp_cp")
            merged = {"dp_cp" if axis == loader[-1] else axis: size for axis, size in box.items() if axis != "cp"}
            model = mesh.view(**{**merged, "dp_cp": box[loader[-1]] * box["cp"]})
        stage = [Family("stage", mesh, tuple(axis for axis in box if axis != "pp"))] if pp is not None else []
        return Arrangement.of(
            str(call),
            f"the last axis varies fastest: {', '.join(box)}",
            [(mesh, words)],
            [Family("model", model, model_axes), Family("loader", mesh, loader), *words, *stage],
        )

    return call.arrange(of, name, box, arrange)


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
    >>> recipes.olmo_experts(8, ep=4, of=Layout)["expert"].partition()
    ((0, 1, 2, 3), (4, 5, 6, 7))
    """
    who = "recipes.olmo_experts"
    call = RecipeCall.of(who, world, ep=None if ep == -1 else ep)
    sizes = call.fill_sizes(parse_recipe_sizes(who, ep_replicate=1 if ep == -1 else -1, ep=ep))

    def arrange(mesh: Any) -> Arrangement:
        whole = mesh.view(dp=world)
        return Arrangement.of(
            str(call),
            "the last axis varies fastest: ep_replicate, ep_shard",
            [(mesh, {"expert": "ep_shard", "replicate": "ep_replicate"})],
            [Family("model", whole, ("dp",)), Family("loader", whole, ("dp",)), "expert", "replicate"],
        )

    return call.arrange(of, name, {"ep_replicate": sizes["ep_replicate"], "ep_shard": sizes["ep"]}, arrange)


def _check_experts(call: RecipeCall, ep: int, box: dict[str, int]) -> None:
    """Raise ShapeError if experts are not split over exactly the ranks of dp_shard."""
    if "tp" in box:
        raise ShapeError(f"{call}: expert parallelism cannot be combined with tensor parallelism.")
    if "dp_shard" not in box:
        raise ShapeError(f"{call}: expert parallelism uses dp_shard, so pass dp_shard={ep} instead of dp.")
    if ep not in (-1, box["dp_shard"]):
        raise ShapeError(f"{call}: expert parallelism uses dp_shard, which is {box['dp_shard']}, but ep is {ep}.")
