"""Compositions drawn at random, each trained three steps and compared with one process in 64-bit floats.

    python -m tests.parallel.random_compositions --count 500
    python -m tests.parallel.random_compositions --only 17,203

Each seed is one composition: a mesh, methods on it, a model and a way of training. Its result is one of three: it
trains (losses, gradients, norms and weights are those of one process), it is refused (by an error that says why), or it
is wrong (another difference, a hang, or a crash). The exit status is 1 if one was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel, loss_parallel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from pgmesh import PgmeshError, ProcessGroupMesh, parallel
from pgmesh.launch.spawning import Outcome
from pgmesh.parallel import Composition, ContextParallel, ExpertParallel, Method, TensorParallel, compose
from pgmesh.parallel.schedules import SCHEDULES
from tests.support import expert_models, parallel_models
from tests.support.expert_models import ExpertBlock
from tests.support.own_methods import AverageLater
from tests.support.parallel_models import TOLERANCE, Adapted, TinyGPT, TrainingRun, batch, named_weights, optimizer_of
from tests.support.pipelines import gpt_stages
from tests.support.tensor_plans import BLOCK_PLAN, EMBEDDED_PLAN, GATHERED_PLAN, SEQUENCE_PLAN, VOCABULARY_PLAN
from tests.support.worlds import world

DEADLINE, GRACE = 90.0, 10.0
"""Seconds for a composition, and for the other ranks after the first error."""

MAX_NORM, IGNORED, EVERY = 0.5, -100, 2

ATTENTION_PLAN = parallel.attention_plan("blocks.*", ["qkv"], "out")
PLANS = {
    "blocks": BLOCK_PLAN,
    "vocabulary": VOCABULARY_PLAN,
    "gathered": GATHERED_PLAN,
    "sequence": SEQUENCE_PLAN,
    "embedded": EMBEDDED_PLAN,
}


@dataclass(frozen=True)
class Drawn:
    """A composition: the mesh, what each method is, the model, and how it is trained. An empty text means none."""

    seed: int
    sizes: dict[str, int]
    """Axes: "run" (each slice is a program), "late", "pp", "idle" (no method, on purpose), "dp", "cp", "tp"."""
    ranks: tuple[int, ...]
    data: str = ""
    viewed: bool = False
    tensor: str = ""
    context: str = ""
    experts: tuple[int, int] | None = None
    """Sizes of edp and ep, if the model has experts."""
    stacked: bool = False
    """The experts of a layer are one module."""
    schedule: str = ""
    stages_per_rank: int = 1
    microbatches: int = 1
    layers: int = 2
    tied: bool = False
    frozen: str = ""
    compiled: bool = False
    fullgraph: bool = False
    """Blocks are compiled without a graph break."""
    prepared: str = ""
    """What ``before_sharding`` wraps by torch's checkpoint_wrapper: "blocks", "matmuls" (selective) or "whole"; blocks
    are then compiled there too."""
    uneven: bool = False
    """The last stage has all layers but one of each other stage."""
    passes: int = 1
    rows: int = 1
    clip: bool = False
    norm_type: float = 2.0
    evaluation: bool = False
    """Each step starts with a forward pass without gradients."""
    masked: bool = False
    ragged: bool = False
    """Parts of the rows have different sizes."""
    omission: str = ""

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    @property
    def parts(self) -> int:
        """Number of parts of the rows of a batch."""
        return self.size("late") * self.size("dp")

    @property
    def rows_of_parts(self) -> list[int]:
        """Number of rows of each part in a pass."""
        return [self.microbatches * self.rows * (2 if self.ragged and part % 2 else 1) for part in range(self.parts)]


class Numbers(random.Random):
    """Random numbers of a seed."""

    def chance(self, percent: float) -> bool:
        return self.random() * 100 < percent


def draw(seed: int) -> Drawn:
    """The composition of a seed. Most can be trained."""
    numbers = Numbers(seed)
    n = numbers.choice([1, 2, 2, 3, 4, 4, 4, 4, 6, 8, 8, 8])
    has_experts = numbers.chance(30)
    sizes, ranks = draw_sizes(numbers, n), list(range(n))
    if numbers.chance(30):
        numbers.shuffle(ranks)
    if not has_experts and numbers.chance(30):  # experts take the ranks of the last axes
        axes = list(sizes.items())
        numbers.shuffle(axes)
        sizes = dict(axes)
    drawn = draw_training(numbers, Drawn(seed, sizes, tuple(ranks)))
    drawn = draw_methods(numbers, drawn, has_experts)
    if numbers.chance(20):
        drawn = replace(drawn, frozen=numbers.choice(["half", "norms"] + ["adapters"] * (drawn.experts is None)))
    may_be_ragged = drawn.size("dp") > 1 and not drawn.schedule
    if may_be_ragged and not drawn.experts and numbers.chance(15):
        drawn = replace(drawn, ragged=True, masked=True)
    if numbers.chance(12):
        return replace(drawn, omission=draw_omission(numbers, drawn))
    if may_be_ragged and drawn.experts and numbers.chance(15):
        drawn = replace(drawn, ragged=True, masked=True)
    return drawn


def draw_sizes(numbers: Numbers, n: int) -> dict[str, int]:
    """Axes whose sizes have the product n."""
    order = ("run", "late", "pp", "idle", "dp", "cp", "tp")
    sizes = dict.fromkeys(order, 1)
    factors: dict[int, list[int]] = {1: [], 2: [2], 3: [3], 4: [2, 2], 6: [3, 2], 8: [2, 2, 2]}
    for factor in factors[n]:
        likely = [1, 1, 3, 0.5, 4, 2.5, 3] if factor == 2 else [0.3, 0.5, 0, 0, 3, 0, 0]
        limits = {"run": 2, "late": 3, "pp": 4, "idle": 2, "dp": 8, "cp": 4, "tp": 4}
        weights = [w * (sizes[axis] * factor <= limits[axis]) for axis, w in zip(order, likely)]
        sizes[numbers.choices(order, weights)[0]] *= factor
    kept = {axis for axis in order if sizes[axis] > 1}
    if "cp" in kept or not kept or numbers.random() < 0.1:  # context parallelism needs a method that averages
        kept.add("dp")
    return {axis: size for axis, size in sizes.items() if axis in kept}


def draw_training(numbers: Numbers, drawn: Drawn) -> Drawn:
    """Add the ways of training that every composition can have."""
    chance = numbers.chance
    drawn = replace(drawn, tied=chance(25), clip=chance(50), masked=chance(25), rows=1 + chance(30))
    drawn = replace(drawn, passes=1 + chance(25))
    prepared = "blocks" if chance(15) else ""
    drawn = replace(drawn, compiled=chance(3), norm_type=math.inf if chance(15) else 2.0, evaluation=chance(15))
    others = Numbers(drawn.seed)
    prepared = others.choice(["blocks", "matmuls", "whole"]) if others.chance(20) and not prepared else prepared
    return replace(drawn, prepared=prepared, uneven=others.chance(20))


def draw_methods(numbers: Numbers, drawn: Drawn, has_experts: bool) -> Drawn:
    """Add a method for each axis, and experts."""
    if {"dp", "cp"} & drawn.sizes.keys():
        with_ddp = drawn.size("tp") == 1 or numbers.chance(6)  # DDP does not take DTensors
        kinds = ["data", "sharded", "sharded", "hybrid"] if with_ddp else ["sharded", "hybrid"]
        drawn = replace(drawn, data=numbers.choice(kinds), viewed=drawn.size("dp") == 4 and numbers.chance(50))
    if drawn.size("cp") > 1:
        kinds = ["ring", "ring", "unbalanced ring"]
        kinds += ["ulysses"] if not has_experts or drawn.size("cp") * drawn.size("tp") <= 4 else []  # 4 heads
        drawn = replace(drawn, context=numbers.choice(kinds))
    if drawn.size("tp") > 1:  # plans that shard sequences do not take positions
        plans = ["blocks"] if has_experts else [*PLANS][: 5 if "cp" not in drawn.sizes else 3]
        drawn = replace(drawn, tensor=numbers.choice(plans))
    if has_experts:
        places = drawn.size("dp") * drawn.size("cp") * drawn.size("tp")
        ways = [w for w in itertools.product((1, 2, 4, 8), repeat=2) if math.prod(w) == places]
        drawn = replace(drawn, experts=numbers.choice(ways) if ways else None, stacked=numbers.chance(50))
    return draw_schedule(numbers, drawn) if "pp" in drawn.sizes else drawn


def draw_omission(numbers: Numbers, drawn: Drawn) -> str:
    """What the program leaves out."""
    omissions = ["seed, broadcast", "seed"] if {*drawn.sizes} - {"run", "idle"} else []
    omissions += ["owner"] if any(drawn.size(axis) > 1 for axis in ("late", "pp", "dp", "cp", "tp")) else []
    omissions += ["average"] if drawn.size("dp") * drawn.size("cp") > 1 else []
    omissions += ["rows"] if drawn.size("dp") > 1 and not drawn.ragged else []
    omissions += ["replica"] if drawn.experts and "late" in drawn.sizes else []
    return numbers.choice(omissions or [""])


def draw_schedule(numbers: Numbers, drawn: Drawn) -> Drawn:
    """Add a pipeline to a composition."""
    size = drawn.sizes["pp"]
    names = ["gpipe", "1f1b", "interleaved"]
    if not drawn.data or numbers.random() < 0.05:
        names += ["zero-bubble", "zero-bubble-v"]
    schedule = numbers.choice(names)
    info = SCHEDULES[schedule]
    on_rank = info.stages_per_rank or 2
    microbatches = numbers.choice([size, 2 * size]) if size == 2 else size
    if schedule == "zero-bubble-v":
        microbatches = 2 * size
    return replace(
        drawn,
        schedule=schedule,
        stages_per_rank=on_rank,
        microbatches=microbatches,
        layers=max(2, size * on_rank) * (2 if size * on_rank == 2 and numbers.random() < 0.5 else 1),
        viewed=False,
        compiled=False,
    )


def model_of(drawn: Drawn, seed: int = 0) -> TinyGPT:
    if drawn.experts:
        block = partial(ExpertBlock, drawn.stacked)
    else:
        block = partial(parallel_models.Block, heads=8 if drawn.size("tp") * drawn.size("cp") > 4 else 4)
    model = TinyGPT(layers=drawn.layers, tied=drawn.tied, block=block, seed=seed)
    if drawn.frozen == "half":
        for part in (model.tokens, model.places, *model.blocks[: drawn.layers // 2]):
            part.requires_grad_(False)
    if drawn.frozen == "norms":
        for layer in model.modules():
            if isinstance(layer, nn.LayerNorm):
                layer.requires_grad_(False)
    if drawn.frozen == "adapters":
        model.requires_grad_(False)
        for block in model.blocks:
            block.up, block.down = Adapted(block.up), Adapted(block.down)
        model.double()
    if drawn.compiled and not drawn.prepared:
        compile_blocks(drawn, model)
    return model


def compile_blocks(drawn: Drawn, model: nn.Module) -> None:
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(fullgraph=drawn.fullgraph, backend="aot_eager")


def save_matmuls(context: object, operator: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
    """Policy of selective checkpointing: all else is computed again."""
    return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def prepare(drawn: Drawn, module: nn.Module) -> nn.Module:
    """Wrap and compile blocks, or wrap the whole module, as ``before_sharding``.

    torch raises an error in the backward pass of a selective checkpoint that is split, or around sharded experts.
    """
    selective = {"context_fn": partial(create_selective_checkpoint_contexts, save_matmuls)}
    is_refused = "zero-bubble" in drawn.schedule or (drawn.experts and drawn.data in ("sharded", "hybrid"))
    options = selective if drawn.prepared == "matmuls" and not is_refused else {}
    if drawn.compiled:  # before: torch 2.13 cannot compile a checkpoint of DTensors
        compile_blocks(drawn, module)
    for name, block in module.blocks.named_children() if drawn.prepared != "whole" else ():
        module.blocks.register_module(name, checkpoint_wrapper(block, **options))
    return checkpoint_wrapper(module) if drawn.prepared == "whole" else module


class Losses:
    """The loss of a program, also of a pipeline: its function gets outputs and targets alone."""

    def __init__(self, drawn: Drawn) -> None:
        self.drawn, self.tokens = drawn, 0.0
        self.together: Composition | None = None

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.drawn.masked:
            assert self.together is not None
            return self.together.mean(token_loss(output, target, "sum"), self.tokens)
        loss = token_loss(output, target) / self.drawn.passes
        return loss.full_tensor() if isinstance(loss, DTensor) else loss


def token_loss(output: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction=reduction)


def with_two_axes_of_rows(mesh: ProcessGroupMesh) -> ProcessGroupMesh:
    """A view with dpa=2 and dpb=2 in the place of dp=4."""
    two = [("dpa", 2), ("dpb", 2)]
    sizes = [each for axis in mesh.axes for each in (two if axis == "dp" else [(str(axis), mesh.size(axis))])]
    return mesh.view(dict(sizes))


def data_methods(mesh: ProcessGroupMesh, drawn: Drawn) -> Iterator[Method]:
    """The methods that split rows."""
    if "late" in drawn.sizes:
        yield AverageLater(mesh, "late")
    if not drawn.data or drawn.omission == "average":
        return
    axes = ("dpa", "dpb") if drawn.viewed else ("dp",)
    if drawn.data == "data":
        yield parallel.DataParallel(mesh, *axes, gradient_as_bucket_view=drawn.seed % 2 == 0)
        return
    how = dict[str, Any]()
    if drawn.data == "hybrid":
        how["replicate"] = "cp" if drawn.context and drawn.seed % 2 else axes[0]
    if drawn.seed % 3 == 0:
        how["reshard_after_forward"] = False
    yield parallel.ShardedDataParallel(mesh, *axes, **how)


def plan_of(drawn: Drawn) -> dict[str, ParallelStyle]:
    """The plan of tensor parallelism. The matrices of an adapter between sharded and whole features are whole."""
    plan = dict(ATTENTION_PLAN if drawn.experts else PLANS[drawn.tensor])
    if drawn.frozen == "adapters":
        up, down = plan.pop("blocks.*.up"), plan.pop("blocks.*.down")
        plan |= {f"blocks.*.{name}": up for name in ("up.base", "up.b")}
        plan |= {f"blocks.*.{name}": down for name in ("down.base", "down.a")}
        if drawn.tensor in ("sequence", "embedded"):
            plan["blocks.*.up.a"] = SequenceParallel()
            plan["blocks.*.down.b"] = SequenceParallel(use_local_output=True)
    return plan


def experts_method(mesh: ProcessGroupMesh, experts: tuple[int, int], drawn: Drawn) -> ExpertParallel:
    """Experts on a view, or on the axis of the ranks that read different rows."""
    if experts == (1, drawn.size("dp")) and "dp" in mesh.axes and drawn.seed % 2 and not drawn.omission:
        return ExpertParallel(mesh, "dp")
    outer = {str(axis): mesh.size(axis) for axis in mesh.axes if axis not in ("dp", "dpa", "dpb", "cp", "tp")}
    sizes = dict(zip(("edp", "ep"), experts))
    if drawn.omission == "replica":  # the experts lie on replicas that average later
        sizes["ep"] *= outer.pop("late")
    return ExpertParallel(mesh.view(outer | sizes), "ep")


def methods_of(mesh: ProcessGroupMesh, drawn: Drawn, loss: Losses) -> Iterator[Method]:
    """The methods of a composition on its mesh or slice."""
    yield from data_methods(mesh, drawn)
    if drawn.tensor:
        yield TensorParallel(mesh, "tp", plan=plan_of(drawn))
    if drawn.context:
        attention: Any = drawn.context.split()[-1]
        yield ContextParallel(mesh, "cp", attention=attention, balanced=drawn.context == "ring")
    if drawn.experts:
        yield experts_method(mesh, drawn.experts, drawn)
    if drawn.schedule:
        counts = {"microbatches": drawn.microbatches, "stages_per_rank": drawn.stages_per_rank}
        stages = mesh.size("pp") * drawn.stages_per_rank
        numbers = [*[1] * (stages - 1), drawn.layers - stages + 1]
        layers = {"blocks": numbers} if drawn.uneven else "blocks"
        yield gpt_stages(mesh, loss=loss, schedule=drawn.schedule, layers=layers, **counts)


def batch_of(drawn: Drawn, step: int, run: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step of one slice."""
    rows = drawn.passes * sum(drawn.rows_of_parts)
    codes, target = batch(1000 * drawn.seed + 10 * step + run, rows)
    if drawn.masked:
        numbers = torch.Generator().manual_seed(drawn.seed + step)
        target = target.masked_fill(torch.rand(target.shape, generator=numbers) < 0.4, IGNORED)
        target[:, 0] = codes[:, 1]  # no microbatch without a token in the sums of one process
    return codes, target


