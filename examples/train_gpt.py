"""Train a small GPT on eight processes of one machine: pipeline x data x tensor parallel, 2 x 2 x 2.

    python examples/train_gpt.py                              # starts eight processes
    torchrun --nproc-per-node 8 examples/train_gpt.py         # or runs in the processes of torchrun
    python examples/train_gpt.py --tied                       # the head is tied to the token embedding

The parallel methods are thin over torch's own: schedules, fully_shard and parallelize_module. Each is given
the axis it works along, and every group they use comes from one mesh. Then one process alone trains the same
model on the same batches. PASS means that the two runs agree, in every loss and in every weight.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from gpt import ALPHABET, GPT, LAYERS, TEXT, batch_of, loss_of
from torch.distributed.tensor import DTensor, Replicate

from pgmesh import ProcessGroupMesh, launch
from pgmesh.parallel import (
    PipelineParallel,
    ShardedDataParallel,
    TensorParallel,
    attention_plan,
    compose,
    mlp_plan,
)

STEPS, MICROBATCHES, RATE = 40, 2, 1e-2
CUTS = {**attention_plan("blocks.*", ["qkv"], "out"), **mlp_plan("blocks.*", ["up"], "down")}
STAGES = {"layers": "blocks", "first": ["tokens", "places"], "last": ["norm", "head"]}

# With 64-bit floats the two runs differ only by the order of sums: 1e-16 each, 1e-13 after forty steps.
# A wrong group, factor or batch gives 1e-5 or more. With 32-bit floats rounding gives 1e-4, which is too close.
TOLERANCE = 1e-9
FALL = 1.5  # minimum decrease of the loss: two models that learn nothing are equal too

Weights = dict[str, torch.Tensor]


def main(tied: bool) -> bool:
    """Run the program on one of the eight ranks."""
    launch.join("gloo")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)

    mesh = ProcessGroupMesh(pp=2, dp=2, tp=2)
    say(f"Eight ranks in a box:\n\n{mesh}\n")
    sums = [show_sums(mesh), show_opposite_orders(), show_second_mesh()]

    say(f"A GPT of {LAYERS} layers reads Python's manual: {len(TEXT):,} characters, {len(ALPHABET)} kinds.")
    start, used = time.perf_counter(), time.process_time()
    losses, weights = train_on_mesh(mesh, tied)
    middle, used = time.perf_counter(), time.process_time() - used
    alone, truth = train_alone(mesh, tied)
    end = time.perf_counter()
    say_times(mesh, middle - start, end - middle, used)

    return verdict(all(sums), losses, alone, furthest(mesh, weights, truth))


# ---- Groups along any axes, in any order, of several meshes ----


def show_sums(mesh: ProcessGroupMesh) -> bool:
    """Sum 2**rank along each combination of axes: the bits of the sum are the ranks that took part."""
    say("axes       blocks   rank 0's block    sum of 2**rank")
    good = [sum_is_right(mesh, *axes) for axes in combinations_of(mesh)]
    for axes, right in zip(combinations_of(mesh), good):
        block, blocks = mesh.ranks(*axes), len(mesh.partition(*axes))
        names, members = " ".join(map(str, axes)), " ".join(map(str, block))
        say(f"{names:<9} {blocks:>7}   {members:<17} {sum_of(block):>14}   {judged(right)}")
    say()
    return all(good)


def show_opposite_orders() -> bool:
    """Create the groups in one order on even ranks and in the opposite order on odd ranks."""
    with ProcessGroupMesh(pp=2, dp=2, tp=2, name="opposite") as mesh:
        order = combinations_of(mesh)
        start = time.perf_counter()
        for axes in order if mesh.rank % 2 == 0 else reversed(order):
            mesh.group(*axes)  # does not wait for other ranks
        made = time.perf_counter()
        good = all(sum_is_right(mesh, *axes) for axes in order)
        used = time.perf_counter()
    say(f"Odd ranks asked for {len(order)} groups in the opposite order, and nobody hung: it took")
    say(f"{made - start:.3f} s to make them, {used - made:.3f} s to connect and sum: {judged(good)}.\n")
    return good


def show_second_mesh() -> bool:
    """Create a mesh of another shape in the same processes, which shares no groups with the first."""
    with ProcessGroupMesh(dp=4, cp=2, name="second") as mesh:
        good = all(sum_is_right(mesh, *axes) for axes in combinations_of(mesh))
        say(f"A second mesh in the same processes, its sums {judged(good)}:\n\n{mesh}\n")
    return good


def combinations_of(mesh: ProcessGroupMesh) -> list[tuple[str | int, ...]]:
    return [axes for n in range(len(mesh.axes)) for axes in combinations(mesh.axes, n + 1)]


def judged(good: bool) -> str:
    return "right on every rank" if good else "WRONG"


def sum_of(ranks: Iterable[int]) -> int:
    return sum(2**rank for rank in ranks)


def sum_is_right(mesh: ProcessGroupMesh, *axes: str | int) -> bool:
    total = torch.tensor(2**mesh.rank)
    dist.all_reduce(total, group=mesh.group(*axes))
    good = torch.tensor(int(total.item() == sum_of(mesh.ranks(*axes))))
    dist.all_reduce(good, dist.ReduceOp.MIN, group=mesh.group())  # true only if it is true on every rank
    return bool(good)


# ---- Training on the mesh and on one rank ----


def train_on_mesh(mesh: ProcessGroupMesh, tied: bool) -> tuple[list[float], Weights]:
    """Loss of each step, and the final parameters of this rank's stages."""
    model = GPT(tied)
    total = sum(weight.numel() for weight in model.parameters())

    methods = compose(
        mesh,
        TensorParallel(mesh, "tp", plan=CUTS),
        ShardedDataParallel(mesh, "dp", reshard_after_forward=False),
        PipelineParallel(mesh, "pp", **STAGES, loss=loss_of, microbatches=MICROBATCHES),
    )
    model = methods.apply(model)
    mine = sum(weight.to_local().numel() for weight in model.parameters())
    say(f"Of its {total:,} weights rank 0 holds {mine:,}.")

    optimizer = torch.optim.AdamW(model.parameters(), RATE)

    curve = []
    for step in progress("on the mesh"):
        inputs, targets = (methods.share(rows) for rows in batch_of(step))  # each replica reads different rows
        optimizer.zero_grad()
        losses = model.step(inputs, target=targets)
        optimizer.step()
        curve.append(mean_loss(mesh, losses))
    return curve, {name: whole(weight) for part in model.parts for name, weight in part.state_dict().items()}


