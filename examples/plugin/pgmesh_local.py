"""A parallel method in another package. Once it is installed, ``pgmesh.parallel.find("local")`` returns it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel import Method, local


class LocalSteps(Method):
    """Local SGD: ranks train independently on different rows, and average their parameters every few steps.

    A program calls ``step()`` after each step of its optimizer.

    Args:
        mesh: the mesh.
        axes: axes along which ranks read different rows.
        every: number of optimizer steps between two averages.
    """

    splits_batch = True

    def __init__(self, mesh: ProcessGroupMesh, *axes: str, every: int, **options: Any) -> None:
        super().__init__(mesh, *axes, **options)
        self.every, self.steps = every, 0
        self.kept: list[nn.Parameter] = []

    def apply(self, module: nn.Module) -> nn.Module:
        """Average the initial parameters over ranks, and return the module."""
        weights = [*self.weights(module)]  # without frozen parameters and experts
        self._mean(weights)
        self.kept += weights  # called once for each pipeline stage of the rank
        return module

    def step(self) -> None:
        """Count an optimizer step; average the parameters in every ``every``-th step."""
        self.steps += 1
        if self.steps % self.every == 0:
            self._mean(self.kept)

    @torch.no_grad()
    def _mean(self, weights: Iterable[nn.Parameter]) -> None:
        for weight in weights:
            part = local(weight)  # this rank's shard, if another method shards the weight
            dist.all_reduce(part, group=self.mesh.group(*self.reduces))
            part /= self.mesh.size(*self.reduces)