def train_alone(drawn: Drawn, run: int, replicas: list[list[int]]) -> list[TrainingRun]:
    """Train in one process, each replica with its parts of the rows. Replicas average weights later."""
    models = [model_of(replace(drawn, compiled=False)) for _ in replicas]
    optimizers, runs = [optimizer_of(model.parameters()) for model in models], [TrainingRun() for _ in replicas]
    for step in range(parallel_models.STEPS):
        codes, target = batch_of(drawn, step, run)
        for model, optimizer, parts, found in zip(models, optimizers, replicas, runs):
            optimizer.zero_grad()
            found.losses.append(backward_alone(drawn, model, codes, target, parts))
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM if drawn.clip else math.inf, drawn.norm_type)
            found.norms.append(norm.item())
            found.gradients.append(parallel_models.gradients_of(model))
            optimizer.step()
        if len(models) > 1 and (step + 1) % EVERY == 0:
            with torch.no_grad():
                for weights in zip(*(model.parameters() for model in models), strict=True):
                    torch._foreach_copy_(weights, [torch.stack(weights).mean(0)] * len(weights))
    for model, found in zip(models, runs):
        found.weights = parallel_models.weights_of(model)
    return runs


def backward_alone(drawn: Drawn, model: TinyGPT, codes: torch.Tensor, target: torch.Tensor, parts: list[int]) -> float:
    """The loss of a replica, and its gradients. Experts balance the tokens of each pass and microbatch."""

    def share(rows: torch.Tensor) -> list[list[torch.Tensor]]:
        """Rows of the replica by pass and microbatch."""
        passes = [each.split(drawn.rows_of_parts) for each in rows.chunk(drawn.passes)]
        chunks = [[each[part].chunk(drawn.microbatches) for part in parts] for each in passes]
        return [[torch.cat(rows) for rows in zip(*each, strict=True)] for each in chunks]

    inputs, labels, total = share(codes), share(target), 0.0
    tokens = sum(int((each != IGNORED).sum()) for per_pass in labels for each in per_pass)
    for rows, label in zip(itertools.chain(*inputs), itertools.chain(*labels), strict=True):
        with mock.patch.object(expert_models, "BALANCE_WEIGHT", expert_models.BALANCE_WEIGHT / drawn.passes):
            loss = token_loss(model(rows), label, "sum")
        loss = loss * drawn.microbatches / tokens
        loss.backward()
        total += loss.item() / drawn.microbatches
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad /= drawn.microbatches
    return total


