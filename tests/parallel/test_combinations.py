"""Tensor, context and expert parallelism together with data and pipelines on eight ranks, against one process."""

from __future__ import annotations

import pytest

from pgmesh import ProcessGroupMesh
from pgmesh.parallel import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    PipelineParallel,
    ShardedDataParallel,
    TensorParallel,
    compose,
)
from tests.support.expert_models import cut_like, expert_model, train_alone_in_parts
from tests.support.parallel_models import FIRST, LAST, TinyGPT, loss_of, train_alone
from tests.support.parallel_training import in_microbatches, train_and_check, whole_loss
from tests.support.tensor_plans import VOCABULARY_PLAN
from tests.support.worlds import check_sums, groups_of, world

pytestmark = pytest.mark.long

PERMUTED = [5, 2, 7, 0, 3, 6, 1, 4]


def pipeline_on(mesh, loss=loss_of):
    return PipelineParallel(mesh, "pp", layers="blocks", first=FIRST, last=LAST, loss=loss, microbatches=2)


# ---- data x context x tensor ----


def data_context_tensor(sizes, ranks, kind):
    with ProcessGroupMesh(**sizes, ranks=ranks) as mesh:
        tensor, context = TensorParallel(mesh, "tp", plan=VOCABULARY_PLAN), ContextParallel(mesh, "cp", attention=kind)
        together = compose(mesh, ShardedDataParallel(mesh, "dp", over=("dp", "cp")), context, tensor)
        train_and_check(
            together, TinyGPT(layers=2), train_alone(TinyGPT(layers=2)), context=context, around=tensor.loss
        )
        check_sums(groups_of(mesh))


def test_data_context_tensor_with_a_ring():
    world(8).run(data_context_tensor, {"dp": 2, "cp": 2, "tp": 2}, range(8), "ring")


def test_data_context_tensor_with_ulysses_on_permuted_ranks():
    world(8).run(data_context_tensor, {"dp": 2, "cp": 2, "tp": 2}, PERMUTED, "ulysses")


# ---- data x tensor x context x pipeline ----


def all_four(sizes, ranks):
    with ProcessGroupMesh(**sizes, ranks=ranks) as mesh:
        tensor, context = TensorParallel(mesh, "tp", plan=VOCABULARY_PLAN), ContextParallel(mesh, "cp")
        data = ShardedDataParallel(mesh, "dp", over=("dp", "cp"))
        together = compose(mesh, pipeline_on(mesh, whole_loss), data, context, tensor)
        train_and_check(
            together, TinyGPT(layers=2), train_alone(TinyGPT(layers=2)), context=context, around=tensor.loss
        )
        check_sums(groups_of(mesh))


def test_data_tensor_context_pipeline():
    world(8).run(all_four, {"pp": 2, "dp": 1, "cp": 2, "tp": 2}, PERMUTED)


# ---- pipeline x data x experts ----


def pipeline_data_experts(sizes, ranks, view, over, tensor, kind):
    with ProcessGroupMesh(**sizes, ranks=ranks) as mesh:
        moe = mesh.view(**view)
        cut = {"tensor": tensor, "columns": ["up"], "rows": ["down"]} if tensor else {}
        experts = ExpertParallel(moe, "ep", over=over, **cut)
        together = compose(mesh, pipeline_on(mesh), kind(mesh, "dp"), experts)
        model = expert_model()
        expected = train_alone_in_parts(2, lambda rows: in_microbatches(rows, mesh.size("dp")))
        train_and_check(
            together,
            model,
            expected,
            parts=lambda whole: {**whole, **cut_like(dict(model.named_parameters()), whole, moe, tensor)},
        )
        check_sums(groups_of(mesh))
        check_sums(groups_of(moe))


@pytest.mark.parametrize(
    ("ranks", "view", "over", "tensor", "kind"),
    [
        (range(8), {"pp": 2, "edp": 2, "ep": 2}, ["edp", "ep"], None, DataParallel),
        (PERMUTED, {"pp": 2, "ep": 2, "etp": 2}, ["ep", "etp"], "etp", DataParallel),
        (PERMUTED, {"pp": 2, "edp": 2, "ep": 2}, ["edp", "ep"], None, ShardedDataParallel),
    ],
    ids=["a view of the same ranks", "experts cut, on permuted ranks", "the rest sharded, on permuted ranks"],
)
def test_pipeline_data_experts(ranks, view, over, tensor, kind):
    world(8).run(pipeline_data_experts, {"pp": 2, "dp": 4}, ranks, view, over, tensor, kind)
