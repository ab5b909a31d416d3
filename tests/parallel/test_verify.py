"""``verify``: programs that train wrong in silence fail, their right twins pass, and what the error says of each.

A program is a function of ``wrong`` that every rank runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import mse_loss, silu

from pgmesh import MethodError, OptionsError, ProcessGroupMesh, ShapeError
from pgmesh.parallel import (
    Composition,
    DataParallel,
    ExpertParallel,
    Method,
    ShardedDataParallel,
    TensorParallel,
    compose,
    local,
    mlp_plan,
    verify,
)
from tests.support.expert_models import expert_model
from tests.support.parallel_models import TinyGPT, batch, loss_of
from tests.support.pipelines import gpt_stages, needs_pipelines
from tests.support.tensor_plans import BLOCK_PLAN, SEQUENCE_PLAN
from tests.support.worlds import on_ranks

WIDTH = 8


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pairs(*shape: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The inputs and targets of two steps."""
    return [(numbers(step, *shape), numbers(step + 10, *shape)) for step in range(2)]


CODES = [batch(step) for step in range(2)]
ONE_LAYER = partial(TinyGPT, layers=1)


# ---- tensor parallelism ----


class GatedMLP(nn.Module):
    """The rows of ``gate_up`` are two halves, or pairs."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.halves = halves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.gate_up(x)
        gate, up = fused.chunk(2, -1) if self.halves else fused.unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(silu(gate) * up)


def fused_layer_cut_in_halves(wrong: bool) -> float:
    mesh = ProcessGroupMesh(dp=2, tp=2, name=f"wrong: {wrong}")
    tensor = TensorParallel(mesh, "tp", plan=mlp_plan("0", into=["gate_up"], out="down"))
    together = compose(mesh, ShardedDataParallel(mesh, "dp"), tensor)
    return verify(together, lambda: nn.Sequential(GatedMLP(wrong)), pairs(8, WIDTH), loss=mse_loss)


def tied_ends_cut_in_different_ways(wrong: bool) -> float:
    mesh = ProcessGroupMesh(pp=2, tp=2, name=f"wrong: {wrong}")
    columns = ColwiseParallel(output_layouts=Replicate())
    ends = {"tokens": columns if wrong else RowwiseParallel(input_layouts=Replicate()), "head": columns}
    together = compose(mesh, gpt_stages(mesh), TensorParallel(mesh, "tp", plan={**BLOCK_PLAN, **ends}))
    square = [batch(step, vocabulary=16) for step in range(2)]  # as many words as features: shards of one size
    return verify(together, lambda: TinyGPT(layers=2, tied=True, vocabulary=16), square)


# ---- averages ----


Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Hooked(Method):
    """Averages gradients, and changes them by a function of this rank's gradient and the average."""

    differs = "rows"

    def __init__(self, mesh: ProcessGroupMesh, *axes: str, change: Change) -> None:
        super().__init__(mesh, *axes)
        self.change = change

    def apply(self, module: nn.Module) -> nn.Module:
        for weight in self.weights(module):
            weight.register_post_accumulate_grad_hook(self._average)
        return module

    def _average(self, weight: nn.Parameter) -> None:
        gradient = local(weight.grad)
        mean = gradient.clone()
        dist.all_reduce(mean, group=self.mesh.group(*self.average_axes))
        mean /= self.mesh.size(*self.average_axes)
        gradient.copy_(self.change(gradient, mean))


def hooked(change: str, wrong: bool) -> float:
    mesh = ProcessGroupMesh(dp=4, name=f"wrong: {wrong}")
    together = compose(mesh, Hooked(mesh, "dp", change=CHANGES[change] if wrong else lambda own, mean: mean))
    return verify(together, lambda: nn.Linear(WIDTH, WIDTH), pairs(8, WIDTH), loss=mse_loss)


CHANGES: dict[str, Change] = {
    "forgotten average": lambda own, mean: own,
    "sum in place": lambda own, mean: mean * 4,
    "gradients of zero": lambda own, mean: mean * 0,
    "gradient of one rank": lambda own, mean: mean.sin() if dist.get_rank() == 3 else mean,
}


# ---- optimizers ----


def rate_by_size_of_shards(wrong: bool) -> float:
    mesh = ProcessGroupMesh(dp=4, name=f"wrong: {wrong}")

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        sizes = [(local(weight) if wrong else weight).numel() for weight in model.parameters()]
        return torch.optim.SGD(model.parameters(), lr=1 / sum(sizes))

    together = compose(mesh, ShardedDataParallel(mesh, "dp"))
    return verify(together, ONE_LAYER, CODES, loss=loss_of, optimizer=optimizer)


