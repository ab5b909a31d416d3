"""Steps of a pipeline with changing shapes, targets and keywords: buffers and gradients against one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import dropout, mse_loss
from torch.utils.checkpoint import checkpoint

from pgmesh import MethodError, ProcessGroupMesh, ShapeError, parallel
from pgmesh.parallel import DataParallel, Method, PipelineParallel, ShardedDataParallel, compose, seeded_rng
from pgmesh.parallel.running import MAX_SCHEDULES
from tests.support.expert_models import expert_model
from tests.support.message_assertions import assert_raises
from tests.support.parallel_models import TinyGPT, assert_same, batch, full_tensor, gradients_of, loss_of
from tests.support.pipelines import gpt_stages, needs_pipelines
from tests.support.worlds import check_sums, groups_of, on_mesh, world

pytestmark = needs_pipelines

WIDTH, PARTS = 6, 4
SHAPES = [(8, 3), (16, 5), (8, 3), (16, 5), (16, 5)]  # two shapes in turn, and one again


class Layer(nn.Module):
    """Batch normalization, dropout with ``seeded_rng``, and buffers of each kind."""

    mean: torch.Tensor | None
    seen: torch.Tensor
    times: torch.Tensor

    def __init__(self, mesh: ProcessGroupMesh, number: int, again: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.seed, self.again = parallel.seed_of(mesh, seed=3, tag=str(number)), again
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", None)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, kind: torch.Tensor, weights: torch.Tensor, scale: float
    ) -> torch.Tensor:
        flat = self.norm(self.linear(x).flatten(0, 1))
        self.seen = self.seen + 1  # another tensor
        mean = x.detach().mean()
        self.mean = mean if self.mean is None else (self.mean + mean) / 2  # there after the first time alone
        if not hasattr(self, "times"):
            self.register_buffer("times", torch.zeros(()))
        self.times.add_(1)
        x = x + (mask * kind.unsqueeze(-1) + scale * weights.unsqueeze(-1)) * flat.view_as(x)
        with torch.random.fork_rng(devices=[]):  # the same state in one process, which runs all layers in turn
            torch.default_generator.manual_seed(int(self.times))  # torch.manual_seed formats its stack for each device
            if self.again and torch.is_grad_enabled():
                return checkpoint(self.drop, x, use_reentrant=False)
            return self.drop(x)

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        with seeded_rng(self.seed):
            return dropout(x, 0.3)


class Noisy(nn.Module):
    """Stages return activations, floats without gradients, and integers. Each also has keywords."""

    def __init__(self, mesh: ProcessGroupMesh, again: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(Layer(mesh, number, again) for number in range(4))
        self.to(torch.float64)
        if frozen:
            self.enter.requires_grad_(False)
            self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor, *more: torch.Tensor, **keywords: Any) -> Any:
        if self.enter is not None:
            more = (x.sum(-1, keepdim=True) > 0).to(x.dtype), torch.ones(x.shape[:2], dtype=torch.int64)
            x = self.enter(x)
        for layer in self.layers:
            x = layer(x, *more, **keywords) if isinstance(layer, Layer) else x
        return (x, *more) if self.leave is None else self.leave(x)


def rows_of(step: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets and weights."""
    given, target = drawn(step, 2, rows, length, 2)
    return given, target, drawn(step + 1, rows, length)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pipeline_on(mesh: ProcessGroupMesh, schedule: str = "1f1b", count: int = 1) -> PipelineParallel:
    names = {"layers": "layers", "first": ["enter"], "last": ["leave"]}
    return PipelineParallel(
        mesh, "pp", **names, loss=mse_loss, microbatches=PARTS, schedule=schedule, stages_per_rank=count
    )


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for part in getattr(model, "parts", [model]):
        found.update({name.removeprefix("module."): each.clone() for name, each in part.named_buffers()})
    return found


