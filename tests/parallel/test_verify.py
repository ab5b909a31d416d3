"""``verify``: programs that train wrong in silence fail, their right twins pass, and what the error says of each.

A program is a function of a mesh and of ``wrong`` that every rank runs. Most compositions pass too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import cross_entropy, mse_loss, normalize, scaled_dot_product_attention, silu

from pgmesh import MethodError, OptionsError, ProcessGroupMesh, ShapeError, parallel
from pgmesh.parallel import Composition, DataParallel, ShardedDataParallel, TensorParallel, compose, local, verify
from tests.parallel import random_compositions
from tests.parallel.random_compositions import Drawn, Losses, backward, methods_of, model_of, with_two_axes_of_rows
from tests.parallel.test_combinations import COMPOSITIONS
from tests.support.expert_models import expert_model
from tests.support.parallel_models import Adapted, TinyGPT, batch, loss_of, optimizer_of
from tests.support.pipelines import gpt_stages
from tests.support.tensor_plans import BLOCK_PLAN, SEQUENCE_PLAN
from tests.support.worlds import on_mesh, on_ranks, world

WIDTH, HEADS, LENGTH, CLASSES = 8, 4, 8, 5


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pairs(*shape: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The inputs and targets of two steps."""
    return [(numbers(step, *shape), numbers(step + 10, *shape)) for step in range(2)]


CODES = [batch(step) for step in range(2)]
ONE_LAYER = partial(TinyGPT, layers=1)
layer = partial(nn.Linear, WIDTH, WIDTH)


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


def fused_layer_cut_in_halves(whole: ProcessGroupMesh, wrong: bool) -> float:
    mesh = whole.view(dp=2, tp=2)
    tensor = TensorParallel(mesh, "tp", plan=parallel.mlp_plan("0", into=["gate_up"], out="down"))
    together = compose(mesh, ShardedDataParallel(mesh, "dp"), tensor)
    return verify(together, lambda: nn.Sequential(GatedMLP(wrong)), pairs(8, WIDTH), loss=mse_loss)


class Alibi(nn.Module):
    """Attention with a slope for each head, by the heads of this rank or by those of all."""

    def __init__(self, mesh: ProcessGroupMesh, local_heads: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mesh, self.local_heads = mesh, local_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, WIDTH // HEADS)).transpose(1, 2).unbind(3)
        here = q.size(1)
        first, heads = (0, here) if self.local_heads else (self.mesh.index("tp") * here, here * self.mesh.size("tp"))
        slopes = 2.0 ** (-8 * torch.arange(first + 1, first + here + 1) / heads)
        distance = torch.arange(x.size(1)) - torch.arange(x.size(1))[:, None]
        bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, -math.inf)
        return self.out(scaled_dot_product_attention(q, k, v, bias.to(q)).transpose(1, 2).flatten(2))


def slopes_of_local_heads(whole: ProcessGroupMesh, wrong: bool) -> float:
    mesh = whole.view(dp=2, tp=2)
    tensor = TensorParallel(mesh, "tp", plan=parallel.attention_plan("0", ["qkv"], "out"))
    together = compose(mesh, ShardedDataParallel(mesh, "dp"), tensor)

    def build(mesh: ProcessGroupMesh) -> nn.Module:
        return nn.Sequential(Alibi(mesh, wrong))

    return verify(together, build, pairs(4, LENGTH, WIDTH), loss=mse_loss)


def tied_ends_cut_in_different_ways(whole: ProcessGroupMesh, wrong: bool) -> float:
    mesh = whole.view(pp=2, tp=2)
    columns = ColwiseParallel(output_layouts=Replicate())
    ends = {"tokens": columns if wrong else RowwiseParallel(input_layouts=Replicate()), "head": columns}
    together = compose(mesh, gpt_stages(mesh), TensorParallel(mesh, "tp", plan={**BLOCK_PLAN, **ends}))
    square = [batch(step, vocabulary=16) for step in range(2)]  # as many words as features: shards of one size
    return verify(together, lambda: TinyGPT(layers=2, tied=True, vocabulary=16), square)


def contrastive_loss_over_local_negatives(mesh: ProcessGroupMesh, wrong: bool) -> float:
    def step(together: Composition, model: nn.Module, given: Any) -> torch.Tensor:
        one, other = (normalize(model(each), dim=-1) for each in together.share(given))
        size = 1 if wrong else together.mesh.size("dp")
        if not wrong:
            one, other = (gathered(each, together.mesh) for each in (one, other))
        loss = cross_entropy(one @ other.T, torch.arange(len(one)))
        (loss * size).backward()  # each rank has the gradient of its own rows, of which the mean is taken
        return loss

    return verify(compose(mesh, DataParallel(mesh, "dp")), layer, pairs(8, WIDTH), step=step)


