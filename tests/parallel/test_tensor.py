"""Tensor parallelism of layers, vocabularies and sequences: all gradients against one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)

from pgmesh import MethodError, ProcessGroupMesh
from pgmesh.parallel import (
    ExpertParallel,
    ShardedDataParallel,
    TensorParallel,
    attention_plan,
    compose,
    mlp_plan,
    verify,
)
from tests.support.expert_models import expert_layer
from tests.support.fake_world import fake_rank
from tests.support.parallel_models import WIDTH, TinyGPT, assert_same_run, batch, loss_of, train_alone, train_parallel
from tests.support.pipelines import gpt_stages
from tests.support.tensor_plans import GATHERED_PLAN, SEQUENCE_PLAN
from tests.support.worlds import check_sums, groups_of, on_ranks

pytestmark = pytest.mark.long

# ---- frozen parameters ----


def frozen_norms() -> TinyGPT:
    model = TinyGPT(layers=2)
    for layer in model.modules():
        layer.requires_grad_(not isinstance(layer, nn.LayerNorm))
    return model


@on_ranks(2)
def test_parameters_unfrozen_after_apply_are_trained():
    """Norms are frozen when the method is applied, and trained afterwards."""
    with ProcessGroupMesh(tp=2) as mesh:
        method = TensorParallel(mesh, "tp", plan=SEQUENCE_PLAN)
        together = compose(mesh, method)
        model = together.apply(frozen_norms()).requires_grad_(True)
        with loss_parallel():
            assert_same_run(train_parallel(model, together.share), train_alone(TinyGPT(layers=2)))
        assert model.norm.weight.grad.placements == model.norm.weight.placements


# ---- what needs no other rank ----


@pytest.fixture
def mesh() -> Iterator[ProcessGroupMesh]:
    with fake_rank(5, 8), ProcessGroupMesh(dp=2, tp=4, name="actor") as mesh:
        yield mesh


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
    (part,) = gpt_stages(mesh, "dp").cut(TinyGPT())
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
    assert twice.one.weight.to_local().shape == (2, 4)


def test_parameters_keep_their_attributes(mesh):
    model = TinyGPT()
    for weight in model.parameters():
        weight.decay = 0.1
    TensorParallel(mesh, "tp", plan=SEQUENCE_PLAN).apply(model)
    assert all(weight.decay == 0.1 for weight in model.parameters())


# ---- sequences ----


def gathered() -> PrepareModuleInputOutput:
    """The style of a layer that gets and returns shards of sequences, and computes with whole ones."""
    return PrepareModuleInputOutput(
        input_layouts=Shard(1),
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
    )


class Mixed(nn.Module):
    """A layer of experts, which serve the positions in turn, after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), expert_layer()
        self.layer.forward = self.mixed

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        chosen = (tokens[:, :2] > 0).sum(-1, keepdim=True)
        weights = torch.ones_like(chosen, dtype=x.dtype)
        return self.layer.mix(tokens, weights, chosen, self.layer.experts).view_as(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x))


MIXED_PLAN = {
    **{name: style for name, style in SEQUENCE_PLAN.items() if name.partition(".")[0] != "blocks"},
    "blocks.0": SEQUENCE_PLAN["blocks.0"],
    "blocks.*.norm": SequenceParallel(use_local_output=True),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


@on_ranks(4)
def test_experts_between_sharded_sequences_train_once_gathered():
    plan, build = {**MIXED_PLAN, "blocks.*.layer": gathered()}, partial(TinyGPT, layers=1, block=Mixed)
    with ProcessGroupMesh(dp=2, tp=2) as mesh:
        for experts in (ExpertParallel(mesh.view(ep=4), "ep"), ExpertParallel(mesh, "tp")):
            together = compose(mesh, ShardedDataParallel(mesh, "dp"), TensorParallel(mesh, "tp", plan=plan), experts)
            assert verify(together, build, [batch(0)], loss=loss_of) < 1e-12
        check_sums(groups_of(mesh))


# ---- compiled modules behind sharded ones ----


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(4)
def test_compiled_blocks_behind_sharded_embedding_train(sharded: bool):
    with ProcessGroupMesh(dp=2, tp=2) as mesh:
        torch.compiler.reset()
        model, tensor = TinyGPT(layers=2), TensorParallel(mesh, "tp", plan=GATHERED_PLAN)
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        data = [ShardedDataParallel(mesh, "dp")] if sharded else []
        together = compose(mesh, tensor, *data, unowned=[] if sharded else ["dp"])
        model = together.apply(model)
        assert_same_run(train_parallel(model, together.share), train_alone(TinyGPT(layers=2)))
        check_sums(groups_of(mesh))
