"""OLMo-core's world mesh, and what its functions take from it."""

from __future__ import annotations

import math
from typing import Any

from pgmesh._util.formatting import format_calls
from pgmesh._util.suggestions import divisors, torchrun_command
from pgmesh._util.validation import parse_size
from pgmesh.errors import ShapeError
from pgmesh.layout import Axis
from pgmesh.recipes.arguments import any_of, arranged, call, some_ranks, take, take_world, what_is_left
from pgmesh.recipes.arrangement import Arrangement, Family

WORDS: dict[str, Axis] = {
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

    An axis that is not given is not there. With no size at all, dp is the world. Groups for gradients ("model") count
    cp as copies of the model; groups for loading data ("loader") do not.

    Args:
        world: how many ranks.
        pp, cp, tp: sizes of pipeline, context and tensor parallelism.
        dp: size of plain data parallelism; -1 is what is left. Some form of it goes with every other size.
        dp_replicate, dp_shard: in place of dp, copies of the model and the ranks that one is sharded over. One not
            given is what is left.
        ep: expert parallelism, over dp_shard and of its size; -1 is just that.
        of: what the mesh is made with; ``Layout`` makes a plan. ProcessGroupMesh unless given.
        name: as for ``ProcessGroupMesh``.

    Raises:
        ShapeError: sizes that do not go together.

    >>> from pgmesh import Layout, recipes
    >>> olmo = recipes.olmo(8, dp=-1, cp=2, tp=2, of=Layout)
    >>> olmo["model"].partition(), olmo["loader"].partition()
    (((0, 2, 4, 6), (1, 3, 5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)))
    """
    who = "olmo"
    ranks = take_world(who, world)
    given = {"pp": pp, "dp": dp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "ep": ep, "cp": cp, "tp": tp}
    spelled = call(who, world, **given)
    rest = {axis: take(who, axis, size) for axis, size in (("pp", pp), ("cp", cp), ("tp", tp)) if size is not None}
    hybrid = dp_replicate is not None or dp_shard is not None
    if dp is not None and hybrid:
        raise ShapeError(f"{spelled}: data parallelism is dp, or dp_replicate x dp_shard, not both.")
    if dp is None and not hybrid:
        if any(size is not None for size in given.values()):
            plain = call(who, world, **{**given, "dp": -1})
            raise ShapeError(f"{spelled}: every other size goes with one of data parallelism.\n\n  {plain}")
        dp = -1
    left = what_is_left(who, world, rest, given={axis: size for axis, size in given.items() if axis not in rest})
    sizes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard} if hybrid else {"dp": dp}
    data = _data(world, left, sizes, given)
    if ep is not None:
        _check_experts(spelled, ep, tp, data)
    box = {axis: {**rest, **data}[axis] for axis in ("pp", *data, "cp", "tp") if axis in rest or axis in data}
    loader = tuple(data)
    words = {word: axis for word, axis in WORDS.items() if axis in box}

    def arrange(mesh: Any) -> Arrangement:
        model, model_axes = mesh, loader
        if cp is not None:  # for gradients, context parallel ranks are copies of the model
            model_axes = (*loader[:-1], "dp_cp")
            merged = {"dp_cp" if axis == loader[-1] else axis: size for axis, size in box.items() if axis != "cp"}
            model = mesh.view(**{**merged, "dp_cp": data[loader[-1]] * cp})
        stage = [Family("stage", mesh, tuple(axis for axis in box if axis != "pp"))] if pp is not None else []
        return Arrangement.of(
            spelled,
            f"the last axis varies fastest: {', '.join(box)}",
            [(mesh, words)],
            [Family("model", model, model_axes), Family("loader", mesh, loader), *words, *stage],
        )

    return arranged(who, of, box, ranks, name, arrange)


def olmo_experts(world: int, *, ep: int = -1, of: Any = None, name: str | None = None) -> Arrangement:
    """OLMo-core's mesh for experts alone, outermost axis first: ep_replicate, ep_shard, which varies fastest.

    Args:
        world: how many ranks.
        ep: over how many ranks experts are split; -1 is all of them.
        of: what the mesh is made with; ``Layout`` makes a plan. ProcessGroupMesh unless given.
        name: as for ``ProcessGroupMesh``.

    Raises:
        ShapeError: a size that does not divide the world.

    >>> from pgmesh import Layout, recipes
    >>> recipes.olmo_experts(8, ep=4, of=Layout)["expert"].partition()
    ((0, 1, 2, 3), (4, 5, 6, 7))
    """
    ranks = take_world("olmo_experts", world)
    size = world if ep == -1 else take("olmo_experts", "ep", ep)
    copies = what_is_left("olmo_experts", world, {"ep": size})

    def arrange(mesh: Any) -> Arrangement:
        whole = mesh.view(dp=world)
        return Arrangement.of(
            call("olmo_experts", world, ep=None if ep == -1 else ep),
            "the last axis varies fastest: ep_replicate, ep_shard",
            [(mesh, {"expert": "ep_shard", "replicate": "ep_replicate"})],
            [Family("model", whole, ("dp",)), Family("loader", whole, ("dp",)), "expert", "replicate"],
        )

    return arranged("olmo_experts", of, {"ep_replicate": copies, "ep_shard": size}, ranks, name, arrange)


def _data(world: int, left: int, sizes: dict[str, int | None], given: dict[str, int | None]) -> dict[str, int]:
    """The sizes of data parallelism, with what is left in place of what was not given."""
    spelled = call("olmo", world, **given)
    found = {axis: -1 if size is None else parse_size("recipes.olmo", axis, size) for axis, size in sizes.items()}
    fixed = {axis: size for axis, size in found.items() if size != -1}
    free = [axis for axis in found if axis not in fixed]
    product = math.prod(fixed.values())
    if len(free) > 1:
        raise ShapeError(f"{spelled}: at most one of {' and '.join(free)} is -1, what is left.")
    if left % product or (not free and product != left):
        is_left = f"what is left for data parallelism is {some_ranks(left)}"
        ways = [_mended(world, left, fixed, given, is_whole=not free)]
        if world == 1:
            ways.insert(0, (f"{torchrun_command(product)} script.py", "a script by itself is a world of 1: start more"))
        raise ShapeError(f"{spelled}: {' x '.join(fixed)} is {product}, but {is_left}.\n\n{format_calls(ways)}")
    return {axis: left // product if size == -1 else size for axis, size in found.items()}


def _mended(
    world: int, left: int, fixed: dict[str, int], given: dict[str, int | None], *, is_whole: bool
) -> tuple[str, str]:
    """The call with sizes of data parallelism that fit in what is left, or fill it, and why."""
    better: dict[str, int | None] = {}
    for axis, size in fixed.items():
        rest = math.prod(fixed.values()) // size
        if left % rest == 0:  # this one alone mends it
            would = divisors(left // rest)
            near = min(would, key=lambda n: (abs(n - size), n))
            better = {axis: -1 if is_whole else near}
            why = f"let {axis} be what is left: {left // rest}" if is_whole else f"{axis} may be {any_of(would)}"
            break
    else:
        first, last = fixed
        better = {first: -1, last: max(n for n in divisors(left) if n <= fixed[last])}
        why = f"{last} may be {any_of(divisors(left))}; {first} is what is left"
    if given["ep"] == given["dp_shard"] and "dp_shard" in better:  # experts go over the same ranks
        better["ep"] = better["dp_shard"]
    return call("olmo", world, **{**given, **better}), why


def _check_experts(spelled: str, ep: int, tp: int | None, data: dict[str, int]) -> None:
    """Experts are split over the ranks that the rest of the model is sharded over."""
    if tp is not None:
        raise ShapeError(f"{spelled}: expert parallelism does not go with tensor parallelism.")
    shard = data.get("dp_shard")
    if shard is None:
        raise ShapeError(f"{spelled}: expert parallelism goes over dp_shard, so give dp_shard={ep} in place of dp.")
    if parse_size("recipes.olmo", "ep", ep) not in (-1, shard):
        raise ShapeError(f"{spelled}: expert parallelism goes over dp_shard, which is {shard}, but ep is {ep}.")
