"""A parallel method in a package of its own. Once it is installed, ``pgmesh.parallel.find("local")`` is it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel import Method


class LocalSteps(Method):
    """Ranks train by themselves, each on its own rows, and take the mean of their weights now and then.

    Args:
        mesh: the mesh.
        axes: along which ranks read different rows.
        every: how many forward passes lie between two means.
    """

    splits_batch = True

    def __init__(self, mesh: ProcessGroupMesh, *axes: str, every: int, **options: Any) -> None:
        super().__init__(mesh, *axes, **options)
        self.every, self.passes = every, 0

    def apply(self, module: nn.Module) -> nn.Module:
        """The same module, which takes the mean before every so many forward passes."""
        module.register_forward_pre_hook(self._before)
        return module

    @torch.no_grad()
    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if module.training and self.passes % self.every == 0:
            for weight in module.parameters():
                dist.all_reduce(weight, group=self.mesh.group(*self.reduces))
                weight /= self.mesh.size(*self.reduces)
        self.passes += module.training
