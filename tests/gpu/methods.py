"""Each parallel method on the device, gradient by gradient against one process on the same device, in 64-bit floats."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from pgmesh import ProcessGroupMesh, parallel
from pgmesh.parallel import ContextParallel, DataParallel, ExpertParallel, ShardedDataParallel, TensorParallel, compose
from pgmesh.parallel.checkpoint import load, save
from pgmesh.parallel.gradients import local
from pgmesh.parallel.mixture import grouped_mm
from tests.gpu.device import DEVICE, placed
from tests.support import parallel_models
from tests.support.expert_models import ExpertBlock as Mixture, expert_layer
from tests.support.parallel_models import STEPS, WIDTH, assert_same, gradients_of, loss_of, optimizer_of, weights_of
from tests.support.pipelines import gpt_stages
from tests.support.tensor_plans import SEQUENCE_PLAN, VOCABULARY_PLAN

TOLERANCE = 1e-10  # 64-bit floats; the order of sums differs, and on a GPU it differs in each run


class Model(parallel_models.TinyGPT):
    """The tiny GPT with its position indices on the device of its input."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, torch.arange(x.shape[1], device=x.device) if positions is None else positions)


def model_of(block: Callable[[], nn.Module] | None = None) -> nn.Module:
    return Model(layers=2, block=block).to(DEVICE)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, target = parallel_models.batch(step)
    return codes.to(DEVICE), target.to(DEVICE)


def alone(model: nn.Module) -> parallel_models.TrainingRun:
    """The training of one process, on the same device."""
    return parallel_models.train_parallel(model, lambda rows: rows, batch=batch_of)


