"""torch's DeviceMesh over the same groups: FSDP2 on one axis, tensor parallelism on the other."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pgmesh import ProcessGroupMesh, launch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same parameters on every rank
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> float:
    mesh = ProcessGroupMesh(dp=2, tp=2)
    slices = mesh.device_mesh()  # one root mesh, as FSDP with tensor parallelism needs
    assert slices.get_group("tp") is mesh.group("tp")

    parallel = parallelize_module(Block(), slices["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(parallel, mesh=slices["dp"])

    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    mine = batch.chunk(mesh.size("dp"))[mesh.index("dp")]
    return (parallel(mine) - Block()(mine)).abs().max().item()


if __name__ == "__main__":
    worst = max(launch.spawn(main, 4))
    print(f"sharded over dp and tp, the outputs differ from one process by {worst:.1e}")
    assert worst < 1e-6
    print("PASS")
