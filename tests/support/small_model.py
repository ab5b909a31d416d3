"""A small model whose layers have the names of the documentation's plans, and its training in one process."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.support.parallel_models import TOLERANCE, full_tensor, named_weights

torch.set_num_threads(1)  # ranks import this too, and share the cores

ROWS, STEPS, RATE = 16, 3, 0.1
FIRST_STAGE = ("0", "2", "blocks.0", "blocks.1")
"""Parameters of the first of two pipeline stages, by the starts of their names."""


class SmallModel(nn.Module):
    """Two layers under the names in the example's plan, then four blocks."""

    def __init__(self, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        for i, layer in enumerate((nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))):
            self.add_module(str(i), layer)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.double()
        for name, weight in self.named_parameters():
            weight.requires_grad = not name.startswith(frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in map(self._modules.get, "012"):
            x = x if layer is None else layer(x)
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, the same in every process."""
    made = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 8, generator=made).double(), torch.randn(ROWS, 8, generator=made).double()


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), RATE, eps=1e-4)


def train(model: nn.Module, share: Any) -> tuple[list[dict[str, torch.Tensor]], nn.Module]:
    """Train three steps; return the gradients of each step, and the model."""
    optimizer = optimizer_of(model)
    gradients = []
    for step in range(STEPS):
        rows, target = map(share, batch(step))
        optimizer.zero_grad()
        if hasattr(model, "step"):
            model.step(rows, target=target)
        else:
            loss_of(model(rows), target).backward()
        gradients.append(
            {name: full_tensor(weight.grad) for name, weight in named_weights(model) if weight.grad is not None}
        )
        optimizer.step()
    return gradients, model


@functools.cache
def train_alone(frozen: tuple[str, ...] = ()) -> tuple[list[dict[str, torch.Tensor]], nn.Module]:
    """Train in one process."""
    return train(SmallModel(frozen), lambda rows: rows)


def assert_same_training(found: tuple[list[dict[str, torch.Tensor]], nn.Module], right: tuple[list, nn.Module]) -> None:
    """Assert that gradients and final weights equal those of one process."""
    for step, (mine, whole_ones) in enumerate(zip(found[0], right[0])):
        assert mine or not any(weight.requires_grad for weight in found[1].parameters())
        for name, gradient in mine.items():
            furthest = (gradient - whole_ones[name]).abs().max().item()
            assert furthest <= TOLERANCE, f"step {step}: the gradient of {name} differs by {furthest:.0e}"
    weights = dict(right[1].named_parameters())
    for name, weight in named_weights(found[1]):
        furthest = (full_tensor(weight) - weights[name]).abs().max().item()
        assert furthest <= TOLERANCE, f"{name} differs by {furthest:.0e}"