@contextmanager
def on_host_sync(mode: str) -> Iterator[None]:
    """Each operation of torch for which the host waits for the GPU raises an "error", or a warning in mode "warn"."""
    if DEVICE.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(
    together: parallel.Composition,
    model: nn.Module,
    expected: parallel_models.TrainingRun,
    *,
    context: ContextParallel | None = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    syncs: bool = False,
) -> None:
    """Three steps, compared with one process; all tensors stay on the device.

    From the second step on, the host does not wait for the GPU. The first step connects groups.

    Args:
        syncs: the host may wait for the GPU in each step, as experts do.
    """
    model = together.apply(model)
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        codes, target = (together.share(each) for each in batch_of(step))
        inputs = {} if context is None else {"positions": context.positions(parallel_models.CONTEXT, DEVICE)}
        optimizer.zero_grad()
        with around(), on_host_sync("default" if syncs or step == 0 else "error"):
            if hasattr(model, "step"):
                out = model.step(codes, target=target, **{name: x.expand(len(codes), -1) for name, x in inputs.items()})
                placed("losses", out or [codes])
            else:
                out = model(codes, **inputs)
                placed("outputs", [out, loss := loss_of(out, target)])
                loss.backward()
        gradients = gradients_of(model)
        placed("gradients", map(local, gradients.values()))
        assert_same(f"gradients of step {step}", gradients, expected.gradients[step], TOLERANCE)
        with on_host_sync("default" if step == 0 else "error"):
            optimizer.step()
    placed("weights", (local(weight) for _, weight in parallel_models.named_weights(model)))
    placed("what the optimizer keeps", moments(optimizer))
    assert_same("weights", weights_of(model), expected.weights, TOLERANCE)


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Optimizer state of each parameter, without the step counts, which torch keeps on the CPU."""
    return [local(each[name]) for each in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


# ---- training with each method ----


def sharded(mesh: ProcessGroupMesh) -> None:
    train(compose(mesh, ShardedDataParallel(mesh, "dp")), model_of(), alone(model_of()))


def hybrid(mesh: ProcessGroupMesh) -> None:
    method = ShardedDataParallel(mesh, "rep", "dp", replicate="rep")
    train(compose(mesh, method), model_of(), alone(model_of()))


def tensor(mesh: ProcessGroupMesh) -> None:
    method = TensorParallel(mesh, "tp", plan=VOCABULARY_PLAN, heads=4)
    train(compose(mesh, method, unowned=["dp"]), model_of(), alone(model_of()), around=loss_parallel)


def sequence(mesh: ProcessGroupMesh) -> None:
    method = TensorParallel(mesh, "tp", plan=SEQUENCE_PLAN)
    together = compose(mesh, ShardedDataParallel(mesh, "dp"), method)
    train(together, model_of(), alone(model_of()), around=loss_parallel)


def context(mesh: ProcessGroupMesh, kind: str) -> None:
    method = ContextParallel(mesh, "cp", attention=kind)
    together = compose(mesh, DataParallel(mesh, "dp"), method)
    train(together, model_of(), alone(model_of()), context=method)


def ulysses(mesh: ProcessGroupMesh) -> None:
    context(mesh, "ulysses")


def ring(mesh: ProcessGroupMesh) -> None:
    context(mesh, "ring")


def experts(mesh: ProcessGroupMesh) -> None:
    train(with_experts(mesh), model_of(Mixture), alone(model_of(Mixture)), syncs=True)


def with_experts(mesh: ProcessGroupMesh) -> parallel.Composition:
    moe = mesh.view(edp=-1, ep=min(4, mesh.size()))
    return compose(mesh, DataParallel(mesh, "dp"), ExpertParallel(moe, "ep"))


def one_host_sync(mesh: ProcessGroupMesh) -> None:
    """A layer of experts waits for the device once, forward and backward, as torch counts it."""
    layer, tokens = expert_layer(8).to(DEVICE), torch.randn(8, WIDTH, device=DEVICE, requires_grad=True)
    with_experts(mesh).apply(layer)
    weights, chosen = torch.rand(8, 2, device=DEVICE), torch.rand(8, 8, device=DEVICE).argsort(1)[:, :2]
    layer.mix(tokens, weights, chosen, layer.experts).sum().backward()  # connects the groups
    with on_host_sync("warn"), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        layer.mix(tokens, weights, chosen, layer.experts).sum().backward()
    syncs = [str(each.message) for each in found if "synchroniz" in str(each.message)]
    assert len(syncs) == int(DEVICE.type == "cuda"), syncs


def grouped_experts(mesh: ProcessGroupMesh) -> None:
    """Outputs and gradients of experts in bfloat16 as one grouped matrix product, and one after another."""
    found = []
    for grouped in (grouped_mm, None):
        torch.manual_seed(1)
        layer = expert_layer(8, stacked=True).to(DEVICE, torch.bfloat16)
        tokens = torch.randn(32, WIDTH, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        weights, chosen = torch.rand_like(tokens[:, :2]), torch.rand(32, 6, device=DEVICE).argsort(1)[:, :2]
        with_experts(mesh).apply(layer)
        with mock.patch("pgmesh.parallel.mixture.grouped_mm", grouped):
            out = layer.mix(tokens, weights, chosen, layer.experts)
        out.float().square().sum().backward()
        found.append([out.detach(), tokens.grad, *(local(weight.grad) for weight in layer.experts.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * other.abs().max().item())


class Ends(nn.Module):
    """A weight of the first stage, and a layer without weights on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.layers = nn.Linear(3, 1, bias=False), nn.ModuleList([nn.Identity(), nn.Identity()])


def norm_without_weights(mesh: ProcessGroupMesh) -> None:
    """Norm where the second stage has no weights, and where gradients are on the CPU."""
    for device in (DEVICE, torch.device("cpu")):
        pipeline = parallel.PipelineParallel(mesh, "pp", layers="layers", first=["start"], loss=loss_of, microbatches=2)
        both = compose(mesh, pipeline, unowned=["dp"])
        torch.manual_seed(0)
        model = both.apply(Ends().to(device))
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        assert abs(both.grad_norm().item() - 3**0.5) < 1e-6
        both.clip_grad_norm_(1.0)
        assert len([*model.parameters()]) == (mesh.index("pp") == 0)
        for weight in model.parameters():
            torch.testing.assert_close(weight.grad.norm().item(), 1.0, rtol=1e-4, atol=0)


def pipeline(mesh: ProcessGroupMesh) -> None:
    train(compose(mesh, gpt_stages(mesh), DataParallel(mesh, "dp")), model_of(), alone(model_of()))


