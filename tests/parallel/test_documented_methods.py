"""Methods of the documentation, composed with sharding, tensor parallelism and a pipeline, against one process.

The classes are read from the pages and examples.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pgmesh import MethodError, ProcessGroupMesh
from pgmesh.parallel import ExpertParallel, Method, PipelineParallel, compose, verify
from tests.support.expert_models import expert_layer
from tests.support.own_methods import AverageLater, Rows
from tests.support.parallel_models import STEPS, TOLERANCE
from tests.support.pipelines import needs_pipelines
from tests.support.small_model import FIRST_STAGE, SmallModel, batch, loss_of, partner
from tests.support.worlds import check_sums, groups_of, on_ranks

ROOT = Path(__file__).parents[2]


# ---- what the pages show ----


def of_markdown() -> type[Method]:
    """Class Average of the page."""
    page = (ROOT / "docs" / "own_methods.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (block,) = (block for block in blocks if "class Average" in block)
    lines = [line[4:] for line in block.splitlines() if line.startswith((">>> ", "... "))]
    start = next(i for i, line in enumerate(lines) if line.startswith("class "))
    end = next((i for i, line in enumerate(lines) if i > start and line and not line.startswith(" ")), len(lines))
    imports = [line for found in blocks for line in found.replace(">>> ", "").splitlines() if "import" in line]
    scope: dict[str, Any] = {}
    exec("\n".join([*(line for line in imports if "pgmesh" in line or "torch" in line), *lines[start:end]]), scope)
    return scope["Average"]


def of_program(name: str) -> type[Method]:
    """Class of the example program."""
    spec = importlib.util.spec_from_file_location("own_method", ROOT / "examples" / "10_own_method.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


# ---- averages of gradients ----


@needs_pipelines
@on_ranks(4)
def test_documented_average_composes_with_one_method():
    averages = of_markdown()
    for kind, frozen in (("tensor", ()), ("two stages", ()), ("pipeline", FIRST_STAGE)):
        with ProcessGroupMesh(dp=2, x=2, name=f"{kind}, {len(frozen)} frozen") as mesh:
            together = compose(mesh, averages(mesh, "dp"), partner(mesh, kind, "x"))
            build = functools.partial(SmallModel, frozen)
            assert verify(together, build, map(batch, range(STEPS)), loss=loss_of) <= TOLERANCE
            check_sums(groups_of(mesh))


# ---- the example's own tensor parallelism ----


@needs_pipelines
@on_ranks(4)
def test_documented_tensor_parallelism_composes_with_other_methods():
    split = of_program("Split")
    for kind in ("sharding", "two stages"):
        with ProcessGroupMesh(x=2, tp=2, name=f"split, {kind}") as mesh:
            together = compose(mesh, partner(mesh, kind, "x"), split(mesh, "tp"))
            assert verify(together, SmallModel, map(batch, range(STEPS)), loss=loss_of) <= TOLERANCE
            check_sums(groups_of(mesh))


@pytest.mark.parametrize("later", [False, True])
def test_weights_leaves_out_frozen_parameters_and_experts(mesh: ProcessGroupMesh, later: bool):
    frozen, trained, layer = nn.Linear(2, 2), nn.Linear(2, 2, bias=False), expert_layer()
    module = ExpertParallel(mesh, "tp").apply(nn.ModuleList([frozen.requires_grad_(False), layer, trained]))
    kept = layer.experts.parameters() if later else ()  # replicas have experts of their own
    found = (AverageLater if later else Rows)(mesh, "dp").weights(module)
    assert [*map(id, found)] == [*map(id, [*kept, trained.weight])]


@needs_pipelines
def test_zero_bubble_schedule_refuses_hooks_on_gradients(mesh: ProcessGroupMesh):
    layers: dict[str, Any] = {"layers": "blocks", "first": "012", "loss": loss_of, "microbatches": 4}
    pipeline = PipelineParallel(mesh, "pp", **layers, schedule="zero-bubble")
    together = compose(mesh, of_markdown()(mesh, "dp"), pipeline, unowned=["tp"])
    with pytest.raises(MethodError, match=r"schedule 'zero-bubble' .* and post-accumulate-grad hooks do not run\."):
        together.apply(SmallModel())