def train(drawn: Drawn) -> tuple[set[str], set[str], float]:
    """Train on this rank, and compare with one process.

    Returns:
        Names of this rank's weights, names of all, and the greatest difference.
    """
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # stages return views, which nothing changes
    with ProcessGroupMesh(**drawn.sizes, ranks=list(drawn.ranks), name=f"drawn{drawn.seed}") as whole:
        run = whole.index("run") if "run" in drawn.sizes else 0
        mesh = whole.at(run=run) if "run" in drawn.sizes and len(drawn.sizes) > 1 else whole
        if drawn.viewed:
            mesh = with_two_axes_of_rows(mesh)
        loss = Losses(drawn)
        methods = [*methods_of(mesh, drawn, loss)]
        unowned = [axis for axis in ("idle", "run") if axis in mesh.axes]
        if drawn.omission == "owner":
            methods.remove(next(m for m in methods if m.differs != "experts" and m.mesh.size(*m.owns) > 1))
        random.Random(drawn.seed).shuffle(methods)
        together = loss.together = compose(mesh, *methods, unowned=unowned, equal_parts=not drawn.ragged)
        model = model_of(drawn, first_seed(drawn, mesh))
        if drawn.omission == "seed, broadcast":
            together.broadcast(model)
        replicas, own = replicas_of(together, mesh, drawn)
        expected = train_alone(drawn, run, replicas)[own]
        own_part = partial(prepare, drawn) if drawn.prepared else None
        applied = together.apply(model, before_sharding=own_part)
        return train_and_compare(drawn, together, applied, loss, expected, run)


