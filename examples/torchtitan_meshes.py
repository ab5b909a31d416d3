"""torchtitan on the groups of a mesh: its ParallelDims takes views of one mesh, which share their groups."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pgmesh import ProcessGroupMesh, launch

try:
    from torchtitan.distributed import ParallelDims
except ModuleNotFoundError:
    raise SystemExit("this example needs torchtitan: pip install torchtitan") from None


class Dims(ParallelDims):
    """torchtitan's meshes, each a view of the same ranks."""

    def build_mesh(self):
        mesh = ProcessGroupMesh(
            pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, tp=self.tp
        )
        outer = {"pp": self.pp, "dp_replicate": self.dp_replicate}
        dense = mesh.view(**outer, fsdp=self.dp_shard * self.cp, tp=self.tp)
        sparse = mesh.view(**outer, efsdp=dense.size("fsdp", "tp") // self.ep, ep=self.ep)
        data = mesh.view(pp=self.pp, batch=self.dp_replicate * self.dp_shard, cp=self.cp, tp=self.tp)
        loss = data.view(pp=self.pp, loss=data.size("batch", "cp"), tp=self.tp)
        views = {"dataloading": data, "loss": loss, "sparse": sparse, "dense": dense}
        self._global_meshes = {name: view.device_mesh() for name, view in views.items()}
        # Of axes with the same name, take the last, the dense one: FSDP and tensor parallelism need one root mesh.
        self._single_axis_meshes = {axis: view.device_mesh(axis) for view in views.values() for axis in view.axes}
        self._validate_meshes()
        self._world_mesh, self.mesh = mesh.device_mesh(), mesh
        return self._world_mesh


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same parameters on every rank
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> float:
    dims = Dims(dp_replicate=1, dp_shard=-1, cp=1, tp=2, pp=1, ep=2, world_size=4, spmd_backend="partial_dtensor")
    tp, fsdp = dims.get_mesh("tp"), dims.get_mesh("fsdp")
    assert tp.get_group() is dims.mesh.group("tp") is dims.get_mesh("ep").get_group()

    model = parallelize_module(Block(), tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=fsdp)

    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    batch = dims.get_mesh("batch")
    mine = rows.chunk(batch.size())[batch.get_local_rank()]
    return (model(mine) - Block()(mine)).abs().max().item()


if __name__ == "__main__":
    worst = max(launch.spawn(main, 4))
    print(f"sharded by torchtitan's meshes, the outputs differ from one process by {worst:.1e}")
    assert worst < 1e-6
    print("PASS")
