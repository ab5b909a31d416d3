"""Tables of the functions in other systems' documentation, each with all its parameters."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

NEWER = {
    *("create_hybrid_dp_cp_groups", "get_hybrid_data_context_parallel_groups", "has_separate_all_gather_group"),
    *("hybrid_context_parallel", "create_all_gather_group", "independent_all_gather"),
}
"""Functions and parameters of Megatron-Core that its documentation does not have yet."""


def megatron() -> dict[str, str]:
    """Every function, and the parameters of a class, of the installed Megatron-Core's ``parallel_state``."""
    spec = importlib.util.find_spec("megatron")
    if spec is None:
        pytest.skip("Megatron-Core is not installed")
    source = Path(next(iter(spec.submodule_search_locations or ())), "core", "parallel_state.py")
    found = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _parameters(node)
        elif isinstance(node, ast.ClassDef):
            methods = {each.name: _parameters(each) for each in node.body if isinstance(each, ast.FunctionDef)}
            found |= {node.name: methods.pop("__init__"), **methods}
    return {name: parameters for name, parameters in found.items() if name not in NEWER}


def _parameters(function: ast.FunctionDef) -> str:
    names = [each.arg for each in function.args.args]
    return " ".join(name for name in names if name not in ("self", *NEWER))


OLMO = {
    "get_world_mesh": "",
    "build_world_mesh": "dp tp cp pp ep device_type",
    "get_device_mesh_info": "device_mesh",
    "build_expert_parallel_mesh": "ep_config device_type",
    "_get_model_mesh": "device_mesh",
    "get_dp_model_mesh": "device_mesh",
    "get_dp_mesh": "device_mesh",
    "get_dp_process_group": "device_mesh",
    "get_dp_shard_mesh": "device_mesh",
    "get_dp_replicate_mesh": "device_mesh",
    "get_ep_mesh": "device_mesh",
    "get_tp_mesh": "device_mesh",
    "get_cp_mesh": "device_mesh",
    "get_pp_mesh": "device_mesh",
    "get_pp_stage_mesh": "device_mesh pp_mesh",
    "_flatten_dims": "device_mesh dims name dim_names",
    "flatten_mesh": "device_mesh name",
}
FAIRSCALE = {
    **{
        f"get_{axis}_parallel_{what}": ""
        for axis in ("context", "data", "pipeline", "tensor")
        for what in ("group", "rank", "ranks", "world_size")
    },
    "destroy_tensor_parallel": "",
    "divide_and_check_no_remainder": "numerator denominator",
    "ensure_divisibility": "numerator denominator",
    "get_tensor_parallel_src_rank": "",
    "initialize_tensor_parallel": "tensor_parallel_size pipeline_parallel_size context_parallel_size "
    "tensor_parallel_backend pipeline_parallel_backend context_parallel_backend "
    "data_parallel_backend timeout",
    "split_tensor_along_last_dim": "tensor num_partitions contiguous_split_chunks",
    "tensor_parallel_is_initialized": "",
}

OSLO = {
    "ParallelContext.from_torch": (
        "data_parallel_size tensor_parallel_size pipeline_parallel_size sequence_parallel_size expert_parallel_size"
    ),
    "ParallelContext.from_slurm": "host port",  # and the five sizes
    "ParallelContext.from_openmpi": "host port",
    "get_local_rank": "ParallelMode.GLOBAL ParallelMode.DATA ParallelMode.TENSOR ParallelMode.PIPELINE "
    "ParallelMode.SEQUENCE ParallelMode.EXPERT",
    "get_world_size": "ParallelMode.GLOBAL ParallelMode.DATA ParallelMode.TENSOR ParallelMode.PIPELINE "
    "ParallelMode.SEQUENCE ParallelMode.EXPERT",
}

OLMO_NAMES = (
    "MeshDimName.dp MeshDimName.dp_replicate MeshDimName.dp_shard MeshDimName.tp MeshDimName.cp MeshDimName.pp "
    "MeshDimName.ep MeshDimName.ep_replicate MeshDimName.ep_shard MeshDimName.dp_ep MeshDimName.dp_cp "
    "DPMeshDimName.replicate DPMeshDimName.shard DataParallelType.ddp DataParallelType.fsdp DataParallelType.hsdp "
    "DataParallelConfig TensorParallelConfig ContextParallelConfig PipelineParallelConfig ExpertParallelConfig "
    "PipelineSchedule PipelineScheduleType PipelineSplitStyle"
)
"""Exports of the page that are not functions."""