def whole_loss(logits: DTensor, target: torch.Tensor) -> torch.Tensor:
    """Loss of logits that are sharded along the vocabulary, as a plain tensor for a pipeline."""
    return loss_of(logits, target).to_local()


def all_of_them(mesh: ProcessGroupMesh) -> None:
    """Tensor, context and sharded data parallelism in a pipeline."""
    tensor, context = TensorParallel(mesh, "tp", plan=VOCABULARY_PLAN), ContextParallel(mesh, "cp")
    sharded = ShardedDataParallel(mesh, "dp")
    every = compose(mesh, gpt_stages(mesh, loss=whole_loss), sharded, context, tensor)
    train(every, model_of(), alone(model_of()), context=context, around=loss_parallel)


# ---- norms, streams, checkpoints, meshes ----


def norm_and_clip(mesh: ProcessGroupMesh) -> None:
    """Norm over all ranks, in 32-bit floats on a GPU, and clipped gradients."""
    right = model_of()
    loss_of(right(batch_of(0)[0]), batch_of(0)[1]).backward()
    expected = nn.utils.clip_grad_norm_(right.parameters(), 0.1)
    both = compose(mesh, ShardedDataParallel(mesh, "dp"))
    model = both.apply(model_of())
    loss_of(model(both.share(batch_of(0)[0])), both.share(batch_of(0)[1])).backward()
    found = both.clip_grad_norm_(0.1)
    placed("the norm", [found])
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=0.0)
    assert_same("clipped gradients", gradients_of(model), gradients_of(right), 1e-6)


def broadcast(mesh: ProcessGroupMesh) -> None:
    torch.manual_seed(mesh.rank)
    layer = nn.BatchNorm1d(4, device=DEVICE)
    nn.init.normal_(layer.weight)
    layer.running_mean.fill_(mesh.rank)
    compose(mesh, DataParallel(mesh, "dp"), unowned=["tp"]).broadcast(layer)
    torch.manual_seed(mesh.ranks("dp")[0])
    right = nn.init.normal_(torch.empty(4, device=DEVICE))
    placed("weights and buffers", [layer.weight, layer.running_mean])
    assert torch.equal(layer.weight.detach(), right), "not the first rank's weight"
    assert layer.running_mean.tolist() == [mesh.ranks("dp")[0]] * 4, "not the first rank's buffer"


def seeds(mesh: ProcessGroupMesh) -> None:
    """Ranks draw different numbers along tp and the same along dp, on the device, and restore its generator."""
    torch.manual_seed(1)
    torch.randint(1 << 62, ())  # as an entry draws from the CPU's generator
    right = torch.rand(8, device=DEVICE)
    torch.manual_seed(1)
    with parallel.seeded_rng(parallel.seed_of(mesh, "tp", seed=7)):
        mine = torch.rand(8, device=DEVICE)
    assert torch.equal(torch.rand(8, device=DEVICE), right), "the entry changed the random numbers outside"
    everyone = [torch.empty_like(mine) for _ in mesh.ranks()]
    torch.distributed.all_gather(everyone, mine, group=mesh.group())
    drawn = {rank: tuple(each.tolist()) for rank, each in zip(mesh.ranks(), everyone)}
    for rank, other in ((a, b) for a in drawn for b in drawn):
        alike = mesh.layout.index_of(rank, "tp") == mesh.layout.index_of(other, "tp")
        assert (drawn[rank] == drawn[other]) is alike, f"rank {rank} and rank {other} drew {'other' * alike} numbers"


