"""Promises of the methods that were broken once without a test that failed."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pgmesh import ProcessGroupMesh
from pgmesh.parallel import (
    PipelineParallel,
    Router,
    ShardedDataParallel,
    compose,
    mix,
)
from pgmesh.parallel.comparing import count_inputs
from pgmesh.parallel.ring import ring_attention
from tests.support.fake_world import fake_rank
from tests.support.pipelines import needs_pipelines


def square_error(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target).square().mean()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.router = mix, Router(8, 2, 1)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = self.router(x)
        return self.mix(x, routed.weights, routed.chosen, self.experts)


class Net(nn.Module):
    """Blocks between two layers."""

    def __init__(self, *blocks: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.blocks, self.head = nn.Linear(width, width), nn.ModuleList(blocks), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tokens is None else self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def pipeline_of(mesh: ProcessGroupMesh, schedule: str = "1f1b") -> PipelineParallel:
    return PipelineParallel(
        mesh,
        "pp",
        layers="blocks",
        first=["tokens"],
        last=["head"],
        loss=square_error,
        microbatches=2,
        schedule=schedule,
    )


@pytest.fixture
def world_of_one() -> Iterator[ProcessGroupMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with ProcessGroupMesh(pp=1, dp=1) as mesh:
        yield mesh
    dist.destroy_process_group()


@needs_pipelines
@pytest.mark.parametrize("between", ["a batch of another shape", "an evaluation"])
def test_step_adds_to_gradients_of_sharded_weights(world_of_one, between: str):
    torch.manual_seed(0)
    plain = Net(nn.Linear(4, 4), nn.Linear(4, 4), width=4).double()
    model = compose(world_of_one, pipeline_of(world_of_one, "gpipe"), ShardedDataParallel(world_of_one, "dp")).apply(
        copy.deepcopy(plain)
    )
    first = torch.randn(4, 4, dtype=torch.float64)
    second = torch.randn(8, 4, dtype=torch.float64) if between == "a batch of another shape" else first
    for batch in (first, second):
        square_error(plain(batch), batch).backward()
    model.step(first, target=first)
    if between == "an evaluation":
        model(first)
    model.step(second, target=second)
    for each in model.modules():
        if hasattr(each, "reshard"):
            each.reshard()
    found = {name.removeprefix("parts.0."): weight.grad.to_local() for name, weight in model.named_parameters()}
    assert found.keys() == {name for name, _ in plain.named_parameters()}
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=0, atol=1e-12)


def test_ring_backward_under_autocast_rounds_no_gradients():
    with fake_rank(0, 1):
        gradients = []
        for inside in (True, False):
            torch.manual_seed(0)
            q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
            with torch.autocast("cpu", torch.bfloat16):
                out = ring_attention(q, k, v, dist.group.WORLD, is_causal=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                out.square().sum().backward()
            gradients.append([q.grad, k.grad, v.grad])
        for one, other in zip(*gradients):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_jagged_inputs_are_not_counted():
    jagged = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    assert count_inputs(jagged) == count_inputs(())
