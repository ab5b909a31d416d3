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
from pgmesh.parallel import (
    ExpertParallel,
    Level,
    Method,
    PipelineParallel,
    ShardedDataParallel,
    compose,
    verify,
)
from tests.support.expert_models import expert_layer
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


# ---- in which order ----


class Shards(Method):
    """Replaces all parameters by copies."""

    differs = "rows"
    level = Level.SHARD

    def apply(self, module: nn.Module) -> nn.Module:
        for each in module.modules():
            for name, weight in list(each.named_parameters(recurse=False)):
                each.register_parameter(name, nn.Parameter(weight.detach().clone()))
        return module


class Keeps(Method):
    """Keeps references to the parameters."""

    differs = "rows"
    averages_later = True

    def apply(self, module: nn.Module) -> nn.Module:
        self.kept = [*module.parameters()]
        return module


def test_sharding_is_applied_before_methods_that_keep_weights(mesh: ProcessGroupMesh):
    for given in ((Keeps(mesh, "dp"), Shards(mesh, "tp")), (Shards(mesh, "tp"), Keeps(mesh, "dp"))):
        module = compose(mesh, *given, unowned=["pp"]).apply(nn.Linear(2, 2))
        (keeps,) = (method for method in given if isinstance(method, Keeps))
        assert {*map(id, keeps.kept)} == {*map(id, module.parameters())}
    order = compose(mesh, Keeps(mesh, "dp"), ShardedDataParallel(mesh, "tp"), unowned=["pp"])
    assert repr(order) == "Composition(ShardedDataParallel along tp; Keeps along dp)"


@needs_pipelines
def test_zero_bubble_schedule_refuses_hooks_on_gradients(mesh: ProcessGroupMesh):
    layers: dict[str, Any] = {"layers": "blocks", "first": "012", "loss": loss_of, "microbatches": 4}
    pipeline = PipelineParallel(mesh, "pp", **layers, schedule="zero-bubble")
    together = compose(mesh, of_markdown()(mesh, "dp"), pipeline, unowned=["tp"])
    with pytest.raises(MethodError, match=r"schedule 'zero-bubble' .* and post-accumulate-grad hooks do not run\."):
        together.apply(SmallModel())


def test_weights_leaves_out_frozen_parameters_and_experts(mesh: ProcessGroupMesh):
    frozen, trained, layer = nn.Linear(2, 2), nn.Linear(2, 2, bias=False), expert_layer()
    module = ExpertParallel(mesh, "tp").apply(nn.ModuleList([frozen.requires_grad_(False), layer, trained]))
    assert [*map(id, Shards(mesh, "dp").weights(module))] == [id(trained.weight)]
    later = [*map(id, Keeps(mesh, "dp").weights(module))]
    assert later == [*map(id, layer.experts.parameters()), id(trained.weight)]  # replicas have experts of their own