LOCAL = "A part of the program computes with what a rank has where one process has all"
REASONS: dict[Callable[[bool], float], str] = {
    fused_layer_cut_in_halves: LOCAL,
    tied_ends_cut_in_different_ways: LOCAL,
    partial(hooked, "forgotten average"): "Or no method averages it.",
    partial(hooked, "sum in place"): "Each gradient that differs is 4 times that on one rank, and dp has size 4.",
    partial(hooked, "gradients of zero"): "These gradients are zero on the mesh.",
    partial(hooked, "gradient of one rank"): "Only rank 3 differs.",
    rate_by_size_of_shards: "in step 1 the update of",
}
"""Programs, and a part of the likely reason that the error of each has."""

NAMES = [each.args[0] if isinstance(each, partial) else each.__name__ for each in REASONS]


@pytest.mark.parametrize(("program", "reason"), REASONS.items(), ids=NAMES)
@on_ranks(4)
def test_verify_fails_wrong_program_and_passes_its_twin(program: Callable[..., float], reason: str):
    with pytest.raises((MethodError, ShapeError)) as caught:
        program(wrong=True)
    assert reason in str(caught.value), caught.value
    assert program(wrong=False) < 1e-12


# ---- right programs ----


@needs_pipelines
@on_ranks(4)
def test_verify_passes_experts_in_microbatches():
    """One rank balances the rows that all ranks have in a microbatch."""
    mesh = ProcessGroupMesh(pp=2, dp=2)
    experts = ExpertParallel(mesh.view(pp=2, ep=2), "ep")
    together = compose(mesh, gpt_stages(mesh), DataParallel(mesh, "dp"), experts)
    assert verify(together, expert_model, CODES) < 1e-12


# ---- what else the error says ----


def error_of(together: Composition, build: Callable[..., nn.Module], batches: Any, **given: Any) -> str:
    with pytest.raises(MethodError) as caught:
        verify(together, build, batches, **given)
    return str(caught.value)


def layer() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