def gathered(rows: torch.Tensor, mesh: ProcessGroupMesh) -> torch.Tensor:
    """The rows of all ranks, of which this rank's own have a gradient."""
    parts = [torch.empty_like(rows) for _ in range(mesh.size("dp"))]
    dist.all_gather(parts, rows.detach(), group=mesh.group("dp"))
    parts[mesh.index("dp")] = rows
    return torch.cat(parts)


def class_weights_normalised_locally(mesh: ProcessGroupMesh, wrong: bool) -> float:
    weights = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    batches = [(numbers(step, 8, WIDTH), torch.arange(8) ** 2 % CLASSES) for step in range(2)]

    def step(together: Composition, model: nn.Module, given: Any) -> torch.Tensor:
        x, labels = together.share(given)
        if wrong:
            loss = cross_entropy(model(x), labels, weights)
        else:
            loss = together.mean(cross_entropy(model(x), labels, weights, reduction="sum"), weights[labels].sum())
        loss.backward()
        return loss

    together = compose(mesh, ShardedDataParallel(mesh, "dp"))
    return verify(together, lambda: nn.Linear(WIDTH, CLASSES), batches, step=step)


Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Hooked(parallel.Method):
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


def hooked(change: str, mesh: ProcessGroupMesh, wrong: bool) -> float:
    together = compose(mesh, Hooked(mesh, "dp", change=CHANGES[change] if wrong else lambda own, mean: mean))
    return verify(together, layer, pairs(8, WIDTH), loss=mse_loss)


CHANGES: dict[str, Change] = {
    "forgotten average": lambda own, mean: own,
    "sum in place": lambda own, mean: mean * 4,
    "gradients of zero": lambda own, mean: mean * 0,
    "gradient of one rank": lambda own, mean: mean.sin() if dist.get_rank() == 3 else mean,
}


def decay_by_old_names(mesh: ProcessGroupMesh, wrong: bool) -> float:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        named = [*model.named_parameters()]
        decayed = [each for name, each in named if (name.startswith("0.") if wrong else each.ndim == 2)]
        others = [each for _, each in named if all(each is not one for one in decayed)]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])

    together = compose(mesh, DataParallel(mesh, "dp"))
    build = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))  # noqa: E731
    return verify(together, build, pairs(8, WIDTH), loss=mse_loss, optimizer=optimizer)


class Lars(torch.optim.Optimizer):
    """SGD whose step of each parameter has a part of the parameter's norm, or of that of this rank's shard."""

    def __init__(self, parameters: Iterator[nn.Parameter], of_shards: bool) -> None:
        super().__init__(parameters, {})
        self.of_shards = of_shards

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    own, gradient = map(local, (weight, weight.grad)) if self.of_shards else (weight, weight.grad)
                    weight -= 0.01 * own.norm() / (gradient.norm() + 1e-8) * weight.grad


def lars_on_shards(mesh: ProcessGroupMesh, wrong: bool) -> float:
    together = compose(mesh, ShardedDataParallel(mesh, "dp"))
    return verify(together, ONE_LAYER, CODES, loss=loss_of, optimizer=lambda model: Lars(model.parameters(), wrong))


LOCAL = "A part of the program computes with what a rank has where one process has all"
UPDATE = "in step 1 the update of"
REASONS: dict[Callable[[ProcessGroupMesh, bool], float], str] = {
    fused_layer_cut_in_halves: LOCAL,
    slopes_of_local_heads: LOCAL,
    tied_ends_cut_in_different_ways: LOCAL,
    contrastive_loss_over_local_negatives: LOCAL,
    class_weights_normalised_locally: LOCAL,
    partial(hooked, "forgotten average"): "Or no method averages it.",
    partial(hooked, "sum in place"): "Each gradient that differs is 4 times that on one rank, and dp has size 4.",
    partial(hooked, "gradients of zero"): "These gradients are zero on the mesh.",
    partial(hooked, "gradient of one rank"): "Only rank 3 differs.",
    decay_by_old_names: UPDATE,
    lars_on_shards: UPDATE,
}
"""Programs, and a part of the likely reason that the error of each has."""

NAMES = [each.args[0] if isinstance(each, partial) else each.__name__ for each in REASONS]


@pytest.mark.parametrize(("program", "reason"), REASONS.items(), ids=NAMES)
@on_mesh(dp=4)
def test_verify_fails_wrong_program_and_passes_its_twin(mesh: Any, program: Callable[..., float], reason: str):
    with pytest.raises((MethodError, ShapeError)) as caught:
        program(mesh, True)
    assert reason in str(caught.value), caught.value
    assert program(mesh, False) < 1e-12


QUICK = ("norm, 1f1b, experts", "masked, ring, sharded")
LONG = (
    "tensor, hybrid; tied",
    "1f1b, experts, sharded; permuted",
    "accumulation, 1f1b, sharded; tied",
    "uneven, zero-bubble-v, tensor; tied",
)
"""Compositions of other pieces of weights: those of two methods, on both ends of a pipeline, and on each stage."""


