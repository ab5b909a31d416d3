"""Parallel methods: each is given a mesh and the axes that it uses. Modules are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgmesh._util.lazy_names import lazy_names

_MODULE_OF = {
    "Method": "base",
    "Level": "base",
    "compose": "composing",
    "Composition": "composing",
    "find": "finding",
    "TensorParallel": "tensor",
    **dict.fromkeys(["attention_plan", "mlp_plan"], "tensor_plans"),
    "DataParallel": "data",
    "ShardedDataParallel": "sharded",
    "PipelineParallel": "pipeline",
    "Pipeline": "running",
    "ContextParallel": "context",
    "ExpertParallel": "expert",
    **dict.fromkeys(["ExpertLinear", "Router", "Routes", "balance_loss", "mix", "with_loss"], "mixture"),
    **dict.fromkeys(["seed_of", "seeded_rng"], "seeds"),
    "verify": "verifying",
    "local": "gradients",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)


if TYPE_CHECKING:
    from pgmesh.parallel.base import Level as Level, Method as Method
    from pgmesh.parallel.composing import Composition as Composition, compose as compose
    from pgmesh.parallel.context import ContextParallel as ContextParallel
    from pgmesh.parallel.data import DataParallel as DataParallel
    from pgmesh.parallel.expert import ExpertParallel as ExpertParallel
    from pgmesh.parallel.finding import find as find
    from pgmesh.parallel.gradients import local as local
    from pgmesh.parallel.mixture import (
        ExpertLinear as ExpertLinear,
        Router as Router,
        Routes as Routes,
        balance_loss as balance_loss,
        mix as mix,
        with_loss as with_loss,
    )
    from pgmesh.parallel.pipeline import PipelineParallel as PipelineParallel
    from pgmesh.parallel.running import Pipeline as Pipeline
    from pgmesh.parallel.seeds import seed_of as seed_of, seeded_rng as seeded_rng
    from pgmesh.parallel.sharded import ShardedDataParallel as ShardedDataParallel
    from pgmesh.parallel.tensor import TensorParallel as TensorParallel
    from pgmesh.parallel.tensor_plans import attention_plan as attention_plan, mlp_plan as mlp_plan
    from pgmesh.parallel.verifying import verify as verify