@on_ranks(4)
def test_verify_says_if_only_norms_or_experts_differ():
    mesh = ProcessGroupMesh(dp=4, name="experts")
    together = compose(mesh, DataParallel(mesh, "dp"), ExpertParallel(mesh, "dp"))

    def step(composition: Composition, model: nn.Module, given: Any) -> None:
        codes, target = composition.share(given)
        loss_of(model(codes), target).backward()
        for name, weight in model.named_parameters():
            if "experts" in name and len(composition.mesh) > 1:
                weight.grad *= 2

    text = error_of(together, partial(expert_model, layers=1), CODES, step=step)
    assert "Only experts differ" in text
    assert "Each gradient that differs is 2 times that on one rank." in text
    mesh = ProcessGroupMesh(tp=4, name="norms")
    plan = {name: style for name, style in SEQUENCE_PLAN.items() if "norm" not in name}
    plan = {**plan, "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    text = error_of(compose(mesh, TensorParallel(mesh, "tp", plan=plan)), ONE_LAYER, CODES, loss=loss_of)
    assert "Only norms differ: one that computes with shards of sequences needs SequenceParallel()" in text


@on_ranks(2)
def test_verify_builds_on_both_meshes_without_dropout():
    sizes = list[int]()

    def build(mesh: ProcessGroupMesh) -> nn.Module:
        sizes.append(mesh.size("dp"))
        return nn.Sequential(layer(), nn.Dropout(0.5))

    mesh = ProcessGroupMesh(dp=2)
    assert verify(compose(mesh, DataParallel(mesh, "dp")), build, pairs(4, WIDTH), loss=mse_loss) < 1e-12
    assert sizes == [2, 1]


class LowRank(nn.Module):
    """An adapter whose second layer starts at zero, as LoRA's does: at first the first one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@on_ranks(2)
def test_verify_sees_gradients_behind_zeros():
    mesh = ProcessGroupMesh(dp=2)

    def step(composition: Composition, model: nn.Module, given: Any) -> None:
        x, y = composition.share(given)
        mse_loss(model(x), y).backward()
        if len(composition.mesh) > 1:
            model.get_parameter("module.a.weight").grad.mul_(3)

    text = error_of(compose(mesh, DataParallel(mesh, "dp")), LowRank, pairs(4, WIDTH)[:1], step=step)
    assert "in step 1 the gradient of a.weight differs by 2.0e+00" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(4)
def test_tolerance_follows_from_the_dtype(dtype: torch.dtype):
    mesh = ProcessGroupMesh(dp=2, tp=2)
    tensor = TensorParallel(mesh, "tp", plan=BLOCK_PLAN)
    together = compose(mesh, ShardedDataParallel(mesh, "dp"), tensor)
    tolerance = math.sqrt(torch.finfo(dtype).eps)
    assert 0 < verify(together, ONE_LAYER, CODES[:1], loss=loss_of, dtype=dtype) <= tolerance
    assert torch.get_default_dtype() == torch.float32
    error_of(together, ONE_LAYER, CODES[:1], loss=loss_of, dtype=dtype, tolerance=1e-9)
    if dtype == torch.bfloat16:  # with the default of 64-bit floats
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float64)
        together = compose(mesh, ShardedDataParallel(mesh, "dp", "tp", mp_policy=policy))
        assert 1e-4 < verify(together, ONE_LAYER, CODES[:1], loss=loss_of, tolerance=0.1) < 0.1
        error_of(together, ONE_LAYER, CODES[:1], loss=loss_of)


@on_ranks(2)
def test_verify_takes_nan_and_infinity_for_a_difference():
    mesh = ProcessGroupMesh(dp=2)
    for ranks_without_nan in (0, 1):  # both runs have it, or that on the mesh

        def step(composition: Composition, model: nn.Module, given: Any, most: int = ranks_without_nan) -> None:
            x, y = composition.share(given)
            mse_loss(model(x), y).backward()
            if len(composition.mesh) > most:
                next(model.parameters()).grad[0, 0] = math.nan

        text = error_of(compose(mesh, DataParallel(mesh, "dp")), layer, pairs(4, WIDTH), step=step)
        assert "in step 1 the gradient of weight differs by inf" in text


# ---- what cannot be verified ----


class Drops(Method):
    """Leaves out a parameter."""

    differs = "weights"

    def apply(self, module: nn.Module) -> nn.Module:
        module.bias = None
        return module


@on_ranks(2)
def test_verify_names_a_parameter_that_no_rank_has():
    mesh = ProcessGroupMesh(tp=2)
    text = error_of(compose(mesh, Drops(mesh, "tp")), layer, pairs(4, WIDTH), loss=mse_loss)
    assert text == "no rank has bias of the whole model."


@on_ranks(2)
def test_differing_builds_are_named_on_every_rank():
    mesh = ProcessGroupMesh(dp=2)
    together = compose(mesh, DataParallel(mesh, "dp"))
    draws = torch.Generator().manual_seed(0)

    def build() -> nn.Module:
        model = layer()
        nn.init.normal_(model.weight, generator=draws)
        return model

    start = "weight is no part of a weight of the whole model: build has to return equal weights in each call"
    assert error_of(together, build, pairs(4, WIDTH), loss=mse_loss).startswith(start)


def test_verify_refuses_what_it_cannot_compare(mesh: ProcessGroupMesh):
    together = compose(mesh, unowned=mesh.axes)
    with pytest.raises(OptionsError, match="verify needs a loss, or a step"):
        verify(together, layer, pairs(4, WIDTH))
    with pytest.raises(OptionsError, match="verify needs the batch of at least one step"):
        verify(together, layer, [], loss=mse_loss)
    text = error_of(together, layer, pairs(4, WIDTH), step=lambda _, model, batch: mse_loss(model(batch[0]), batch[1]))
    assert text == "a step has left no gradients on one rank: it has to train the model that it is given."
    with torch.device("meta"):
        model = layer()
    assert "on the meta device" in error_of(together, lambda: model, pairs(4, WIDTH), loss=mse_loss)

    def build() -> nn.Module:
        raise torch.OutOfMemoryError("tried to allocate 80.00 GiB")

    start = "the whole model does not fit on one rank: verify fewer layers. (tried to allocate 80.00 GiB)"
    assert error_of(together, build, pairs(4, WIDTH), loss=mse_loss) == start

    class Later(Method):
        differs, averages_later = "rows", True

    later = compose(mesh, Later(mesh, "dp"), unowned=["pp", "tp"])
    assert error_of(later, layer, [], loss=mse_loss).startswith("Later along dp averages weights later")