def first_seed(drawn: Drawn, mesh: ProcessGroupMesh) -> int:
    """The seed of a rank's model: 0 on the rank whose weights others get."""
    if not drawn.omission.startswith("seed"):
        return 0
    ranks = mesh.ranks(*(axis for axis in mesh.axes if axis != "idle"))
    return ranks.index(mesh.rank)


def replicas_of(together: Composition, mesh: ProcessGroupMesh, drawn: Drawn) -> tuple[list[list[int]], int]:
    """The parts of rows of each replica that is averaged later, and the index of this rank's replica."""
    own = mesh.index("late") if "late" in drawn.sizes else 0
    pairs: list[Any] = [None] * len(mesh)
    dist.all_gather_object(pairs, (own, together.rank), group=mesh.group(*mesh.axes))
    replicas = [sorted({part for replica, part in pairs if replica == i}) for i in range(drawn.size("late"))]
    if together.num_replicas == drawn.parts:
        assert sorted(itertools.chain(*replicas)) == list(range(drawn.parts)), (
            f"parts of rows are read twice: {replicas}"
        )
    return replicas, own


def train_and_compare(
    drawn: Drawn, together: Composition, model: nn.Module, loss: Losses, expected: TrainingRun, run: int
) -> tuple[set[str], set[str], float]:
    optimizer = together.attach(optimizer_of(model.parameters()))
    compare = Comparison(model)
    for step in range(parallel_models.STEPS):
        optimizer.zero_grad()
        value = backward(drawn, together, model, loss, step, run)
        kind = {"norm_type": drawn.norm_type}
        norm = together.clip_grad_norm_(MAX_NORM, **kind) if drawn.clip else together.grad_norm(**kind)
        if value is not None:
            compare.number(f"loss of step {step}", value, expected.losses[step])
        compare.number(f"norm of step {step}", norm.item(), expected.norms[step])
        compare.gradients(step, expected.gradients[step])
        optimizer.step()
    compare.tensors("weights", parallel_models.weights_of(model), expected.weights)
    names = {name for name, _ in named_weights(model)}
    found = [*together.named_parameters(model)]
    assert {name for name, _ in found} <= {*expected.gradients[0], *expected.weights}
    assert {weight for _, weight in found} == {*model.parameters()}
    own = dict(named_weights(model))
    assert drawn.tied or all(own[name] is weight for name, weight in found)
    return names, {*expected.weights}, compare.greatest


