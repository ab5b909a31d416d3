"""Checkpoints of a model with tied weights, saved on one mesh and loaded on others, against one process."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from pgmesh import MethodError, ProcessGroupMesh
from pgmesh.parallel import Composition, DataParallel, PipelineParallel, ShardedDataParallel, checkpoint, compose
from tests.parallel.random_compositions import methods_of
from tests.parallel.test_combinations import on, stages, twice
from tests.support import parallel_models
from tests.support.own_methods import AverageLater
from tests.support.parallel_models import STEPS, TinyGPT, assert_same, batch, loss_of, optimizer_of, train_alone
from tests.support.pipelines import needs_pipelines
from tests.support.worlds import on_mesh, on_ranks

KINDS = {
    "data": on(dp=4, data="data"),
    "sharded x tensor": on(dp=2, tp=2, data="sharded", tensor="gathered"),
    "pipeline x data": stages(dp=2, data="data", microbatches=4),
    "pipeline x sharded": twice(dp=2, data="sharded", microbatches=4),
    "both ends on a rank": twice(tp=2, schedule="zero-bubble-v", tensor="gathered", microbatches=4),
}


def composed(mesh: ProcessGroupMesh, kind: str) -> Composition:
    return compose(mesh, *methods_of(mesh, KINDS[kind], loss_of))


def tied(*, head_first: bool) -> TinyGPT:
    """The model; the first name of its tied weight is that of the head or that of the embedding."""
    model = TinyGPT(tied=True)
    if head_first:
        for name in [name for name in model._modules if name != "head"]:
            model._modules[name] = model._modules.pop(name)
    return model


@functools.cache
def expected(head_first: bool) -> tuple[parallel_models.TrainingRun, dict[str, dict[str, torch.Tensor]]]:
    """Training in one process, and its optimizer state before the last step, by each name of each weight."""
    model = tied(head_first=head_first)
    optimizer = optimizer_of(model.parameters())
    train_alone(model, steps=range(STEPS - 1), optimizer=optimizer)
    return train_alone(tied(head_first=head_first)), {
        name: dict(optimizer.state[weight]) for name, weight in parallel_models.named_weights(model)
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, share: Callable[..., Any], *steps: int) -> None:
    found = parallel_models.train_parallel(model, share, steps=steps, optimizer=optimizer)
    for step, gradients in zip(steps, found.gradients, strict=True):
        assert_same(f"gradients of step {step}", gradients, expected(True)[0].gradients[step])


def save_on(kind: str, folder: Path, head_first: bool) -> None:
    with ProcessGroupMesh(KINDS[kind].sizes, name=f"{kind}, saving {head_first}") as mesh:
        together = composed(mesh, kind)
        model = together.apply(tied(head_first=head_first), before_sharding=checkpoint_wrapper)  # other names
        optimizer = optimizer_of(model.parameters())
        train(model, optimizer, together.share, *range(STEPS - 1))
        if head_first:
            checkpoint.save(folder, mesh, model, optimizer)
        else:
            saving = checkpoint.async_save(folder, mesh, model, optimizer)
            assert any("tag=checkpoint" in group.label for group in mesh.held())  # which training does not use
            train(model, optimizer, together.share, STEPS - 1)  # changes all that is saved
            saving.result()
        dist.barrier()


def load_on(kind: str, folder: Path, head_first: bool) -> None:
    """Compare the loaded optimizer state, and the weights after one more step, with one process."""
    right, states = expected(head_first)
    with ProcessGroupMesh(KINDS[kind].sizes, name=f"{kind}, loading {head_first}") as mesh:
        together, model = composed(mesh, kind), tied(head_first=head_first)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 1.0
        model = together.apply(model)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        checkpoint.load(folder, mesh, model, optimizer)
        assert {(group["lr"], group["eps"]) for group in optimizer.param_groups} == {(0.05, 1e-4)}
        held = list(optimizer.state.values())
        assert len(held) == len({*model.parameters()})
        for key in ("exp_avg", "exp_avg_sq", "step"):
            found = {name: optimizer.state[weight][key] for name, weight in parallel_models.named_weights(model)}
            assert_same(f"{kind}: {key}", found, {name: state[key] for name, state in states.items()})
            assert len({id(state[key]) for state in held}) == len(held)  # two weights never share what is updated
        train(model, optimizer, together.share, STEPS - 1)
        assert_same(f"{kind}: weights", parallel_models.weights_of(model), right.weights)
        dist.barrier()


@needs_pipelines
@on_ranks(4)
def test_tied_weights_of_a_pipeline_load_without_one(tmp_path: Path):
    save_on("pipeline x data", tmp_path, True)
    load_on("data", tmp_path, True)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_tied_weights_load_with_every_method(kind: str, tmp_path: Path):
    kinds = [*KINDS, *KINDS]
    save_on(kind, tmp_path, False)
    load_on(kinds[kinds.index(kind) + 1], tmp_path, False)  # each is loaded by the next one
    if kind == "both ends on a rank":
        load_on(kind, tmp_path, False)


class Parts(nn.Module):
    """A model with an attribute ``parts``, as a Pipeline has."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


