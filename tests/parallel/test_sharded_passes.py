"""Passes of sharded modules: without a backward pass, and on ranks that run different modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pgmesh import MethodError, ProcessGroupMesh
from pgmesh.parallel import ShardedDataParallel, compose
from tests.support.on_mesh import on_mesh
from tests.support.parallel_models import assert_same, gradients_of, weights_of


class Net(nn.Module):
    """Layers, and weights of the root: two of the same shape, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "ab"})
        self.one, self.other = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
        self.double()

    def forward(self, x: torch.Tensor, dropped: int | None = None, head: str = "", last: str = "one") -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i == dropped else torch.tanh(layer(x))
        x = self.heads[head](x) if head else self.heads["b"](self.heads["a"](x))
        return {"one": self.one, "other": self.other, "both": lambda x: self.one(x) + self.other(x)}[last](x)


PASSES: dict[str, Callable[[nn.Module], Any]] = {
    "no_grad": lambda _: torch.no_grad(),
    "inference_mode": lambda _: torch.inference_mode(),
    "eval": lambda model: evaluating(model),
    "training": lambda _: contextlib.nullcontext(),
}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Any:
    model.eval()
    yield
    model.train()


def train(model: nn.Module, share: Callable[[Any], Any], kind: str, when: str) -> list[dict[str, torch.Tensor]]:
    """Three steps with a pass that no backward pass follows. Gradients of each step, and the last weights."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(3):
        x = torch.full((4, 4), 1.0 + step, dtype=torch.float64)
        model.zero_grad() if when == "before zero_grad" else optimizer.zero_grad()
        model(share(x), last="both").square().mean().backward()
        found.append(gradients_of(model))
        if when == "before step":
            with PASSES[kind](model):
                model(share(x), last="both")
        optimizer.step()
        if when == "before zero_grad":
            with PASSES[kind](model):
                model(share(x), last="both")
    with torch.no_grad():
        found.append({"output": model(x, last="both")})
    return [*found, weights_of(model)]


@on_mesh(dp=2)
def test_passes_without_backward_leave_training_unchanged(mesh: ProcessGroupMesh):
    for when, kind in [(when, kind) for when in ("before step", "before zero_grad") for kind in PASSES]:
        if (when, kind) == ("before zero_grad", "training"):  # the page says so
            continue
        together = compose(mesh, ShardedDataParallel(mesh, "dp", reshard_after_forward=False))
        found = train(together.apply(Net()), together.share, kind, when)
        for one, right in zip(found, train(Net(), lambda x: x, kind, when), strict=True):
            assert_same(f"{kind} {when}", one, right)


DIFFERING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "heads": ({"head": "a"}, {"head": "b"}),
    "numbers of calls": ({"dropped": None}, {"dropped": 1}),
    "dropped layers": ({"dropped": 0}, {"dropped": 1}),
    "weights of the root": ({"last": "one"}, {"last": "other"}),
}
"""Arguments of the model on each of two ranks."""


def run(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


@pytest.mark.parametrize("case", DIFFERING)
@pytest.mark.parametrize("replicate", [(), "dp"], ids=["sharded", "replicated"])
@on_mesh(dp=2)
def test_ranks_that_run_different_modules_raise(mesh: ProcessGroupMesh, case: str, replicate: Any):
    together = compose(mesh, ShardedDataParallel(mesh, "dp", replicate=replicate))
    model, x = together.apply(Net()), torch.ones(2, 4, dtype=torch.float64)
    arguments = DIFFERING[case][mesh.rank]
    with pytest.raises(MethodError, match=r"^ranks ran other sharded modules: .* on rank 0; .* on rank 1\. "):
        run(lambda: model(x, **arguments).square().mean().backward(), times=2)


@on_mesh(dp=2)
def test_layers_dropped_by_rank_later_raise(mesh: ProcessGroupMesh):
    model, x = compose(mesh, ShardedDataParallel(mesh, "dp")).apply(Net()), torch.ones(2, 4, dtype=torch.float64)
    for step in range(10):
        model(x, dropped=step % 3).sum().backward()  # the same on all ranks
    with pytest.raises(MethodError, match=r"of layers\.1 on rank 0; .* of layers\.0 on rank 1\."):
        run(lambda: model(x, dropped=mesh.rank).sum().backward(), times=100)


@on_mesh(outer=2, inner=2)
def test_modules_that_all_ranks_choose_alike_train(mesh: ProcessGroupMesh):
    for replicate in ((), "outer"):
        together = compose(mesh, ShardedDataParallel(mesh, "outer", "inner", replicate=replicate))
        model, alone = together.apply(Net()), Net()
        for step in range(12):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            arguments = {"dropped": step % 3, "head": "ab"[step // 2 % 2], "last": ("one", "other")[step // 4 % 2]}
            with together.accumulate(model, last=step % 3 > 0):
                model(together.share(x), **arguments).square().mean().backward()
            alone(x, **arguments).square().mean().backward()
        assert_same("gradients", gradients_of(model), gradients_of(alone))


@on_mesh(outer=2, inner=2)
def test_replicas_may_evaluate_alone(mesh: ProcessGroupMesh):
    model = compose(mesh, ShardedDataParallel(mesh, "outer", "inner", replicate="outer")).apply(Net())
    x = torch.ones(2, 4, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(1 + mesh.index("outer")):
            model(x)
    model(x, last="both").sum().backward()