def mean_loss(mesh: ProcessGroupMesh, losses: list[torch.Tensor]) -> float:
    """Loss of the whole batch, on every rank, from the losses on the ranks of the last stage."""
    share = torch.stack(losses).mean() / mesh.size("dp") if losses else torch.zeros(())
    dist.all_reduce(share, group=mesh.group("pp", "dp"))
    return share.item()


def whole(weight: DTensor) -> torch.Tensor:
    """The full tensor of a parameter, gathered along dp first, since dp sharded it last."""
    return weight.redistribute(placements=[Replicate(), *weight.placements[1:]]).full_tensor()


def train_alone(mesh: ProcessGroupMesh, tied: bool) -> tuple[list[float], Weights]:
    """The same training on rank 0 alone. The other ranks wait for the result."""
    out: list[Any] = [[], {}]
    if mesh.rank == 0:
        model = GPT(tied)
        optimizer = torch.optim.AdamW(model.parameters(), RATE)
        for step in progress("alone"):
            inputs, targets = batch_of(step)
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            out[0].append(loss.item())
        out[1] = model.state_dict()
    dist.broadcast_object_list(out, src=0, group=mesh.group())
    return out[0], out[1]


# ---- Comparison ----


def furthest(mesh: ProcessGroupMesh, weights: Weights, truth: Weights) -> float:
    """Maximum difference of any parameter of any stage."""
    most = torch.stack([(weight - truth[name]).abs().max() for name, weight in weights.items()]).max()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.group())
    return most.item()


