"""A mixture of experts in one process: a router, the experts' outputs mixed, a loss that keeps their loads alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pgmesh.errors import ShapeError


def mix(tokens: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList | nn.ModuleDict) -> Tensor:
    """What each token's experts make of it, weighed and summed.

    A module that keeps this function in an attribute is one that ``ExpertParallel`` knows. Every expert runs, if need
    be on no token, so that it always has a gradient.

    Args:
        tokens: (tokens, width).
        weights: how much each expert of a token counts, (tokens, top_k).
        chosen: which experts they are, numbers from 0, (tokens, top_k).
        experts: each a module from (rows, width) to (rows, width).

    >>> import torch
    >>> twice, thrice = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.constant_(twice.weight, 2), torch.nn.init.constant_(thrice.weight, 3)
    >>> tokens, weights, chosen = torch.ones(2, 1), torch.tensor([[0.5, 0.5], [1, 0]]), torch.tensor([[0, 1], [0, 1]])
    >>> mix(tokens, weights, chosen, torch.nn.ModuleList([twice, thrice])).flatten().tolist()
    [2.5, 2.0]
    """
    return mix_with(
        tokens, weights, chosen, len(experts), lambda rows, counts: run_experts(rows, counts.tolist(), experts)
    )


def mix_with(
    tokens: Tensor, weights: Tensor, chosen: Tensor, experts: int, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """``mix``, with the way in which rows are served: rows sorted by expert and how many each gets, to rows again."""
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    outputs = compute(tokens.index_select(0, order // chosen.size(1)), counts)
    unsorted = outputs.index_select(0, order.argsort()).view(*chosen.shape, outputs.size(-1))
    return (unsorted * weights.unsqueeze(-1)).sum(1)


def run_experts(rows: Tensor, counts: list[int], experts: nn.ModuleList | nn.ModuleDict) -> Tensor:
    """What each expert makes of its rows, which stand in the order of the experts."""
    each: Iterable[nn.Module] = experts.values() if isinstance(experts, nn.ModuleDict) else experts
    return torch.cat([expert(part) for expert, part in zip(each, torch.split(rows, counts), strict=True)])


def balance_loss(probabilities: Tensor, chosen: Tensor, count: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """How uneven the experts' loads are: 1 where all are alike, up to the number of experts.

    The number of experts times the sum, over experts, of the share of choices that fell on one times the mean
    probability that it was given: https://arxiv.org/abs/2101.03961, section 2.2. A module that keeps this function in
    an attribute has choices counted over all ranks under ``ExpertParallel``.

    Args:
        probabilities: of each expert for each token, (tokens, experts).
        chosen: (tokens, top_k).
        count: what makes the counts of all ranks from those of this one.

    >>> import torch
    >>> balance_loss(torch.eye(2), torch.tensor([[0], [1]])).item()
    1.0
    >>> balance_loss(torch.eye(2)[[0, 0]], torch.tensor([[0], [0]])).item()
    2.0
    """
    experts = probabilities.size(-1)
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    counts = counts if count is None else count(counts)
    shares = counts.to(probabilities.dtype) / counts.sum()
    return experts * (shares * probabilities.mean(0)).sum()


class Routes(NamedTuple):
    """Where the tokens go."""

    weights: Tensor
    """How much each expert of a token counts, (tokens, top_k)."""
    chosen: Tensor
    """Which experts they are, (tokens, top_k)."""
    balance: Tensor
    """How uneven the experts' loads are; 1 where they are alike."""


class Router(nn.Module):
    """Chooses the experts of each token: those of the highest probability under one linear layer.

    Args:
        width: of a token.
        experts: how many there are.
        top_k: how many each token goes to. Their weights are their probabilities, scaled to sum to 1; where it is
            one, its probability as it is, since a gradient has to reach the layer.

    Raises:
        ShapeError: fewer experts than each token needs.

    >>> import torch
    >>> routes = Router(8, experts=4, top_k=2)(torch.ones(3, 8))
    >>> routes.weights.shape, routes.chosen.shape
    (torch.Size([3, 2]), torch.Size([3, 2]))
    """

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        if not 1 <= top_k <= experts:
            raise ShapeError(f"Router: each token goes to at least 1 expert and to {experts} at most, not to {top_k}.")
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(width, experts, bias=False)
        self.balance_loss = balance_loss

    def forward(self, tokens: Tensor) -> Routes:
        probabilities = self.gate(tokens).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, -1)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routes(weights, chosen, self.balance_loss(probabilities, chosen))


def with_loss(tensor: Tensor, loss: Tensor) -> Tensor:
    """The tensor itself, whose backward counts a loss besides: for one inside a model that hands out its output alone.

    The loss counts as it is, whatever becomes of the tensor. That is what a pipeline needs, whose stages hand on
    activations alone. Where the program scales its loss, as for 16-bit gradients, scale this one too.

    >>> import torch
    >>> weight = torch.ones((), requires_grad=True)
    >>> (0 * with_loss(weight, 3 * weight)).backward()
    >>> weight.grad
    tensor(3.)
    """
    carried: Tensor = _WithLoss.apply(tensor, loss)  # type: ignore[no-untyped-call]
    return carried


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.saved_tensors[0]