def noisy(schedule: str, count: int, data: Callable[..., Method] | None, again: bool, frozen: bool) -> None:
    """Alternate between two shapes in steps and forward passes, against microbatches in one process.

    Gradients of two steps are added.
    """
    with ProcessGroupMesh(pp=2, dp=2 if data else 1) as mesh:
        methods = [data(mesh, "dp")] if data else []
        together = compose(mesh, pipeline_on(mesh, schedule, count), *methods)
        model = together.apply(Noisy(mesh, again=again, frozen=frozen))
        plains = [Noisy(mesh, frozen=frozen) for _ in range(mesh.size("dp"))]  # of each share of the rows
        for step, (rows, length) in enumerate(SHAPES):
            given, target, weights = rows_of(step, rows, length)
            scale = 0.5 + step  # not a part of the shapes
            for weight in itertools.chain(model.parameters(), *(plain.parameters() for plain in plains)):
                weight.grad = weight.grad if step % 2 else None
                if step == 4:  # with a known shape, so that no stage is made anew
                    weight.requires_grad_()
            keywords = {"weights": together.share(weights), "scale": scale}
            losses = model.step(together.share(given), target=together.share(target), **keywords)
            right = []
            for plain, *mine in zip(plains, *(each.chunk(len(plains)) for each in (given, target, weights))):
                parts = zip(*(each.chunk(PARTS) for each in mine))
                right.append([mse_loss(plain(a, weights=w, scale=scale), b) for a, b, w in parts])
                (torch.stack(right[-1]).mean() / len(plains)).backward()
            sums = gradients_of(plains[0])
            for plain in plains[1:]:
                sums = {name: sums[name] + each for name, each in gradients_of(plain).items()}
            what = f"{schedule}, step {step}"
            assert_same(f"gradients of {what}", {n: full_tensor(each) for n, each in gradients_of(model).items()}, sums)
            mine = plains[mesh.index("dp")]
            assert_same(f"buffers of {what}", buffers_of(model), buffers_of(mine))
            if losses:
                torch.testing.assert_close(torch.stack(losses), torch.stack(right[mesh.index("dp")]).detach())
            if schedule != "zero-bubble-v":
                given, _, weights = map(together.share, rows_of(100 + step, rows, length + step % 2))  # another shape
                out = model(given, weights=weights, scale=scale)
                parts = [*zip(given.chunk(PARTS), weights.chunk(PARTS))]
                with torch.no_grad():
                    wanted = [torch.cat([plain(a, weights=w, scale=scale) for a, w in parts]) for plain in plains]
                if out is not None:
                    torch.testing.assert_close(out, wanted[mesh.index("dp")], rtol=0, atol=1e-12)
                assert_same(f"buffers after {what}", buffers_of(model), buffers_of(mine))
        assert all(part.training for part in model.parts)
        check_sums(groups_of(mesh))


@pytest.mark.parametrize(
    ("schedule", "count", "data", "again", "frozen"),
    [
        ("1f1b", 1, None, False, False),
        ("gpipe", 1, None, True, True),
        ("interleaved", 2, None, True, False),
        ("zero-bubble", 1, None, False, True),
        ("zero-bubble-v", 2, None, False, False),
        ("1f1b", 1, functools.partial(DataParallel, gradient_as_bucket_view=True), True, False),
        ("1f1b", 1, ShardedDataParallel, True, False),
    ],
)
def test_steps_of_alternating_shapes_equal_one_process(schedule, count, data, again, frozen):
    world(4 if data else 2).run(noisy, schedule, count, data, again, frozen)


class Wrapping(nn.Module):
    """Model of which one stage returns a value that the next stage cannot take."""

    def __init__(self, wrap: Callable[[torch.Tensor], object], last: bool = False) -> None:
        super().__init__()
        self.layers, self.wrap, self.last = nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), wrap, last

    def forward(self, x: torch.Tensor) -> object:
        for layer in self.layers:
            x = layer(x)
        return x if self.last and self.layers[1] is None else self.wrap(x)


