"""The arrangement of Megatron-Core: a dense mesh, an expert view of it, and every group of ``parallel_state``."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Union

from pgmesh._util.formatting import format_call, format_ranks, join_words
from pgmesh._util.suggestions import divisors
from pgmesh._util.validation import parse_size
from pgmesh.errors import ShapeError
from pgmesh.layout import Axis
from pgmesh.recipes.arguments import RecipeCall, parse_recipe_sizes
from pgmesh.recipes.arrangement import Arrangement, Family, Pick, split_axes

DEFAULT_ORDER = "tp-cp-ep-dp-pp"

DENSE_AXES: dict[str, Axis] = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}
EXPERT_AXES: dict[str, Axis] = {"expert-tensor": "etp", "expert": "ep", "expert-data": "edp", "pipeline": "pp"}

EXPERT_AXIS = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
"""The axis of the expert mesh for each axis of an order."""

SHORT_NAMES: dict[str, tuple[str, ...]] = {
    "tp": ("tensor",),
    "pp": ("pipeline",),
    "mp": ("model",),
    "dp": ("data",),
    "dp_cp": ("data+context",),
    "intra_dp_cp": ("data+context in instance",),
    "cp": ("context",),
    "tp_dp": ("tensor+data",),
    "tp_dp_cp": ("tensor+data+context",),
    "tp_cp": ("tensor+context",),
    "embd": ("embedding",),
    "pos_embd": ("position embedding",),
    "ep": ("expert",),
    "ep_tp": ("expert-tensor",),
    "tp_ep_mp": ("expert-tensor+expert",),
    "tp_ep_pp": ("expert-tensor+expert+pipeline",),
    "ep_dp": ("expert-data",),
    "intra_ep_dp": ("expert-data in instance",),
    "inter_ep_dp": ("between instances",),
    "intra_dist_opt_instance": ("instance",),
}
"""The names of groups in Megatron's settings for NCCL."""

Stages = Union[int, Sequence[int], Pick]
"""Stages of a pipeline: their numbers, or a function that selects some of a pipeline's ranks."""

KEYWORDS = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "hierarchical_context_parallel_sizes": "hierarchical_cp",
    "num_distributed_optimizer_instances": "optimizer_instances",
    "get_embedding_ranks": "embedding",
    "get_position_embedding_ranks": "position_embedding",
}
"""The arguments here for those of Megatron's ``initialize_model_parallel``."""


def _translate_keywords(recipe: Callable[..., Arrangement]) -> Any:
    """The recipe, which answers keywords of Megatron with the translated call."""

    @functools.wraps(recipe)
    def call(*args: Any, **given: Any) -> Arrangement:
        theirs = [word for word in given if word not in inspect.signature(recipe).parameters]
        if not KEYWORDS.keys().isdisjoint(theirs):
            ours = {KEYWORDS.get(word, word): given[word] for word in given if word in KEYWORDS or word not in theirs}
            problem = f"recipes.megatron has no argument {join_words(theirs, 'or')}: see docs/coming_from/megatron.md."
            raise ShapeError(f"{problem}\n\n  {format_call('recipes.megatron', {}, *args, **ours)}")
        return recipe(*args, **given)

    return call


