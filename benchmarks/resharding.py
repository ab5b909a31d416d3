"""Benchmark of moving a model of 256 MB from four trainer processes to four others, over Gloo.

The sides run in turn in the same processes; every second repetition has the reverse order. A figure is the median over
repetitions of the time from a barrier until the last rank is done. After each run, every target shard is compared with
the values that it must have, bit by bit.

The first case is FSDP2 x tensor parallelism to two replicas of tensor parallelism:

- gather and broadcast: each tensor is gathered whole on the trainer, broadcast to the others, and cut there;
- checkpoint: ``torch.distributed.checkpoint`` saves to memory (/dev/shm), and loads there.

In the second case the trainer's ranks hold replicas of tensor parallelism, of another size than the target's, since
Megatron-Core's ``swap_model_weights`` knows no other shards. Its Gloo service asks for a CUDA stream, which it does not
use: without CUDA it gets None.
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
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from benchmarks.report import OURS, Figure, Target
from benchmarks.sides import import_quietly
from pgmesh import ProcessGroupMesh, Resharder
from pgmesh.launch import spawn

RANKS, BUCKET = 8, 16 << 20
WIDTH, HIDDEN, VOCABULARY, LAYERS = 1024, 2816, 6144, 4
COLUMNS = {"q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "o": 1, "down": 1, "embed": 0, "head": 0}
"""The dimension that tensor parallelism shards. Norms are replicated."""
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (VOCABULARY, WIDTH),
    **{
        f"layers.{i}.{name}": shape
        for i in range(LAYERS)
        for name, shape in {
            **dict.fromkeys("qkvo", (WIDTH, WIDTH)),
            **dict.fromkeys(("gate", "up"), (HIDDEN, WIDTH)),
            "down": (WIDTH, HIDDEN),
            **dict.fromkeys(("norm1", "norm2"), (WIDTH,)),
        }.items()
    },
    "norm": (WIDTH,),
    "head": (VOCABULARY, WIDTH),
}
GATHER, CHECKPOINT, MEGATRON = "gather and broadcast", "checkpoint", "Megatron-Core"
SHARDED, REPLICAS = "fsdp=2 tp=2 to dp=2 tp=2", "dp=2 tp=2 to tp=4"

State = dict[str, DTensor]


class Side(NamedTuple):
    """One mesh with the model on it: the state of this rank, or {} if it is not in the mesh."""

    mesh: ProcessGroupMesh
    state: State


def figures(repetitions: int) -> list[Figure]:
    """Figures of both cases: time, bytes and staging memory."""
    results = spawn(measure, RANKS, repetitions, timeout=timedelta(seconds=240))
    found = []
    for case, peers in ((SHARDED, {GATHER: 4.0, CHECKPOINT: 2.0}), (REPLICAS, {MEGATRON: 2.0})):
        times, moved, left_out = ([rank[case][i] for rank in results] for i in range(3))
        seconds = {side: median(map(max, zip(*(rank[side] for rank in times)))) for side in times[0]}
        targets = tuple(Target(factor, peer) for peer, factor in peers.items() if peer in seconds)
        sent, received, floor, staged = zip(*moved)
        mean = sum(sent) / (RANKS / 2)
        found += [
            Figure(f"256 MB, {case}", seconds, "s", targets, left_out[0]),
            Figure(
                "bytes received", {OURS: sum(received), "floor": sum(floor)}, "B", (Target(most=1, against="floor"),)
            ),
            Figure("greatest sender", {OURS: max(sent), "mean": mean}, "B", (Target(most=1.1, against="mean"),)),
            Figure("staging memory", {OURS: max(staged), "bucket": BUCKET}, "B", (Target(most=1, against="bucket"),)),
        ]
    return found


def measure(repetitions: int) -> dict[str, tuple[dict[str, list[float]], tuple[int, ...], dict[str, str]]]:
    """For each case the seconds of each repetition by side, the bytes of pgmesh, and the sides that cannot run."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch's checkpoint
    found = {}
    for case in (SHARDED, REPLICAS):
        trainer = ProcessGroupMesh(dp=2, tp=2, ranks=range(4), name=f"trainer, {case}")
        target_sizes = {"dp": 2, "tp": 2} if case == SHARDED else {"dp": 1, "tp": 4}
        rollout = ProcessGroupMesh(ranks=range(4, 8), name=f"rollout, {case}", **target_sizes)
        source = Side(trainer, state_on(trainer, fsdp=case == SHARDED))
        target, truth = (Side(rollout, state_on(rollout, fsdp=False)) for _ in range(2))
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
                for name, tensor in target.state.items():
                    if not torch.equal(tensor.to_local(), truth.state[name].to_local()):
                        raise ArithmeticError(f"{side}: {name} is wrong on rank {rollout.rank}")
                if repetition:  # the first one connects and plans
                    times[side].append(took)
                if side == OURS:
                    moved = result.sent, result.received, result.floor, result.staged
        found[case] = dict(times), moved, left_out
    return found


def sides_of(case: str, source: Side, target: Side) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """What moves the model on each side, and the reasons of those that cannot."""
    sync = Resharder(source.mesh, target.mesh, source=source.state, target=target.state, buckets=BUCKET)
    sides: dict[str, Callable[[], Any]] = {OURS: sync}
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


def state_on(mesh: ProcessGroupMesh, *, fsdp: bool) -> State:
    """The model on a mesh: sharded along tp, and along dp as FSDP2 does, or replicated along dp."""
    state: State = {}
    for number, (name, shape) in enumerate(SHAPES.items() if mesh.rank in mesh else ()):
        whole = torch.arange(torch.Size(shape).numel()).add(number).remainder(65_521).float().view(shape)
        (dp, tp), split = mesh.coord, COLUMNS.get(name.rpartition(".")[2])
        shard, across = (
            (whole, Replicate()) if split is None else (whole.chunk(mesh.size("tp"), split)[tp], Shard(split))
        )
        along: Placement = Replicate()
        if fsdp:
            shard = shard.chunk(mesh.size("dp"))[dp]
            along = _StridedShard(0, split_factor=mesh.size("tp")) if split == 0 else Shard(0)
        state[name] = DTensor.from_local(
            shard.clone(),
            mesh.device_mesh(),
            [along, across],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    return state


def gather_and_broadcast(source: Side, target: Side, group: Any) -> None:
    """Gather each tensor on the trainer, broadcast it to the target's ranks, and copy the shard there."""
    for name, shape in SHAPES.items():
        whole = torch.empty(shape)
        if source.state:
            weight = source.state[name]  # dp sharded it last, so it is gathered along dp first
            whole = weight.redistribute(placements=[Replicate(), weight.placements[1]]).full_tensor()
        if group is not None:
            dist.broadcast(whole, 0, group=group)
        if target.state:
            split = COLUMNS.get(name.rpartition(".")[2])
            tp = target.mesh.coord[1]
            mine = whole if split is None else whole.chunk(target.mesh.size("tp"), split)[tp]
            target.state[name].to_local().copy_(mine)


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
