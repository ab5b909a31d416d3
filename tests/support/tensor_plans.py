"""Plans of tensor parallelism for the tiny GPT of ``parallel_models.py``."""

from __future__ import annotations

from pgmesh.parallel import attention_plan, mlp_plan

BLOCK_PLAN = {**attention_plan("blocks.*", ["qkv"], "out"), **mlp_plan("blocks.*", ["up"], "down")}
VOCABULARY_PLAN = {**BLOCK_PLAN, "tokens": "vocabulary", "head": "vocabulary"}
SEQUENCE_PLAN = {
    **VOCABULARY_PLAN,
    "places": "whole",
    "blocks.0": "enter",
    "blocks.*.norm*": "sequence",
    "norm": "sequence",
}