def test_a_stage_that_returns_other_outputs_raises(mesh):
    mesh = mesh.view(pp=1, tp=1, rest=8)

    def model(module: nn.Module) -> nn.Module:
        names = {"layers": "layers", "schedule": "interleaved"}
        return PipelineParallel(mesh, "pp", **names, loss=loss, microbatches=2, stages_per_rank=2).apply(module)

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(out.to_local() if isinstance(out, DTensor) else out, target)

    message = "microbatch 0 of stage 0 returned {}, but has to return plain tensors.{}"
    hint = "\n\n  return x.to_local()   # of a DTensor x, if the next stage takes this rank's shard"
    tensor = functools.partial(DTensor.from_local, device_mesh=mesh.device_mesh("tp"), placements=[Replicate()])
    changed = model(Wrapping(lambda x: x[:, : widths.pop()]))
    widths = [1, 2, 2]
    text = "microbatch 1 of stage 0 returned torch.float32 [2, 1], but the first returned torch.float32 [2, 2]."
    assert_raises(MethodError, lambda: changed.step(torch.ones(4, 2), target=torch.ones(4, 2)), text)
    for wrap, name in (
        (lambda x: {"x": x}, "dict"),
        (tensor, "DTensor"),
        (lambda x: (x, None), "torch.float32 [2, 2], NoneType"),
    ):
        text = message.format(name, hint if name == "DTensor" else "")
        step = model(Wrapping(wrap)).step
        assert_raises(MethodError, lambda step=step: step(torch.ones(4, 2), target=torch.ones(4, 2)), text)
    assert len(model(Wrapping(tensor, last=True)).step(torch.ones(4, 2), target=torch.ones(4, 2))) == 2


LENGTHS = [(8, 8), (8, 8), (8, 5), (4, 5), (4, 8)]
"""Length of the sequences of both data ranks in each step: after the second, new ones come on one rank alone."""


@pytest.mark.parametrize("experts", [False, True])
@on_mesh(pp=2, dp=2)
def test_new_shapes_on_some_data_ranks_are_accepted(mesh: ProcessGroupMesh, experts: bool):
    methods: list[Method] = [gpt_stages(mesh)]
    if experts:
        methods.append(parallel.ExpertParallel(mesh.view(pp=2, ep=2), "ep"))
    together = compose(mesh, *methods, ShardedDataParallel(mesh, "dp"))
    make = functools.partial(expert_model, layers=2) if experts else functools.partial(TinyGPT, layers=2)
    model, plain = together.apply(make()), make()
    for step, lengths in enumerate(LENGTHS):
        shares = [
            [each[rows, :length] for each in batch(step)]
            for length, rows in zip(lengths, (slice(4), slice(4, 8)), strict=True)
        ]
        codes, target = shares[mesh.index("dp")]
        for weight in (*model.parameters(), *plain.parameters()):
            weight.grad = None
        out = model(codes)
        if out is not None:
            right = torch.cat([plain(part) for part in codes.chunk(2)]).detach()
            torch.testing.assert_close(out, right, rtol=0, atol=1e-12)
        model.step(codes, target=target)
        if not experts:  # the loss of their loads counts over ranks
            for rows, wanted in shares:
                (loss_of(plain(rows), wanted) / 2).backward()
            assert_same(f"gradients of step {step}", gradients_of(model), gradients_of(plain))


class NoSingleRow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            raise ValueError("a single row")
        return super().forward(x)


def rejecting() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(NoSingleRow(4, 4), nn.Linear(4, 4))).double()


@on_mesh(pp=1, dp=2)
def test_step_after_a_failed_step_adds_right_gradients(mesh: ProcessGroupMesh):
    pipeline = PipelineParallel(mesh, "pp", layers="0", loss=mse_loss, microbatches=2)
    sharded = ShardedDataParallel(mesh, "dp", layers=lambda stage: [*stage[0]])
    model, plain = compose(mesh, pipeline, sharded).apply(rejecting()), rejecting()
    first, second = model.parts[0][0]
    first.set_modules_to_forward_prefetch([second])
    rows = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine = rows.chunk(2)[mesh.rank]
    model.step(mine, target=mine)
    with pytest.raises(RuntimeError, match="failed to run forward"):
        model.step(mine[:2], target=mine[:2])
    model.step(mine, target=mine)
    (2 * mse_loss(plain(rows), rows)).backward()
    assert_same("gradients", gradients_of(model), gradients_of(plain))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).double()

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x if extra is None else x * extra["mask"].unsqueeze(-1)
        return x


