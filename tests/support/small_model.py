"""A small model whose layers have the names of the documentation's plans."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from pgmesh import ProcessGroupMesh
from pgmesh.parallel import Method, PipelineParallel, ShardedDataParallel, TensorParallel

torch.set_num_threads(1)  # ranks import this too, and share the cores

ROWS = 16
FIRST_STAGE = ("0", "2", "blocks.0", "blocks.1")
"""Parameters of the first of two pipeline stages, by the starts of their names."""


class SmallModel(nn.Module):
    """Two layers under the names in the example's plan, then four blocks."""

    def __init__(self, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        for i, layer in enumerate((nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))):
            self.add_module(str(i), layer)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.double()
        for name, weight in self.named_parameters():
            weight.requires_grad = not name.startswith(frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in map(self._modules.get, "012"):
            x = x if layer is None else layer(x)
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, the same in every process."""
    made = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 8, generator=made).double(), torch.randn(ROWS, 8, generator=made).double()


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def partner(mesh: ProcessGroupMesh, kind: str, axis: str) -> Method:
    """A method along an axis, to compose with: "sharding", "tensor", "pipeline" or "two stages"."""
    stages = {"layers": "blocks", "first": "012", "loss": loss_of, "microbatches": 4}
    return {
        "sharding": lambda: ShardedDataParallel(mesh, axis),
        "tensor": lambda: TensorParallel(mesh, axis, plan={"0": ColwiseParallel(), "2": RowwiseParallel()}),
        "pipeline": lambda: PipelineParallel(mesh, axis, **stages),
        "two stages": lambda: PipelineParallel(mesh, axis, **stages, schedule="interleaved", stages_per_rank=2),
    }[kind]()
