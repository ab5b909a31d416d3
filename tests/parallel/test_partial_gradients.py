"""Weights of which each rank has a part of the gradient only: an error in the second step, with the right entries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.distributed.tensor import parallel
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from pgmesh import MethodError, ProcessGroupMesh
from pgmesh.parallel import Method, ShardedDataParallel, TensorParallel, compose
from tests.support.parallel_models import Block, TinyGPT, batch, loss_of, train_alone
from tests.support.parallel_training import train_and_compare
from tests.support.pipelines import gpt_stages, needs_pipelines
from tests.support.tensor_plans import BLOCK_PLAN, SEQUENCE_PLAN
from tests.support.worlds import check_sums, fresh_world, groups_of, on_ranks, world

pytestmark = pytest.mark.long

torch.set_num_threads(1)  # also on ranks, which import this: others share their cores

HEAD_NORM = (
    "blocks.0.head_norm.weight gets a part of its gradient on each rank along tp=2, and nothing adds the parts up: its "
    "module computes with a shard of the activations, and needs an entry that says which one.\n\n"
    "  plan={**plan, 'blocks.0.head_norm': SequenceParallel(use_local_output=True)}   # a shard of the positions\n"
    "  plan={**plan, 'blocks.0.head_norm': SequenceParallel(sequence_dim=2, use_local_output=True)}   # of the heads, "
    "the third dimension"
)


class NormedHeads(Block):
    """Queries and keys are normed, each head with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head_norm = nn.LayerNorm(self.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.head_norm(self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head)))
        q, k, v = heads.transpose(1, 2).unbind(3)
        x = x + self.out(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class NormedHeadsAgain(NormedHeads):
    """Activations are computed again in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def normed_heads(kind: str = "") -> TinyGPT:
    """Two blocks with norms of heads."""
    model = TinyGPT(block=NormedHeadsAgain if kind == "checkpointed" else NormedHeads, layers=2)
    for block in model.blocks:
        if kind == "compiled":
            block.compile(fullgraph=True, backend="aot_eager")
        if kind == "zero outputs":  # gradients of what is before are 0 in the first step
            nn.init.zeros_(block.out.weight)
        if kind == "frozen":
            block.head_norm.requires_grad_(False)
    return model


def methods_of(mesh: ProcessGroupMesh, kind: str, plan: dict[str, ParallelStyle]) -> list[Method]:
    data: list[Method] = [ShardedDataParallel(mesh, "dp", replicate="dp" if kind == "hybrid" else ())]
    if kind == "pipeline":
        data = [gpt_stages(mesh, "dp", schedule="gpipe")]
    return [*data, TensorParallel(mesh, "tp", plan=plan)]


def train(kind: str, passes: int = 1) -> tuple[int, str]:
    """Train without an entry for the norms of heads. Returns the number of passes before the error, and the error."""
    with ProcessGroupMesh(dp=2, tp=2) as mesh:
        together = compose(mesh, *methods_of(mesh, kind, BLOCK_PLAN))
        model = together.apply(normed_heads(kind))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            codes, target = together.share(batch(step))
            with together.accumulate(model, last=step % passes == passes - 1):
                try:
                    if kind == "pipeline":
                        model.step(codes, target=target)
                    else:
                        loss_of(model(codes), target).backward()
                except (MethodError, RuntimeError) as error:  # RuntimeError: of torch's stage
                    return step, str(error.__cause__ or error)
            if step % passes == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
        check_sums(groups_of(mesh))
        return 4, ""


@pytest.mark.parametrize(
    ("kind", "passes", "raises_in"),
    [
        ("sharded", 1, 1),
        ("hybrid", 1, 1),
        ("checkpointed", 1, 1),
        ("compiled", 1, 1),
        ("accumulated", 2, 2),  # fully_shard has gradients after the last pass alone
        ("zero outputs", 1, 2),
        ("frozen", 1, 4),
    ],
)
def test_partial_gradients_raise_in_next_training_pass(kind: str, passes: int, raises_in: int):
    expected = (raises_in, "" if kind == "frozen" else HEAD_NORM)
    assert world(4).run(train, kind, passes) == [expected] * 4


@needs_pipelines
def test_partial_gradients_of_a_stage_raise():
    with fresh_world(4) as ranks:  # the second stage, ranks 2 and 3, loses the first one
        assert ranks.run(train, "pipeline")[:2] == [(1, HEAD_NORM)] * 2


@on_ranks(4)
def test_partial_gradients_of_sharded_weights_raise():
    """Errors of plans without entries for norms that ``fully_shard`` shards with the whole module, and with a block."""
    errors = list[str]()
    with ProcessGroupMesh(dp=2, tp=2) as mesh:
        for name in ("norm", "blocks.*.norm*"):
            tensor = TensorParallel(mesh, "tp", plan=without(SEQUENCE_PLAN, name))
            together = compose(mesh, ShardedDataParallel(mesh, "dp"), tensor)
            model, codes = together.apply(TinyGPT(layers=1)), together.share(batch(0)[0])
            model(codes).to_local().square().sum().backward()
            with pytest.raises(MethodError) as caught:
                model(codes)
            errors.append(str(caught.value).partition(" ")[0])
    assert errors == ["norm.weight", "blocks.0.norm1.weight"]


# ---- the printed entries ----


class ScaledBlock(Block):
    """A block with a parameter of its own, or in a submodule."""

    def __init__(self, in_submodule: bool) -> None:
        super().__init__()
        self.own = Scale() if in_submodule else None
        self.scale = None if in_submodule else nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale if self.own is None else self.own(x))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def scaled(in_submodule: bool = False) -> TinyGPT:
    return TinyGPT(block=lambda: ScaledBlock(in_submodule), layers=1)


def without(plan: dict[str, ParallelStyle], *names: str) -> dict[str, ParallelStyle]:
    return {name: style for name, style in plan.items() if name not in names}


PROGRAMS: dict[str, tuple[Callable[[], TinyGPT], Callable[[], TinyGPT], dict[str, ParallelStyle], int]] = {
    "norms of heads": (normed_heads, normed_heads, BLOCK_PLAN, 1),
    "norms of sharded sequences": (
        lambda: TinyGPT(layers=2),
        lambda: TinyGPT(layers=2),
        without(SEQUENCE_PLAN, "blocks.*.norm*", "norm"),
        0,
    ),
    "own parameters of a block": (scaled, lambda: scaled(True), SEQUENCE_PLAN, 0),
}
"""The model, the model that the entries are for, a plan without them, and the index of the right entry of an error."""


def errors_until_right(program: str) -> list[str]:
    """Add each printed entry to the plan until the model trains as in one process. Returns the names of the weights."""
    make, make_changed, plan, right = PROGRAMS[program]
    plan, names = dict(plan), list[str]()
    with ProcessGroupMesh(tp=2) as mesh:
        while (error := error_of(mesh, (make_changed if names else make)(), plan)) is not None:
            names.append(error.partition(" ")[0])
            call = [line for line in error.splitlines() if line.startswith("  plan=")][right]
            plan = eval(call.partition("   #")[0].strip().removeprefix("plan="), vars(parallel) | {"plan": plan})
        together, expected = compose(mesh, TensorParallel(mesh, "tp", plan=plan)), train_alone(make_changed())
        train_and_compare(together, together.apply(make_changed()), expected, around=around(plan))
        return names


def around(plan: dict[str, ParallelStyle]) -> Callable[[], contextlib.AbstractContextManager[None]]:
    return loss_parallel if "head" in plan else contextlib.nullcontext


def error_of(mesh: ProcessGroupMesh, model: nn.Module, plan: dict[str, ParallelStyle]) -> str | None:
    model = TensorParallel(mesh, "tp", plan=plan).apply(model)
    codes, target = batch(0)
    for _ in range(2):
        try:
            with around(plan)():
                loss_of(model(codes), target).backward()
        except MethodError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    ("program", "names"),
    [
        ("norms of heads", ["blocks.0.head_norm.weight", "blocks.1.head_norm.weight"]),
        ("norms of sharded sequences", [f"{b}.norm{i}.weight" for b in ("blocks.0", "blocks.1") for i in (1, 2)]),
        ("own parameters of a block", ["blocks.0.scale"]),
    ],
)
def test_printed_entries_make_training_right(program: str, names: Sequence[str]):
    last = ["norm.weight"] if program == "norms of sharded sequences" else []
    assert world(2).run(errors_until_right, program) == [[*names, *last]] * 2
