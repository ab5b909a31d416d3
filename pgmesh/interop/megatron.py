"""Megatron-Core with the groups of an arrangement: its ``ProcessGroupCollection`` and its ``parallel_state``.

Needs ``megatron-core``, tested with 0.16.1. The names of fields and globals are those of NVIDIA/Megatron-LM,
``megatron/core/process_groups_config.py`` and ``parallel_state.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

from pgmesh._util.suggestions import closest_name, did_you_mean
from pgmesh.errors import AxisError, ShapeError, UnsupportedTorchError, WorldError

if TYPE_CHECKING:
    from pgmesh.recipes import Arrangement

TRIED_ON = "0.16.1"

NAMES: dict[str, tuple[str | None, str, str | None]] = {
    "tensor": ("tp", "_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    "pipeline": ("pp", "_PIPELINE_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS"),
    "model": ("mp", "_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GLOBAL_RANKS"),
    "embedding": ("embd", "_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS"),
    "position embedding": ("pos_embd", "_POSITION_EMBEDDING_GROUP", "_POSITION_EMBEDDING_GLOBAL_RANKS"),
    "context": ("cp", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    "tensor+context": ("tp_cp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", None),
    "hcp": ("hcp", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", None),
    "expert": ("ep", "_EXPERT_MODEL_PARALLEL_GROUP", "_EXPERT_MODEL_PARALLEL_RANKS"),
    "expert-tensor": ("expt_tp", "_EXPERT_TENSOR_PARALLEL_GROUP", None),
    "expert-tensor+expert": ("tp_ep", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", None),
    "expert-tensor+expert+pipeline": ("tp_ep_pp", "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", None),
    "tensor+data+context": ("tp_dp_cp", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", None),
    "data": ("dp", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GLOBAL_RANKS"),
    "data+context": ("dp_cp", "_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"),
    "expert-data": ("expt_dp", "_EXPERT_DATA_PARALLEL_GROUP", None),
    "data+context in instance": ("intra_dp_cp", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", None),
    "expert-data in instance": ("intra_expt_dp", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", None),
    "between instances": ("inter_dist_opt", "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", None),
    "instance": ("intra_dist_opt", "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", None),
    "tensor+data": (None, "_TENSOR_AND_DATA_PARALLEL_GROUP", None),
}
"""Each name of an arrangement in Megatron-Core: the field of ``ProcessGroupCollection``, and the globals of
``parallel_state`` that hold its group and its ranks. "hcp" is the short name of all levels."""

FIELDS = {field: name for name, (field, _, _) in NAMES.items() if field}
GROUPS = {group: name for name, (_, group, _) in NAMES.items()}
RANK_LISTS = {ranks: name for name, (_, _, ranks) in NAMES.items() if ranks}
"""The name of each field, of each global group and of each global list of ranks."""

_WITH_GLOO = ("data", "data+context", "data+context in instance", "expert-data", "expert-data in instance")
GLOO_GROUPS = {f"{NAMES[name][1]}_GLOO": name for name in _WITH_GLOO}
"""The name of each global that holds a Gloo group of the same ranks."""

ALL_GATHER_GROUP = "_DATA_PARALLEL_GROUP_WITH_CP_AG"
HYBRID_GROUPS = "_HYBRID_DP_CP_GROUPS"
"""Globals that depend on ``all_gather=`` and on ``recipes.megatron(hybrid_cp=True)``. The second is a dict by size."""

GROUP_LIST = "_global_process_group_list"
"""The global list of all groups, whose timeouts Megatron changes. None is the world."""


def process_groups(arrangement: Arrangement, *fields: str) -> Any:
    """Megatron-Core's ``ProcessGroupCollection`` with the groups of an arrangement. It needs no other initialization.

    As in Megatron-Core, a field is None on ranks outside ``embd`` or ``pos_embd``, without levels of context
    parallelism (``hcp``), and with one optimizer instance (``inter_dist_opt``).

    Args:
        arrangement: the result of ``recipes.megatron``.
        fields: the fields to fill. Default: all.

    Raises:
        AxisError: the collection has no such field.
        WorldError: megatron-core is not installed.

    >>> from pgmesh import recipes
    >>> from pgmesh.interop import megatron
    >>> arrangement = recipes.megatron(8, tp=2, pp=2)
    >>> megatron.process_groups(arrangement, "tp", "pp", "dp")      # doctest: +SKIP
    ProcessGroupCollection(tp(2), pp(2), dp(2))
    """
    collection = _import_core("process_groups_config").ProcessGroupCollection
    for field in fields:
        if field not in FIELDS:
            hint = did_you_mean(closest_name(field, FIELDS))
            raise AxisError(f"a ProcessGroupCollection has no field {field!r}.{hint} It has {', '.join(FIELDS)}.")
    return collection(**{field: _group(arrangement, FIELDS[field]) for field in fields or FIELDS})


@contextmanager
def published(
    arrangement: Arrangement,
    *,
    gloo: bool = False,
    all_gather: bool = False,
    virtual_pipeline: int | None = None,
) -> Iterator[None]:
    """Put the groups of an arrangement into Megatron-Core's ``parallel_state``, and restore it after the block.

    Some code reads these globals, such as Megatron's vocabulary-parallel loss. They belong to the whole process, so
    use it in one thread at a time. Blocks can be nested, for several models.

    Args:
        arrangement: the result of ``recipes.megatron``.
        gloo: also fill the Gloo groups of data parallelism.
        all_gather: also fill the second communicator of data with context parallelism, whose tag is "all-gather".
        virtual_pipeline: number of chunks of the model on each rank. The schedule sets the current chunk.

    Raises:
        UnsupportedTorchError: this megatron-core has groups that pgmesh does not know.
        ShapeError: ``virtual_pipeline`` without a pipeline.
        WorldError: megatron-core is not installed.

    >>> from pgmesh import recipes
    >>> from pgmesh.interop import megatron
    >>> with megatron.published(recipes.megatron(8, tp=2, pp=2)):   # doctest: +SKIP
    ...     parallel_state.get_tensor_model_parallel_rank()
    1
    """
    state = vars(_import_core("parallel_state"))
    _check_groups(state)
    values = _groups(arrangement, gloo, all_gather) | _ranks(arrangement)
    values["_GLOBAL_MEMORY_BUFFER"] = _import_core("utils").GlobalMemoryBuffer()
    if virtual_pipeline is not None:
        if arrangement["pipeline"].size() == 1:
            raise ShapeError(
                f"virtual_pipeline={virtual_pipeline} needs more than 1 stage, but {arrangement!r} has pp=1.\n\n"
                f"  megatron.published(arrangement)   # without virtual_pipeline"
            )
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = virtual_pipeline
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
    before = {name: value for name, value in state.items() if _is_state_variable(name)}
    try:
        state.update(dict.fromkeys(before))  # clear cached sizes and ranks, which getters prefer to the groups
        state.update(values)
        yield
    finally:
        for name in [name for name in state if _is_state_variable(name) and name not in before]:
            del state[name]
        state.update(before)


def _check_groups(state: Mapping[str, Any]) -> None:
    """Raise UnsupportedTorchError if ``parallel_state`` has groups that pgmesh does not know."""
    known = {*GROUPS, *GLOO_GROUPS, ALL_GATHER_GROUP, HYBRID_GROUPS}
    unknown = sorted(name for name in state if _is_state_variable(name) and "GROUP" in name and name not in known)
    if unknown:
        version = _import_core("package_info").__version__
        raise UnsupportedTorchError(
            f"parallel_state of megatron-core {version} has groups that pgmesh, which was tested with {TRIED_ON}, does "
            f"not know: {', '.join(unknown)}.\n\n  pip install megatron-core=={TRIED_ON}"
        )


def _is_state_variable(name: str) -> bool:
    """True if a global of ``parallel_state`` is a variable, not a function or a class."""
    return name == GROUP_LIST or (name.startswith("_") and name.isupper())


def _groups(arrangement: Arrangement, gloo: bool, all_gather: bool) -> dict[str, Any]:
    """The values of the globals that hold groups."""
    values = {name: _group(arrangement, each) for name, each in GROUPS.items()}
    if gloo:
        values |= {name: _group(arrangement, each, backend="gloo") for name, each in GLOO_GROUPS.items()}
    if all_gather:
        values[ALL_GATHER_GROUP] = _group(arrangement, "data+context", tag="all-gather")
    pieces = [arrangement[name] for name in arrangement if name.startswith("data+context by ")]
    hybrid = {piece.size(): piece.group() for piece in pieces}
    groups = [*values.values(), *hybrid.values(), *(values[NAMES["hcp"][1]] or ())]
    used = dict.fromkeys(group for group in groups if isinstance(group, ProcessGroup))
    return {**values, HYBRID_GROUPS: hybrid, GROUP_LIST: [None, *used]}


def _group(arrangement: Arrangement, name: str, **options: Any) -> Any:
    """This rank's group of a name, None if it has none, or a list of groups for the levels of context parallelism."""
    if name == "hcp":
        return [_group(arrangement, level, **options) for level in arrangement.short.get(name, ())] or None
    part = arrangement[name]
    is_single = name == "between instances" and part.size() == 1
    return part.group(**options) if arrangement.rank in part and not is_single else None


def _ranks(arrangement: Arrangement) -> dict[str, list[int] | None]:
    """The values of the globals that hold ranks; None for a group that this rank is not in."""
    ranks = {name: list(arrangement[each].ranks()) for name, each in RANK_LISTS.items()}
    return {name: each if arrangement.rank in each else None for name, each in ranks.items()}


def _import_core(module: str) -> Any:
    """A module of Megatron-Core."""
    try:
        return importlib.import_module(f"megatron.core.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        raise WorldError(f"megatron-core is not installed.\n\n  pip install megatron-core=={TRIED_ON}") from None
