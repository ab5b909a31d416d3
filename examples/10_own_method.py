"""A custom parallel method: a class that takes a mesh and axes, and composes with the built-in methods."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pgmesh import ProcessGroupMesh, launch
from pgmesh.parallel import Method, compose, local


class Average(Method):
    """Minimal data parallelism: each gradient is averaged as soon as it is accumulated."""

    differs = "rows"  # ranks along its axes read different rows

    def apply(self, module: nn.Module) -> nn.Module:
        for weight in self.weights(module):  # without frozen parameters and experts
            weight.register_post_accumulate_grad_hook(self.average)
        return module

    def average(self, weight: nn.Parameter) -> None:
        gradient = local(weight.grad)  # this rank's shard, if another method shards the weight
        dist.all_reduce(gradient, group=self.mesh.group(*self.average_axes))
        gradient /= self.mesh.size(*self.average_axes)


class Split(Method):
    """Tensor parallelism for two layers, by torch's parallelize_module."""

    differs = "weights"  # so it is applied before Average, in any order of the arguments

    def apply(self, module: nn.Module) -> nn.Module:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(module, self.mesh.device_mesh(*self.owns), plan)


def model() -> nn.Module:
    torch.manual_seed(0)  # the same parameters on every rank
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def main() -> float:
    mesh = ProcessGroupMesh(dp=2, tp=2)
    methods = compose(mesh, Average(mesh, "dp"), Split(mesh, "tp"))  # an error unless each axis has one owner
    parallel, alone = methods.apply(model()), model()
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).double()
    parallel(methods.share(rows)).square().mean().backward()
    alone(rows).square().mean().backward()
    pairs = zip(parallel.parameters(), alone.parameters())
    return max((mine.grad.full_tensor() - whole.grad).abs().max().item() for mine, whole in pairs)


if __name__ == "__main__":
    worst = max(launch.spawn(main, 4))
    print(f"averaged along dp and split along tp, gradients differ from one process by {worst:.0e}")
    assert worst < 1e-14
    print("PASS")
