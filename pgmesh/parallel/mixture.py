"""Mixture of experts on one rank: a router, the weighted sum of expert outputs, and a load-balance loss.

It needs no mesh. ``ExpertParallel`` replaces ``mix`` and ``balance_loss`` by its versions over several ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pgmesh.errors import MethodError, ShapeError
from pgmesh.parallel.gradients import local

grouped_mm: Any = getattr(nn.functional, "grouped_mm", None)
"""torch's grouped matrix multiplication; None on a torch without it."""


def mix(tokens: Tensor, weights: Tensor, chosen: Tensor, experts: nn.Module) -> Tensor:
    """Weighted sum of the outputs of each token's experts.

    ``ExpertParallel`` replaces this function in each module that has it as an attribute. Every expert runs, also with
    no tokens, so that it always has a gradient.

    Experts are a ModuleList or ModuleDict of modules of any shapes, which run one after another. Or they are one module
    in which the first dimension of each parameter is the expert, such as one of ``ExpertLinear`` layers: its
    ``forward(rows, counts)`` gets the rows of all experts, sorted by expert, and their number for each expert.

    Args:
        tokens: (tokens, width).
        weights: weight of each expert of a token, (tokens, top_k).
        chosen: indices of the experts of a token, from 0, (tokens, top_k).
        experts: one module, or modules from (rows, width) to (rows, width).

    Returns:
        (tokens, width).

    >>> import torch
    >>> twice, thrice = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.constant_(twice.weight, 2), torch.nn.init.constant_(thrice.weight, 3)
    >>> tokens, weights, chosen = torch.ones(2, 1), torch.tensor([[0.5, 0.5], [1, 0]]), torch.tensor([[0, 1], [0, 1]])
    >>> mix(tokens, weights, chosen, torch.nn.ModuleList([twice, thrice])).flatten().tolist()
    [2.5, 2.0]
    """
    rows, counts, order = permute(tokens, chosen, count_experts(experts))
    if isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
        return unpermute(run_in_turn(experts, rows, counts.tolist()), weights, order)
    return unpermute(experts(rows, counts), weights, order)


def count_experts(experts: nn.Module) -> int:
    """Number of experts of a list, or of a module in which the first dimension of each parameter is the expert.

    Raises:
        MethodError: it is no such list, and has no parameters.
    """
    if isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
        return len(experts)
    first = next((each for each in experts.parameters() if each.ndim), None)
    if first is None:
        raise MethodError(
            f"{type(experts).__name__} is no ModuleList of experts, and has no parameters, whose first dimension would "
            "be the expert.\n\n  self.experts = nn.ModuleList(...)"
        )
    return first.size(0)