def backward(drawn: Drawn, together: Composition, model: nn.Module, loss: Losses, step: int, run: int) -> float | None:
    """Backward passes of a step on this rank. Returns the loss, if this rank has it."""
    codes, target = batch_of(drawn, step, run)
    passes = [part_of(drawn, together, *each) for each in zip(codes.chunk(drawn.passes), target.chunk(drawn.passes))]
    loss.tokens = sum(int((each["labels"] != IGNORED).sum()) for each in passes) / drawn.microbatches
    if drawn.evaluation and drawn.schedule != "zero-bubble-v":  # torch cannot run it without a backward pass
        with torch.no_grad():
            model(passes[0]["inputs"], **{name: passes[0][name] for name in passes[0].keys() - {"inputs", "labels"}})
    values = list[torch.Tensor]()
    for i, given in enumerate(passes):
        inputs, labels = given.pop("inputs"), given.pop("labels")
        with contextlib.ExitStack() as stack:
            if any(isinstance(each, TensorParallel) for each in together.methods):
                stack.enter_context(loss_parallel())
            stack.enter_context(together.accumulate(model, last=i == drawn.passes - 1, passes=drawn.passes))
            if drawn.schedule:
                pieces = model.step(inputs, target=labels, **given)
                values += [torch.stack(pieces).mean()] if pieces else []
            else:
                values.append(loss(model(inputs, **given), labels))
                values[-1].backward()
    if not values:
        return None
    found = torch.stack([each.detach() for each in values]).sum()
    return (found if drawn.masked else together.mean(found)).item()


