"""Plans of tensor parallelism for the tiny GPT of ``parallel_models.py``."""

from __future__ import annotations

from pgmesh.parallel import attention_plan, mlp_plan

BLOCKS = {**attention_plan("blocks.*", ["qkv"], "out"), **mlp_plan("blocks.*", ["up"], "down")}
WORDS = {**BLOCKS, "tokens": "vocabulary", "head": "vocabulary"}
SEQUENCE = {
    **WORDS,
    "places": "whole",
    "blocks.0": "enter",
    "blocks.*.norm*": "sequence",
    "norm": "sequence",
}
