"""Parallel methods of a program: three that change no weights, one for each kind, and one that averages them later."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pgmesh.parallel import Method, local


class Rows(Method):
    """Appends its name to a list on the module."""

    differs = "rows"

    def apply(self, module: nn.Module) -> nn.Module:
        module.signed = [*getattr(module, "signed", []), str(self)]
        return module


class Positions(Rows):
    differs = "positions"


class Weights(Rows):
    differs = "weights"


class AverageLater(Method):
    """Averages the weights of ranks after every second optimizer step."""

    differs = "rows"
    averages_later = True

    def apply(self, module: nn.Module) -> nn.Module:
        self.kept, self.steps = [*getattr(self, "kept", ()), *self.weights(module)], 0
        return module

    @property
    def steps_to_average(self) -> int:
        return 2 - self.steps % 2

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        self.steps += 1
        for weight in self.kept if self.steps % 2 == 0 else ():
            dist.all_reduce(local(weight), group=self.mesh.group(*self.owns))
            local(weight).div_(self.mesh.size(*self.owns))
