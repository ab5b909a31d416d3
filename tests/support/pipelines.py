"""Whether this torch can run a pipeline, and the pipeline of the tiny GPT."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import PipelineStage

from pgmesh import ProcessGroupMesh, torch_private
from pgmesh.parallel import PipelineParallel
from tests.support.parallel_models import FIRST, LAST, loss_of

needs_pipelines = pytest.mark.skipif(
    not torch_private.stages_are_supported(PipelineStage), reason="pipelines need the stages of torch 2.12"
)


def gpt_stages(mesh: ProcessGroupMesh, axis: str = "pp", **changes: Any) -> PipelineParallel:
    """A pipeline of the tiny GPT, by default with two microbatches."""
    options = {"layers": "blocks", "first": FIRST, "last": LAST, "loss": loss_of, "microbatches": 2, **changes}
    return PipelineParallel(mesh, axis, **options)
