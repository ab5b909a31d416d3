"""Tensor parallelism of layers, vocabularies and sequences: all gradients against one process."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
)

from pgmesh import MethodError, ProcessGroupMesh
from pgmesh.parallel import (
    TensorParallel,
    attention_plan,
    compose,
    mlp_plan,
)
from tests.support.parallel_models import TinyGPT, assert_same_run, train_alone, train_parallel
from tests.support.pipelines import gpt_stages
from tests.support.tensor_plans import SEQUENCE_PLAN
from tests.support.worlds import on_ranks

pytestmark = pytest.mark.long


@on_ranks(2)
def test_parameters_unfrozen_after_apply_are_trained():
    """Norms are frozen when the method is applied, and trained afterwards. Parameters keep their attributes."""
    with ProcessGroupMesh(tp=2) as mesh:
        method = TensorParallel(mesh, "tp", plan=SEQUENCE_PLAN)
        together = compose(mesh, method)
        model = TinyGPT(layers=2)
        for weight in model.parameters():
            weight.decay = 0.1
        for layer in model.modules():
            layer.requires_grad_(not isinstance(layer, nn.LayerNorm))
        model = together.apply(model).requires_grad_(True)
        assert all(weight.decay == 0.1 for weight in model.parameters())
        with loss_parallel():
            assert_same_run(train_parallel(model, together.share), train_alone(TinyGPT(layers=2)))
        assert model.norm.weight.grad.placements == model.norm.weight.placements


def test_ready_plans_name_layers_into_and_out_of():
    layers = {**attention_plan("layers.*.attn"), **mlp_plan("layers.*.mlp")}
    assert {name: type(style) for name, style in layers.items()} == {
        "layers.*.attn.q_proj": ColwiseParallel,
        "layers.*.attn.k_proj": ColwiseParallel,
        "layers.*.attn.v_proj": ColwiseParallel,
        "layers.*.attn.o_proj": RowwiseParallel,
        "layers.*.mlp.gate_proj": ColwiseParallel,
        "layers.*.mlp.up_proj": ColwiseParallel,
        "layers.*.mlp.down_proj": RowwiseParallel,
    }


@pytest.mark.parametrize("pattern", ["tokens", "t*", "place?", "blocks.0.up", "blocks.*.up"])
def test_plan_may_name_modules_of_another_stage(mesh, pattern):
    (part,) = gpt_stages(mesh).cut(TinyGPT())
    TensorParallel(mesh, "tp", plan={pattern: ColwiseParallel()}).apply(part)
    cut = [name for name, weight in part.named_parameters() if isinstance(weight, DTensor) and "bias" not in name]
    assert cut == (["blocks.2.up.weight", "blocks.3.up.weight"] if pattern == "blocks.*.up" else [])
    with pytest.raises(MethodError, match=r"^the plan names 'tokenz', which TinyGPT does not have"):
        TensorParallel(mesh, "tp", plan={"tokenz": ColwiseParallel()}).apply(part)


def test_a_module_under_two_names_is_cut_once(mesh):
    twice = nn.Module()
    twice.one = twice.other = nn.Linear(4, 8)
    TensorParallel(mesh, "tp", plan={"one": ColwiseParallel(), "o*r": ColwiseParallel()}).apply(twice)
    assert twice.one is twice.other
    assert twice.one.weight.to_local().shape == (4, 4)
