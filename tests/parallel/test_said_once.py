"""What a program does not say, the composition derives, or raises an error: four ranks against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pgmesh import AxisError, MethodError, ProcessGroupMesh
from pgmesh.parallel import Composition, DataParallel, ExpertParallel, Method, ShardedDataParallel, compose, verify
from tests.support.expert_models import expert_model
from tests.support.own_methods import AverageLater
from tests.support.parallel_models import (
    TinyGPT,
    assert_same,
    assert_same_run,
    batch,
    gradients_of,
    loss_of,
    train_alone,
    train_parallel,
)
from tests.support.worlds import on_ranks, world

pytestmark = pytest.mark.long


# ---- a method of the program ----


class Halves(Method):
    """Cuts sequences into consecutive parts. The model treats each position alone."""

    differs = "positions"

    def apply(self, module: nn.Module) -> nn.Module:
        return module

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.mesh.size(*self.owns), 1)[self.mesh.index(*self.owns)]


def position_model() -> TinyGPT:
    return TinyGPT(layers=0)


@pytest.mark.parametrize("data", [DataParallel, ShardedDataParallel])
@on_ranks(4)
def test_an_own_method_that_cuts_sequences_widens_averages(
    data: type[DataParallel] | type[ShardedDataParallel],
):
    def step(together: Composition, model: nn.Module, given: Any) -> torch.Tensor:
        share = together.share([*given, torch.arange(8).expand(8, -1)])
        loss = loss_of(model(share[0], share[2]), share[1])
        loss.backward()
        return loss

    with ProcessGroupMesh(dp=2, cp=2) as mesh:
        together = compose(mesh, Halves(mesh, "cp"), data(mesh, "dp"))
        assert verify(together, position_model, map(batch, range(3)), step=step) < 1e-12


@on_ranks(4)
def test_experts_across_replicas_that_average_later_raise():
    with ProcessGroupMesh(late=2, dp=2) as mesh, pytest.raises(AxisError, match="hold different weights"):
        compose(mesh, AverageLater(mesh, "late"), DataParallel(mesh, "dp"), ExpertParallel(mesh.view(ep=4), "ep"))


# ---- experts that are copied, emptied or replaced ----


def assign(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
    return model


def empty(model: nn.Module) -> nn.Module:
    state = {name: each.clone() for name, each in model.state_dict().items()}
    model.to_empty(device="cpu").load_state_dict(state)
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {"assign": assign, "copy": copy.deepcopy, "empty": empty}


def changed_before(change: str) -> None:
    """The experts of four ranks read four parts of the rows, and each is on two ranks."""
    with ProcessGroupMesh(dp=4) as mesh:
        together = compose(mesh, DataParallel(mesh, "dp"), ExpertParallel(mesh.view(edp=2, ep=2), "ep"))
        model = together.apply(CHANGES[change](expert_model()))
        compare_with_one_process(together, model)


def changed_after(change: str) -> None:
    """Experts lie on the four ranks, which read the same tokens."""
    with ProcessGroupMesh(ep=4) as mesh:
        together = compose(mesh, ExpertParallel(mesh, "ep"), unowned=["ep"])
        model = CHANGES[change](together.apply(expert_model()))
        if change == "copy":
            with pytest.raises(MethodError, match="returned 1 module, and none"):
                together.grad_norm(module=model)
            codes, target = batch(0)
            loss_of(model(codes), target).backward()
            expected = train_alone(expert_model(), steps=1)
            assert_same("gradients", gradients_of(model), expected.gradients[0])
        else:
            compare_with_one_process(together, model)


def compare_with_one_process(together: Any, model: nn.Module) -> None:
    found = train_parallel(model, together.share, clip=lambda: together.clip_grad_norm_(1.0))
    assert_same_run(found, train_alone(expert_model(), clip=1.0))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", [changed_before, changed_after])
def test_experts_stay_experts_after_each_change(change: str, when: Callable[[str], None]) -> None:
    world(4).run(when, change)
