"""Pipelines without a loss, and forward passes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pgmesh import ProcessGroupMesh
from pgmesh.parallel import PipelineParallel
from tests.support.parallel_models import FIRST, LAST, TinyGPT, batch
from tests.support.worlds import on_ranks

pytestmark = pytest.mark.long

torch.set_num_threads(1)  # also on ranks, which import this: others share their cores


def stages(mesh: ProcessGroupMesh, **more: Any) -> PipelineParallel:
    """A pipeline without a loss."""
    return PipelineParallel(mesh, "pp", layers="blocks", first=FIRST, last=LAST, loss=None, microbatches=2, **more)


@on_ranks(2)
def test_a_pipeline_without_a_loss_goes_forward():
    with ProcessGroupMesh(pp=2) as mesh:
        codes, _ = batch(0)
        model = stages(mesh).apply(TinyGPT())
        out = model(codes)
        assert (out is None) == (mesh.rank == 0)
        if out is not None:
            torch.testing.assert_close(out, TinyGPT()(codes).detach(), rtol=0, atol=1e-12)
