"""Benchmark of moving models of 256 MB and 1 GB between eight processes, over Gloo.

The sides run in turn in the same processes; every second repetition has the reverse order. A figure is the median over
repetitions of the time from a barrier until the last rank is done. After each run, every target shard is compared with
the values that it must have, bit by bit.

The first case is FSDP2 x tensor parallelism to two replicas of tensor parallelism:

- gather and broadcast: each tensor is gathered whole on the trainer, broadcast to the others, and cut there;
- checkpoint: ``torch.distributed.checkpoint`` saves to memory (/dev/shm), and loads there.

In the other cases the trainer's ranks hold replicas of tensor parallelism, since Megatron-Core's ``swap_model_weights``
knows no other shards. Its Gloo service asks for a CUDA stream, which it does not use: without CUDA it gets None. In the
last case all eight ranks train, and the same eight generate.

Bare Gloo is not a peer, but a lower bound: sends and receives of as many bytes, from one buffer for each pair of ranks,
a copy of what the rank holds already, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from benchmarks.report import OURS, Figure, Target
from benchmarks.sides import FLOOR, import_quietly
from pgmesh import ProcessGroupMesh
from pgmesh.launch import spawn
from pgmesh.resharding import Resharder, ReshardPlan
from pgmesh.resharding.sharding import size_of

RANKS, BUCKET = 8, 16 << 20
MODELS = {"256 MB": 1, "1 GB": 2}
"""The factor of the width of each model."""
COLUMNS = {"q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "o": 1, "down": 1, "embed": 0, "head": 0}
"""The dimension that tensor parallelism shards. Norms are replicated."""
LAYERS = 4

Shapes = dict[str, tuple[int, ...]]


def shapes_of(factor: int) -> Shapes:
    """The shapes of a model by name."""
    width, hidden, vocabulary = 1024 * factor, 2816 * factor, 6144 * factor
    layer: Shapes = {
        **dict.fromkeys("qkvo", (width, width)),
        **dict.fromkeys(("gate", "up"), (hidden, width)),
        "down": (width, hidden),
        **dict.fromkeys(("norm1", "norm2"), (width,)),
    }
    layers = {f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {"embed": (vocabulary, width), **layers, "norm": (width,), "head": (vocabulary, width)}


GATHER, CHECKPOINT, MEGATRON = "gather and broadcast", "checkpoint", "Megatron-Core"
SHARDED, REPLICAS, SAME = "fsdp=2 tp=2 to dp=2 tp=2", "dp=2 tp=2 to tp=4", "same ranks, dp=4 tp=2 to dp=2 tp=4"
CASES = {
    SHARDED: (range(4), range(4, 8), {GATHER: 4.0, CHECKPOINT: 2.0}),
    REPLICAS: (range(4), range(4, 8), {MEGATRON: 1.0}),
    SAME: (range(8), range(8), {MEGATRON: 1.0}),
}
"""The ranks of the trainer and of the target, and how many times as long each peer is asked to take."""

State = dict[str, DTensor]


class Side:
    """The model on one mesh: sharded along tp, and along dp as FSDP2 does or replicated.

    Args:
        mesh: a mesh with axes dp and tp.
        shapes: the shapes of the model.
        fsdp: True if it is sharded along dp.
    """

    def __init__(self, mesh: ProcessGroupMesh, shapes: Shapes, *, fsdp: bool) -> None:
        self.mesh, self.shapes, self.fsdp = mesh, shapes, fsdp
        self.state: State = {}  # of this rank; empty outside the mesh
        for number, (name, shape) in enumerate(shapes.items() if mesh.rank in mesh else ()):
            whole = torch.arange(torch.Size(shape).numel()).add(number).remainder(65_521).float().view(shape)
            shard = self.cut(name, whole)
            if fsdp:
                shard = shard.chunk(mesh.size("dp"))[mesh.coord[0]]
            of_whole = {"shape": whole.shape, "stride": whole.stride()}
            self.state[name] = DTensor.from_local(shard.clone(), mesh.device_mesh(), self.placements(name), **of_whole)

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard along tp."""
        split = COLUMNS.get(name.rpartition(".")[2])
        return whole if split is None else whole.chunk(self.mesh.size("tp"), split)[self.mesh.coord[1]]

    def placements(self, name: str) -> list[Placement]:
        split = COLUMNS.get(name.rpartition(".")[2])
        along = _StridedShard(0, split_factor=self.mesh.size("tp")) if split == 0 else Shard(0)
        return [along if self.fsdp else Replicate(), Replicate() if split is None else Shard(split)]


