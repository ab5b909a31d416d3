"""What a composition keeps between calls: settled axes, and whether inputs were compared."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from pgmesh import MethodError, ProcessGroupMesh
from pgmesh.parallel import DataParallel, ShardedDataParallel, compose
from tests.support.own_methods import Weights
from tests.support.parallel_models import TinyGPT, assert_same, batch, gradients_of, loss_of, optimizer_of, weights_of
from tests.support.pipelines import gpt_stages
from tests.support.worlds import on_ranks


class Halves(Weights):
    """Each rank keeps half of the rows of each matrix, as a plain tensor."""

    def apply(self, module: nn.Module) -> nn.Module:
        for layer in module.children():
            layer.weight = nn.Parameter(layer.weight.detach().chunk(2)[self.mesh.index(*self.owns)].clone())
        return module


def test_shard_as_plain_tensor_raises(mesh: ProcessGroupMesh):
    model = nn.Sequential(nn.Linear(4, 6, bias=False))
    with pytest.raises(MethodError, match=r"replaced 0\.weight, .*by a plain tensor of shape \(3, 4\)"):
        compose(mesh, Halves(mesh, "tp"), unowned=["pp", "dp"]).apply(model)


def test_clipping_does_not_round_factor_to_gradient_dtype(mesh: ProcessGroupMesh):
    together = compose(mesh, unowned=mesh.axes)
    layer = together.apply(nn.Linear(4, 1, bias=False, dtype=torch.float16))
    layer.weight.grad = torch.full_like(layer.weight, 1000.0)
    assert together.clip_grad_norm_(2e-6) == 2000
    assert layer.weight.grad.tolist() == [[pytest.approx(1e-6, rel=0.1)] * 4]


def test_mean_counts_more_tokens_than_float16_can(mesh: ProcessGroupMesh):
    loss = torch.tensor(60_000.0, dtype=torch.float16, requires_grad=True)
    mean = compose(mesh, unowned=mesh.axes).mean(loss, tokens=70_000)
    assert mean.item() == pytest.approx(60_000 / 70_000, rel=1e-3)


@on_ranks(2)
def test_clipping_raises_everywhere_if_norm_is_nan():
    """One rank has it; the gradients stay."""
    with ProcessGroupMesh(tp=2) as mesh:
        together = compose(mesh, Weights(mesh, "tp"))
        model = together.apply(nn.Sequential(nn.Linear(2, 2, bias=False)))
        model[0].weight.grad = torch.full_like(model[0].weight, math.nan if mesh.rank else 9.0)
        with pytest.raises(MethodError, match=r"the norm of order 2\.0 of the gradients is nan"):
            together.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert mesh.rank or (model[0].weight.grad == 9.0).all()
        assert together.clip_grad_norm_(1.0).isnan()


@on_ranks(4)
def test_second_model_is_mean_of_weights():
    """As the page has it."""
    with ProcessGroupMesh(pp=2, dp=2) as mesh:
        methods, build = [gpt_stages(mesh), ShardedDataParallel(mesh, "dp")], partial(TinyGPT, layers=2)
        together = compose(mesh, *methods)
        model, average = together.apply(build()), together.apply(build(seed=1).requires_grad_(False))
        alone = build()
        expected = {name: weight.detach().clone() for name, weight in alone.named_parameters()}
        optimizers = [optimizer_of(each.parameters()) for each in (model, alone)]
        for step in range(2):
            codes, target = batch(step)
            loss_of(alone(codes), target).backward()
            model.step(together.share(codes), target=together.share(target))
            nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            together.clip_grad_norm_(0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for mean, weight in zip(average.parameters(), model.parameters()):
                    mean.lerp_(weight, 0.1 if step else 1.0)
                for name, weight in alone.named_parameters():
                    expected[name].lerp_(weight, 0.1 if step else 1.0)
        assert_same("means", weights_of(average), expected)


@on_ranks(2)
def test_parameter_added_after_apply_raises_in_first_step():
    with ProcessGroupMesh(dp=2) as mesh:
        for data in (DataParallel, ShardedDataParallel):
            model = compose(mesh, data(mesh, "dp")).apply(TinyGPT(layers=1))
            inner = getattr(model, "module", model)
            inner.blocks[0].adapter = nn.Linear(2, 2)
            with pytest.raises(MethodError, match=r"blocks\.0\.adapter\.weight was added to the module after apply"):
                model(batch(0)[0])


@on_ranks(2)
def test_evaluation_pass_hides_no_sharded_parameters():
    with ProcessGroupMesh(dp=2) as mesh:
        together = compose(mesh, ShardedDataParallel(mesh, "dp"))
        model, plain = together.apply(TinyGPT(layers=1)), TinyGPT(layers=1)
        codes, target = batch(0)
        with torch.no_grad():
            model(together.share(codes))
        together.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        model(together.share(codes))
        with pytest.raises(MethodError, match="after a forward pass without a backward pass"):
            together.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        together.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])  # changes the names of parameters, not the parameters
        loss_of(model(together.share(codes)), together.share(target)).backward()
        loss_of(plain(codes), target).backward()
        with torch.no_grad():
            model(together.share(codes))
        norms = together.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(*norms)
        assert_same("clipped gradients", gradients_of(model), gradients_of(plain))


def test_mean_takes_tokens_or_losses_of_a_step(mesh: ProcessGroupMesh):
    together = compose(mesh, unowned=mesh.axes, equal_parts=False)
    with pytest.raises(MethodError, match=r"together\.mean\(loss_sum, tokens\)"):
        together.mean(torch.tensor(2.0))
    assert together.mean(torch.tensor(6.0), tokens=4) == 1.5
    assert together.mean([torch.tensor(1.0), torch.tensor(2.0)]) == 1.5  # each divided by the tokens of all ranks
    with pytest.raises(MethodError, match=r"if losses: print\(together\.mean\(losses\)\)"):
        together.mean([])
