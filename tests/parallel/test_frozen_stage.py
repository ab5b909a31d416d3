"""Pipeline stages without trainable parameters, with each method that can be applied to a stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pgmesh import ProcessGroupMesh
from pgmesh.parallel import DataParallel, PipelineParallel, ShardedDataParallel, compose
from tests.support.parallel_models import assert_same_run
from tests.support.pipelines import needs_pipelines
from tests.support.small_model import SmallModel, loss_of, train, train_alone
from tests.support.worlds import check_sums, groups_of, on_ranks

LAST = ("blocks.2", "blocks.3")


def next_to_a_frozen_stage(
    kind: type[DataParallel] | type[ShardedDataParallel], frozen: tuple[str, ...], **more: Any
) -> None:
    """Ranks start with different frozen weights, which are broadcast from the first rank along dp."""
    with ProcessGroupMesh(dp=2, pp=2, name=f"{kind.__name__}, {frozen[0]} frozen") as mesh:
        pipeline = PipelineParallel(mesh, "pp", layers="blocks", first="012", loss=loss_of, microbatches=4, **more)
        together, model = compose(mesh, kind(mesh, "dp"), pipeline), SmallModel(frozen)
        if kind is DataParallel and mesh.index("dp"):
            for weight in model.parameters():
                nn.init.zeros_(weight)
        assert_same_run(train(together.apply(model), together.share), train_alone(frozen))
        check_sums(groups_of(mesh))


@needs_pipelines
@pytest.mark.parametrize("kind", [DataParallel, ShardedDataParallel])
@on_ranks(4)
def test_a_pipeline_trains_next_to_a_frozen_stage(kind: type[DataParallel] | type[ShardedDataParallel]):
    next_to_a_frozen_stage(kind, LAST)
    next_to_a_frozen_stage(kind, ("0", "2", "blocks.0", "blocks.2"), schedule="interleaved", stages_per_rank=2)


@on_ranks(2)
def test_data_parallel_does_not_wrap_frozen_module():
    """A frozen module without a pipeline is not wrapped, and gets the weights of the first rank."""
    mesh = ProcessGroupMesh(dp=2)
    data, module = DataParallel(mesh, "dp"), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
    nn.init.constant_(module[0].weight, 1.0 + mesh.rank)
    module[1].running_mean.fill_(1.0 + mesh.rank)
    assert data.apply(module) is module
    assert module[0].weight.eq(1.0).all()
    assert module[1].running_mean.eq(1.0).all()
    with data.accumulate(module, last=False):
        module(torch.ones(2, 2))
    own = nn.Linear(2, 2).requires_grad_(False)
    nn.init.constant_(own.weight, 1.0 + mesh.rank)
    assert DataParallel(mesh, "dp", init_sync=False).apply(own) is own
    assert own.weight.eq(1.0 + mesh.rank).all()
    assert nn.Tanh is type(data.apply(nn.Tanh()))
