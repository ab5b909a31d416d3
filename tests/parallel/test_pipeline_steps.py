"""Several steps of a pipeline: accumulated gradients, new shapes and schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pgmesh import MethodError, ProcessGroupMesh, ShapeError
from pgmesh.parallel import DataParallel, Method, PipelineParallel, ShardedDataParallel, compose
from pgmesh.parallel.running import MAX_SCHEDULES
from tests.support.fake_world import fake_rank
from tests.support.parallel_models import assert_same, full_tensor, gradients_of
from tests.support.pipelines import needs_pipelines
from tests.support.worlds import check_sums, groups_of, on_ranks

pytestmark = needs_pipelines


WIDTH, PARTS = 4, 2


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