def verdict(sums: bool, losses: list[float], alone: list[float], in_weights: float) -> bool:
    in_losses = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    fell = losses[0] - sum(losses[-5:]) / 5
    say(chart(losses, alone))
    say(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on the mesh, {alone[0]:.4f} -> {alone[-1]:.4f} alone")
    say(f"greatest difference {in_losses:.0e} in a loss, {in_weights:.0e} in a weight after the last step\n")
    checks = {
        "a sum of 2**rank is wrong": sums,
        f"the losses differ by more than {TOLERANCE:.0e}": in_losses <= TOLERANCE,
        f"the weights differ by more than {TOLERANCE:.0e}": in_weights <= TOLERANCE,
        f"the loss fell by {fell:.2f}, less than {FALL}": fell >= FALL,
    }
    wrong = [reason for reason, good in checks.items() if not good]
    passed = f"both agree to {TOLERANCE:.0e}, and the loss fell by {fell:.2f}"
    say(f"FAIL: {'; '.join(wrong)}" if wrong else f"PASS: {passed}")
    return not wrong


def chart(losses: list[float], alone: list[float], height: int = 12) -> str:
    """Both loss curves, one column for each step."""
    top, bottom = max(losses + alone), min(losses + alone)
    level = (top - bottom) / (height - 1)
    lines = []
    for row in range(height):
        here = [[round((top - loss) / level) == row for loss in curve] for curve in (losses, alone)]
        marks = "".join(" o+⊕"[a + 2 * b] for a, b in zip(*here, strict=True))
        lines.append(f"{top - row * level:5.2f} │{marks.rstrip()}")
    steps = f"step 1 to {len(losses)}"
    return "\n".join([" loss", *lines, f"      └{'─' * len(losses)}", f"       {steps}:  o mesh  + alone  ⊕ both\n"])


# ---- Output ----


def say_times(mesh: ProcessGroupMesh, on_mesh: float, alone: float, used: float) -> None:
    """Print both times, and why the mesh is slower on a machine like this, if it is."""
    total = torch.tensor(used)
    dist.all_reduce(total, group=mesh.group())
    say(f"{STEPS} steps took {on_mesh:.1f} s on the mesh and {alone:.1f} s alone.")
    if on_mesh > alone:
        where = f"{total:.1f} s of processor time on {os.cpu_count()} cores"
        say(f"The mesh is slower here: its eight processes used {where}.")
        say("This model is so small that a step is mostly Python, which every process runs, and waiting for messages.")
        say("A mesh pays where a model is too large, or too slow, for one device.")
    say()


def say(words: str = "") -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(words, flush=True)


def progress(what: str) -> Iterable[int]:
    """Step numbers, with a progress bar on a terminal and a line for every ten steps elsewhere."""
    if dist.get_rank() != 0:
        return range(STEPS)
    if not sys.stdout.isatty():
        return lines(what)
    try:
        from rich.progress import track
    except ImportError:
        return plain_bar(what)
    return track(range(STEPS), what, transient=True)


def lines(what: str) -> Iterable[int]:
    for step in range(STEPS):
        yield step
        if (step + 1) % 10 == 0:
            say(f"  {what}: step {step + 1} of {STEPS}")


def plain_bar(what: str) -> Iterable[int]:
    for step in range(STEPS):
        print(f"\r{what} [{'#' * step:.<{STEPS}}]", end="", flush=True)
        yield step
    print("\r\033[K", end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT on a mesh of eight processes.")
    parser.add_argument("--tied", action="store_true", help="let the head share the token embedding's weight")
    tied = parser.parse_args().tied
    if dist.is_torchelastic_launched():
        passed = [main(tied)]
    else:
        print(f"Starting eight processes on {os.cpu_count()} cores: each loads torch first ...\n", flush=True)
        passed = launch.spawn(main, 8, tied, timeout=timedelta(minutes=5))
    sys.exit(0 if all(passed) else 1)