def permute(tokens: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once for each of its experts, and sort the copies by expert.

    Args:
        tokens: as in ``mix``, as is ``chosen``.
        chosen: indices of the experts of a token.
        experts: number of experts.

    Returns:
        The rows, the number of rows of each expert, and the order for ``unpermute``.
    """
    order = chosen.flatten().argsort(stable=True)
    return tokens.index_select(0, order // chosen.size(1)), count_choices(chosen, experts), order


def unpermute(outputs: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Weighted sum of the outputs of each token's experts, from the output rows of a ``permute``."""
    by_token = outputs.index_select(0, order.argsort()).view(*weights.shape, outputs.size(-1))
    return (by_token * weights.unsqueeze(-1)).sum(1)


def count_choices(chosen: Tensor, experts: int) -> Tensor:
    """Number of times that each expert is chosen. Unlike ``bincount``, the host does not wait for a GPU."""
    flat = chosen.flatten()
    return torch.zeros(experts, dtype=torch.int64, device=chosen.device).scatter_add_(0, flat, torch.ones_like(flat))


def run_in_turn(experts: nn.ModuleList | nn.ModuleDict, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Outputs of a list of experts, each applied to its rows.

    Args:
        experts: the experts.
        rows: the rows, sorted by expert.
        counts: number of rows of each expert.
    """
    parts = zip(experts.children(), torch.split(rows, [*counts]), strict=True)
    return torch.cat([expert(part) for expert, part in parts])


class ExpertLinear(nn.Module):
    """A linear layer of all experts: the weight is (experts, outputs, inputs), and the bias (experts, outputs).

    It is one call of torch's ``grouped_mm`` for rows and weights in bfloat16, with sizes that are multiples of 8.
    Otherwise the experts run one after another, and the host waits for the device. It starts as ``nn.Linear`` does.

    Args:
        experts: number of experts.
        in_features: number of inputs of each.
        out_features: number of outputs of each.
        bias: True to add a bias.

    >>> from pgmesh.parallel import ExpertLinear
    >>> layer = ExpertLinear(2, 3, 4)
    >>> rows, counts = torch.ones(5, 3), torch.tensor([2, 3])  # 2 rows for the first expert, 3 for the second
    >>> layer(rows, counts).shape, layer.weight.shape
    (torch.Size([5, 4]), torch.Size([2, 4, 3]))
    """

    def __init__(self, experts: int, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(experts, out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values, those of ``nn.Linear``."""
        bound = self.weight.size(-1) ** -0.5
        for each in self.parameters():
            nn.init.uniform_(each, -bound, bound)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The outputs of rows that are sorted by expert.

        Args:
            rows: (rows, inputs).
            counts: number of rows of each expert.
        """
        weight = local(self.weight)  # ExpertParallel makes a DTensor of it
        if can_group(rows, weight):
            outputs: Tensor = grouped_mm(rows, weight.mT, offs=counts.cumsum(0).to(torch.int32))
        else:
            parts = torch.split(rows, counts.tolist())
            outputs = torch.cat([part @ each.T for part, each in zip(parts, weight, strict=True)])
        if self.bias is None:
            return outputs
        return outputs + local(self.bias).to(outputs).repeat_interleave(counts, 0, output_size=rows.size(0))


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Return True if torch's grouped_mm takes these: bfloat16, with sizes that are multiples of 16 bytes."""
    if grouped_mm is None or not rows.dtype is weight.dtype is torch.bfloat16:
        return False
    return all(size % 8 == 0 for size in weight.shape[1:])


def balance_loss(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Load-balance loss of the Switch Transformer. It is 1 if all experts are chosen equally often.

    In a module that has this function as an attribute, ``ExpertParallel`` counts choices over all ranks.

    Args:
        probabilities: probability of each expert for each token, (tokens, experts).
        chosen: indices of the experts of a token, (tokens, top_k).

    >>> import torch
    >>> balance_loss(torch.eye(2), torch.tensor([[0], [1]])).item()
    1.0
    >>> balance_loss(torch.eye(2)[[0, 0]], torch.tensor([[0], [0]])).item()
    2.0
    """
    return switch_loss(probabilities.mean(0), count_choices(chosen, probabilities.size(-1)))


def switch_loss(mean: Tensor, counts: Tensor) -> Tensor:
    """The number of experts times the sum, over experts, of the fraction of choices times the mean probability.

    https://arxiv.org/abs/2101.03961, section 2.2.
    """
    return len(mean) * (counts.to(mean.dtype) / counts.sum() * mean).sum()


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
        """The routes of these tokens, whose last dimension is the width."""
        probabilities = self.gate(tokens).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, -1)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routes(weights, chosen, self.balance_loss(probabilities, chosen))


def with_loss(tensor: Tensor, loss: Tensor) -> Tensor:
    """Return the tensor, and add a loss to the backward pass through it.

    The gradient of the loss is always 1, whatever gradient the tensor gets. So a pipeline stage can have a loss of its
    layers, such as the load-balance loss, although it returns only activations. A program that scales its loss, for
    16-bit gradients for example, has to scale this one too. ``Composition.accumulate(..., passes=n)`` divides it by n;
    a program that accumulates without a composition divides it itself.

    Raises:
        MethodError: in a ``Composition.accumulate`` without ``passes``.

    >>> import torch
    >>> weight = torch.ones((), requires_grad=True)
    >>> (0 * with_loss(weight, 3 * weight)).backward()
    >>> weight.grad
    tensor(3.)
    """
    if Accumulation.passes is None:
        raise MethodError(
            "with_loss adds its loss in each backward pass, so accumulate needs their number to add the mean.\n\n"
            "  together.accumulate(model, last=last, passes=passes)"
        )
    same: Tensor = _WithLoss.apply(tensor, loss / Accumulation.passes)  # type: ignore[no-untyped-call]
    return same


class Accumulation:
    """The gradient accumulation of this process: not of a thread, since autograd's threads may run a forward again."""

    passes: int | None = 1
    """Number of backward passes; None if the program has not said it."""

    @classmethod
    @contextlib.contextmanager
    def of(cls, passes: int | None) -> Iterator[None]:
        """Set the number of passes for the block."""
        before, cls.passes = cls.passes, passes
        try:
            yield
        finally:
            cls.passes = before


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.saved_tensors[0]
