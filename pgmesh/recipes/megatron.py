"""The arrangement of Megatron-Core: a dense mesh, an expert view of it, and every group of ``parallel_state``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Union

from pgmesh._util.formatting import format_ranks, join_words
from pgmesh._util.suggestions import divisors, fit_sizes
from pgmesh.layout import Axis, Layout
from pgmesh.recipes.arguments import Refused, fill_sizes, parse_order, parse_sizes, parse_world, recipe
from pgmesh.recipes.arrangement import Along, Arrangement, Pick, build
from pgmesh.recipes.pieces import Pieces, cut_blocks

DEFAULT_ORDER = "tp-cp-ep-dp-pp"

EXPERT_AXIS = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
"""The axis of the expert mesh for each axis of an order."""


class GroupName(NamedTuple):
    """A name of groups.

    Args:
        axes: the axes that the groups are along, joined by ``-``; empty if other functions of this file define them.
        short: the name in Megatron's settings for NCCL; empty if there is none.
    """

    axes: str
    short: str


NAMES = {
    "tensor": GroupName("tp", "tp"),
    "pipeline": GroupName("pp", "pp"),
    "model": GroupName("pp-tp", "mp"),
    "data": GroupName("dp", "dp"),
    "data+context": GroupName("dp-cp", "dp_cp"),
    "context": GroupName("cp", "cp"),
    "tensor+data": GroupName("tp-dp", "tp_dp"),
    "tensor+data+context": GroupName("tp-dp-cp", "tp_dp_cp"),
    "tensor+context": GroupName("tp-cp", "tp_cp"),
    "amax": GroupName("tp-dp", ""),
    "expert": GroupName("ep", "ep"),
    "expert-tensor": GroupName("etp", "ep_tp"),
    "expert-tensor+expert": GroupName("etp-ep", "tp_ep_mp"),
    "expert-tensor+expert+pipeline": GroupName("etp-ep-pp", "tp_ep_pp"),
    "expert-data": GroupName("edp", "ep_dp"),
    "embedding": GroupName("", "embd"),
    "position embedding": GroupName("", "pos_embd"),
    "data+context in instance": GroupName("", "intra_dp_cp"),
    "expert-data in instance": GroupName("", "intra_ep_dp"),
    "instance": GroupName("", "intra_dist_opt_instance"),
    "between instances": GroupName("", "inter_ep_dp"),
}
"""The names of groups. The levels of context parallelism have names too, by their number."""

Stages = Union[int, Sequence[int], Pick]
"""Stages of a pipeline: their numbers, or a function that selects some of a pipeline's ranks."""