def verify_drawn(drawn: Drawn) -> float:
    """Verify a composition, with its own step. Its batches are numbers, from which the step makes the tensors."""
    with ProcessGroupMesh(**drawn.sizes, ranks=list(drawn.ranks), name="drawn") as mesh:
        mesh = with_two_axes_of_rows(mesh) if drawn.viewed else mesh
        loss = Losses(drawn)
        together = loss.together = compose(mesh, *methods_of(mesh, drawn, loss))

        def step(composition: Composition, model: nn.Module, number: int) -> float | None:
            found = backward(drawn, composition, model, loss, number, 0)
            if drawn.clip:
                composition.clip_grad_norm_(random_compositions.MAX_NORM, norm_type=drawn.norm_type)
            return found

        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            return optimizer_of(model.parameters())

        return verify(together, lambda: model_of(drawn), range(2), step=step, optimizer=optimizer)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_verify_passes_composition(name: str):
    drawn = COMPOSITIONS[name]
    assert max(world(len(drawn.ranks)).run(verify_drawn, drawn)) < 1e-9


@on_mesh(dp=4)
def test_verify_passes_experts_in_bfloat16_within_tolerance(mesh: ProcessGroupMesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    experts = parallel.ExpertParallel(mesh.view(edp=2, ep=2), "ep")
    together = compose(mesh, ShardedDataParallel(mesh, "dp", mp_policy=policy), experts)
    assert 1e-4 < verify(together, expert_model, CODES, loss=loss_of, tolerance=0.1) < 0.1


def error_of(together: Composition, build: Callable[..., nn.Module], batches: Any, **given: Any) -> str:
    with pytest.raises(MethodError) as caught:
        verify(together, build, batches, **given)
    return str(caught.value)


@on_mesh(dp=4)
def test_verify_says_if_only_norms_or_experts_differ(mesh: ProcessGroupMesh):
    together = compose(mesh, DataParallel(mesh, "dp"), parallel.ExpertParallel(mesh, "dp"))

    def step(composition: Composition, model: nn.Module, given: Any) -> None:
        codes, target = composition.share(given)
        loss_of(model(codes), target).backward()
        for name, weight in model.named_parameters():
            if "experts" in name and len(composition.mesh) > 1:
                weight.grad *= 2

    text = error_of(together, partial(expert_model, layers=1), CODES, step=step)
    assert "Only experts differ" in text
    assert "Each gradient that differs is 2 times that on one rank." in text
    mesh = mesh.view(tp=4)
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


def adapted() -> nn.Module:
    """The second layer of the adapter starts at zero, as LoRA's does: at first the first one has no gradient."""
    model = Adapted(layer())
    nn.init.zeros_(model.b.weight)
    return model


@on_mesh(dp=2)
def test_verify_sees_gradients_behind_zeros(mesh: ProcessGroupMesh):

    def step(composition: Composition, model: nn.Module, given: Any) -> None:
        x, y = composition.share(given)
        mse_loss(model(x), y).backward()
        if len(composition.mesh) > 1:
            model.get_parameter("module.a.weight").grad.mul_(3)

    text = error_of(compose(mesh, DataParallel(mesh, "dp")), adapted, pairs(4, WIDTH)[:1], step=step)
    assert "in step 1 the gradient of a.weight differs by 2.0e+00" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_mesh(dp=2, tp=2)
def test_tolerance_follows_from_the_dtype(mesh: ProcessGroupMesh, dtype: torch.dtype):
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


@on_mesh(dp=2)
def test_verify_takes_nan_and_infinity_for_a_difference(mesh: ProcessGroupMesh):
    for ranks_without_nan in (0, 1):  # both runs have it, or that on the mesh

        def step(composition: Composition, model: nn.Module, given: Any, most: int = ranks_without_nan) -> None:
            x, y = composition.share(given)
            mse_loss(model(x), y).backward()
            if len(composition.mesh) > most:
                next(model.parameters()).grad[0, 0] = math.nan

        text = error_of(compose(mesh, DataParallel(mesh, "dp")), layer, pairs(4, WIDTH), step=step)
        assert "in step 1 the gradient of weight differs by inf" in text


class Drops(parallel.Method):
    differs = "weights"

    def apply(self, module: nn.Module) -> nn.Module:
        module.bias = None
        return module


@on_mesh(tp=2)
def test_verify_names_a_parameter_that_no_rank_has(mesh: ProcessGroupMesh):
    text = error_of(compose(mesh, Drops(mesh, "tp")), layer, pairs(4, WIDTH), loss=mse_loss)
    assert text == "no rank has bias of the whole model."


@on_mesh(dp=2)
def test_differing_builds_are_named_on_every_rank(mesh: ProcessGroupMesh):
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

    class Later(parallel.Method):
        differs, averages_later = "rows", True

    later = compose(mesh, Later(mesh, "dp"), unowned=["pp", "tp"])
    assert error_of(later, layer, [], loss=mse_loss).startswith("Later along dp averages weights later")
