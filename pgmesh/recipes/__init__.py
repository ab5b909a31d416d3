"""Whole arrangements by the names of the systems that people come from, and every group of their pages.

Each recipe is a plain function of sizes, which returns an ``Arrangement``. With ``of=Layout`` that is a plan, made
without processes and without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgmesh.recipes.arrangement import Arrangement, Family
from pgmesh.recipes.fairscale import fairscale
from pgmesh.recipes.megatron import hybrid_context, megatron
from pgmesh.recipes.olmo import olmo, olmo_experts
from pgmesh.recipes.oslo import oslo

if TYPE_CHECKING:
    from pgmesh.recipes.scratch import Scratch

__all__ = [
    "Arrangement",
    "Family",
    "Scratch",
    "fairscale",
    "hybrid_context",
    "megatron",
    "olmo",
    "olmo_experts",
    "oslo",
]


def __getattr__(name: str) -> Any:
    if name == "Scratch":  # alone here, it needs torch
        from pgmesh.recipes.scratch import Scratch

        return Scratch
    raise AttributeError(f"module 'pgmesh.recipes' has no attribute {name!r}")
