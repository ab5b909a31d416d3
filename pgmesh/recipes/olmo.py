"""The world mesh of OLMo-core, and the groups that its functions return."""

from __future__ import annotations

import math
from typing import Any

from pgmesh._util.formatting import format_calls
from pgmesh._util.suggestions import divisors, torchrun_command
from pgmesh._util.validation import parse_size
from pgmesh.errors import ShapeError
from pgmesh.layout import Axis
from pgmesh.recipes.arguments import (
    build_arrangement,
    format_choices,
    format_rank_count,
    format_recipe_call,
    parse_recipe_size,
    parse_world,
    remaining_size,
)
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
        pp, cp, tp: sizes of pipeline, context and tensor parallelism.
        dp: size of data parallelism; -1 is the remaining size. Required if any other size is given, unless
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
    recipe = "olmo"
    ranks = parse_world(recipe, world)
    given = {"pp": pp, "dp": dp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "ep": ep, "cp": cp, "tp": tp}
    call_text = format_recipe_call(recipe, world, **given)
    other = {"pp": pp, "cp": cp, "tp": tp}
    rest = {axis: parse_recipe_size(recipe, axis, size) for axis, size in other.items() if size is not None}
    hybrid = dp_replicate is not None or dp_shard is not None
    if dp is not None and hybrid:
        raise ShapeError(f"{call_text}: data parallelism is dp, or dp_replicate x dp_shard, not both.")
    if dp is None and not hybrid:
        if any(size is not None for size in given.values()):
            suggestion = format_recipe_call(recipe, world, **{**given, "dp": -1})
            raise ShapeError(f"{call_text}: pp, cp, tp and ep need a size of data parallelism.\n\n  {suggestion}")
        dp = -1
    left = remaining_size(recipe, world, rest, given={axis: size for axis, size in given.items() if axis not in rest})
    sizes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard} if hybrid else {"dp": dp}
    data = _data_sizes(world, left, sizes, given)
    if ep is not None:
        _check_experts(call_text, ep, tp, data)
    box = {axis: {**rest, **data}[axis] for axis in ("pp", *data, "cp", "tp") if axis in rest or axis in data}
    loader = tuple(data)
    words = {word: axis for word, axis in AXIS_OF_WORD.items() if axis in box}

    def arrange(mesh: Any) -> Arrangement:
        model, model_axes = mesh, loader
        if cp is not None:  # for gradients, context parallel ranks have copies of the model
            model_axes = (*loader[:-1], "dp_cp")
            merged = {"dp_cp" if axis == loader[-1] else axis: size for axis, size in box.items() if axis != "cp"}
            model = mesh.view(**{**merged, "dp_cp": data[loader[-1]] * cp})
        stage = [Family("stage", mesh, tuple(axis for axis in box if axis != "pp"))] if pp is not None else []
        return Arrangement.of(
            call_text,
            f"the last axis varies fastest: {', '.join(box)}",
            [(mesh, words)],
            [Family("model", model, model_axes), Family("loader", mesh, loader), *words, *stage],
        )

    return build_arrangement(recipe, of, box, ranks, name, arrange)


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
    ranks = parse_world("olmo_experts", world)
    size = world if ep == -1 else parse_recipe_size("olmo_experts", "ep", ep)
    copies = remaining_size("olmo_experts", world, {"ep": size})

    def arrange(mesh: Any) -> Arrangement:
        whole = mesh.view(dp=world)
        return Arrangement.of(
            format_recipe_call("olmo_experts", world, ep=None if ep == -1 else ep),
            "the last axis varies fastest: ep_replicate, ep_shard",
            [(mesh, {"expert": "ep_shard", "replicate": "ep_replicate"})],
            [Family("model", whole, ("dp",)), Family("loader", whole, ("dp",)), "expert", "replicate"],
        )

    return build_arrangement("olmo_experts", of, {"ep_replicate": copies, "ep_shard": size}, ranks, name, arrange)


def _data_sizes(world: int, left: int, sizes: dict[str, int | None], given: dict[str, int | None]) -> dict[str, int]:
    """The sizes of data parallelism. A missing one is the remaining size."""
    call_text = format_recipe_call("olmo", world, **given)
    found = {axis: -1 if size is None else parse_size("recipes.olmo", axis, size) for axis, size in sizes.items()}
    fixed = {axis: size for axis, size in found.items() if size != -1}
    free = [axis for axis in found if axis not in fixed]
    product = math.prod(fixed.values())
    if len(free) > 1:
        raise ShapeError(f"{call_text}: at most one of {' and '.join(free)} can be -1, the remaining size.")
    if left % product or (not free and product != left):
        is_left = f"{format_rank_count(left)} remain{'s' * (left == 1)} for data parallelism"
        ways = [_suggest_data_sizes(world, left, fixed, given, is_whole=not free)]
        if world == 1:
            ways.insert(0, (f"{torchrun_command(product)} script.py", "a script by itself is a world of 1: start more"))
        raise ShapeError(f"{call_text}: {' x '.join(fixed)} is {product}, but {is_left}.\n\n{format_calls(ways)}")
    return {axis: left // product if size == -1 else size for axis, size in found.items()}


def _suggest_data_sizes(
    world: int, left: int, fixed: dict[str, int], given: dict[str, int | None], *, is_whole: bool
) -> tuple[str, str]:
    """A call with sizes of data parallelism that divide ``left``, or whose product it is, and the reason."""
    better: dict[str, int | None] = {}
    for axis, size in fixed.items():
        rest = math.prod(fixed.values()) // size
        if left % rest == 0:  # changing this size is enough
            fitting = divisors(left // rest)
            near = min(fitting, key=lambda n: (abs(n - size), n))
            better = {axis: -1 if is_whole else near}
            why = f"{axis} may be {format_choices(fitting)}"
            if is_whole:
                why = f"{axis} is the remaining size, {left // rest}"
            break
    else:
        first, last = fixed
        better = {first: -1, last: max(n for n in divisors(left) if n <= fixed[last])}
        why = f"{last} may be {format_choices(divisors(left))}; {first} is the remaining size"
    if given["ep"] == given["dp_shard"] and "dp_shard" in better:  # experts use the same axis
        better["ep"] = better["dp_shard"]
    return format_recipe_call("olmo", world, **{**given, **better}), why


def _check_experts(call_text: str, ep: int, tp: int | None, data: dict[str, int]) -> None:
    """Raise ShapeError if experts are not split over exactly the ranks of dp_shard."""
    if tp is not None:
        raise ShapeError(f"{call_text}: expert parallelism cannot be combined with tensor parallelism.")
    shard = data.get("dp_shard")
    if shard is None:
        raise ShapeError(f"{call_text}: expert parallelism uses dp_shard, so pass dp_shard={ep} instead of dp.")
    if parse_size("recipes.olmo", "ep", ep) not in (-1, shard):
        raise ShapeError(f"{call_text}: expert parallelism uses dp_shard, which is {shard}, but ep is {ep}.")