def saved_and_loaded(mesh: ProcessGroupMesh, other: ProcessGroupMesh, folder: str | Path) -> None:
    """Save a model that is sharded along dp, and load it along dp and tp."""
    both = compose(mesh, ShardedDataParallel(mesh, "dp"))
    model = both.apply(model_of())
    optimizer = optimizer_of(model.parameters())
    loss_of(model(both.share(batch_of(0)[0])), both.share(batch_of(0)[1])).backward()
    optimizer.step()
    save(folder, mesh, model, optimizer)
    tensor = TensorParallel(other, "tp", plan=VOCABULARY_PLAN)
    cut = compose(other, ShardedDataParallel(other, "dp"), tensor)
    loaded = cut.apply(Model(layers=2, seed=1).to(DEVICE))
    reader = optimizer_of(loaded.parameters())
    load(folder, other, loaded, reader)
    placed("loaded weights", map(local, loaded.parameters()))
    placed("what the loaded optimizer keeps", moments(reader))
    for step in range(1, STEPS):
        reader.zero_grad()
        with loss_parallel():
            loss_of(loaded(cut.share(batch_of(step)[0])), cut.share(batch_of(step)[1])).backward()
        reader.step()
    expected = alone(model_of()).weights
    assert_same("weights after a load and more steps", weights_of(loaded), expected, TOLERANCE)


def device_mesh(mesh: ProcessGroupMesh) -> None:
    """torch's DeviceMesh over these groups is of the device, and DTensor works on it."""
    found = mesh.device_mesh("dp", "tp")
    assert found.device_type == DEVICE.type, f"a DeviceMesh of {found.device_type}"
    whole = torch.arange(64.0, device=DEVICE).view(8, 8)
    shards = [torch.distributed.tensor.Shard(0), torch.distributed.tensor.Shard(1)]
    cut = torch.distributed.tensor.distribute_tensor(whole, found, shards)
    placed("a part and the whole", [cut.to_local(), cut.full_tensor()])
    assert torch.equal(cut.full_tensor(), whole), "a DTensor is not put together as it was"


class Case(NamedTuple):
    """A check of a mesh of eight ranks; on one rank every axis has size 1."""

    check: Callable[[ProcessGroupMesh], None]
    sizes: dict[str, int]
    needs: tuple[str, ...]
    """Collectives of the backend that a method needs, on the device."""


REDUCED = ("all_reduce", "broadcast", "all_gather")
SHARDED = (*REDUCED, "all_gather_into_tensor", "reduce_scatter_tensor")
CUT = (*REDUCED, "all_gather_into_tensor", "scatter")
CASES = {
    case.check.__name__: case
    for case in (
        Case(sharded, {"dp": 8}, SHARDED),
        Case(hybrid, {"rep": 2, "dp": 4}, SHARDED),
        Case(tensor, {"dp": 2, "tp": 4}, CUT),
        Case(sequence, {"dp": 2, "tp": 4}, (*SHARDED, *CUT)),
        Case(ulysses, {"dp": 2, "cp": 4}, (*REDUCED, "all_to_all_single")),
        Case(ring, {"dp": 2, "cp": 4}, (*REDUCED, "send")),
        Case(experts, {"dp": 8}, (*REDUCED, "all_to_all_single")),
        Case(one_host_sync, {"dp": 8}, (*REDUCED, "all_to_all_single")),
        Case(grouped_experts, {"dp": 8}, (*REDUCED, "all_to_all_single")),
        Case(norm_without_weights, {"pp": 2, "dp": 4}, REDUCED),
        Case(pipeline, {"pp": 2, "dp": 4}, (*REDUCED, "send")),
        Case(all_of_them, {"pp": 2, "dp": 1, "cp": 2, "tp": 2}, (*SHARDED, *CUT, "send")),
        Case(norm_and_clip, {"dp": 8}, SHARDED),
        Case(broadcast, {"dp": 4, "tp": 2}, REDUCED),
        Case(seeds, {"dp": 4, "tp": 2}, REDUCED),
        Case(device_mesh, {"dp": 4, "tp": 2}, CUT),
    )
}


def check(name: str, alone: bool) -> None:
    """A case on a mesh of this world."""
    case = CASES[name]
    with ProcessGroupMesh(**(dict.fromkeys(case.sizes, 1) if alone else case.sizes), name=name) as mesh:
        case.check(mesh)


def check_checkpoint(folder: str, alone: bool) -> None:
    sizes = {"dp": 1, "tp": 1} if alone else {"dp": 2, "tp": 4}
    with ProcessGroupMesh(dp=-1, name="saves") as mesh, ProcessGroupMesh(**sizes, name="loads") as other:
        saved_and_loaded(mesh, other, folder)
