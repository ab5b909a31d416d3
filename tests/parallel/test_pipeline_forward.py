"""A pipeline with batches of several shapes, forward passes between its steps, and pipelines without a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pgmesh import MethodError, OptionsError, ProcessGroupMesh
from pgmesh.parallel import DataParallel, PipelineParallel, ShardedDataParallel, compose
from tests.support.fake_world import fake_rank
from tests.support.message_assertions import assert_raises
from tests.support.parallel_models import (
    FIRST,
    LAST,
    TinyGPT,
    assert_same,
    batch,
    full_tensor,
    gradients_of,
    loss_of,
)
from tests.support.worlds import check_sums, groups_of, world

pytestmark = pytest.mark.long

torch.set_num_threads(1)  # also on ranks, which import this: others share their cores


def stages(
    mesh: ProcessGroupMesh, schedule: str = "1f1b", count: int = 1, loss=loss_of, **more: Any
) -> PipelineParallel:
    names = {"layers": "blocks", "first": FIRST, "last": LAST, **more}
    return PipelineParallel(mesh, "pp", **names, loss=loss, microbatches=2, schedule=schedule, stages_per_rank=count)


def batches_of_other_shapes(data: type | None) -> None:
    """Steps with different rows and lengths, and forward passes between them, against one process."""
    with ProcessGroupMesh(pp=2, dp=2) as mesh:
        for schedule, count in [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)][: 3 if data else 4]:
            methods = [stages(mesh, schedule, count), *([data(mesh, "dp")] if data else [])]
            together = compose(mesh, *methods, unowned=() if data else ["dp"])
            model, plain = together.apply(TinyGPT(tied=True)), TinyGPT(tied=True)
            here = model.method.is_last(count - 1)
            for rows, length in [(8, 8), (4, 8), (4, 5), (8, 8)]:
                codes, target = (each[:rows, :length] for each in batch(rows + length))
                mine, wanted = together.share(codes), together.share(target)
                for weight in (*model.parameters(), *plain.parameters()):
                    weight.grad = None
                model.step(mine, target=wanted)
                loss_of(plain(codes), target).backward()
                what = f"{schedule}: gradients of {rows} x {length}"
                assert_same(
                    what, {name: full_tensor(each) for name, each in gradients_of(model).items()}, gradients_of(plain)
                )
                out = model(mine)
                assert (out is not None) == here
                with torch.no_grad():
                    losses = model.step(mine, target=wanted)
                assert len(losses) == 2 * here
                if here:
                    assert not out.requires_grad
                    torch.testing.assert_close(out, plain(mine).detach(), rtol=0, atol=1e-12)
                    right = loss_of(plain(mine), wanted).detach()
                    torch.testing.assert_close(torch.stack(losses).mean(), right, rtol=0, atol=1e-12)
                assert_same(
                    what, {name: full_tensor(each) for name, each in gradients_of(model).items()}, gradients_of(plain)
                )
        check_sums(groups_of(mesh))


@pytest.mark.parametrize("data", [None, DataParallel, ShardedDataParallel])
def test_pipeline_takes_new_shapes_and_forward_passes(data):
    world(4).run(batches_of_other_shapes, data)


def test_step_without_loss_raises():
    with fake_rank(0, 2), ProcessGroupMesh(pp=2) as mesh:
        codes, target = batch(0)
        assert_raises(
            OptionsError,
            lambda: stages(mesh, loss=None).apply(TinyGPT()).step(codes, target=target),
            "PipelineParallel along pp has no loss, so a step has no backward pass.\n\n"
            "  PipelineParallel(..., loss=cross_entropy)   # or model(inputs), which runs only the forward pass",
        )
        assert_raises(
            MethodError,
            lambda: stages(mesh, "zero-bubble-v", 2, loss=None).apply(TinyGPT())(codes),
            "schedule 'zero-bubble-v' always runs forward and backward in torch 2.13.\n\n"
            "  PipelineParallel(..., schedule='zero-bubble', stages_per_rank=2)   # can run only forward",
        )


def without_a_loss() -> None:
    with ProcessGroupMesh(pp=2) as mesh:
        codes, _ = batch(0)
        model = stages(mesh, loss=None).apply(TinyGPT())
        out = model(codes)
        assert (out is None) == (mesh.rank == 0)
        if out is not None:
            torch.testing.assert_close(out, TinyGPT()(codes).detach(), rtol=0, atol=1e-12)


def test_a_pipeline_without_a_loss_goes_forward():
    world(2).run(without_a_loss)
