"""Programs whose meaning changes on a stage, which has only some layers: each trains right or raises.

Code between layers, layers by number, a module in two places, experts twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pgmesh import OptionsError, ProcessGroupMesh
from pgmesh.parallel import PipelineParallel, compose, verify
from tests.support.parallel_models import FIRST, LAST
from tests.support.pipelines import needs_pipelines
from tests.support.worlds import on_ranks

pytestmark = [pytest.mark.long, needs_pipelines]

LAYERS, WIDTH = 5, 4


Loop = Callable[[Any, torch.Tensor], torch.Tensor]


class Looping(nn.Module):
    """Layers in a container of some kind, and a forward pass over them."""

    def __init__(self, kind: type[nn.Module], loop: Loop) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)]
        named = {f"layer{i}": each for i, each in enumerate(made)}
        self.layers = kind(*made) if kind is nn.Sequential else kind(named if kind is nn.ModuleDict else made)
        self.loop = loop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loop(self.layers, x)


def with_code_between(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = (x + layer(x)).tanh()
    return x


def in_slices(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers[:3]:
        x = x + layer(x)
    for layer in layers[3:]:
        x = layer(x).tanh()
    assert len(layers) == LAYERS
    return x


def present_by_number(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for number in range(len(layers)):
        if layers[number] is not None:
            x = layers[number](x) + number
    return x


def in_items(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    for name, layer in layers.items():
        x = layer(x).tanh() + int(name[-1])
    return x


def in_names_and_values(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    for name, layer in zip(layers, layers.values(), strict=True):
        x = layer(x).tanh() + int(name[-1])
    return x


def as_a_whole(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return layers(x)


@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        (nn.ModuleList, with_code_between),
        (nn.ModuleList, in_slices),
        (nn.Sequential, present_by_number),
        (nn.Sequential, as_a_whole),
        (nn.ModuleDict, in_items),
        (nn.ModuleDict, in_names_and_values),
    ],
)
@on_ranks(2)
def test_loop_over_stage_layers_equals_one_process(kind: type[nn.Module], loop: Loop):
    """Two ranks with two stages each, against one process. Each stage compiles to one graph."""
    with ProcessGroupMesh(pp=2) as mesh:
        counts = {"microbatches": 2, "stages_per_rank": 2}
        pipeline = PipelineParallel(mesh, "pp", layers="layers", loss=mse_loss, schedule="interleaved", **counts)
        rows, target = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert verify(compose(mesh, pipeline), lambda: Looping(kind, loop), [(rows, target)]) < 1e-12
        torch.compiler.reset()
        for stage in pipeline.cut(Looping(kind, loop)):
            assert torch.compile(stage, backend="eager", fullgraph=True)(rows).equal(stage(rows))


def test_layers_of_other_stages_are_counted_and_none(mesh):
    for kind in (nn.ModuleList, nn.Sequential, nn.ModuleDict):
        module = Looping(kind, as_a_whole)
        (stage,) = PipelineParallel(mesh, "pp", layers="layers", loss=None, microbatches=2).cut(module)
        layers = stage.layers
        assert len(layers) == len([*module.layers]) == LAYERS  # the module itself is not changed
        assert layers["layer0" if kind is nn.ModuleDict else 0] is None
        assert kind is nn.ModuleDict or "(0): None" in repr(layers)
    assert ("layer4" in layers, "layer0" in layers) == (True, False)


@pytest.mark.parametrize(
    "places",
    [
        {"first": FIRST, "last": [*LAST, "tokens"]},
        {"first": ["tokens", "places", "head.norm"], "last": LAST},
        {"first": [*FIRST, "blocks.0"], "last": LAST},
        {"first": [*FIRST, "blocks"], "last": LAST},
    ],
)
def test_module_in_two_places_raises(mesh, places):
    def build(**changes: Any) -> PipelineParallel:
        return PipelineParallel(mesh, "pp", **{"layers": "blocks", **places, **changes}, loss=None, microbatches=2)

    with pytest.raises(OptionsError, match="but a module is on one stage") as caught:
        build()
    call = str(caught.value).splitlines()[-1].strip().replace("PipelineParallel(..., ", "build(")
    method = eval(call, {"build": build})
    assert ([*method.first], [*method.last]) == ([*FIRST], [*LAST])
