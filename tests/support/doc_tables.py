"""Tables of the functions in other systems' documentation, each with all its parameters."""

from __future__ import annotations

MEGATRON = {
    "get_nccl_options": "pg_name nccl_comm_cfgs",
    "update_pg_timeout": "timeout pg",
    "create_group": "ranks timeout backend pg_options use_local_synchronization group_desc",
    "generate_masked_orthogonal_rank_groups": "world_size parallel_size mask",
    "create_hierarchical_groups": "rank ranks hierarchical_group_sizes create_gloo_process_groups pg_options timeout "
    "group_desc",
    "RankGenerator": "tp ep dp pp cp order rank_offset",
    "default_embedding_ranks": "pp_ranks",
    "default_position_embedding_ranks": "pp_ranks",
    "overwrite_nccl_comm_cfgs": "nccl_comm_cfgs pg_name key_value_pair",
    "initialize_model_parallel": "tensor_model_parallel_size pipeline_model_parallel_size "
    "virtual_pipeline_model_parallel_size pipeline_model_parallel_comm_backend use_sharp "
    "context_parallel_size hierarchical_context_parallel_sizes expert_model_parallel_size "
    "num_distributed_optimizer_instances expert_tensor_parallel_size "
    "nccl_communicator_config_path distributed_timeout_minutes order get_embedding_ranks "
    "get_position_embedding_ranks create_gloo_process_groups high_priority_stream_groups "
    "sharp_enabled_group",
    "is_initialized": "",
    "is_unitialized": "",
    "model_parallel_is_initialized": "",
    "get_model_parallel_group": "check_initialized",
    "get_tensor_model_parallel_group": "check_initialized",
    "get_pipeline_model_parallel_group": "check_initialized",
    "get_data_parallel_group": "with_context_parallel partial_data_parallel",
    "get_data_parallel_group_gloo": "with_context_parallel partial_data_parallel",
    "get_context_parallel_group": "check_initialized",
    "get_context_parallel_global_ranks": "check_initialized",
    "get_hierarchical_context_parallel_groups": "check_initialized",
    "get_embedding_group": "check_initialized",
    "get_position_embedding_group": "check_initialized",
    "get_amax_reduction_group": "with_context_parallel tp_only_amax_red",
    "get_tensor_and_data_parallel_group": "check_initialized with_context_parallel",
    "get_tensor_and_context_parallel_group": "check_initialized",
    "set_tensor_model_parallel_world_size": "world_size",
    "set_pipeline_model_parallel_world_size": "world_size",
    "set_virtual_pipeline_model_parallel_world_size": "world_size",
    "get_tensor_model_parallel_world_size": "",
    "get_pipeline_model_parallel_world_size": "",
    "set_tensor_model_parallel_rank": "rank",
    "set_pipeline_model_parallel_rank": "rank",
    "get_tensor_model_parallel_rank": "",
    "get_pipeline_model_parallel_rank": "",
    "is_pipeline_first_stage": "ignore_virtual vp_stage",
    "is_pipeline_last_stage": "ignore_virtual vp_stage",
    "is_rank_in_embedding_group": "ignore_virtual vp_stage",
    "is_rank_in_position_embedding_group": "",
    "get_virtual_pipeline_model_parallel_rank": "",
    "set_virtual_pipeline_model_parallel_rank": "rank",
    "get_virtual_pipeline_model_parallel_world_size": "",
    "get_tensor_model_parallel_src_rank": "",
    "get_model_parallel_src_rank": "",
    "get_data_parallel_src_rank": "with_context_parallel",
    "get_pipeline_model_parallel_first_rank": "",
    "get_pipeline_model_parallel_last_rank": "",
    "get_pipeline_model_parallel_next_rank": "",
    "get_pipeline_model_parallel_prev_rank": "",
    "get_data_parallel_world_size": "with_context_parallel partial_data_parallel",
    "set_data_parallel_rank": "rank",
    "get_data_parallel_rank": "with_context_parallel partial_data_parallel",
    "get_context_parallel_world_size": "",
    "get_context_parallel_rank": "",
    "get_tensor_and_context_parallel_world_size": "",
    "get_tensor_and_context_parallel_rank": "",
    "get_expert_model_parallel_group": "check_initialized",
    "get_expert_model_parallel_src_rank": "",
    "get_expert_model_parallel_world_size": "",
    "set_expert_model_parallel_world_size": "world_size",
    "get_expert_model_parallel_rank": "",
    "set_expert_model_parallel_rank": "rank",
    "get_expert_tensor_parallel_group": "check_initialized",
    "get_expert_tensor_parallel_world_size": "",
    "set_expert_tensor_parallel_world_size": "world_size",
    "get_expert_tensor_parallel_rank": "",
    "set_expert_tensor_parallel_rank": "rank",
    "get_expert_tensor_and_model_parallel_group": "check_initialized",
    "get_expert_tensor_and_model_parallel_world_size": "",
    "get_expert_tensor_and_model_parallel_rank": "",
    "get_expert_tensor_model_pipeline_parallel_group": "check_initialized",
    "get_expert_data_parallel_group": "check_initialized partial_expert_data_parallel",
    "get_data_modulo_expert_parallel_group": "partial_expert_data_parallel",
    "get_expert_data_parallel_group_gloo": "partial_expert_data_parallel",
    "get_expert_data_parallel_rank": "partial_expert_data_parallel",
    "get_expert_data_parallel_world_size": "partial_expert_data_parallel",
    "get_intra_distributed_optimizer_instance_group": "check_initialized",
    "get_inter_distributed_optimizer_instance_group": "check_initialized",
    "_set_global_memory_buffer": "",
    "_set_global_symmetric_memory_buffer": "",
    "get_global_memory_buffer": "",
    "get_global_symmetric_memory_buffer": "",
    "destroy_global_memory_buffer": "",
    "destroy_global_symmetric_memory_buffer": "",
    "get_all_ranks": "",
    "destroy_model_parallel": "",
    "get_mask": "order token",
    "get_ranks": "token",
}
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
    "destroy_tensor_parallel": "",
    "divide_and_check_no_remainder": "numerator denominator",
    "ensure_divisibility": "numerator denominator",
    "get_context_parallel_group": "",
    "get_context_parallel_rank": "",
    "get_context_parallel_ranks": "",
    "get_context_parallel_world_size": "",
    "get_data_parallel_group": "",
    "get_data_parallel_rank": "",
    "get_data_parallel_ranks": "",
    "get_data_parallel_world_size": "",
    "get_pipeline_parallel_group": "",
    "get_pipeline_parallel_rank": "",
    "get_pipeline_parallel_ranks": "",
    "get_pipeline_parallel_world_size": "",
    "get_tensor_parallel_group": "",
    "get_tensor_parallel_rank": "",
    "get_tensor_parallel_ranks": "",
    "get_tensor_parallel_src_rank": "",
    "get_tensor_parallel_world_size": "",
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
