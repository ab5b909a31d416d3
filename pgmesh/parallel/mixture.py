"""Mixture of experts on one rank: a router, the weighted sum of expert outputs, and a load-balance loss.

It needs no mesh. ``ExpertParallel`` replaces ``mix`` and ``balance_loss`` by its versions over several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pgmesh.errors import ShapeError


def mix(tokens: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList | nn.ModuleDict) -> Tensor:
    """Weighted sum of the outputs of each token's experts.

    ``ExpertParallel`` replaces this function in each module that has it as an attribute. Every expert runs, also with
    no tokens, so that it always has a gradient.

    Args:
        tokens: (tokens, width).
        weights: weight of each expert of a token, (tokens, top_k).
        chosen: indices of the experts of a token, from 0, (tokens, top_k).
        experts: modules from (rows, width) to (rows, width).

    Returns:
        (tokens, width).

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
    """Weighted sum of the experts' outputs, which ``compute`` returns.

    Args:
        tokens: as in ``mix``, as are ``weights`` and ``chosen``.
        weights: weight of each expert of a token.
        chosen: indices of the experts of a token.
        experts: number of experts.
        compute: takes rows sorted by expert, and the number of rows of each expert; returns the output rows.
    """
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    outputs = compute(tokens.index_select(0, order // chosen.size(1)), counts)
    unsorted = outputs.index_select(0, order.argsort()).view(*chosen.shape, outputs.size(-1))
    return (unsorted * weights.unsqueeze(-1)).sum(1)


def run_experts(rows: Tensor, counts: list[int], experts: nn.ModuleList | nn.ModuleDict) -> Tensor:
    """Outputs of the experts, each applied to its rows. Rows are sorted by expert; ``counts`` is the number of each."""
    each: Iterable[nn.Module] = experts.values() if isinstance(experts, nn.ModuleDict) else experts
    return torch.cat([expert(part) for expert, part in zip(each, torch.split(rows, counts), strict=True)])


def balance_loss(probabilities: Tensor, chosen: Tensor, count: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Load-balance loss of the Switch Transformer. It is 1 if all experts are chosen equally often.

    It is the number of experts times the sum, over experts, of the fraction of choices times the mean probability:
    https://arxiv.org/abs/2101.03961, section 2.2. In a module that has this function as an attribute,
    ``ExpertParallel`` counts choices over all ranks.

    Args:
        probabilities: probability of each expert for each token, (tokens, experts).
        chosen: indices of the experts of a token, (tokens, top_k).
        count: sums this rank's counts of choices over all ranks; None for one rank.

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
    """Output of a ``Router``: experts of each token and their weights."""

    weights: Tensor
    """Weight of each expert of a token, (tokens, top_k)."""
    chosen: Tensor
    """Indices of the experts of a token, (tokens, top_k)."""
    balance: Tensor
    """Load-balance loss; 1 if all experts have the same load."""


class Router(nn.Module):
    """Selects the ``top_k`` experts of each token by the probabilities of a linear layer.

    Weights are the probabilities of the selected experts. For ``top_k`` > 1 they are scaled to sum to 1. For 1 they are
    not, since a constant weight would give the layer no gradient.

    Args:
        width: width of a token.
        experts: number of experts.
        top_k: number of experts of each token.

    Raises:
        ShapeError: ``top_k`` is less than 1 or more than the number of experts.

    >>> import torch
    >>> routes = Router(8, experts=4, top_k=2)(torch.ones(3, 8))
    >>> routes.weights.shape, routes.chosen.shape
    (torch.Size([3, 2]), torch.Size([3, 2]))
    """

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        if not 1 <= top_k <= experts:
            raise ShapeError(f"Router: top_k is at least 1 and at most the number of experts, {experts}, not {top_k}.")
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
    """Return the tensor, and add a loss to the backward pass through it.

    The gradient of the loss is always 1, whatever gradient the tensor gets. So a pipeline stage can have a loss of its
    layers, such as the load-balance loss, although it returns only activations. A program that scales its loss, for
    16-bit gradients for example, has to scale this one too.

    >>> import torch
    >>> weight = torch.ones((), requires_grad=True)
    >>> (0 * with_loss(weight, 3 * weight)).backward()
    >>> weight.grad
    tensor(3.)
    """
    same: Tensor = _WithLoss.apply(tensor, loss)  # type: ignore[no-untyped-call]
    return same


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.saved_tensors[0]