def figures(repetitions: int) -> list[Figure]:
    """Figures of all cases: time, bytes and staging memory."""
    return [figure for model in MODELS for figure in figures_of(model, repetitions)]


def figures_of(model: str, repetitions: int) -> list[Figure]:
    """Figures of one model. A larger one is moved less often. Each case has its own processes, to free memory."""
    shapes, often = shapes_of(MODELS[model]), -(-repetitions // MODELS[model])
    found = []
    for case, (trainer, _, peers) in CASES.items():
        results = spawn(measure, RANKS, often, shapes, case, timeout=timedelta(seconds=600))
        times, moved, left_out = zip(*results)
        seconds = {side: median(map(max, zip(*(rank[side] for rank in times)))) for side in times[0]}
        targets = tuple(Target(factor, peer) for peer, factor in peers.items() if peer in seconds)
        targets += (Target(most=1.3, against=FLOOR),)
        sent, received, floor, staged = zip(*moved)
        mean = sum(sent) / len(trainer)
        found.append(Figure(f"{model}, {case}", seconds, "s", targets, left_out[0]))
        for what, most, ours, limit, other in (
            ("bytes received", 1.0, sum(received), sum(floor), "floor"),
            ("greatest sender", 1.1, max(sent), mean, "mean"),
            ("staging memory", 1.0, max(staged), BUCKET, "bucket"),
        ):
            found.append(Figure(what, {OURS: ours, other: limit}, "B", (Target(most=most, against=other),)))
    return found


def measure(
    repetitions: int, shapes: Shapes, case: str
) -> tuple[dict[str, list[float]], tuple[int, ...], dict[str, str]]:
    """Of one case: seconds of each repetition by side, the bytes of pgmesh, and the sides that cannot run."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch's checkpoint
    trains, generates, _ = CASES[case]
    tp = 2 if case == SHARDED else 4
    trainer = ProcessGroupMesh(dp=-1, tp=2, ranks=trains, name=f"trainer, {case}")
    rollout = ProcessGroupMesh(dp=-1, tp=tp, ranks=generates, name=f"rollout, {case}")
    source = Side(trainer, shapes, fsdp=case == SHARDED)
    target, truth = (Side(rollout, shapes, fsdp=False) for _ in range(2))
    sides, left_out = sides_of(case, source, target)
    times: dict[str, list[float]] = defaultdict(list)
    for repetition in range(repetitions + 1):
        for side, run in [*sides.items()][:: 1 if repetition % 2 else -1]:
            for tensor in target.state.values():
                tensor.to_local().zero_()
            dist.barrier()
            start = time.perf_counter()
            result = run()
            took = time.perf_counter() - start
            dist.barrier()
            for name, tensor in target.state.items() if side != FLOOR else ():
                if not torch.equal(tensor.to_local(), truth.state[name].to_local()):
                    raise ArithmeticError(f"{side}: {name} is wrong on rank {rollout.rank}")
            if repetition:  # the first one connects and plans
                times[side].append(took)
            if side == OURS:
                moved = result.sent, result.received, result.floor, result.staged
    return dict(times), moved, left_out


def sides_of(case: str, source: Side, target: Side) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """What moves the model on each side, and the reasons of those that cannot."""
    states = {"source": source.state, "target": target.state}  # which some ranks make later
    sync = Resharder(source.mesh, target.mesh, **states, staging_bytes=BUCKET, timeout=300)
    sides: dict[str, Callable[[], Any]] = {OURS: sync, FLOOR: bare(source, target)}
    if case == SHARDED:
        both = ProcessGroupMesh(5, ranks=[0, *target.mesh.ranks()], name="broadcast")
        group = both.group() if both.rank in both else None
        folder = [tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) if both.rank == 0 else ""]
        dist.broadcast_object_list(folder, src=0)
        sides[GATHER] = lambda: gather_and_broadcast(source, target, group)
        sides[CHECKPOINT] = lambda: save_and_load(source, target, folder[0])
        return sides, {}
    try:
        swap = import_quietly("megatron.core.resharding.refit").swap_model_weights
        models = megatron_model(source), megatron_model(target)
        with contextlib.ExitStack() as stack:
            if not torch.cuda.is_available():
                stack.enter_context(mock.patch.object(torch.cuda, "Stream", return_value=None))
            swap(*models, "gloo")
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:  # another version, or not installed
        return sides, {MEGATRON: f"cannot run: {error}"[:60]}
    sides[MEGATRON] = lambda: swap(*models, "gloo")
    return sides, {}


def bare(source: Side, target: Side) -> Callable[[], Any]:
    """Sends, receives and copies of as many bytes."""
    group = ProcessGroupMesh(RANKS, name=f"bare, {source.mesh.name}").group()
    ranks = [*range(RANKS)]
    sent, received = (dict.fromkeys(ranks, 0) for _ in range(2))
    held = 0
    for name, shape in source.shapes.items():
        sides = (source.mesh, source.placements(name), target.mesh, target.placements(name))
        plan = ReshardPlan(shape, *sides).of(dist.get_rank())
        for part in plan.sends:
            sent[part.peer] += 4 * part.size
        for part in plan.receives:
            received[part.peer] += 4 * part.size
        held += 4 * size_of(plan.copied or ((),))
    copied, copy = (torch.ones(held, dtype=torch.uint8) for _ in range(2))
    buffers = [
        (do, torch.ones(size, dtype=torch.uint8), peer)  # zeros would be one page of memory
        for do, sizes in ((dist.irecv, received), (dist.isend, sent))
        for peer, size in sizes.items()
        if size
    ]

    def run() -> None:
        batch = [dist.P2POp(do, buffer, peer, group) for do, buffer, peer in buffers]
        works = dist.batch_isend_irecv(batch) if batch else []
        copy.copy_(copied)
        for work in works:
            work.wait()

    return run


def gather_and_broadcast(source: Side, target: Side, group: Any) -> None:
    """Gather each tensor on the trainer, broadcast it to the target's ranks, and copy the shard there."""
    for name, shape in source.shapes.items():
        whole = torch.empty(shape)
        if source.state:
            weight = source.state[name]  # dp sharded it last, so it is gathered along dp first
            whole = weight.redistribute(placements=[Replicate(), weight.placements[1]]).full_tensor()
        if group is not None:
            dist.broadcast(whole, 0, group=group)
        if target.state:
            target.state[name].to_local().copy_(target.cut(name, whole))


def save_and_load(source: Side, target: Side, folder: str) -> None:
    """Save on the trainer, and load on the target's ranks."""
    if source.state:
        checkpoint.save(dict(source.state), checkpoint_id=folder, process_group=source.mesh.group())
    dist.barrier()
    if target.state:
        checkpoint.load(dict(target.state), checkpoint_id=folder, process_group=target.mesh.group())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def megatron_model(side: Side) -> nn.Module:
    """The state as a module that Megatron-Core can move. Ranks outside the mesh have one without parameters."""
    model = nn.Module()
    here = (
        side.mesh
        if side.state
        else ProcessGroupMesh(dp=1, tp=1, ranks=[side.mesh.rank], name=f"alone, {side.mesh.name}")
    )
    for name, tensor in side.state.items():
        parameter = nn.Parameter(tensor.to_local())  # the same memory
        split = COLUMNS.get(name.rpartition(".")[2])
        parameter.tensor_model_parallel, parameter.partition_dim = split is not None, split or 0
        model.register_parameter(name.replace(".", "_"), parameter)
    model.pg_collection = SimpleNamespace(tp=here.group("tp"), dp=here.group("dp"), pp=None, ep=None)
    model.config = SimpleNamespace(num_moe_experts=None)
    return model