WORDS = {
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


@functools.partial(recipe, words=WORDS)
def megatron(
    world: int,
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    order: str = DEFAULT_ORDER,
    rank_offset: int = 0,
    hierarchical_cp: Sequence[int] | None = None,
    hybrid_cp: bool = False,
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
        tp, cp, pp, ep: sizes of tensor, context, pipeline and expert parallelism.
        etp: tensor parallelism inside experts. Default: ``tp``.
        order: the axes, fastest first, joined by ``-``. Axes of size 1 may be omitted.
        rank_offset: the first rank.
        hierarchical_cp: sizes whose product is ``cp``. They define "context level 1", whose groups are contiguous,
            "context level 2", and so on.
        hybrid_cp: add "data+context by 2", "data+context by 4" and so on: the pieces of data+context groups, by every
            power of two below their size.
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
    ranks = parse_world(world, rank_offset)
    sizes = fill_sizes({"dp": -1, "tp": tp, "cp": cp, "pp": pp}, len(ranks))
    expert_sizes = {"edp": -1, "ep": ep, "etp": tp if etp is None else etp}
    sizes |= fill_sizes(expert_sizes, len(ranks) // sizes["pp"], "a pipeline stage")
    # an order names an axis of the dense mesh and that of the expert mesh at once
    larger = {axis: max(sizes[axis], sizes[EXPERT_AXIS.get(axis, axis)]) for axis in DEFAULT_ORDER.split("-")}
    fastest_first = parse_order(order, DEFAULT_ORDER, "fastest axis first", larger)
    slowest_first = fastest_first[::-1]  # the order of a mesh
    dense = Layout({axis: sizes[axis] for axis in slowest_first if axis != "ep"}, ranks=ranks)
    expert_axes = [EXPERT_AXIS[axis] for axis in slowest_first if axis in EXPERT_AXIS]
    expert = dense.view({axis: sizes[axis] for axis in expert_axes})
    # as written, like Megatron: only axes of size 1 may be omitted
    _check_pipelines(fastest_first, str(order).lower().endswith("pp"), dense, expert)
    levels = {} if hierarchical_cp is None else _context_levels(dense, hierarchical_cp)
    names = {
        **_along_axes(dense, expert),
        **levels,
        **(_hybrid_pieces(dense) if hybrid_cp else {}),
        "embedding": _stages(dense, embedding),
        "position embedding": _stages(dense, position_embedding),
        **_instances(dense, expert, optimizer_instances),
    }
    direction = f"fastest axis first: {'-'.join(fastest_first)}"
    short = {**{name.short: [word] for word, name in NAMES.items() if name.short}, "hcp": [*levels]}
    return build(Arrangement(dense, names, expert, direction, short), of, name)


def _along_axes(dense: Layout, expert: Layout) -> dict[str, Along]:
    """The groups along axes of the dense mesh or, if that lacks one of the axes, of the expert mesh."""
    names = {}
    for word, (text, _) in NAMES.items():
        axes = tuple(text.split("-"))
        if text:
            names[word] = Along(dense if {*axes} <= {*dense.axes} else expert, axes)
    return names


def _check_pipelines(order: Sequence[str], is_pp_last: bool, dense: Layout, expert: Layout) -> None:
    """Check that the dense and the expert mesh have the same pipelines and, if pp is not last, the same data size."""
    pp, dp, edp = dense.size("pp"), dense.size("dp"), expert.size("edp")
    pipeline, expert_pipeline = dense.partition("pp")[0], expert.partition("pp")[0]
    if pp == 1 or is_pp_last or (dp == edp and pipeline == expert_pipeline):
        return
    raise Refused(
        f"pp is {pp} and not last in the order, so that experts need the data size and the pipelines of the "
        f"rest. But data is {edp} for experts and {dp} for the rest, and the first pipeline is "
        f"{list(expert_pipeline)} for experts and {list(pipeline)} for the rest.",
        "pp last, which is slowest",
        order="-".join([*(axis for axis in order if axis != "pp"), "pp"]),
    )


def _context_levels(dense: Layout, sizes: Sequence[int]) -> dict[str, Along]:
    """The levels of context parallelism. The groups of the first level are contiguous; the others are strided."""
    sizes = sizes if isinstance(sizes, Iterable) else [sizes]
    levels = parse_sizes({f"cp{level}": size for level, size in enumerate(sizes, 1)})
    cp = dense.size("cp")
    if -1 in levels.values() or math.prod(levels.values()) != cp:
        fitting, _, _ = fit_sizes(levels or {"cp1": cp}, cp)
        problem = f"the sizes of hierarchical_cp are at least 1, and their product is cp, which is {cp}."
        raise Refused(problem, hierarchical_cp=[*fitting.values()])
    box: dict[Axis, int] = {}
    for axis, size in zip(dense.axes, dense.shape):
        box.update(reversed(levels.items()) if axis == "cp" else {axis: size})
    view = dense.view(box)
    return {f"context level {level}": Along(view, (axis,)) for level, axis in enumerate(levels, 1)}


def _hybrid_pieces(dense: Layout) -> dict[str, Along]:
    """The pieces of the data+context groups, of every power of two between 1 and the whole."""
    total = dense.size("dp", "cp")
    if total & (total - 1):
        raise Refused(f"data+context has {total} ranks; hybrid context parallelism needs a power of two.")
    powers = [2**exponent for exponent in range(1, total.bit_length() - 1)]
    pieces = {size: _pieces(dense, ("dp", "cp"), size) for size in powers}
    return {f"data+context by {size}": Along(each.view, each.inside) for size, each in pieces.items()}


def _pieces(mesh: Layout, axes: tuple[Axis, ...], size: int) -> Pieces:
    """The pieces of so many ranks of the blocks along some axes.

    Raises:
        Refused: they are not along any axes.
    """
    if (pieces := cut_blocks(mesh, axes, size)) is None:
        problem = f"in this order, pieces of {size} ranks of {' x '.join(map(str, axes))} are not along any axes."
        raise Refused(problem, "fastest axis first", order=DEFAULT_ORDER)
    return pieces


def _stages(dense: Layout, stages: Any) -> Along:
    """The ranks of some stages of each pipeline."""

    def ranks_at(pipeline: list[int]) -> Sequence[int]:
        return Layout(pp=len(pipeline), ranks=pipeline).at(pp=stages).ranks()

    along = Along(dense, ("pp",), stages if callable(stages) else ranks_at)
    along.ranks_of(dense.partition("pp")[0])  # raises at once if there are no such stages
    return along


def _instances(dense: Layout, expert: Layout, count: int) -> dict[str, Along]:
    """The groups of the optimizer's instances. Each instance has all of the optimizer's state, sharded over its ranks.

    Dense and expert parameters have a group each inside an instance. They share the group between instances, which
    has one rank of each.
    """
    data, expert_data = dense.size("dp", "cp"), expert.size("edp")
    possible = divisors(math.gcd(data, expert_data))
    if count not in possible:
        raise Refused(
            f"optimizer_instances must divide data x context, which is {data}, and expert data, which is "
            f"{expert_data}, so it may be {join_words(possible, 'or')}.",
            optimizer_instances=max(n for n in possible if n == 1 or n <= count),
        )
    pieces = _pieces(dense, ("dp", "cp"), data // count)
    expert_pieces = _pieces(expert, ("edp",), expert_data // count)
    first, expert_first = (each.view.partition(*each.between)[0] for each in (pieces, expert_pieces))
    if first != expert_first:
        raise Refused(
            "dense and expert parameters share the group between optimizer instances, but in this order its ranks are "
            f"{format_ranks(first)} for dense and {format_ranks(expert_first)} for expert parameters.",
            "fastest axis first; the same ranks for both",
            order=DEFAULT_ORDER,
        )
    whole = tuple(axis for axis in expert_pieces.view.axes if axis not in expert_pieces.between)
    return {
        "data+context in instance": Along(pieces.view, pieces.inside),
        "expert-data in instance": Along(expert_pieces.view, expert_pieces.inside),
        "instance": Along(expert_pieces.view, whole),
        "between instances": Along(pieces.view, pieces.between),
    }
