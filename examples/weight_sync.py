"""Train a small GPT on four processes, and generate text with the same weights on four others.

    python examples/weight_sync.py                            # starts eight processes
    torchrun --nproc-per-node 8 examples/weight_sync.py       # or runs in the processes of torchrun

The trainer shards the model with FSDP2 and tensor parallelism, 2 x 2. The generator holds two replicas, each with
tensor parallelism on two ranks. Each replica continues its own half of the prompts. Every ten steps a Resharder moves
the weights from the trainer to the generator, in place. Each rank receives its own shards and nothing else.

Rank 0 also continues the prompts, alone, with the same weights. PASS means that the replicas write the same text.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from gpt import ALPHABET, CODES, CONTEXT, GPT, batch_of, loss_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from pgmesh import ProcessGroupMesh, launch
from pgmesh.parallel import ShardedDataParallel, TensorParallel, attention_plan, compose, mlp_plan
from pgmesh.resharding import Resharder

STEPS, EVERY, RATE, SAMPLES, PROMPT, LENGTH = 20, 10, 1e-2, 4, 16, 60
CUTS = {**attention_plan("blocks.*", ["qkv"], "out"), **mlp_plan("blocks.*", ["up"], "down")}
LETTERS = [*ALPHABET]


def main() -> bool:
    """Run the program on one of the eight ranks. True if all texts are equal."""
    launch.join("gloo")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # rounding differs between the two, and must not change a letter

    trainer = ProcessGroupMesh(dp=2, tp=2, ranks=range(4), name="trainer")
    generator = ProcessGroupMesh(dp=2, tp=2, ranks=range(4, 8), name="generator")
    say(f"{trainer}\n\n{generator}\n")
    good = train(trainer, generator) if trainer.rank in trainer else serve(trainer, generator)

    passed = torch.tensor(int(good))
    dist.all_reduce(passed, dist.ReduceOp.MIN)
    say("PASS" if passed else "FAIL: one process with the same weights writes other text")
    return bool(passed)


def train(mesh: ProcessGroupMesh, generator: ProcessGroupMesh) -> bool:
    """Train on the first four ranks, and send the weights every ten steps."""
    methods = compose(mesh, TensorParallel(mesh, "tp", plan=CUTS), ShardedDataParallel(mesh, "dp"))
    model = methods.apply(GPT(tied=False))
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    sync = Resharder(mesh, generator, source=model)
    good, texts = True, list[str]()
    for step in range(1, STEPS + 1):
        inputs, targets = map(methods.share, batch_of(step))
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            moved = sync()
            say(f"step {step}: loss {loss.item():.2f}; rank 0 sent {moved.sent:,} bytes in {moved.seconds:.3f} s")
            good = check(model, mesh, texts) and good
    return good


def serve(trainer: ProcessGroupMesh, mesh: ProcessGroupMesh) -> bool:
    """Generate on the last four ranks, whenever weights arrive. Rank 0 compares the texts."""
    model = TensorParallel(mesh, "tp", plan=CUTS).apply(GPT(tied=False))
    for weight in model.parameters():
        nn.init.zeros_(weight)  # only the trainer's weights can give the right text
    sync = Resharder(trainer, mesh, target=model)
    for _ in range(STEPS // EVERY):
        moved = sync()
        assert moved.received == moved.floor, "a rank receives its own shards, and nothing else"
        texts = generate(model, slice(mesh.index("dp"), None, 2))
        dist.all_gather_object([None] * dist.get_world_size(), texts)
    return True


def check(model: nn.Module, mesh: ProcessGroupMesh, texts: list[str]) -> bool:
    """Compare what the replicas write with what rank 0 writes alone, which it returns in ``texts``."""
    whole = {name: whole_of(weight) for name, weight in model.state_dict().items()}
    gathered: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, None)
    if mesh.rank != 0:
        return True
    alone = GPT(tied=False)
    alone.load_state_dict(whole)
    before, texts[:] = list(texts), generate(alone, slice(None))
    say(f"    {texts[0]!r}")
    is_equal = all(gathered[rank] == texts[rank // 2 % 2 :: 2] for rank in range(4, 8))
    return is_equal and texts != before  # new weights write another text


def whole_of(weight: torch.Tensor) -> torch.Tensor:
    """The full tensor of a parameter, gathered along dp first, since dp sharded it last."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.redistribute(placements=[Replicate(), *weight.placements[1:]]).full_tensor()


@torch.no_grad()
def generate(model: nn.Module, samples: slice) -> list[str]:
    """Continue some of the prompts, which are pieces of the training text."""
    starts = torch.arange(SAMPLES)[samples, None] * 10_007
    codes = CODES[starts + torch.arange(PROMPT)]
    # With this noise the likeliest letter is a random one, and every process draws the same.
    uniform = torch.rand(SAMPLES, LENGTH, len(ALPHABET), generator=torch.Generator().manual_seed(0))
    noise = -(-uniform.log()).log()[samples]
    for i in range(LENGTH):
        logits = model(codes[:, -CONTEXT:])
        codes = torch.cat([codes, (logits[:, -1] + noise[:, i]).argmax(-1, keepdim=True)], 1)
    return ["".join(LETTERS[code] for code in row) for row in codes.tolist()]


def say(words: str = "") -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(words, flush=True)


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        passed = [main()]
    else:
        print(f"Starting eight processes on {os.cpu_count()} cores: each loads torch first ...\n", flush=True)
        passed = launch.spawn(main, 8, timeout=timedelta(minutes=5))
    sys.exit(0 if all(passed) else 1)
