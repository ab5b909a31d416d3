"""Plans of tensor parallelism for the tiny GPT of ``parallel_models.py``."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard, parallel
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from pgmesh.parallel import attention_plan, mlp_plan


def block_plan(sequence: bool = False) -> dict[str, parallel.ParallelStyle]:
    return {
        **attention_plan("blocks.*", ["qkv"], "out", sequence=sequence),
        **mlp_plan("blocks.*", ["up"], "down", sequence=sequence),
    }


BLOCK_PLAN = block_plan()
VOCABULARY_PLAN = {
    **BLOCK_PLAN,
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(use_local_output=False),
}
GATHERED_PLAN = {**VOCABULARY_PLAN, "head": ColwiseParallel(output_layouts=Replicate())}
SEQUENCE_PLAN = {
    **block_plan(sequence=True),
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    "blocks.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
    "blocks.*.norm*": SequenceParallel(),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}
"""Sequences are sharded in the first block."""

EMBEDDED_PLAN = {
    **{name: style for name, style in SEQUENCE_PLAN.items() if name != "blocks.0"},
    "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "places": parallel.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
}
"""Sequences are sharded in the embeddings."""
