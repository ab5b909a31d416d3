"""Keyword inputs of a pipeline, such as masks and position ids, reach every stage in microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from pgmesh import ProcessGroupMesh, ShapeError
from pgmesh.parallel import Composition, DataParallel, PipelineParallel, ShardedDataParallel, compose, verify
from tests.support.parallel_models import assert_same, gradients_of
from tests.support.pipelines import needs_pipelines
from tests.support.worlds import check_sums, groups_of, on_ranks

pytestmark = needs_pipelines


WIDTH, LENGTH, LAYERS = 6, 5, 4


@dataclass
class Extra:
    """Arguments in an object that torch does not split, until it is registered."""

    mask: torch.Tensor
    scale: float


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.places = nn.Linear(WIDTH, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, positions: torch.Tensor, scale: float) -> torch.Tensor:
        return x + scale * mask.unsqueeze(-1) * torch.tanh(self.linear(x) + self.places(positions))


class Masked(nn.Module):
    """Each layer uses a mask, position ids and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.double()

    def forward(self, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        x = x if self.into is None else self.into(x)
        for block in self.blocks:
            x = block(x, **keywords)
        return x


def batch(step: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Inputs, targets and keywords: rows with masks and positions of their own."""
    torch.manual_seed(step)
    x, target = torch.randn(2, rows, length, WIDTH, dtype=torch.float64)
    positions = torch.stack([torch.randperm(2 * LENGTH)[:length] for _ in range(rows)])
    mask = torch.rand(rows, length, dtype=torch.float64).round()
    return x, target, {"mask": mask, "positions": positions, "scale": 0.5 + step}


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


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
            torch.testing.assert_close(torch.stack(losses).mean(), loss_of(outputs, target), rtol=0, atol=1e-12)
        return losses

    stages = {"layers": "blocks", "first": ["into"], "loss": loss_of, "schedule": schedule, "stages_per_rank": count}
    with ProcessGroupMesh(pp=2, dp=2) as mesh:
        pipeline = PipelineParallel(mesh, "pp", microbatches=2, **stages)
        methods = [pipeline] if kind is None else [pipeline, kind(mesh, "dp")]
        together = compose(mesh, *methods, unowned=["dp"] if kind is None else [])
        sizes = [(8, 5), (8, 5), (16, 3)]  # the shapes of keywords change too
        assert verify(together, Masked, [batch(i, *size) for i, size in enumerate(sizes)], step=step) < 1e-12
        check_sums(groups_of(mesh))


@on_ranks(2)
def test_mask_without_row_for_each_input_raises():
    with ProcessGroupMesh(pp=2) as mesh:
        pipeline = PipelineParallel(mesh, "pp", layers="blocks", first=["into"], loss=loss_of, microbatches=2)
        model = pipeline.apply(Masked())
        x, target, keywords = batch(0, 8, 5)
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


class Scaled(nn.Module):
    """Each layer uses a mean over rows of a mask, which is another number for the rows of all microbatches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.double()

    def forward(self, x: torch.Tensor, extra: Any) -> torch.Tensor:
        mask, scale = (extra["mask"], extra["scale"]) if isinstance(extra, dict) else (extra.mask, extra.scale)
        for block in self.blocks:
            x = block(x) * mask.mean() * scale
        return x


@on_ranks(2)
def test_keyword_in_registered_dataclass_is_split():
    with ProcessGroupMesh(pp=2) as mesh:
        pipeline = PipelineParallel(mesh, "pp", layers="blocks", loss=loss_of, microbatches=2)
        model, right = pipeline.apply(Scaled()), Scaled()
        x, target, keywords = batch(0, 8, 5)
        mask, scale = keywords["mask"] + torch.arange(8)[:, None], keywords["scale"]
        torch.export.register_dataclass(Extra)
        for extra in (Extra(mask, scale), {"mask": mask, "scale": scale}):
            model.zero_grad()
            model.step(x, target=target, extra=extra)
            right.zero_grad()
            for rows in (slice(0, 4), slice(4, 8)):
                (loss_of(right(x[rows], Extra(mask[rows], scale)), target[rows]) / 2).backward()
            assert_same(type(extra).__name__, gradients_of(model), gradients_of(right))
