"""What apply returns: a program's own function before sharding, names in wrappers, and values from the meta device."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pgmesh import MethodError, ProcessGroupMesh, parallel
from pgmesh.parallel import DataParallel, ExpertParallel, Method, ShardedDataParallel, TensorParallel, compose, verify
from pgmesh.parallel.composing import INITIALIZE
from tests.support.expert_models import ExpertBlock
from tests.support.message_assertions import last_call
from tests.support.parallel_models import TinyGPT, assert_same, batch, loss_of, weights_of
from tests.support.pipelines import gpt_stages, needs_pipelines
from tests.support.tensor_plans import BLOCK_PLAN
from tests.support.worlds import on_mesh


def wrap_blocks(module: nn.Module) -> nn.Module:
    for name, block in [*module.blocks.named_children()]:
        module.blocks.register_module(name, checkpoint_wrapper(block))
    return module


@needs_pipelines
def test_before_sharding_gets_each_stage_after_tensor_methods(mesh: ProcessGroupMesh):
    stages = gpt_stages(mesh, schedule="interleaved", stages_per_rank=2)
    seen = list[nn.Module]()

    def prepare(stage: nn.Module) -> nn.Module:
        seen.append(stage)
        assert not any(isinstance(each, (FSDPModule, DistributedDataParallel)) for each in stage.modules())
        assert any(isinstance(each, DTensor) for each in stage.parameters())
        return wrap_blocks(stage)

    tensor = TensorParallel(mesh, "tp", plan=BLOCK_PLAN)
    together = compose(mesh, stages, ShardedDataParallel(mesh, "dp"), tensor)
    model = together.apply(TinyGPT(), before_sharding=prepare)
    assert seen == [*model.parts]
    assert all(isinstance(each, FSDPModule) for each in seen)
    blocks = tuple(f"blocks.{stages.stage(index)}." for index in range(2))
    names = {name for name, _ in together.named_parameters(model) if name.startswith("blocks")}
    assert names == {name for name, _ in TinyGPT().named_parameters() if name.startswith(blocks)}


def wrap_experts(module: nn.Module) -> nn.Module:
    for block in module.blocks:
        block.experts = checkpoint_wrapper(block.experts)
    return module


@pytest.mark.parametrize("data", [DataParallel, ShardedDataParallel])
@on_mesh(dp=4)
def test_verify_passes_with_checkpointed_experts(mesh: ProcessGroupMesh, data: Callable[..., Method]):
    together = compose(mesh, data(mesh, "dp"), ExpertParallel(mesh.view(edp=2, ep=2), "ep"))
    build = partial(TinyGPT, layers=1, block=ExpertBlock)
    assert verify(together, build, [batch(0)], loss=loss_of, before_sharding=wrap_experts) < 1e-12


def test_trained_ignored_params_are_an_error(mesh: ProcessGroupMesh):
    model = TinyGPT(layers=1)
    sharded = ShardedDataParallel(mesh, "dp", ignored_params={model.norm.weight})
    together = compose(mesh, sharded, unowned=["pp", "tp"])
    with pytest.raises(MethodError, match=r"norm\.weight is one of ignored_params, so no method") as caught:
        together.apply(model)
    exec(last_call(caught.value), {"module": model})
    together.apply(model)


class Wraps(Method):
    differs = "weights"

    def apply(self, module: nn.Module) -> nn.Module:
        return nn.Sequential(module)


class Module(nn.Module):
    """A model with an attribute ``module``, as DDP has."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.last = nn.Linear(2, 2), nn.Linear(2, 2)


@pytest.mark.parametrize("prepare", [None, checkpoint_wrapper])
def test_named_parameters_has_names_from_before_apply(mesh: ProcessGroupMesh, prepare: Any):
    together = compose(mesh, DataParallel(mesh, "dp"), Wraps(mesh, "tp"), unowned="pp")
    model = Module()
    expected = {weight: name for name, weight in model.named_parameters()}
    applied = together.apply(model, before_sharding=prepare)
    assert {weight: name for name, weight in together.named_parameters(applied)} == expected
    assert not {name for name, _ in applied.named_parameters()} & {*expected.values()}


def test_plan_has_own_names_of_wrapped_layers(mesh: ProcessGroupMesh):
    tensor = TensorParallel(mesh, "tp", plan=BLOCK_PLAN)
    model = compose(mesh, tensor, unowned=["pp", "dp"]).apply(wrap_blocks(TinyGPT(layers=2)))
    assert sum(isinstance(each, DTensor) for each in model.parameters()) == 16
    plan = {f"blocks.*._checkpoint_wrapped_module.{name}": BLOCK_PLAN[f"blocks.*.{name}"] for name in ("up", "down")}
    for model in (TinyGPT(), wrap_blocks(TinyGPT())):
        with pytest.raises(MethodError, match=r"Did you mean 'blocks\.\*\.up'\?"):
            TensorParallel(mesh, "tp", plan=plan).apply(model)


def without_heads(module: nn.Module) -> nn.Module:
    del module.head
    module.norm = nn.Identity()
    return module


