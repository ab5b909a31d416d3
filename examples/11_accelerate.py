"""accelerate on the groups of a mesh: its ParallelismConfig takes a DeviceMesh of the mesh."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from pgmesh import ProcessGroupMesh, launch

try:
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import ParallelismConfig
except ModuleNotFoundError:
    raise SystemExit("this example needs accelerate: pip install accelerate") from None

ROWS = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(0)  # the same parameters on every rank
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def main() -> float:
    mesh = ProcessGroupMesh(dp_replicate=2, dp_shard=2)  # names and order as in accelerate, without sizes of 1
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    config.device_mesh = mesh.device_mesh()  # Accelerator(parallelism_config=config) uses it, on GPUs
    slices = config.get_device_mesh("cpu")
    assert slices.get_group("dp_shard") is mesh.group("dp_shard")

    model = fully_shard(net(), mesh=slices["dp_replicate", "dp_shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = prepare_data_loader(
        DataLoader(ROWS, batch_size=2), torch_device_mesh=slices, num_processes=4, process_index=mesh.rank
    )

    alone = net()
    own = torch.optim.SGD(alone.parameters(), lr=0.1)
    for mine, whole in zip(loader, ROWS.split(2 * mesh.size())):
        for each, rows, steps in ((model, mine, optimizer), (alone, whole, own)):
            each(rows).square().mean().backward()
            steps.step()
            steps.zero_grad()
    pairs = zip(model.parameters(), alone.parameters())
    return max((theirs.full_tensor() - right).abs().max().item() for theirs, right in pairs)


if __name__ == "__main__":
    worst = max(launch.spawn(main, 4))
    print(f"fed by accelerate over dp_replicate and dp_shard, the weights differ from one process by {worst:.1e}")
    assert worst < 1e-6
    print("PASS")
