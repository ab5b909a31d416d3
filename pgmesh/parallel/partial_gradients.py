"""A search for weights of which each rank has a part of the gradient only, in the first steps of tensor parallelism.

torch shards the layers that a plan names. All other weights are whole on each rank, and have to get the same gradient
on all ranks along the axis. A module without an entry that computes with a shard of the activations, such as a norm of
this rank's heads, gets a part of its gradient on each rank, and torch adds the parts up for modules with an entry only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from pgmesh.errors import MethodError
from pgmesh.parallel.base import Method
from pgmesh.parallel.divisibility import format_sizes
from pgmesh.parallel.exchange import collective_device
from pgmesh.parallel.first_step import can_be_checked
from pgmesh.parallel.gradients import local
from pgmesh.parallel.local_experts import expert_tensors

SUMS = 15
"""Number of equal parts of a gradient whose sums are compared."""

DIFFERENT = 0.05
"""A greater difference is no rounding error, relative to the gradient: parts of a sum have little in common."""

NOISE = 1e-6
"""A gradient below this is 0 except for rounding, relative to the greatest one: that of a bias of keys is."""

MAX_PASSES = 100
"""Number of passes after which gradients that have always been 0 are no longer compared."""


class GradientComparison:
    """Compares the first gradients of whole weights between the ranks along the axes of a method.

    1. The first training pass of the module registers a hook on each of the weights.
    2. In the backward pass, the hooks keep a summary of each gradient.
    3. The next training pass compares the summaries of all ranks, in one collective, and removes the hooks.

    A gradient of 0 on all ranks says nothing. Behind a layer that starts with zeros it is 0 in the first step, so its
    hook stays, and the next pass compares again. Not compared are the weights of a module that is compiled as a whole,
    and those under schedules that skip hooks ("zero-bubble").

    Args:
        method: the method that has sharded the other weights of the module.
        module: the module.
    """

    def __init__(self, method: Method, module: nn.Module) -> None:
        self._method = method
        self._entries = entries_of_whole_weights(module)
        """The plan entry that each of the weights would need, by name."""
        self._hooks: dict[str, RemovableHandle] | None = None
        """The hook of each weight that is still compared, by name; None before the first training pass."""
        self._summaries: dict[str, Tensor] = {}
        self._passes = 0
        self._of_module = module.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        """Forward pre-hook of the module."""
        if not can_be_checked(module):
            return
        if self._hooks is None:
            self._hooks = self._watch(module)
        elif self._summaries:
            self._compare(self._hooks)
            if not self._hooks:
                self._of_module.remove()

    def _watch(self, module: nn.Module) -> dict[str, RemovableHandle]:
        """Let the backward pass keep a summary of the gradient of each trainable weight. Experts are never the same."""
        experts, hooks = expert_tensors(module), dict[str, RemovableHandle]()
        for name, weight in module.named_parameters():
            if name in self._entries and weight.requires_grad and name not in experts:
                keep = partial(self._keep_summary, name)
                hooks[name] = weight.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]
        return hooks

    def _keep_summary(self, name: str, weight: Tensor) -> None:
        """Hook of a weight."""
        if weight.grad is not None:
            self._summaries[name] = summarize(weight.grad)

    def _compare(self, hooks: dict[str, RemovableHandle]) -> None:
        """Compare the summaries of all ranks, and remove the hooks of weights that were compared.

        Raises:
            MethodError: some differ; the same on every rank.
        """
        of_ranks = self._gather({name: self._summaries.get(name, torch.zeros(1 + SUMS)) for name in hooks})
        distance = (of_ranks - of_ranks[0]).norm(dim=-1).amax(0)
        size = of_ranks.norm(dim=-1).amax(0)
        is_partial = (distance > DIFFERENT * size) & (size > NOISE * size.max())
        for name, differs, compared in zip([*hooks], is_partial.tolist(), (size > 0).tolist()):
            if differs:
                raise self._error(name)
            if compared or self._passes == MAX_PASSES:
                hooks.pop(name).remove()
        self._summaries.clear()
        self._passes += 1

    def _gather(self, summaries: Mapping[str, Tensor]) -> Tensor:
        """The summaries of all ranks: (ranks, weights, numbers). Numbers that are not finite are 0."""
        group = self._method.mesh.group(*self._method.owns)
        own = torch.stack([*summaries.values()]).to(collective_device(group, torch.device("cpu")))
        of_ranks = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(of_ranks, own, group=group)
        return torch.stack(of_ranks).nan_to_num(0.0, 0.0, 0.0)

    def _error(self, name: str) -> MethodError:
        entry, owner = self._entries[name], name.rpartition(".")[0]
        own = "" if entry == owner else "; own: a new submodule for this parameter"
        return MethodError(
            f"{name} gets a part of its gradient on each rank along "
            f"{format_sizes(self._method.mesh, self._method.owns)}, and nothing adds the parts up: its module computes "
            "with a shard of the activations, and needs an entry that says which one.\n\n"
            f"  plan={{**plan, {entry!r}: SequenceParallel(use_local_output=True)}}   # a shard of the positions{own}\n"
            f"  plan={{**plan, {entry!r}: SequenceParallel(sequence_dim=2, use_local_output=True)}}   # of the heads, "
            "the third dimension"
        )


def entries_of_whole_weights(module: nn.Module) -> dict[str, str]:
    """The key of a plan for each parameter of a module that is no DTensor, by its name.

    A style is for all parameters of a module. So those of a module with submodules need one for themselves, "own".
    """
    entries: dict[str, str] = {}
    for owner_name, owner in module.named_modules():
        needs_own = not owner_name or len([*owner.modules()]) > 1
        entry = f"{owner_name}.own".lstrip(".") if needs_own else owner_name
        for name, weight in owner.named_parameters(recurse=False):
            if not isinstance(weight, DTensor):
                entries[f"{owner_name}.{name}".lstrip(".")] = entry
    return entries


def summarize(gradient: Tensor) -> Tensor:
    """The norm of a gradient, and the sums of equal parts of it."""
    flat = local(gradient).detach().to_dense().flatten().float()
    return torch.stack([flat.norm(), *(part.sum() for part in flat.tensor_split(SUMS))]).cpu()