def with_adapters(module: nn.Module) -> nn.Module:
    module.blocks[0].up.adapter = nn.Linear(2, 2)
    return module


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (without_heads, "removed, added or reshaped 3 of 53 parameters, such as 'norm.weight': [16] before, not there"),
        (with_adapters, "2 of 53 parameters, such as 'blocks.0.up.adapter.weight': not there before, [2, 2] after"),
        (nn.Module.eval, None),
        (lambda module: None, "it returned None, not the module"),
        (lambda module: [module], "it returned [TinyGPT("),
    ],
)
def test_before_sharding_that_changes_parameters_raises(mesh: ProcessGroupMesh, prepare: Any, text: str | None):
    together = compose(mesh, ShardedDataParallel(mesh, "dp"), unowned=["pp", "tp"])
    if text is None:
        together.apply(TinyGPT(), before_sharding=prepare)
        return
    with pytest.raises(MethodError) as caught:
        together.apply(TinyGPT(), before_sharding=prepare)
    message = str(caught.value)
    assert message.startswith(f"before_sharding={prepare.__name__} failed in apply: MethodError: it ")
    assert text in message
    if prepare is with_adapters:  # the call that the error prints
        (line,) = [each for each in message.splitlines() if each.startswith("  model = ")]
        variables = {"together": together, "change": with_adapters, "model": TinyGPT()}
        exec(line.strip(), variables)
        assert "blocks.0.up.adapter.bias" in dict(together.named_parameters(variables["model"]))


KINDS: dict[str, Callable[[ProcessGroupMesh], list[Method]]] = {
    "sharded": lambda mesh: [ShardedDataParallel(mesh, "dp", "other")],
    "replicated": lambda mesh: [ShardedDataParallel(mesh, "dp", "other", replicate="other")],
    "tensor": lambda mesh: [ShardedDataParallel(mesh, "dp"), TensorParallel(mesh, "other", plan=BLOCK_PLAN)],
    "experts": lambda mesh: [ShardedDataParallel(mesh, "dp", "other"), ExpertParallel(mesh, "other")],
    "pipeline": lambda mesh: [gpt_stages(mesh, "other"), ShardedDataParallel(mesh, "dp")],
}


def model_of(kind: str, tied: bool = False) -> TinyGPT:
    with torch.device("meta"):
        return TinyGPT(layers=2, block=ExpertBlock if kind == "experts" else None, tied=tied)


def draw(layer: nn.Module) -> None:
    """Random numbers for biases and norms too, which torch starts with constants."""
    for weight in layer.parameters(recurse=False):
        nn.init.normal_(weight)


def tied_model(head_first: bool) -> TinyGPT:
    model = model_of("pipeline", tied=True)
    if head_first:
        tokens = model.tokens
        del model.tokens
        model.tokens = tokens
    return model


def alone(kind: str, module: nn.Module | None = None) -> nn.Module:
    with ProcessGroupMesh(one=1, ranks=[torch.distributed.get_rank()]) as mesh:
        together = compose(mesh)
        model = together.apply(module or model_of(kind)).to_empty(device="cpu")
        if module is not None:
            text = "were one parameter, of which to_empty has made two"
            with pytest.raises(MethodError, match=text) as caught:
                together.initialize(model, draw, seed=3)
            exec(last_call(caught.value), {"model": model})
        together.initialize(model, draw, seed=3)
        return model


@pytest.mark.long
@needs_pipelines
@pytest.mark.parametrize("kind", KINDS)
@on_mesh(dp=2, other=2)
def test_initialized_weights_are_those_of_one_process(mesh: ProcessGroupMesh, kind: str):
    """After errors, since different weights start with the same values, or equal ones with others."""
    together = compose(mesh, *KINDS[kind](mesh))
    wrapped = checkpoint_wrapper if kind == "sharded" else None  # the names of its layers are other ones
    model = together.apply(model_of(kind), before_sharding=wrapped).to_empty(device="cpu")
    codes, target = map(together.share, batch(0))
    step = partial(model.step, codes, target=target) if kind == "pipeline" else partial(model, codes)
    seeds = {0: "are different weights, and start with the same values"}
    if kind == "replicated":
        found = r"of which the first is \S+ \(shard \d\): rank \d has other values than rank \d\.\n\n"
        seeds |= {10 + mesh.rank: f"start with different weights, {found}{re.escape(INITIALIZE)}"}
        seeds |= {20 + mesh.index("dp"): ""}
    for seed, text in seeds.items():
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                parallel.local(weight).normal_()
        with pytest.raises(MethodError, match=text) if text else nullcontext():
            step()
    torch.manual_seed(mesh.rank)
    together.initialize(model, draw, seed=3)
    assert_same(kind, weights_of(model), weights_of(alone(kind)), 0.0)
    step()


@pytest.mark.long
@needs_pipelines
@pytest.mark.parametrize("head_first", [False, True])
@on_mesh(pp=2)
def test_initialized_copies_of_tied_weights_are_equal(mesh: ProcessGroupMesh, head_first: bool):
    together = compose(mesh, gpt_stages(mesh))
    model = together.apply(tied_model(head_first)).to_empty(device="cpu")
    together.initialize(model, draw, seed=3)
    mine = next(each for name, each in weights_of(model).items() if name in ("tokens.weight", "head.weight"))
    assert torch.equal(mine, weights_of(alone("tied", tied_model(head_first)))["tokens.weight"])
