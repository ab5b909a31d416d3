"""Initial values of weights from the meta device, on meshes of several shapes, against one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from pgmesh import MethodError, ProcessGroupMesh
from pgmesh.parallel import ExpertParallel, Method, ShardedDataParallel, TensorParallel, compose, local
from pgmesh.parallel.composing import INITIALIZE
from tests.support.expert_models import ExpertBlock
from tests.support.message_assertions import last_call
from tests.support.parallel_models import TinyGPT, assert_same, batch, weights_of
from tests.support.pipelines import gpt_stages, needs_pipelines
from tests.support.tensor_plans import BLOCK_PLAN
from tests.support.worlds import check_sums, groups_of, on_ranks

pytestmark = pytest.mark.long

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


@needs_pipelines
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_initialized_weights_are_those_of_one_process(kind: str):
    """After errors, since different weights start with the same values, or equal ones with others."""
    with ProcessGroupMesh(dp=2, other=2) as mesh:
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
                    local(weight).normal_()
            with pytest.raises(MethodError, match=text) if text else nullcontext():
                step()
        torch.manual_seed(mesh.rank)
        together.initialize(model, draw, seed=3)
        assert_same(kind, weights_of(model), weights_of(alone(kind)), 0.0)
        step()
        check_sums(groups_of(mesh))


@needs_pipelines
@pytest.mark.parametrize("head_first", [False, True])
@on_ranks(2)
def test_initialized_copies_of_tied_weights_are_equal(head_first: bool):
    with ProcessGroupMesh(pp=2) as mesh:
        together = compose(mesh, gpt_stages(mesh))
        model = together.apply(tied_model(head_first)).to_empty(device="cpu")
        together.initialize(model, draw, seed=3)
        mine = next(each for name, each in weights_of(model).items() if name in ("tokens.weight", "head.weight"))
        assert torch.equal(mine, weights_of(alone("tied", tied_model(head_first)))["tokens.weight"])
