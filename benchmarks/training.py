"""Benchmark of a training step with pgmesh's methods against the same program in plain torch.

Both programs train the same small GPT in the same four Gloo processes, a few steps of each in turn; every second round
has the reverse order, and in every second world the other program is built first. A figure is the median over the
rounds of all worlds of the CPU time of a step, summed over all threads of all ranks. Steps in which inputs are checked
come before. The checks are counted. Both programs have to compute the same weights.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from benchmarks.report import OURS, Figure, Target, medians
from pgmesh import ProcessGroupMesh
from pgmesh.launch import spawn
from pgmesh.parallel import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Method,
    PipelineParallel,
    Router,
    ShardedDataParallel,
    TensorParallel,
    attention_plan,
    compose,
    local,
    mix,
    mlp_plan,
)

RANKS, MICROBATCHES, STEPS_A_ROUND = 4, 4, 4
ROUNDS_OF_A_WORLD = 3
"""More worlds with fewer rounds: in one world, a program differed from itself on another Gloo group by up to 10 %."""
LAYERS, WIDTH, HEAD, VOCABULARY, CONTEXT, ROWS, EXPERTS = 4, 128, 32, 256, 64, 16, 8
FIRST, LAST = ("tokens", "places"), ("norm", "head")
PLAIN = "plain torch"
CASES = {"dp4": {"dp": 4}, "fsdp4": {"dp": 4}, **{f"{a}2 x dp2": {a: 2, "dp": 2} for a in ("tp", "pp", "cp")}}
"""The compared programs, and the sizes of their meshes."""

Program = tuple[nn.Module, Callable[[], Any]]
"""A module, and its training step."""


# ---- the model ----


class Block(nn.Module):
    """Causal attention, then an MLP. Rows of ``qkv`` are sorted by head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attention: Callable[..., Tensor] = scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, HEAD))
        q, k, v = heads.transpose(1, 2).unbind(3)
        x = x + self.out(self.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A small GPT. Modules of other pipeline stages are None.

    Args:
        positions: positions of this rank's part of a sequence; all if it is not given.
    """

    def __init__(self, positions: Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens: nn.Embedding | None = nn.Embedding(VOCABULARY, WIDTH)
        self.places: nn.Embedding | None = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm: nn.LayerNorm | None = nn.LayerNorm(WIDTH)
        self.head: nn.Linear | None = nn.Linear(WIDTH, VOCABULARY)
        self.positions = torch.arange(CONTEXT) if positions is None else positions

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.places is not None:
            x = self.tokens(x) + self.places(self.positions)
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def batch() -> tuple[Tensor, Tensor]:
    codes = torch.randint(VOCABULARY, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return codes[:, :-1].contiguous(), codes[:, 1:].contiguous()


def train(module: nn.Module, run: Callable[[], Any]) -> Program:
    """A program whose ``run`` runs forward and backward."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        run()
        optimizer.step()

    return module, step


def train_on(module: nn.Module, codes: Tensor, target: Tensor) -> Program:
    return train(module, lambda: loss_of(module(codes), target).backward())


# ---- the program with pgmesh ----


def with_pgmesh(case: str, mesh: ProcessGroupMesh) -> Program:
    methods = list[Method]()
    context = ContextParallel(mesh, "cp") if "cp" in case else None
    if context is not None:
        methods += [context, DataParallel(mesh, "dp")]
    elif case == "fsdp4" or "tp" in case:
        methods.append(ShardedDataParallel(mesh, "dp"))
    else:
        methods.append(DataParallel(mesh, "dp"))
    if "tp" in case:
        plan = {**attention_plan("blocks.*", ["qkv"], "out"), **mlp_plan("blocks.*", ["up"], "down")}
        methods.append(TensorParallel(mesh, "tp", plan=plan, heads=WIDTH // HEAD))
    if "pp" in case:
        methods.append(
            PipelineParallel(
                mesh, "pp", layers="blocks", first=FIRST, last=LAST, loss=loss_of, microbatches=MICROBATCHES
            )
        )
    together = compose(mesh, *methods)
    model = together.apply(Model(None if context is None else context.positions(CONTEXT)))
    codes, target = map(together.share, batch())
    if "pp" in case:
        return train(model, lambda: model.step(codes, target=target))
    return train_on(model, codes, target)


# ---- the same in plain torch ----


def with_torch(case: str) -> Program:
    rank = dist.get_rank()
    codes, target = batch()
    if case in ("dp4", "fsdp4"):
        mine = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
        if case == "fsdp4":
            return train_on(shard(Model(), init_device_mesh("cpu", (RANKS,))), codes[mine], target[mine])
        return train_on(DistributedDataParallel(Model()), codes[mine], target[mine])
    outer, inner = divmod(rank, 2)  # the other axis comes first in each mesh, and dp varies fastest
    mine = slice(inner * ROWS // 2, (inner + 1) * ROWS // 2)
    codes, target = codes[mine], target[mine]
    if "tp" in case:
        device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        model = Model()
        for block in model.blocks:
            parallelize_module(block, device_mesh["tp"], plan)
        return train_on(shard(model, device_mesh["dp"]), codes, target)
    across = [dist.new_group([i, i + 2]) for i in range(2)][inner]
    if "cp" in case:
        ring = Ring(across)
        model = Model(ring.cut(torch.arange(CONTEXT), 0))
        for block in model.blocks:
            block.attention = ring.attention
        return train_on(DistributedDataParallel(model), ring.cut(codes, 1), ring.cut(target, 1))
    replicas = [dist.new_group([2 * i, 2 * i + 1]) for i in range(2)][outer]
    model, half = Model(), LAYERS // 2
    model.blocks = model.blocks[half * outer : half * (outer + 1)]
    for name in LAST if outer == 0 else FIRST:
        setattr(model, name, None)
    wrapped = DistributedDataParallel(model, process_group=replicas)
    rows, hidden = codes[: len(codes) // MICROBATCHES], torch.empty(len(codes) // MICROBATCHES, CONTEXT, WIDTH)
    hidden.requires_grad_()
    logits = torch.empty(*rows.shape, VOCABULARY, requires_grad=True)
    shapes = ((rows,), (hidden,)) if outer == 0 else ((hidden,), (logits,))
    stage = PipelineStage(wrapped, outer, 2, torch.device("cpu"), *shapes, group=across)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_of)
    if outer == 0:
        return train(wrapped, lambda: schedule.step(codes))
    return train(wrapped, lambda: schedule.step(target=target, losses=[], return_outputs=False))


def shard(model: nn.Module, device_mesh: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=device_mesh)
    return fully_shard(model, mesh=device_mesh)


class Ring:
    """Causal ring attention over a group. Rank i of n has chunks i and 2n-1-i of the sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.n = group, dist.get_rank(group), dist.get_world_size(group)

    def cut(self, whole: Tensor, dimension: int) -> Tensor:
        chunks = whole.chunk(2 * self.n, dimension)
        return torch.cat([chunks[self.rank], chunks[2 * self.n - 1 - self.rank]], dimension)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out: Tensor = RingFunction.apply(q, k, v, self)
        return out

    def shift(self, tensor: Tensor, tag: int) -> tuple[Tensor, list[dist.Work]]:
        """Send a tensor to the next rank and receive one from the previous rank."""
        received, (following, previous) = torch.empty_like(tensor), ((self.rank + i) % self.n for i in (1, -1))
        send = dist.P2POp(dist.isend, tensor, group=self.group, tag=tag, group_peer=following)
        receive = dist.P2POp(dist.irecv, received, group=self.group, tag=tag, group_peer=previous)
        return received, dist.batch_isend_irecv([send, receive])

    def visible(self, source: int, length: int) -> tuple[slice, slice, Tensor | None]:
        """Queries and keys of another rank that see each other, and the mask."""
        if source == self.rank:
            return slice(length), slice(length), torch.ones(length, length, dtype=torch.bool).triu(1)
        half = length // 2
        return (slice(length), slice(half), None) if source < self.rank else (slice(half, length), slice(length), None)


class RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        out, log_sum = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), -torch.inf)
        keys_values = torch.cat([k, v], -1)
        for i in range(ring.n):
            following, works = ring.shift(keys_values, 0) if i + 1 < ring.n else (keys_values, [])
            rows, keys, mask = ring.visible((ring.rank - i) % ring.n, q.size(-2))
            key, value = keys_values[..., keys, :].chunk(2, -1)
            scores = q[..., rows, :] @ key.mT * q.size(-1) ** -0.5
            if mask is not None:
                scores = scores.masked_fill(mask, -torch.inf)
            before = log_sum[..., rows, :]
            after = torch.logaddexp(before, scores.logsumexp(-1, keepdim=True))
            out[..., rows, :] = out[..., rows, :] * (before - after).exp() + (scores - after).exp() @ value
            log_sum[..., rows, :] = after
            for work in works:
                work.wait()
            keys_values = following
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, log_sum = ctx.saved_tensors
        ring, scale, delta = ctx.ring, q.size(-1) ** -0.5, (gradient * out).sum(-1, keepdim=True)
        grad_q, keys_values = torch.zeros_like(q), torch.cat([k, v], -1)
        sums, sum_works = torch.zeros_like(keys_values), list[dist.Work]()
        for i in range(ring.n):
            following, works = ring.shift(keys_values, 0) if i + 1 < ring.n else (keys_values, [])
            rows, keys, mask = ring.visible((ring.rank - i) % ring.n, q.size(-2))
            query, grad_out, (key, value) = (
                q[..., rows, :],
                gradient[..., rows, :],
                keys_values[..., keys, :].chunk(2, -1),
            )
            scores = query @ key.mT * scale
            if mask is not None:
                scores = scores.masked_fill(mask, -torch.inf)
            probabilities = (scores - log_sum[..., rows, :]).exp()
            grad_scores = probabilities * (grad_out @ value.mT - delta[..., rows, :]) * scale
            grad_q[..., rows, :] += grad_scores @ key
            block = torch.zeros_like(keys_values)
            block[..., keys, :] = torch.cat([grad_scores.mT @ query, probabilities.mT @ grad_out], -1)
            for work in sum_works:
                work.wait()
            sums, sum_works = ring.shift(sums + block, 1)
            for work in works:
                work.wait()
            keys_values = following
        for work in sum_works:
            work.wait()
        grad_k, grad_v = sums.chunk(2, -1)
        return grad_q, grad_k, grad_v, None


# ---- measurement ----


def measure(case: str, rounds: int, ours_first: bool) -> tuple[list[int], dict[str, list[float]]]:
    """Checks of inputs in each of the first steps, and CPU seconds of a step in each round, by side.

    CPU seconds are those of all threads. They depend less on other load than the time of day does.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    with ProcessGroupMesh(**CASES[case]) as mesh:
        builders = {OURS: lambda: with_pgmesh(case, mesh), PLAIN: lambda: with_torch(case)}
        programs = {side: builders[side]() for side in ((OURS, PLAIN) if ours_first else (PLAIN, OURS))}
        exchanges = list[int]()
        for _ in range(4):
            gather = dist.all_gather_object
            with mock.patch("torch.distributed.all_gather_object", side_effect=gather) as counter:
                programs[OURS][1]()
            exchanges.append(counter.call_count)  # only the checks gather objects
            programs[PLAIN][1]()
        ours, plain = ([local(weight) for weight in programs[side][0].parameters()] for side in (OURS, PLAIN))
        if not all(torch.allclose(one, other, rtol=1e-3, atol=1e-5) for one, other in zip(ours, plain, strict=True)):
            raise ArithmeticError(f"{case}: the two programs have different weights")
        took: dict[str, list[float]] = defaultdict(list)
        for i in range(rounds):
            for side in list(programs)[:: -1 if i % 2 else 1]:
                dist.barrier()
                start = time.process_time()
                for _ in range(STEPS_A_ROUND):
                    programs[side][1]()
                took[side].append((time.process_time() - start) / STEPS_A_ROUND)
        dist.barrier()
        return exchanges, dict(took)


class Experts(nn.Module):
    """A layer of experts alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.router = mix, Router(WIDTH, EXPERTS, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, tokens: Tensor) -> Tensor:
        routes = self.router(tokens)
        return self.mix(tokens, routes.weights, routes.chosen, self.experts)


def bytes_of_experts(edp: int, ep: int) -> float:
    """Bytes of the weights, gradients and Adam's states of the experts on a rank, as a multiple of its equal part."""
    with ProcessGroupMesh(dp=RANKS) as mesh:
        together = compose(mesh, ShardedDataParallel(mesh, "dp"), ExpertParallel(mesh.view(edp=edp, ep=ep), "ep"))
        model = Experts()
        whole = sum(weight.nbytes for weight in model.experts.parameters())
        model = together.apply(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.randn(CONTEXT, WIDTH)).square().sum().backward()
        optimizer.step()
        storages = dict[int, int]()  # several gradients lie in one
        for weight in model.experts.parameters():
            states = [each for each in optimizer.state[weight].values() if each.ndim]
            found = [local(each).untyped_storage() for each in (weight.detach(), weight.grad, *states)]
            storages |= {each.data_ptr(): each.nbytes() for each in found}
        return sum(storages.values()) / (4 * whole / RANKS)


def figures(rounds: int, cases: Iterable[str] = CASES) -> list[Figure]:
    found = list[Figure]()
    for case in cases:
        times, first, later = {side: list[float]() for side in (OURS, PLAIN)}, 0, 0
        for world in range(math.ceil(rounds / ROUNDS_OF_A_WORLD)):
            arguments = case, ROUNDS_OF_A_WORLD, world % 2 == 0
            results = spawn(measure, RANKS, *arguments, timeout=timedelta(seconds=240))
            for side, values in times.items():
                values += [sum(each) for each in zip(*(took[side] for _, took in results))]
            first = max(first, *(counts[0] for counts, _ in results))
            later = max(later, *(max(counts[2:]) for counts, _ in results))
        found += [
            Figure(f"{case}: CPU time of a step", medians(times), targets=(Target(most=1.05, against=PLAIN),)),
            Figure(f"{case}: input checks in the first step", {OURS: first}, "", (Target(most=1),)),
            Figure(f"{case}: input checks from the third step on", {OURS: later}, "", (Target(most=0),)),
        ]
    for edp, ep in ((1, 4), (2, 2), (4, 1)):
        most = max(spawn(bytes_of_experts, RANKS, edp, ep, timeout=timedelta(seconds=240)))
        what = f"edp{edp} x ep{ep}: bytes of experts on a rank, of 1/{RANKS} of all"
        found.append(Figure(what, {OURS: most}, "x", (Target(most=1.05),)))
    return found
