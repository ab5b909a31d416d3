"""A parallel method in another package. Once it is installed, ``pgmesh.parallel.find("diloco")`` returns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from pgmesh import MethodError
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel import Method, local

NESTEROV = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
"""Outer optimizer of the paper."""


class DiLoCo(Method):
    """DiLoCo: ranks train independently on different rows, and meet every few steps in an outer optimizer step.

    The mean over ranks of how far their parameters moved is the gradient of the outer step. All ranks continue from its
    result. With ``outer=partial(SGD, lr=1.0)`` that is the mean of the parameters: local SGD. Buffers stay as they are.
    Save checkpoints right after an outer step; they do not have the momentum of the outer optimizer.
    Ranks must take the same number of steps: a GradScaler, which skips steps on some ranks, does not work with it.

    Args:
        mesh: the mesh.
        axes: axes along which ranks read different rows.
        every: number of optimizer steps between two outer steps.
        outer: makes the outer optimizer from parameters.
        options: as in ``Method``.

    Source: https://arxiv.org/abs/2311.08105
    """

    differs = "rows"  # so its level is Level.DATA: sharding before it has replaced the parameters
    averages_later = True  # parameters, in the outer steps, in place of gradients in each step

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axes: str,
        every: int,
        outer: Callable[[Iterable[torch.Tensor]], Optimizer] = NESTEROV,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(mesh, *axes, options=options)
        self.every, self.outer, self.steps, self.is_attached = every, outer, 0, False
        self.parameters: list[nn.Parameter] = []
        self.agreed: list[torch.Tensor] = []  # this rank's part of each parameter, as of the last outer step

    def apply(self, module: nn.Module) -> nn.Module:
        """Keep the parameters, and return the module."""
        for weight in self.weights(module):  # without frozen parameters and experts
            self.parameters.append(weight)  # apply is called once for each pipeline stage of the rank
            self.agreed.append(local(weight).detach().clone())  # this rank's shard, if another method shards the weight
        return module

    @property
    def steps_to_average(self) -> int:
        """Number of optimizer steps until the next outer step."""
        return self.every - self.steps % self.every

    def attach(self, optimizer: Optimizer) -> None:
        """Count the steps of the optimizer.

        Raises:
            MethodError: another optimizer was attached before. All parameters need one optimizer, or the outer step
                would come between the steps of two.
        """
        if self.is_attached:
            raise MethodError("DiLoCo takes one optimizer for all parameters, and attach() was already called.")
        self.is_attached = True
        self.outer_optimizer = self.outer(self.agreed) if self.agreed else None  # a frozen stage has none
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _before_step(self, *optimizer_and_arguments: Any) -> None:
        if self.steps % self.every == 0:  # the same on all ranks: initial ones, those of an outer step or a checkpoint
            for weight, agreed in zip(self.parameters, self.agreed):
                agreed.copy_(local(weight))

    @torch.no_grad()
    def _after_step(self, *optimizer_and_arguments: Any) -> None:
        self.steps += 1
        if self.steps % self.every == 0 and self.outer_optimizer is not None:
            for weight, agreed in zip(self.parameters, self.agreed):
                agreed.grad = agreed - local(weight)
                self._mean(agreed.grad)
            self.outer_optimizer.step()
            for weight, agreed in zip(self.parameters, self.agreed):
                local(weight).copy_(agreed)
                agreed.grad = None

    def _mean(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self.mesh.group(*self.owns))
        tensor /= self.mesh.size(*self.owns)
