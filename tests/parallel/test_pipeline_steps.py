"""Steps of a pipeline: accumulated gradients, new shapes and schedules, targets and keywords of several tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pgmesh import MethodError, ProcessGroupMesh, ShapeError
from pgmesh.parallel import Composition, DataParallel, Method, PipelineParallel, ShardedDataParallel, compose, verify
from pgmesh.parallel.running import MAX_SCHEDULES
from tests.support.fake_world import fake_rank
from tests.support.parallel_models import assert_same, full_tensor, gradients_of
from tests.support.pipelines import needs_pipelines
from tests.support.worlds import check_sums, groups_of, on_ranks

pytestmark = needs_pipelines

WIDTH, LENGTH, LAYERS, PARTS = 4, 5, 4, 2


class Net(nn.Module):
    """Two layers. ``length`` cuts the output of the first one."""

    length: int | None = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))[:, : self.length]
        return x


def rows_of(rows: int, length: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(10 * rows + length)
    return torch.randn(rows, length, WIDTH, dtype=torch.float64, generator=numbers)


def pipeline_on(mesh: ProcessGroupMesh, **changes: Any) -> PipelineParallel:
    return PipelineParallel(mesh, "pp", **{"layers": "layers", "loss": mse_loss, "microbatches": PARTS, **changes})


# ---- accumulated gradients ----


@pytest.mark.parametrize(
    ("data", "options"), [(DataParallel, {"gradient_as_bucket_view": True}), (ShardedDataParallel, {})]
)
@on_ranks(4)
def test_steps_with_known_and_new_shapes_add_gradients(data: Callable[..., Method], options: dict[str, Any]):
    """Three batches of three steps with known and new shapes, and an evaluation after each."""
    with ProcessGroupMesh(pp=2, dp=2) as mesh:
        together = compose(mesh, pipeline_on(mesh), data(mesh, "dp", **options))
        model, plain = together.apply(Net()), Net()
        for step, (rows, length) in enumerate([(8, 3), (8, 3), (16, 2)] * 2 + [(8, 3), (4, 3), (8, 2)]):
            if step % 3 == 0:
                model.zero_grad()
                plain.zero_grad()
            batch = rows_of(rows, length) + step
            mine = together.share(batch)
            model.step(mine, target=mine)
            model(together.share(rows_of(8, 4)))
            mse_loss(plain(batch), batch).backward()
            found = {name: full_tensor(each) for name, each in gradients_of(model).items()}
            assert_same(f"gradients after step {step}", found, gradients_of(plain))
        check_sums(groups_of(mesh))


# ---- schedules ----


@on_ranks(2)
def test_a_pipeline_keeps_schedules_of_the_latest_shapes():
    with ProcessGroupMesh(pp=2) as mesh:
        model, plain = pipeline_on(mesh).apply(Net()), Net()
        lengths = [*range(1, MAX_SCHEDULES + 3), 1, MAX_SCHEDULES + 2]
        for length in lengths:
            batch = rows_of(4, length)
            model.zero_grad()
            plain.zero_grad()
            kept = [*model.schedules.values()]
            model.step(batch, target=batch)
            mse_loss(plain(batch), batch).backward()
            assert_same(f"gradients of length {length}", gradients_of(model), gradients_of(plain))
            assert len(model.schedules) <= MAX_SCHEDULES
        assert [*model.schedules.values()] == kept  # the last length was known


@on_ranks(1)
def test_outputs_of_another_shape_than_at_first_raise():
    with ProcessGroupMesh(pp=1) as mesh:
        model, batch = pipeline_on(mesh, schedule="interleaved", stages_per_rank=2).apply(Net()), rows_of(4, 4)
        model.step(batch, target=batch)
        model.parts[0].length = 2
        with pytest.raises(MethodError, match=r"^microbatch 0 of stage 0 .*\[2, 2, 4\], .* first .*\[2, 4, 4\]\.$"):
            model.step(batch, target=batch)


def test_pipeline_without_a_loss_goes_forward():
    with fake_rank(0, 1), ProcessGroupMesh(pp=1) as mesh:
        batch = rows_of(4, 2)
        torch.testing.assert_close(pipeline_on(mesh, loss=None).apply(Net())(batch), Net()(batch).detach())


# ---- targets of several tensors ----


def of_several(output: torch.Tensor, target: Any) -> torch.Tensor:
    wanted, weights = target.values() if isinstance(target, dict) else target
    return ((output - wanted).square() * weights[:, None, None]).mean()


def named(pair: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(("wanted", "weights"), pair))


@pytest.mark.parametrize("kind", [tuple, list, named])
@on_ranks(2)
def test_target_may_be_several_tensors(kind: Any):
    with ProcessGroupMesh(pp=2) as mesh:
        stages = PipelineParallel(mesh, "pp", layers="layers", loss=of_several, microbatches=2)
        model, alone = compose(mesh, stages).apply(Net()), Net()
        for rows in (4, 8):
            x, target = rows_of(rows, 3), (rows_of(rows, 3) + 1, torch.arange(rows, dtype=torch.float64))
            losses = model.step(x, target=kind(target))
            loss = of_several(alone(x), target)
            loss.backward()
            if losses:
                torch.testing.assert_close(torch.stack(losses).mean(), loss)
            with torch.no_grad():
                if losses := model.step(x, target=kind(target)):
                    torch.testing.assert_close(torch.stack(losses).mean(), loss)
        assert_same("gradients", gradients_of(model), gradients_of(alone))
        check_sums(groups_of(mesh))


@on_ranks(2)
def test_target_of_unknown_type_raises_on_all_ranks():
    with ProcessGroupMesh(pp=2) as mesh:
        stages = PipelineParallel(mesh, "pp", layers="layers", loss=of_several, microbatches=2)
        model, x = compose(mesh, stages).apply(Net()), rows_of(4, 3)
        with pytest.raises(MethodError, match="does not know the type object"):
            model.step(x, target=(x, object()))
        with pytest.raises(ShapeError, match="4 rows of inputs, 3 rows of target cannot be split"):
            model.step(x, target=[x[:3]])


# ---- keywords ----


@dataclass
class Extra:
    """Arguments in an object that torch does not split, until it is registered."""

    mask: torch.Tensor
    positions: torch.Tensor
    scale: float


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.places = nn.Linear(WIDTH, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, positions: torch.Tensor, scale: float) -> torch.Tensor:
        return x + scale * mask.unsqueeze(-1) * torch.tanh(self.linear(x) + self.places(positions))


class Masked(nn.Module):
    """Each layer uses a mask, position ids and a number, which are keywords or in one object."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.double()

    def forward(self, x: torch.Tensor, extra: Any = None, **keywords: Any) -> torch.Tensor:
        keywords = keywords or (extra if isinstance(extra, dict) else vars(extra))
        x = x if self.into is None else self.into(x)
        for block in self.blocks:
            x = block(x, **keywords)
        return x


