"""Pipelines without a loss, and forward passes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pgmesh import MethodError, OptionsError, ProcessGroupMesh
from pgmesh.parallel import PipelineParallel
from tests.support.fake_world import fake_rank
from tests.support.message_assertions import assert_raises
from tests.support.parallel_models import FIRST, LAST, TinyGPT, batch
from tests.support.worlds import on_ranks

pytestmark = pytest.mark.long

torch.set_num_threads(1)  # also on ranks, which import this: others share their cores


def stages(mesh: ProcessGroupMesh, **more: Any) -> PipelineParallel:
    """A pipeline without a loss."""
    return PipelineParallel(mesh, "pp", layers="blocks", first=FIRST, last=LAST, loss=None, microbatches=2, **more)


def test_step_without_loss_raises():
    with fake_rank(0, 2), ProcessGroupMesh(pp=2) as mesh:
        codes, target = batch(0)
        assert_raises(
            OptionsError,
            lambda: stages(mesh).apply(TinyGPT()).step(codes, target=target),
            "PipelineParallel along pp has no loss, so a step has no backward pass.\n\n"
            "  PipelineParallel(..., loss=cross_entropy)   # or model(inputs), which runs only the forward pass",
        )
        assert_raises(
            MethodError,
            lambda: stages(mesh, schedule="zero-bubble-v", stages_per_rank=2).apply(TinyGPT())(codes),
            "schedule 'zero-bubble-v' always runs forward and backward in torch 2.13.\n\n"
            "  PipelineParallel(..., schedule='zero-bubble', stages_per_rank=2)   # can run only forward",
        )


@on_ranks(2)
def test_a_pipeline_without_a_loss_goes_forward():
    with ProcessGroupMesh(pp=2) as mesh:
        codes, _ = batch(0)
        model = stages(mesh).apply(TinyGPT())
        out = model(codes)
        assert (out is None) == (mesh.rank == 0)
        if out is not None:
            torch.testing.assert_close(out, TinyGPT()(codes).detach(), rtol=0, atol=1e-12)
