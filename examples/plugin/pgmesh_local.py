"""A parallel method in a package of its own. Once it is installed, ``pgmesh.parallel.find("local")`` is it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel import Method, local


class LocalSteps(Method):
    """Ranks train by themselves, each on its own rows, and take the mean of their weights now and then.

    A program calls ``step()`` after each step of its optimizer.

    Args:
        mesh: the mesh.
        axes: along which ranks read different rows.
        every: how many of the optimizer's steps lie between two means.
    """

    splits_batch = True

    def __init__(self, mesh: ProcessGroupMesh, *axes: str, every: int, **options: Any) -> None:
        super().__init__(mesh, *axes, **options)
        self.every, self.steps = every, 0
        self.kept: list[nn.Parameter] = []

    def apply(self, module: nn.Module) -> nn.Module:
        """The same module, whose weights start as the mean of the ranks' own."""
        weights = [*self.weights(module)]  # without frozen weights and experts
        self._mean(weights)
        self.kept += weights  # a rank may have several stages of a pipeline
        return module

    def step(self) -> None:
        """Take the mean of the ranks' weights, if so many steps were taken since the last one."""
        self.steps += 1
        if self.steps % self.every == 0:
            self._mean(self.kept)

    @torch.no_grad()
    def _mean(self, weights: Iterable[nn.Parameter]) -> None:
        for weight in weights:
            part = local(weight)  # this rank's part, where another method cuts the weight
            dist.all_reduce(part, group=self.mesh.group(*self.reduces))
            part /= self.mesh.size(*self.reduces)