def masked_batch(step: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Inputs, targets and keywords: rows with masks and positions of their own."""
    torch.manual_seed(step)
    x, target = torch.randn(2, rows, length, WIDTH, dtype=torch.float64)
    positions = torch.stack([torch.randperm(2 * LENGTH)[:length] for _ in range(rows)])
    mask = torch.rand(rows, length, dtype=torch.float64).round()
    return x, target, {"mask": mask, "positions": positions, "scale": 0.5 + step}


@pytest.mark.parametrize(
    ("schedule", "count", "kind"),
    [
        ("gpipe", 1, DataParallel),
        ("1f1b", 1, ShardedDataParallel),
        ("interleaved", 2, DataParallel),
        ("zero-bubble", 2, None),
    ],
)
@on_ranks(4)
def test_every_stage_gets_its_microbatch_of_the_keywords(schedule: str, count: int, kind: Any):
    def step(together: Composition, model: Any, given: Any) -> Any:
        x, target, keywords = given
        mine = together.share({name: each for name, each in keywords.items() if name != "scale"})
        x, target, more = together.share(x), together.share(target), {**mine, "scale": keywords["scale"]}
        losses = model.step(x, target=target, **more)
        outputs = model(x, **more)
        if losses:
            torch.testing.assert_close(torch.stack(losses).mean(), mse_loss(outputs, target), rtol=0, atol=1e-12)
        return losses

    stages = {"layers": "blocks", "first": ["into"], "loss": mse_loss, "schedule": schedule, "stages_per_rank": count}
    with ProcessGroupMesh(pp=2, dp=2) as mesh:
        pipeline = PipelineParallel(mesh, "pp", microbatches=2, **stages)
        methods = [pipeline] if kind is None else [pipeline, kind(mesh, "dp")]
        together = compose(mesh, *methods, unowned=["dp"] if kind is None else [])
        sizes = [(8, 5), (8, 5), (16, 3)]  # the shapes of keywords change too
        assert verify(together, Masked, [masked_batch(i, *size) for i, size in enumerate(sizes)], step=step) < 1e-12
        check_sums(groups_of(mesh))


@on_ranks(2)
def test_mask_without_row_for_each_input_raises():
    with ProcessGroupMesh(pp=2) as mesh:
        pipeline = PipelineParallel(mesh, "pp", layers="blocks", first=["into"], loss=mse_loss, microbatches=2)
        model = pipeline.apply(Masked())
        x, target, keywords = masked_batch(0, 8, 5)
        row, nested = torch.ones(1, 5), (torch.ones(8), {"sin": torch.ones(16)})
        for mask, rows in (
            (row, "1 row of mask"),
            (torch.tensor(1.0), "0 rows of mask"),
            (nested, "8 rows of mask, 16 rows of mask"),  # torch splits the tensors inside tuples and dicts too
        ):
            with pytest.raises(ShapeError) as caught:
                model.step(x, target=target, **{**keywords, "mask": mask})
            found = f"8 rows of inputs, {rows}, 8 rows of positions, 8 rows of target"
            message = f"{found} cannot be split into 2 equal microbatches along pp=2."
            assert str(caught.value).splitlines()[0] == message


@on_ranks(2)
def test_keyword_in_registered_dataclass_is_split():
    with ProcessGroupMesh(pp=2) as mesh:
        pipeline = PipelineParallel(mesh, "pp", layers="blocks", first=["into"], loss=mse_loss, microbatches=2)
        model, right = pipeline.apply(Masked()), Masked()
        x, target, keywords = masked_batch(0, 8, 5)
        mse_loss(right(x, **keywords), target).backward()
        torch.export.register_dataclass(Extra)
        for extra in (Extra(**keywords), keywords):
            model.zero_grad()
            model.step(x, target=target, extra=extra)
            assert_same(type(extra).__name__, gradients_of(model), gradients_of(right))
