"""Train a small GPT on six processes, kill one of them at a random moment, and go on with a spare in its place.

    python examples/survive.py            # the rank and the moment are chosen at random
    python examples/survive.py --seed 7   # or chosen again

The mesh is dp=3 x tp=2 on ranks 0 to 5; ranks 6 and 7 stand by. The survivors agree on who is lost, a spare comes in,
and every rank applies its methods anew on the new mesh. Weights and optimizer state come to the spare from the living
replicas, and the step that was lost is done again. Then one process alone trains the same model on the same batches.
PASS means that the two runs agree in every loss.
"""

from __future__ import annotations

import argparse
import multiprocessing.connection
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, batch_of, loss_of
from torch.distributed.tensor import DTensor

from pgmesh import PgmeshError, ProcessGroupMesh, Resharder, launch
from pgmesh.parallel import TensorParallel, attention_plan, mlp_plan

SIZES, SPARES = {"dp": 3, "tp": 2}, [6, 7]
RANKS = 6 + len(SPARES)
STEPS, ROWS, RATE = 12, 30, 1e-2  # each replica reads a third of the rows
CUTS = {**attention_plan("blocks.*", ["qkv"], "out"), **mlp_plan("blocks.*", ["up"], "down")}
TOLERANCE = 1e-9  # in 64-bit floats only the order of sums differs; a wrong weight or batch makes 1e-5 or more
SECONDS = 60

State = dict[str, torch.Tensor]


# ---- on each rank ----


def run(rank: int, port: int, events: Any) -> None:
    """Train until the last step, on whichever mesh there is."""
    torch.set_num_threads(1)  # the other ranks share the cores
    torch.set_default_dtype(torch.float64)
    launch.join("gloo", timeout=SECONDS, replica=rank, replicas=RANKS, host="127.0.0.1", port=port)
    mesh = ProcessGroupMesh(SIZES, ranks=range(6), name="train")
    mesh.abort_when_lost()

    def tell(what: str, *more: float) -> None:
        events.send((time.monotonic(), rank, what, *more))

    states: dict[int, State] = {}  # the values before the last two steps, by number of finished steps
    model = None
    while max(states, default=-1) < STEPS:
        try:
            while rank not in mesh:
                mesh = mesh.stand_by(timeout=600)
            if model is None:
                model, optimizer = set_up(mesh)
                tell("rebuilt")
                states = agree_and_transfer(mesh, values(model, optimizer), states)
                tell("transferred")
            step = max(states)
            tell("begins", step)
            loss = train_one_step(mesh, model, optimizer, step)
            states = {step: states[step], step + 1: copy(values(model, optimizer))}
            tell("ends", step, loss)
        except (RuntimeError, PgmeshError):  # a lost rank, or another rank that has aborted the mesh
            if rank not in mesh:  # a spare: no other rank is left
                break
            tell("detected")
            mesh, model = mesh.shrink(spares=SPARES, timeout=SECONDS), None
            tell("agreed")
            if rank == min({*mesh} - {*SPARES}):
                print(mesh.shrunk, flush=True)
    dist.destroy_process_group()


