"""The tiny GPT with a mixture of experts in each block, and its training in one process."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from pgmesh.parallel import ExpertLinear, Router, mix, with_loss
from tests.support.parallel_models import HEADS, WIDTH, TinyGPT

EXPERTS, TOP_K, BALANCE_WEIGHT = 8, 2, 0.1


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(gelu(self.up(rows)))


class StackedExperts(nn.Module):
    """The experts of a layer as one module."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = ExpertLinear(experts, WIDTH, 2 * WIDTH)
        self.down = ExpertLinear(experts, 2 * WIDTH, WIDTH, bias=False)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return self.down(gelu(self.up(rows, counts)), counts)


def experts_of_layer(experts: int, stacked: bool = False) -> nn.Module:
    return StackedExperts(experts) if stacked else nn.ModuleList(Expert() for _ in range(experts))


class ExpertBlock(nn.Module):
    """Causal attention, then a mixture of experts with a balance loss."""

    def __init__(self, stacked: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = scaled_dot_product_attention
        self.router, self.experts = Router(WIDTH, EXPERTS, TOP_K), experts_of_layer(EXPERTS, stacked)
        self.mix = mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, WIDTH // HEADS))
        q, k, v = heads.transpose(1, 2).unbind(3)
        x = x + self.out(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        tokens = self.norm2(x).flatten(0, 1)
        routes = self.router(tokens)
        mixed = self.mix(tokens, routes.weights, routes.chosen, self.experts)
        return x + with_loss(mixed.view_as(x), BALANCE_WEIGHT * routes.balance)


def expert_model(layers: int = 2, stacked: bool = False) -> TinyGPT:
    """The tiny GPT with experts in each block."""
    return TinyGPT(layers=layers, block=lambda: ExpertBlock(stacked))


def expert_layer(experts: int | nn.Module = 4, stacked: bool = False) -> nn.Module:
    """A layer with only experts: a number of them, or a module."""
    layer = nn.Module()
    layer.mix, layer.experts = mix, experts if isinstance(experts, nn.Module) else experts_of_layer(experts, stacked)
    return layer