def part_of(drawn: Drawn, together: Composition, codes: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    given = {"inputs": codes, "labels": target}
    if drawn.context:
        given["positions"] = torch.arange(parallel_models.CONTEXT).expand(len(codes), -1)
    if drawn.ragged:  # the program splits the rows itself
        context = [each for each in together.methods if isinstance(each, ContextParallel)]
        given = {name: each.split(drawn.rows_of_parts)[together.rank] for name, each in given.items()}
        return {name: context[0].cut(each) if context else each for name, each in given.items()}
    given = together.share(given)
    if drawn.omission == "rows" and together.rank == 0:  # this rank drops its last row
        given = {name: each[:-1] for name, each in given.items()}
    return given


@dataclass
class Comparison:
    """Compares what a rank has with one process."""

    model: nn.Module
    greatest: float = 0.0

    def number(self, what: str, found: float, expected: float) -> None:
        difference = abs(found - expected)
        assert difference <= TOLERANCE * max(1.0, abs(expected)), f"{what} is {found:.6g}, not {expected:.6g}"
        self.greatest = max(self.greatest, difference)

    def gradients(self, step: int, expected: dict[str, torch.Tensor]) -> None:
        """Compare gradients, and which weights have one."""
        found = parallel_models.gradients_of(self.model)
        trained = {name for name, weight in named_weights(self.model) if weight.requires_grad and weight.numel()}
        missing = sorted((trained & expected.keys()) - found.keys())
        assert not missing, f"gradients of step {step}: none of {missing[:3]}"
        self.tensors(f"gradients of step {step}", found, expected)

    def tensors(self, what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        if found:  # a frozen stage has no gradients
            self.greatest = max(self.greatest, parallel_models.assert_same(what, found, expected))


@dataclass(frozen=True)
class Result:
    """What came of a composition: "trains", "refused" or "WRONG"."""

    drawn: Drawn
    kind: str
    text: str
    seconds: float = 0.0


CLEAR = {
    "NotImplementedError": "",  # torch names what it does not support
    "AssertionError": "expected all tensors_saved_with_vc_check to be Tensors",  # the page has this pair
}
"""Refusals of torch that are clear enough: a part of the message by the name of the error."""


def run_one(seed: int) -> Result:
    """Train the composition of a seed, in the world of its size."""
    drawn, start = draw(seed), time.monotonic()
    ranks = world(len(drawn.ranks))
    outcomes = ranks._gather(train, [(drawn,)] * len(drawn.ranks), DEADLINE, GRACE)
    if any(each.error for each in outcomes):
        ranks.usable = all(isinstance(each.exception, PgmeshError) for each in outcomes)
        kind, text = judge(outcomes)
    elif missing := sorted(outcomes[0].result[1] - set[str]().union(*(each.result[0] for each in outcomes))):
        kind, text = "WRONG", f"no rank has {missing[:3]}"
    else:
        kind, text = "trains", f"{max(each.result[2] for each in outcomes):.0e}"
    if kind == "trains" and drawn.omission in ("average", "owner", "rows", "replica"):
        kind, text = "WRONG", f"trains, but omits {drawn.omission}"
    return Result(drawn, kind, text, time.monotonic() - start)


def judge(outcomes: list[Outcome]) -> tuple[str, str]:
    """Whether errors of ranks are a refusal."""
    failed = sorted((each for each in outcomes if each.error and not each.timed_out), key=lambda each: each.failed_at)
    if not failed:
        return "WRONG", f"hangs:\n{outcomes[0].details}"
    first = failed[0]
    waiting = sum(each.timed_out for each in outcomes)
    where = f" (rank {first.rank} alone; {waiting} others wait)" if waiting else ""
    name = first.error.removeprefix("raised ").partition(":")[0]
    if isinstance(first.exception, PgmeshError) or (name in CLEAR and CLEAR[name] in first.error):
        return "refused", first.error.removeprefix("raised ") + where
    return "WRONG", f"{first.error}{where}\n{first.details}"


def run_all(seeds: list[int], report: Callable[[str], object] = print) -> list[Result]:
    """Train the compositions of some seeds, and report each that is refused or wrong."""
    results = []
    for seed in seeds:
        results.append(result := run_one(seed))
        report(f"{seed:5} {result.kind:8} {result.seconds:5.1f} s  {result.drawn}  {result.text}")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="number of compositions")
    parser.add_argument("--only", default="", help="seeds, separated by commas")
    parsed = parser.parse_args()
    seeds = [int(each) for each in parsed.only.split(",") if each]
    results = run_all(seeds or [*range(parsed.count)], lambda line: print(line, flush=True))
    kinds = Counter(result.kind for result in results)
    print(f"{kinds['trains']} train, {kinds['refused']} are refused, {kinds['WRONG']} are wrong")
    for result in results:
        if result.kind == "WRONG":
            print(f"wrong: --only {result.drawn.seed}")
    return int(kinds["WRONG"] > 0)


if __name__ == "__main__":
    from tests.parallel import random_compositions  # ranks import its functions by this name

    sys.exit(random_compositions.main())