def of_net(mesh: ProcessGroupMesh, loss: Callable[..., torch.Tensor] | None) -> PipelineParallel:
    return PipelineParallel(mesh, "pp", layers="layers", loss=loss, microbatches=2)


@on_mesh(pp=2)
def test_a_pipeline_keeps_schedules_of_the_latest_shapes(mesh: ProcessGroupMesh):
    model, plain = of_net(mesh, mse_loss).apply(Net()), Net()
    lengths = [*range(1, MAX_SCHEDULES + 3), 1, MAX_SCHEDULES + 2]
    for length in lengths:
        rows = drawn(length, 4, length, WIDTH)
        model.zero_grad()
        plain.zero_grad()
        kept = [*model.schedules.values()]
        model.step(rows, target=rows)
        mse_loss(plain(rows), rows).backward()
        assert_same(f"gradients of length {length}", gradients_of(model), gradients_of(plain))
        assert len(model.schedules) <= MAX_SCHEDULES
    assert [*model.schedules.values()] == kept  # the last length was known


def test_pipeline_without_a_loss_goes_forward(mesh):
    rows = drawn(0, 4, 2, WIDTH)
    torch.testing.assert_close(of_net(mesh.view(pp=1, rest=8), None).apply(Net())(rows), Net()(rows).detach())


def of_several(output: torch.Tensor, target: Any) -> torch.Tensor:
    wanted, weights = target.values() if isinstance(target, dict) else target
    return ((output - wanted).square() * weights[:, None, None]).mean()


@on_mesh(pp=2)
def test_target_may_be_several_tensors(mesh: ProcessGroupMesh):
    model, alone = compose(mesh, of_net(mesh, of_several)).apply(Net()), Net()
    for kind, rows in itertools.product((tuple, list, lambda pair: dict(zip("ab", pair))), (4, 8)):
        x, wanted = drawn(rows, 2, rows, 3, WIDTH)
        target = wanted, torch.arange(rows, dtype=torch.float64)
        losses = model.step(x, target=kind(target))
        loss = of_several(alone(x), target)
        loss.backward()
        with torch.no_grad():
            losses += model.step(x, target=kind(target))
        if losses:
            torch.testing.assert_close(torch.stack(losses).view(2, 2).mean(1), loss.expand(2))
    assert_same("gradients", gradients_of(model), gradients_of(alone))
    with pytest.raises(MethodError, match="does not know the type object"):
        model.step(x, target=(x, object()))
    with pytest.raises(ShapeError, match="8 rows of inputs, 3 rows of target cannot be split"):
        model.step(x, target=[x[:3]])


@on_mesh(pp=2)
def test_keywords_are_split_in_dicts_or_raise(mesh: ProcessGroupMesh):
    model, right, x, mask = of_net(mesh, mse_loss).apply(Net()), Net(), drawn(0, 8, 5, WIDTH), drawn(1, 8, 5)
    mse_loss(right(x, {"mask": mask}), x).backward()
    model.step(x, target=x, extra={"mask": mask})
    assert_same("gradients", gradients_of(model), gradients_of(right))
    for extra, rows in (
        (torch.ones(1, 5), "1 row of extra"),
        (torch.tensor(1.0), "0 rows of extra"),
        ((torch.ones(8), {"sin": torch.ones(16)}), "8 rows of extra, 16 rows of extra"),
    ):
        with pytest.raises(ShapeError) as caught:
            model.step(x, target=x, extra=extra)
        message = f"8 rows of inputs, {rows}, 8 rows of target cannot be split into 2 equal microbatches along pp=2."
        assert str(caught.value).splitlines()[0] == message