@_translate_keywords
def megatron(
    world: int,
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    pp: int = 1,
    order: str = DEFAULT_ORDER,
    rank_offset: int = 0,
    hierarchical_cp: Sequence[int] | None = None,
    optimizer_instances: int = 1,
    embedding: Stages = (0, -1),
    position_embedding: Stages = (0,),
    of: Any = None,
    name: str | None = None,
) -> Arrangement:
    """Megatron-Core's arrangement; ``order`` names the fastest axis first, as Megatron does.

    The size of data parallelism is the world divided by the other sizes. The expert mesh is a view of the same ranks
    in the same order. It has ``etp`` instead of ``tp``, no ``cp``, and the remaining size as expert data parallelism.

    Args:
        world: number of ranks.
        tp, cp, ep, pp: sizes of tensor, context, expert and pipeline parallelism.
        etp: tensor parallelism inside experts. Default: ``tp``.
        order: the axes, fastest first, joined by ``-``. Axes of size 1 may be omitted.
        rank_offset: the first rank.
        hierarchical_cp: sizes whose product is ``cp``. They define the families "context level 1", whose groups are
            contiguous, "context level 2", and so on.
        optimizer_instances: number of copies of the optimizer's state.
        embedding: stages with word embeddings, by number, or a function that selects some of a pipeline's ranks. The
            group has the ranks in the order given.
        position_embedding: stages with position embeddings.
        of: class of the mesh; ``Layout`` returns a plan. Default: ProcessGroupMesh.
        name: as for ``ProcessGroupMesh``.

    Raises:
        ShapeError: the sizes or the order are incompatible. The message suggests compatible ones.

    >>> from pgmesh import Layout, recipes
    >>> print(recipes.megatron(8, tp=2, ep=2, pp=2, of=Layout).seen_by(5))    # doctest: +ELLIPSIS
    recipes.megatron(8, tp=2, pp=2, ep=2)
    fastest axis first: tp-cp-ep-dp-pp
    dense   pp=2 dp=2 cp=1 tp=2
    expert  pp=2 edp=1 ep=2 etp=2
    <BLANKLINE>
    group                          axes                 size  blocks  of rank 5
    tensor                         tp                      2       4  4, 5
    pipeline                       pp                      2       4  1, 5
    model                          pp, tp                  4       2  0, 1, 4, 5
    ...
    """
    who = "recipes.megatron"
    sizes = parse_recipe_sizes(who, dp=-1, tp=tp, cp=cp, pp=pp, ep=ep)
    expert_sizes = parse_recipe_sizes(who, edp=-1, ep=ep, etp=tp if etp is None else etp)
    call = RecipeCall.of(
        who,
        world,
        rank_offset,
        **{axis: size for axis, size in sizes.items() if size not in (1, -1)},
        etp=None if expert_sizes["etp"] == tp else expert_sizes["etp"],
        order=None if order == DEFAULT_ORDER else order,
        rank_offset=rank_offset or None,
        hierarchical_cp=hierarchical_cp and list(hierarchical_cp),
        optimizer_instances=None if optimizer_instances == 1 else optimizer_instances,
        embedding=None if embedding == (0, -1) else embedding,
        position_embedding=None if position_embedding == (0,) else position_embedding,
    )
    ep = sizes.pop("ep")
    sizes = call.fill_sizes(sizes)
    expert_sizes = call.fill_sizes(expert_sizes, len(call.ranks) // sizes["pp"], "a pipeline stage")
    named_sizes = {"": {**sizes, "ep": ep}, "of experts ": {"tp": expert_sizes["etp"], "dp": expert_sizes["edp"]}}
    fastest_first = call.parse_order(order, DEFAULT_ORDER, "fastest axis first", named_sizes)
    slowest_first = fastest_first[::-1]  # the order of a mesh

    def arrange(dense: Any) -> Arrangement:
        expert_axes = [EXPERT_AXIS[axis] for axis in slowest_first if axis in EXPERT_AXIS]
        expert = dense.view({axis: {**sizes, **expert_sizes}[axis] for axis in expert_axes})
        _check_same_pipelines(call, order, dense, expert)
        return Arrangement.of(
            str(call),
            f"fastest axis first: {'-'.join(fastest_first)}",
            [(dense, DENSE_AXES), (expert, EXPERT_AXES)],
            [
                "tensor",
                "pipeline",
                Family("model", dense, ("pp", "tp")),
                "data",
                "data+context",
                "context",
                *_context_levels(call, dense, hierarchical_cp),
                "tensor+data",
                "tensor+data+context",
                "tensor+context",
                Family("amax", dense, ("dp", "tp")),
                _stage_family("embedding", dense, embedding),
                _stage_family("position embedding", dense, position_embedding),
                "expert",
                "expert-tensor",
                "expert-tensor+expert",
                "expert-tensor+expert+pipeline",
                "expert-data",
                *_instance_families(call, dense, expert, optimizer_instances),
            ],
            {**SHORT_NAMES, "hcp": [f"context level {level}" for level in range(1, len(hierarchical_cp or ()) + 1)]},
        )

    return call.arrange(of, name, {axis: sizes[axis] for axis in slowest_first if axis in sizes}, arrange)


def hybrid_context(arrangement: Arrangement) -> dict[int, Family]:
    """Families of slices of the data+context groups, by size: every power of two above 1 and below the group's size.

    Raises:
        ShapeError: a power of two does not divide the size of the group.

    >>> from pgmesh import Layout, recipes
    >>> slices = recipes.hybrid_context(recipes.megatron(8, cp=4, of=Layout))
    >>> slices[4].partition(), list(slices)
    (((0, 1, 2, 3), (4, 5, 6, 7)), [2, 4])
    """
    family = arrangement["data+context"]
    found = {}
    for power in range(1, (family.size - 1).bit_length()):
        size = 2**power
        cut = split_axes(family.mesh, family.axes, size) if family.size % size == 0 else None
        if cut is None:
            raise ShapeError(
                f"{arrangement.call}: data+context has {family.size} ranks, which is not divisible by slices of "
                f"{size}; hybrid context parallelism needs a power of two."
            )
        found[size] = Family(f"data+context by {size}", cut[0], cut[2], arrangement.rank)
    return found


def _check_same_pipelines(call: RecipeCall, order: str, dense: Any, expert: Any) -> None:
    """Raise ShapeError if the dense and the expert mesh have different pipelines."""
    dp, edp, pp = dense.size("dp"), expert.size("edp"), dense.size("pp")
    last = "-".join([*(axis for axis in order.split("-") if axis != "pp"), "pp"])
    fix = f"\n\n  order={last!r}   # pp last, which is slowest"
    if pp > 1 and not order.endswith("pp") and dp != edp:
        raise ShapeError(
            f"{call}: pp is {pp} and not last in the order, so that expert data has to equal data, but expert "
            f"data is {edp} and data {dp}: etp x ep has to be tp x cp = {dense.size('tp', 'cp')}.{fix}"
        )
    dense_pipeline, expert_pipeline = dense.partition("pp")[0], expert.partition("pp")[0]
    if dense_pipeline != expert_pipeline:
        raise ShapeError(
            f"{call}: experts would have other pipelines than the rest: rank {dense_pipeline[0]} is in "
            f"{list(dense_pipeline)} and in {list(expert_pipeline)}.{fix}"
        )


def _instance_families(call: RecipeCall, dense: Any, expert: Any, count: int) -> list[Family]:
    """Families of groups inside and between instances of the optimizer. Both meshes share the group between them."""
    total, edp = dense.size("dp", "cp"), expert.size("edp")
    possible = divisors(math.gcd(total, edp))
    if count not in possible:
        raise ShapeError(
            f"{call}: optimizer_instances must divide data x context, which is {total}, and expert data, which is "
            f"{edp}, so it may be {join_words(possible, 'or')}."
        )
    cut, expert_cut = split_axes(dense, ("dp", "cp"), total // count), split_axes(expert, ("edp",), edp // count)
    firsts = [each and each[0].partition(*each[1])[0] for each in (cut, expert_cut)]
    if cut is None or expert_cut is None or firsts[0] != firsts[1]:
        places = [format_ranks(first) if first else "not along any axes" for first in firsts]
        raise ShapeError(
            f"{call}: dense and expert parameters share the group between optimizer instances, but in this "
            f"order its ranks are {places[0]} for dense and {places[1]} for expert parameters.\n\n"
            f"  order={DEFAULT_ORDER!r}   # fastest axis first; the same ranks for both"
        )
    view, outer, inner = cut
    expert_view, expert_outer, expert_inner = expert_cut
    return [
        Family("data+context in instance", view, inner),
        Family("expert-data in instance", expert_view, expert_inner),
        Family("instance", expert_view, tuple(axis for axis in expert_view.axes if axis not in expert_outer)),
        Family("between instances", view, outer),
    ]


def _context_levels(call: RecipeCall, dense: Any, sizes: Sequence[int] | None) -> list[Family]:
    """Families of the levels of context parallelism. The first level is contiguous; the others are strided."""
    if sizes is None:
        return []
    sizes = [parse_size(call.who, "hierarchical_cp", size) for size in sizes]
    cp = dense.size("cp")
    if not sizes or math.prod(sizes) != cp:
        product = f"{' x '.join(map(str, sizes)) or 'nothing'} is {math.prod(sizes)}"
        raise ShapeError(f"{call}: the product of hierarchical_cp must be cp, but {product} and cp is {cp}.")
    levels = {f"cp{level}": size for level, size in enumerate(sizes, 1)}
    box: dict[str, int] = {}
    for axis, size in zip(dense.axes, dense.shape):
        box.update(reversed(levels.items()) if axis == "cp" else {axis: size})
    view = dense.view(**box)
    return [Family(f"context level {level}", view, (axis,)) for level, axis in enumerate(levels, 1)]


def _stage_family(name: str, dense: Any, stages: Stages) -> Family:
    """The family of the ranks of some stages of each pipeline."""
    if callable(stages):
        return Family(name, dense, ("pp",), pick=stages)
    return Family(name, dense.at(pp=[stages] if isinstance(stages, int) else stages), ("pp",))
