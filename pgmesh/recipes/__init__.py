"""Arrangements of ranks as other systems define them: Megatron-Core, OLMo-core, fairscale and OSLO.

Each recipe is a function of sizes that returns an ``Arrangement`` with every group of that system, by name. With
``of=Layout`` the arrangement is a plan, which needs neither processes nor torch.
"""

from __future__ import annotations

from pgmesh.recipes.arrangement import Along, Arrangement
from pgmesh.recipes.fairscale import fairscale
from pgmesh.recipes.megatron import megatron
from pgmesh.recipes.olmo import olmo, olmo_experts
from pgmesh.recipes.oslo import oslo
from pgmesh.recipes.scratch import Scratch

__all__ = [
    "Along",
    "Arrangement",
    "Scratch",
    "fairscale",
    "megatron",
    "olmo",
    "olmo_experts",
    "oslo",
]
