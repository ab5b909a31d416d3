"""Megatron-Core with the groups of an arrangement: its ``ProcessGroupCollection`` and its ``parallel_state``.

Needs ``megatron-core``, tested with 0.16.1. The names of fields and globals are those of NVIDIA/Megatron-LM,
``megatron/core/process_groups_config.py`` and ``parallel_state.py``.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pgmesh._util.suggestions import closest_name, did_you_mean
from pgmesh.errors import AxisError, SeamError, ShapeError, WorldError

if TYPE_CHECKING:
    from pgmesh.recipes import Arrangement, Family

TRIED_ON = "0.16.1"

FIELDS = {
    "tp": "tensor",
    "pp": "pipeline",
    "mp": "model",
    "embd": "embedding",
    "pos_embd": "position embedding",
    "cp": "context",
    "tp_cp": "tensor+context",
    "hcp": "context level *",
    "ep": "expert",
    "expt_tp": "expert-tensor",
    "tp_ep": "expert-tensor+expert",
    "tp_ep_pp": "expert-tensor+expert+pipeline",
    "tp_dp_cp": "tensor+data+context",
    "dp": "data",
    "dp_cp": "data+context",
    "expt_dp": "expert-data",
    "intra_dp_cp": "data+context in instance",
    "intra_expt_dp": "expert-data in instance",
    "inter_dist_opt": "between instances",
    "intra_dist_opt": "instance",
}
"""The family of each field of ``ProcessGroupCollection``. ``*`` is any level."""

GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "_MODEL_PARALLEL_GROUP": "model",
    "_EMBEDDING_GROUP": "embedding",
    "_POSITION_EMBEDDING_GROUP": "position embedding",
    "_DATA_PARALLEL_GROUP": "data",
    "_DATA_PARALLEL_GROUP_WITH_CP": "data+context",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "data+context in instance",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tensor+data",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tensor+data+context",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tensor+context",
    "_CONTEXT_PARALLEL_GROUP": "context",
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": "context level *",
    "_EXPERT_MODEL_PARALLEL_GROUP": "expert",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expert-tensor",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "expert-tensor+expert",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "expert-tensor+expert+pipeline",
    "_EXPERT_DATA_PARALLEL_GROUP": "expert-data",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "expert-data in instance",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "between instances",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "instance",
}
"""The family of each global of ``parallel_state`` that holds a group."""

GLOO_GROUPS = {
    "_DATA_PARALLEL_GROUP_GLOO": "data",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "data+context",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "data+context in instance",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO": "expert-data",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO": "expert-data in instance",
}
"""The family of each global that holds a Gloo group of the same ranks."""

RANK_LISTS = {
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "tensor",
    "_PIPELINE_GLOBAL_RANKS": "pipeline",
    "_MODEL_PARALLEL_GLOBAL_RANKS": "model",
    "_EMBEDDING_GLOBAL_RANKS": "embedding",
    "_POSITION_EMBEDDING_GLOBAL_RANKS": "position embedding",
    "_DATA_PARALLEL_GLOBAL_RANKS": "data",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "data+context",
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": "context",
    "_EXPERT_MODEL_PARALLEL_RANKS": "expert",
}
"""The family of each global that holds the ranks of a group."""

ALL_GATHER_GROUP = "_DATA_PARALLEL_GROUP_WITH_CP_AG"
HYBRID_GROUPS = "_HYBRID_DP_CP_GROUPS"
"""Globals that depend on arguments of ``published``. Without ``hybrid=``, the second is an empty dict."""

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
    hybrid: Mapping[int, Family] | None = None,
    virtual_pipeline: int | None = None,
) -> Iterator[None]:
    """Put the groups of an arrangement into Megatron-Core's ``parallel_state``, and restore it after the block.

    Some code reads these globals, such as Megatron's vocabulary-parallel loss. They belong to the whole process, so
    use it in one thread at a time. Blocks can be nested, for several models.

    Args:
        arrangement: the result of ``recipes.megatron``.
        gloo: also fill the Gloo groups of data parallelism.
        all_gather: also fill the second communicator of data with context parallelism, whose tag is "all-gather".
        hybrid: the result of ``recipes.hybrid_context``, for hybrid context parallelism.
        virtual_pipeline: number of chunks of the model on each rank. The schedule sets the current chunk.

    Raises:
        SeamError: this megatron-core lacks a global that must be filled, or has groups that pgmesh does not know.
        ShapeError: ``virtual_pipeline`` without a pipeline.
        WorldError: megatron-core is not installed.

    >>> from pgmesh import recipes
    >>> from pgmesh.interop import megatron
    >>> with megatron.published(recipes.megatron(8, tp=2, pp=2)):   # doctest: +SKIP
    ...     parallel_state.get_tensor_model_parallel_rank()
    1
    """
    state = vars(_import_core("parallel_state"))
    known = {*GROUPS, *GLOO_GROUPS, ALL_GATHER_GROUP, HYBRID_GROUPS}
    unknown = sorted(name for name in state if _is_state_variable(name) and "GROUP" in name and name not in known)
    if unknown:
        raise SeamError(
            f"megatron-core {_version()} has groups in its parallel_state that pgmesh, which was tested with "
            f"{TRIED_ON}, does not know: {', '.join(unknown)}. Code that reads them would find None."
            f"\n\n  pip install megatron-core=={TRIED_ON}"
        )
    if virtual_pipeline is not None and arrangement["pipeline"].size == 1:
        raise ShapeError(
            f"virtual_pipeline={virtual_pipeline} needs a pipeline of more than 1 stage, but {arrangement!r} has pp=1."
            f"\n\n  megatron.published(arrangement)   # without virtual_pipeline"
        )
    values: dict[str, Any] = {name: _group(arrangement, family) for name, family in GROUPS.items()}
    if gloo:
        values |= {name: _group(arrangement, family, backend="gloo") for name, family in GLOO_GROUPS.items()}
    if all_gather:
        values[ALL_GATHER_GROUP] = _group(arrangement, "data+context", tag="all-gather")
    values[HYBRID_GROUPS] = {size: family.group() for size, family in (hybrid or {}).items()}
    values[GROUP_LIST] = _unique_groups(values)
    values |= {name: _ranks(arrangement, family) for name, family in RANK_LISTS.items()}
    values["_GLOBAL_MEMORY_BUFFER"] = _import_core("utils").GlobalMemoryBuffer()
    if virtual_pipeline is not None:
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = virtual_pipeline
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
    missing = sorted(values.keys() - state.keys())
    if missing:
        raise SeamError(
            f"megatron-core {_version()} has no {', '.join(missing)} in its parallel_state; pgmesh was tested with "
            f"{TRIED_ON}.\n\n  pip install megatron-core=={TRIED_ON}"
        )
    before = {name: value for name, value in state.items() if _is_state_variable(name)}
    try:
        state.update(dict.fromkeys(before))  # clear cached sizes and ranks, which getters prefer to the groups
        state.update(values)
        yield
    finally:
        for name in [name for name in state if _is_state_variable(name) and name not in before]:
            del state[name]
        state.update(before)


def _is_state_variable(name: str) -> bool:
    """True if a global of ``parallel_state`` is a variable, not a function or a class."""
    return name == GROUP_LIST or (name.startswith("_") and name.isupper())


def _group(arrangement: Arrangement, name: str, **options: Any) -> Any:
    """This rank's group of a family, None if it has none, or a list of groups for a family with levels."""
    if name.endswith("*"):
        levels = [family for family in arrangement if family.startswith(name[:-1])]
        return [_group(arrangement, level, **options) for level in levels] or None
    family = arrangement[name]
    if arrangement.rank not in family or (name == "between instances" and family.size == 1):
        return None
    return family.group(**options)


def _ranks(arrangement: Arrangement, name: str) -> list[int] | None:
    """The ranks of this rank's group of a family; None if it has none."""
    family = arrangement[name]
    return list(family.ranks) if arrangement.rank in family else None


def _unique_groups(values: Mapping[str, Any]) -> list[Any]:
    """None, for the group of the world, and each group among the values once."""
    several = [value.values() if isinstance(value, dict) else value for value in values.values()]
    groups = itertools.chain.from_iterable(each if isinstance(each, Iterable) else [each] for each in several)
    return [None, *dict.fromkeys(group for group in groups if group is not None)]


def _import_core(module: str) -> Any:
    """A module of Megatron-Core."""
    try:
        return importlib.import_module(f"megatron.core.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        raise WorldError(
            f"this needs megatron-core, which is not installed.\n\n  pip install megatron-core=={TRIED_ON}"
        ) from None


def _version() -> str:
    return str(_import_core("package_info").__version__)