@needs_pipelines
@on_ranks(2)
def test_a_model_may_call_its_layers_parts(tmp_path: Path):
    def through(mesh: ProcessGroupMesh, model: nn.Module) -> None:
        with torch.no_grad():
            kept = {name: parallel_models.full_tensor(weight) for name, weight in model.named_parameters()}
            checkpoint.save(tmp_path / mesh.name, mesh, model)
            dist.barrier()
            for weight in model.parameters():
                weight.zero_()
            checkpoint.load(tmp_path / mesh.name, mesh, model)
            for name, weight in model.named_parameters():
                assert parallel_models.full_tensor(weight).equal(kept[name]), f"{mesh.name}: {name}"
        dist.barrier()

    with ProcessGroupMesh(dp=2, name="no pipeline") as mesh:
        through(mesh, ShardedDataParallel(mesh, "dp").apply(Parts()))
    with ProcessGroupMesh(pp=2, name="a pipeline") as mesh:
        through(mesh, PipelineParallel(mesh, "pp", layers="parts", loss=None, microbatches=2).apply(Parts()))


@on_ranks(2)
def test_load_of_no_checkpoint_names_the_path(tmp_path: Path):
    damaged, model = tmp_path / "damaged", nn.Linear(4, 4)
    damaged.mkdir(exist_ok=True)
    for file in (tmp_path / "file", damaged / ".metadata"):
        file.touch()
    with ProcessGroupMesh(dp=2, name="a reader") as mesh:
        for path in (tmp_path / "step-100", tmp_path, tmp_path / "file" / "inside", damaged):
            message = f"^{re.escape(str(path))} has no checkpoint that this model can load: "
            with pytest.raises(MethodError, match=message):
                checkpoint.load(path, mesh, model)


@on_mesh(dp=2)
def test_several_optimizers_are_saved_without_steps(mesh: ProcessGroupMesh, tmp_path: Path):
    """One for matrices, and another for the rest. None runs its hooks, or takes a step with present gradients."""
    states = []
    for resumed in (False, True):
        together = compose(mesh, ShardedDataParallel(mesh, "dp"))
        model, hooks = together.apply(TinyGPT(layers=1)), list[str]()
        matrices = [each for each in model.parameters() if each.ndim == 2]
        rest = [each for each in model.parameters() if each.ndim != 2]
        optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.1)]
        for each in optimizers:
            each.register_step_pre_hook(lambda *_, hooks=hooks: hooks.append("before"))
            each.register_step_post_hook(lambda *_, hooks=hooks: hooks.append("after"))
            torch.optim.lr_scheduler.ConstantLR(each, factor=1.0)  # it wraps the method step
        if resumed:
            loss_of(model(together.share(batch(0)[0])), together.share(batch(0)[1])).backward()
            checkpoint.load(tmp_path, mesh, model, optimizers)
            model.zero_grad()
        steps = (2, 3) if resumed else range(4)
        for step in steps:
            codes, target = map(together.share, batch(step))
            loss_of(model(codes), target).backward()
            for each in optimizers:
                each.step()
            if step == 1:
                checkpoint.save(tmp_path, mesh, model, optimizers)
            model.zero_grad()
        assert hooks == ["before", "after"] * 2 * len(steps)
        states.append({name: parallel_models.full_tensor(each) for name, each in model.named_parameters()})
    assert_same("weights", states[1], states[0], 0.0)


@pytest.mark.parametrize("sharded", [False, True])
@on_mesh(late=2, dp=2)
def test_save_between_averages_names_next_safe_step(mesh: ProcessGroupMesh, sharded: bool, tmp_path: Path):
    later, data = AverageLater(mesh, "late"), (ShardedDataParallel if sharded else DataParallel)(mesh, "dp")
    together = compose(mesh, later, data)
    model = together.apply(TinyGPT(layers=1))
    optimizer = together.attach(optimizer_of(model.parameters()))
    for step in range(4):
        loss_of(model(together.share(batch(step)[0])), together.share(batch(step)[1])).backward()
        optimizer.step()
        if step % 2:
            checkpoint.save(tmp_path / str(step), mesh, model, optimizer)
            continue
        with pytest.raises(MethodError, match=r"AverageLater along late averages them later") as caught:
            checkpoint.save(tmp_path / str(step), mesh, model, optimizer)
        assert str(caught.value).endswith("   # after 1 more steps of the optimizer, when replicas are equal")
    assert later.steps == 4