def set_up(mesh: ProcessGroupMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model with its methods applied on this mesh, and an optimizer with its state."""
    model = TensorParallel(mesh, "tp", plan=CUTS).apply(GPT(tied=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.0))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # creates the state, and changes no weight
    for state in optimizer.state.values():
        state["step"].zero_()
    optimizer.param_groups[0]["lr"] = RATE
    return model, optimizer


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The weights and the optimizer's state on this rank, by name."""
    names = [name for name, _ in model.named_parameters()]
    found = dict(model.named_parameters())
    for name, state in zip(names, optimizer.state.values(), strict=True):
        found |= {f"{name}.{key}": tensor for key, tensor in state.items()}
    return {name: local(tensor.detach()) for name, tensor in found.items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copy(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def agree_and_transfer(mesh: ProcessGroupMesh, state: State, states: dict[int, State]) -> dict[int, State]:
    """Fill ``state`` with the values after the last step that all replicas finished, and return them with their step.

    Ranks without values, such as spares, get theirs from the ranks of their dp group, which hold the same shards.
    """
    newest = torch.full((RANKS,), -1)
    newest[mesh.rank] = max(states, default=-1)
    dist.all_reduce(newest, dist.ReduceOp.MAX, group=mesh.group())
    held = {rank: newest[rank].item() for rank in mesh if newest[rank] >= 0}
    if not held:  # the first step of all
        return {0: copy(state)}
    step = min(held.values())  # a rank may have finished one step more
    replicas = mesh.along("dp")
    givers = [index for index, rank in enumerate(replicas) if rank in held]
    takers = [index for index, rank in enumerate(replicas) if rank not in held]
    if mesh.rank in held:
        for name, tensor in states[step].items():
            state[name].copy_(tensor)
    if takers:
        side = {"source": state} if mesh.rank in held else {"target": state}
        Resharder(replicas.at(dp=givers), replicas.at(dp=takers), **side)()
    return {step: copy(state)}


def train_one_step(
    mesh: ProcessGroupMesh, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> float:
    """Loss of the whole batch. No rank finishes a step before all have begun it."""
    rows = slice(mesh.index("dp"), ROWS, mesh.size("dp"))
    inputs, targets = (each[:ROWS][rows] for each in batch_of(step))
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    gradients = [local(weight.grad) for weight in model.parameters()]
    total = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(total, group=mesh.group("dp"))  # torch's DDP takes no DTensors
    total /= mesh.size("dp")
    for gradient, mean in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    mean_loss = loss.detach() / len(mesh)
    dist.all_reduce(mean_loss, group=mesh.group())
    optimizer.step()
    return mean_loss.item()


# ---- the program that starts them ----


def train_and_kill(seed: int) -> tuple[dict[int, float], list[tuple[Any, ...]]]:
    """Loss of each step, and the events since the kill."""
    chosen = random.Random(seed)
    victim, at_step = chosen.randrange(6), chosen.randrange(2, STEPS - 2)
    with launch.StoreProcess() as store:  # it outlives the ranks
        processes = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        pipes = [processes.Pipe(duplex=False) for _ in range(RANKS)]
        ranks = [
            processes.Process(target=run, args=(rank, store.port, events), daemon=True)
            for rank, (_, events) in enumerate(pipes)
        ]
        try:
            for process, (_, events) in zip(ranks, pipes, strict=True):
                process.start()
                events.close()
            found = follow([events for events, _ in pipes], ranks, victim, at_step, chosen)
            for process in ranks:
                process.join(SECONDS)
            return found
        finally:
            for process in ranks:
                process.kill()


def follow(
    pipes: list[Any], ranks: list[Any], victim: int, at_step: int, chosen: random.Random
) -> tuple[dict[int, float], list[tuple[Any, ...]]]:
    """Read the events of the ranks, and kill one of them at a moment of a step."""
    losses: dict[int, float] = {}
    timeline: list[tuple[Any, ...]] = []
    began, killed, open_pipes = {}, 0.0, [*pipes]
    while len(losses) < STEPS or not killed:
        ready = multiprocessing.connection.wait(open_pipes, timeout=SECONDS)
        if not ready:
            raise TimeoutError(f"no rank said anything for {SECONDS} s")
        for pipe in ready:
            try:
                event = pipe.recv()
            except EOFError:
                open_pipes.remove(pipe)
                continue
            moment, rank, what, *more = event
            timeline.append(event)
            if what == "begins":
                began[rank, more[0]] = moment
            if what == "ends":
                losses[more[0]] = more[1]
            if what == "begins" and rank == victim and more[0] == at_step and not killed:
                last = moment - began[rank, at_step - 1]
                time.sleep(chosen.random() * last)
                killed = time.monotonic()
                ranks[victim].kill()
                print(f"step {at_step}: rank {victim} is killed {killed - moment:.3f} s after its begin", flush=True)
    return losses, [(moment - killed, *event) for moment, *event in timeline if moment > killed]


def train_alone() -> list[float]:
    """The losses of one process that nothing happens to."""
    model, losses = GPT(tied=False), []
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    for step in range(STEPS):
        inputs, targets = (each[:ROWS] for each in batch_of(step))
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(seed: int) -> bool:
    print(f"seed {seed}: six ranks train, and two stand by", flush=True)
    losses, events = train_and_kill(seed)
    for what in ("detected", "agreed", "rebuilt", "transferred", "ends"):
        # From the kill until the last rank is there, in its first event of this kind after the mesh was replaced.
        after = {rank: moment for moment, rank, event, *_ in events if event == "agreed"}
        firsts: dict[int, float] = {}
        for moment, rank, event, *_ in events:
            if event == what and (what == "detected" or moment >= after.get(rank, 0.0)):
                firsts.setdefault(rank, moment)
        print(f"  {max(firsts.values()):6.3f} s  {'next step done' if what == 'ends' else what}")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    alone = train_alone()
    furthest = max(abs(losses[step] - alone[step]) for step in range(STEPS))
    print(f"loss {losses[0]:.4f} -> {losses[STEPS - 1]:.4f} on the mesh, {alone[0]:.4f} -> {alone[-1]:.4f} alone")
    print(f"greatest difference {furthest:.0e}")
    passed = furthest <= TOLERANCE
    print("PASS" if passed else "FAIL")
    return passed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.randrange(1000), help="chooses the rank and the moment")
    sys.exit(0 if main(parser.parse_args().seed) else 1)
