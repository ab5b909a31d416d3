"""Whether this torch can run a pipeline."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import PipelineStage

from pgmesh import torch_private

needs_pipelines = pytest.mark.skipif(
    not torch_private.stages_are_supported(PipelineStage), reason="pipelines need the stages of torch 2.12"
)
