"""Train on six ranks while two stand by, and go on without the ranks that are lost, are stopped or come late.

    python examples/elastic.py             # starts a store and eight processes of this file
    python examples/elastic.py --fsdp 2    # weights are sharded by FSDP2; otherwise by tensor parallelism
    python examples/elastic.py --rank 3 --host n0 --port 29500   # is one of the eight; the store is elsewhere

Kill or stop any of the processes: each line begins with the rank and the process that printed it. ``survive.py`` does
it at a random moment, and compares the losses with those of one process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, mse_loss

from pgmesh import MembershipError, MissingRanksError, PgmeshError, ProcessGroupMesh, launch
from pgmesh.resharding import Resharder

STEPS, ROWS, WIDTH, RATE = 100, 12, 16, 1e-2  # the rows of a batch can be split evenly over 2, 3, 4 or 6 parts

State = dict[str, torch.Tensor]  # this rank's shards of the weights and of the optimizer's state, by name


def run(rank: int, host: str, port: int, fsdp: int) -> None:
    """Train or stand by, until all steps are done."""
    launch.join("gloo", timeout=60, replica=rank, replicas=8, host=host, port=port)
    mesh = ProcessGroupMesh(dp=3, fsdp=fsdp, tp=-1, ranks=range(6), name="train")  # on all eight ranks
    mesh.abort_when_lost()  # optional: notice stopped or unreachable ranks, in 5 to 7.5 s
    standing_by = rank not in mesh
    saved: dict[int, State] = {} if standing_by else {0: {}}  # by step; {} is the new model
    failed_after: int | None = None
    while True:
        try:
            if not standing_by:
                train(mesh, saved)
                break
            mesh = mesh.stand_by(timeout=86400)
        except (RuntimeError, PgmeshError) as error:  # a lost rank, or an aborted mesh
            say(rank, f"{error}")
            if standing_by:  # no rank is left, or a day has passed
                break
            try:
                mesh = mesh.shrink("dp", spares=range(8), timeout=120)  # on every rank that is left
            except MembershipError as taken_for_lost:  # the others went on: it is a spare now
                say(rank, f"{taken_for_lost}")
                standing_by = True
                continue
            except MissingRanksError:  # too few ranks are left
                if STEPS in saved:  # the others have finished
                    break
                raise
            newest = max(saved, default=-1)
            if not mesh.shrunk.lost and failed_after == newest:
                raise  # no rank is lost, and no step was done since: an error of the program
            failed_after = newest
        say(rank, f"{mesh.shrunk}")
        standing_by = rank not in mesh
        if rank in mesh.shrunk.replaced_by.values():  # it came in as a spare: the others may be many steps ahead
            saved.clear()
    dist.destroy_process_group()


def train(mesh: ProcessGroupMesh, saved: dict[int, State]) -> None:
    """Train on this mesh until the last step is done on all ranks."""
    model, optimizer = set_up(mesh)
    step = agree_and_transfer(mesh, values(model, optimizer), saved)
    say(mesh.rank, f"goes on after step {step}")
    while step < STEPS:
        loss = train_one_step(mesh, model, optimizer, step)
        step += 1
        saved[step] = copy(values(model, optimizer))
        saved.pop(step - 2, None)  # another rank may need the step before this one
        if mesh.index() == 0:
            say(mesh.rank, f"step {step}: loss {loss!r}")
    dist.all_reduce(torch.ones(1), group=mesh.group())  # no rank leaves before all are done: one may be lost still


def set_up(mesh: ProcessGroupMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model with its parallel methods on this mesh, and the optimizer with its state."""
    mesh.connect(*mesh.axes, mesh.axes, timeout=600)  # every group that is used below; a rank may start late
    model = Model()
    parallelize_module(model, mesh.device_mesh("tp"), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh.device_mesh("dp", "fsdp"))  # replicated along dp, sharded along fsdp
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.0))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # creates the state, and changes no weight
    for state in optimizer.state.values():
        state["step"].zero_()
    optimizer.param_groups[0]["lr"] = RATE
    return model, optimizer


def agree_and_transfer(mesh: ProcessGroupMesh, state: State, saved: dict[int, State]) -> int:
    """Set ``state`` to the values after the last step that all ranks with weights have finished, and return its number.

    A rank without weights, such as a spare, gets them from the ranks of its dp group, which have the same shards.
    """
    newest = torch.full((dist.get_world_size(),), -1)
    newest[mesh.rank] = max(saved, default=-1)
    dist.all_reduce(newest, dist.ReduceOp.MAX, group=mesh.group())
    steps = {rank: int(newest[rank]) for rank in mesh if newest[rank] >= 0}
    for block in mesh.partition("dp"):
        if steps.keys().isdisjoint(block):
            raise RuntimeError(f"no rank is left that has the shards of ranks {block}: start from a checkpoint")
    step = min(steps.values())
    if mesh.rank in steps:
        for name, tensor in saved[step].items():
            state[name].copy_(tensor)
    replicas = mesh.along("dp")
    givers = [index for index, rank in enumerate(replicas) if rank in steps]
    takers = [index for index, rank in enumerate(replicas) if rank not in steps]
    if takers:
        side = {"source": state} if mesh.rank in steps else {"target": state}
        Resharder(replicas.at(dp=givers), replicas.at(dp=takers), **side)()
    saved.clear()
    saved[step] = copy(state)
    return step


def train_one_step(mesh: ProcessGroupMesh, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Loss of the whole batch. No rank finishes a step before all have begun it, so they are at most one step apart."""
    inputs, targets = (rows[mesh.index("dp", "fsdp") :: mesh.size("dp", "fsdp")] for rows in batch_of(step))
    optimizer.zero_grad()
    loss = mse_loss(model(inputs), targets)
    loss.backward()  # averages the gradients along dp and fsdp
    mean = loss.detach() / len(mesh)
    dist.all_reduce(mean, group=mesh.group())  # a collective of all ranks, before the weights change
    optimizer.step()
    return mean.item()


class Model(nn.Module):
    """A small model, built alike on every rank. In 64-bit floats, the losses differ by the order of sums alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH).double(), nn.Linear(4 * WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(gelu(self.up(x)))


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, alike on every rank."""
    inputs = torch.randn(ROWS, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sin()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """This rank's shards, by name. They are the tensors themselves."""
    found = dict(model.named_parameters())
    for name, weight in model.named_parameters():
        found |= {f"{name}.{key}": tensor for key, tensor in optimizer.state[weight].items()}
    shards = {name: tensor.detach() for name, tensor in found.items()}
    return {name: shard.to_local() if isinstance(shard, DTensor) else shard for name, shard in shards.items()}


def copy(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def say(rank: int, text: str) -> None:
    print(f"rank {rank} (process {os.getpid()}): {text}", flush=True)


def start_all(options: list[str]) -> int:
    """Start a store and eight processes of this file, and return their greatest exit status."""
    with launch.StoreProcess() as store:  # it outlives the ranks
        command = [sys.executable, __file__, "--port", str(store.port), *options]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(8)]
        return max(process.wait() for process in ranks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rank", type=int, help="of this process; without it, all eight are started")
    parser.add_argument("--host", default="127.0.0.1", help="of the store")
    parser.add_argument("--port", type=int, help="of the store")
    parser.add_argument("--fsdp", type=int, default=1, choices=[1, 2], help="ranks along which FSDP2 shards weights")
    given = parser.parse_args()
    if given.rank is None:
        sys.exit(start_all(["--fsdp", str(given.fsdp)]))
    torch.set_num_threads(1)  # the ranks share the cores
    run(given.rank, given.host, given.port, given.fsdp)
