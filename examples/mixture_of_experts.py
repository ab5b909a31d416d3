"""A mixture of experts reads Python's manual: its dense layers on one view of four ranks, its experts on another.

Dense layers are sharded along dp=4. The eight experts of each layer are shared out along ep=2, four to a rank, and
these are sharded along edp=2. A router sends each character to two experts, wherever they are, by an all-to-all with as
many rows as there are. Then this process alone trains the same model on the same batches.
PASS means that the ranks ended with the weights of one process, and that it learnt.
"""

from __future__ import annotations

import time

import torch
from gpt import ALPHABET, CONTEXT, HEAD, WIDTH, batch_of, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.functional import gelu, scaled_dot_product_attention

from pgmesh import ProcessGroupMesh, launch
from pgmesh.parallel import ExpertLinear, ExpertParallel, Router, ShardedDataParallel, compose, local, mix

LAYERS, EXPERTS, STEPS, RATE = 2, 8, 12, 1e-2
WHOLE = StateDictOptions(full_state_dict=True)
BALANCE = 0.01  # weight of the load-balance loss
TOLERANCE = 1e-9  # in 64-bit floats only the order of sums differs, 1e-16 at a time; a wrong group makes 1e-5 or more


class Experts(nn.Module):
    """All experts of a layer. Each weight is experts x outputs x inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = ExpertLinear(EXPERTS, WIDTH, WIDTH), ExpertLinear(EXPERTS, WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Rows are sorted by expert; counts has the number of those of each expert."""
        return self.down(gelu(self.up(rows, counts)), counts)


class Layer(nn.Module):
    """Causal attention, then a mixture of experts. ExpertParallel replaces its ``mix`` attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.router, self.mix = Router(WIDTH, EXPERTS, top_k=2), mix
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, HEAD)).transpose(1, 2).unbind(3)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        tokens = self.norm2(x).flatten(0, 1)
        routes = self.router(tokens)
        mixed = self.mix(tokens, routes.weights, routes.chosen, self.experts)
        return x + mixed.view_as(x), routes.balance, routes.chosen


class Reader(nn.Module):
    """The model, with the same parameters in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, len(ALPHABET), bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits, the load-balance loss, and the characters sent to each expert of the last layer."""
        x, uneven, chosen = self.tokens(x) + self.places(torch.arange(x.shape[1])), torch.zeros(()), None
        for layer in self.layers:
            x, balance, chosen = layer(x)
            uneven = uneven + balance
        return self.head(x), uneven, torch.bincount(chosen.flatten(), minlength=EXPERTS)


def train(model: nn.Module, share=lambda rows: rows) -> tuple[list[float], torch.Tensor]:
    """Loss of each step over the rows of this process, and the expert loads of the last step."""
    optimizer, losses, loads = torch.optim.AdamW(model.parameters(), RATE), [], torch.zeros(())
    for step in range(STEPS):
        inputs, targets = (share(rows) for rows in batch_of(step))
        optimizer.zero_grad()
        logits, uneven, loads = model(inputs)
        loss = loss_of(logits, targets)
        (loss + BALANCE * uneven).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, loads


def main() -> tuple[str, list[float], torch.Tensor, int, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)  # the other ranks share the cores
    mesh = ProcessGroupMesh(dp=4)
    moe = mesh.view(edp=2, ep=2)  # the same ranks with other axes
    together = compose(mesh, ShardedDataParallel(mesh, "dp"), ExpertParallel(moe, "ep"))
    model = together.apply(Reader())
    losses, loads = train(model, together.share)
    held = sum(local(weight).numel() for weight in model.parameters())
    return f"{mesh}\n\n{moe}", losses, loads, held, get_model_state_dict(model, options=WHOLE)


if __name__ == "__main__":
    start = time.perf_counter()
    ranks = launch.spawn(main, 4)
    print(f"The same four ranks, as the dense layers and as the experts see them:\n\n{ranks[0][0]}\n")
    weights, whole = ranks[0][4], sum(weight.numel() for weight in ranks[0][4].values())
    print(f"weights on each rank: {', '.join(f'{rank[3]:,}' for rank in ranks)}, of {whole:,}")
    middle = time.perf_counter()
    torch.set_num_threads(1)  # as on each rank, so that times are comparable
    model = Reader()
    alone, loads = train(model)
    truth = model.state_dict()
    print(
        f"\n{STEPS} steps: {middle - start:.1f} s with starting four ranks, {time.perf_counter() - middle:.1f} s alone"
    )

    losses = [sum(each) / 4 for each in zip(*(rank[1] for rank in ranks))]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on the mesh, {alone[0]:.4f} -> {alone[-1]:.4f} alone")
    sent = sum(rank[2] for rank in ranks)
    print(f"characters sent to each expert of the last layer in the last step: {sent.tolist()}")
    furthest = max((weight - truth[name]).abs().max().item() for name, weight in weights.items())
    in_losses = max(abs(a - b) for a, b in zip(losses, alone))
    print(f"greatest difference {in_losses:.0e} in a loss, {furthest:.0e} in a weight after the last step")
    assert weights.keys() == truth.keys(), "some weights are on no rank"
    assert max(furthest, in_losses) < TOLERANCE, "the mesh and one process differ"
    assert sent.equal(loads), "tokens went to other experts"
    assert losses[-1] < losses[0] - 1, "it learnt nothing"
    print("PASS")
