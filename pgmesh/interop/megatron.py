"""Megatron-Core over the groups of an arrangement: its collection of groups, and its parallel state for a while.

Needs ``megatron-core``, tried with 0.16.1. Names of its fields and globals are those of NVIDIA/Megatron-LM,
``megatron/core/process_groups_config.py`` and ``parallel_state.py``.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pgmesh.errors import AxisError, SeamError, ShapeError, WorldError
from pgmesh.layout import alike

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
"""Each field of ``ProcessGroupCollection``, and what the arrangement calls that group."""

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
"""Each global of ``parallel_state`` that holds a group."""

GLOO_GROUPS = {
    "_DATA_PARALLEL_GROUP_GLOO": "data",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "data+context",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "data+context in instance",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO": "expert-data",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO": "expert-data in instance",
}
"""Those that hold a group's twin on Gloo."""

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
"""Those that hold a group's ranks."""

ALL_GATHER_GROUP = "_DATA_PARALLEL_GROUP_WITH_CP_AG"
HYBRID_GROUPS = "_HYBRID_DP_CP_GROUPS"
"""Those that hold groups which ``published`` is asked for."""

GROUP_LIST = "_global_process_group_list"
"""Every group, for a timeout that is changed for all; None stands for the world's."""


def process_groups(arrangement: Arrangement, *fields: str) -> Any:
    """Megatron-Core's ``ProcessGroupCollection`` over the groups of an arrangement; nothing else has to be initialised.

    A field is None where Megatron's own would be: on ranks outside ``embd`` or ``pos_embd``, without levels of context
    parallelism (``hcp``), with one optimizer instance (``inter_dist_opt``).

    Args:
        arrangement: what ``recipes.megatron`` returns.
        fields: which to fill; all, unless given.

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
            close = alike(field, list(FIELDS))
            hint = f" Did you mean {close!r}?" if close else ""
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
    """For a block, Megatron-Core's ``parallel_state`` holds the groups of an arrangement; then what it held before.

    For code that reads those globals, as Megatron's own vocabulary-parallel loss does. They are the whole process's:
    publish in one thread at a time. Blocks may stand inside one another, for several models.

    Args:
        arrangement: what ``recipes.megatron`` returns.
        gloo: fill the Gloo twins of the data groups too.
        all_gather: fill the second communicator for data with context, tagged "all-gather".
        hybrid: what ``recipes.hybrid_context`` returns, for hybrid context parallelism.
        virtual_pipeline: how many chunks of the model a rank holds; which of them runs is for the schedule to say.

    Raises:
        SeamError: this megatron-core lacks a global that is to be filled, or has groups that pgmesh does not know.
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
            f"megatron-core {_version()}, beside which pgmesh was tried on {TRIED_ON}, has groups in its "
            f"parallel_state that pgmesh does not know: {', '.join(unknown)}. Code that reads them would find none."
            f"\n\n  pip install megatron-core=={TRIED_ON}"
        )
    if virtual_pipeline is not None and arrangement["pipeline"].size == 1:
        raise ShapeError(
            f"virtual_pipeline={virtual_pipeline} takes a pipeline of more than 1 stage, but {arrangement!r} has pp=1."
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
            f"megatron-core {_version()}, beside which pgmesh was tried on {TRIED_ON}, has no {', '.join(missing)} in "
            f"its parallel_state.\n\n  pip install megatron-core=={TRIED_ON}"
        )
    before = {name: value for name, value in state.items() if _is_state_variable(name)}
    try:
        state.update(dict.fromkeys(before))  # such as sizes that somebody has set: they would be believed
        state.update(values)
        yield
    finally:
        for name in [name for name in state if _is_state_variable(name) and name not in before]:
            del state[name]
        state.update(before)


def _is_state_variable(name: str) -> bool:
    """Whether a global of ``parallel_state`` is what it knows, not what it does."""
    return name == GROUP_LIST or (name.startswith("_") and name.isupper())


def _group(arrangement: Arrangement, name: str, **options: Any) -> Any:
    """A group of an arrangement, or what Megatron holds in its place: None where there is none, a list of levels."""
    if name.endswith("*"):
        levels = [family for family in arrangement if family.startswith(name[:-1])]
        return [_group(arrangement, level, **options) for level in levels] or None
    family = arrangement[name]
    if arrangement.rank not in family or (name == "between instances" and family.size == 1):
        return None
    return family.group(**options)


def _ranks(arrangement: Arrangement, name: str) -> list[int] | None:
    family = arrangement[name]
    return list(family.ranks) if arrangement.rank in family else None


def _unique_groups(values: Mapping[str, Any]) -> list[Any]:
    """None, which is the world's group, and every group that is filled in."""
    several = [value.values() if isinstance(value, dict) else value for value in values.values()]
    groups = itertools.chain.from_iterable(each if isinstance(each, Iterable) else [each] for each in several)
    return [None, *dict.fromkeys(group for group in groups if group is not None)]


def _import_core(module: str) -> Any:
    """A module of Megatron-Core, which is imported when it is first needed."""
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
