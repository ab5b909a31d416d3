"""Three pages, whose tables name each method, level and schedule, and the methods of the pages and of examples/plugin.

The reference of that method, DiLoCo, is a plain loop in one process, over replicas that read different rows.
"""

from __future__ import annotations

import inspect
import re
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from pgmesh import MethodError, ProcessGroupMesh, parallel
from pgmesh.parallel import Method, PipelineParallel, ShardedDataParallel, TensorParallel, compose, verify
from pgmesh.parallel.schedules import SCHEDULES
from tests.support.expert_models import expert_layer
from tests.support.own_methods import AverageLater, Rows
from tests.support.parallel_models import TOLERANCE, assert_same, optimizer_of, train_parallel, weights_of
from tests.support.pipelines import needs_pipelines
from tests.support.programs import clean_env, run_programs
from tests.support.worlds import check_sums, groups_of, on_mesh, world

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / "docs" / f"{page}.md").read_text("utf-8") for page in ("parallel", "methods", "own_methods"))
ROWS = 16
FIRST_STAGE = ("0", "2", "blocks.0", "blocks.1")
"""Parameters of the first of two pipeline stages, by the starts of their names."""


class SmallModel(nn.Module):
    """Two layers under the names in the documentation's plans, then four blocks."""

    def __init__(self, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        for i, layer in enumerate((nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))):
            self.add_module(str(i), layer)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.double()
        for name, weight in self.named_parameters():
            weight.requires_grad = not name.startswith(frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in map(self._modules.get, "012"):
            x = x if layer is None else layer(x)
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, the same in every process."""
    made = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 8, generator=made).double(), torch.randn(ROWS, 8, generator=made).double()


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def partner(mesh: ProcessGroupMesh, kind: str, axis: str, **changes: Any) -> Method:
    """A method along an axis, to compose with: "sharding", "tensor", "pipeline" or "two stages"."""
    if kind == "sharding":
        return ShardedDataParallel(mesh, axis)
    if kind == "tensor":
        return TensorParallel(mesh, axis, plan={"0": ColwiseParallel(), "2": RowwiseParallel()})
    changes |= {"schedule": "interleaved", "stages_per_rank": 2} if kind == "two stages" else {}
    return PipelineParallel(mesh, axis, layers="blocks", first="012", loss=loss_of, microbatches=4, **changes)


def rows(heading: str) -> list[list[str]]:
    """The cells of each row of the table that starts with these cells."""
    (table,) = re.findall(rf"^\| {re.escape(heading)} \|.*\n\|---.*\n((?:\|.*\n)*)", PAGE, flags=re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_table_has_each_method():
    public = [getattr(parallel, name) for name in parallel.__all__]
    methods = {each.__name__ for each in public if inspect.isclass(each) and issubclass(each, Method)} - {"Method"}
    table = {code(row[0])[0].partition("(")[0]: row for row in rows("method | what differs along its axes")}
    assert table.keys() == methods
    for row in table.values():
        assert row[2].startswith(("thin over torch's", "our reference"))
        assert len(row) == 3
    for name in methods - {"DataParallel", "ShardedDataParallel", "PipelineParallel"}:
        assert "Untested on GPUs." in inspect.getdoc(getattr(parallel, name))


def test_tables_have_each_level_and_schedule():
    assert [code(row[0]) for row in rows("level")] == [[f"Level.{level.name}"] for level in parallel.Level]
    table = rows("`schedule=`")
    assert [word.strip('"') for row in table for word in code(row[0])] == [*SCHEDULES]
    for row in table:
        for schedule in (SCHEDULES[word.strip('"')] for word in code(row[0])):
            assert (row[2] == "no") == schedule.split_backward


PROGRAM, VERIFYING = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[:2]
LOSSES, TABLE = re.findall(r"^```console\n(?:\$ .*? train.py\n)?(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[:2]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines that the first program of the page prints under torchrun, and those of its verification after that."""
    setup = "".join(re.findall(r"^    ((?:tensor|together) = .*\n)", PROGRAM, re.MULTILINE))
    script = tmp_path_factory.mktemp("page") / "train.py"
    script.write_text(f"{PROGRAM}\nmesh = ProcessGroupMesh(dp=2, tp=2, name='another')\n{setup}{VERIFYING}", "utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_env(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_first_program_prints_losses_of_one_process(printed: list[str], tmp_path: Path):
    alone = PROGRAM.replace("dp=2, tp=2", "dp=1, tp=1")
    ((out, _),) = run_programs(tmp_path, alone, environs=[clean_env()])
    assert printed[:3] == out.splitlines() == LOSSES.splitlines()
    assert len(out.splitlines()) == 3


@pytest.mark.long
def test_verify_prints_the_table_of_the_page(printed: list[str]):
    """But for the numbers, and the order of the parameters."""
    title, header, *table = TABLE.splitlines()
    assert printed[3:5] == [title, header]
    assert {line.split()[0] for line in printed[5:]} == {line.split()[0] for line in table}
    assert max(float(each) for each in re.findall(r"\d\.\de[-+]\d\d", "\n".join(printed[4:]))) < 1e-13


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


@needs_pipelines
@on_mesh(x=2, own=2)
def test_documented_methods_compose_with_others(mesh: ProcessGroupMesh):
    average, split = of_markdown(), runpy.run_path(str(ROOT / "examples" / "10_own_method.py"))["Split"]
    for own, kind, frozen in (
        (average, "tensor", ()),
        (average, "pipeline", FIRST_STAGE),
        (split, "sharding", ()),
        (split, "two stages", ()),
    ):
        together, build = compose(mesh, partner(mesh, kind, "x"), own(mesh, "own")), partial(SmallModel, frozen)
        assert verify(together, build, map(batch, range(2)), loss=loss_of) <= TOLERANCE


@pytest.mark.parametrize("later", [False, True])
def test_weights_leaves_out_frozen_parameters_and_experts(mesh: ProcessGroupMesh, later: bool):
    frozen, trained, layer = nn.Linear(2, 2), nn.Linear(2, 2, bias=False), expert_layer()
    module = parallel.ExpertParallel(mesh, "tp").apply(nn.ModuleList([frozen.requires_grad_(False), layer, trained]))
    kept = layer.experts.parameters() if later else ()  # replicas have experts of their own
    found = (AverageLater if later else Rows)(mesh, "dp").weights(module)
    assert [*map(id, found)] == [*map(id, [*kept, trained.weight])]


@needs_pipelines
def test_zero_bubble_schedule_refuses_hooks_on_gradients(mesh: ProcessGroupMesh):
    pipeline = partner(mesh, "pipeline", "pp", schedule="zero-bubble")
    together = compose(mesh, of_markdown()(mesh, "dp"), pipeline, unowned=["tp"])
    with pytest.raises(MethodError, match=r"schedule 'zero-bubble' .* and post-accumulate-grad hooks do not run\."):
        together.apply(SmallModel())


STEPS, EVERY, REPLICAS = 7, 2, 2


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the package."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "examples" / "plugin", folder / "source")  # where a build may leave what it likes
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--target", str(folder / "site"), str(source)]
    subprocess.run(command, timeout=120, check=True)
    return folder / "site"


def model_of(replica: int, frozen: tuple[str, ...]) -> SmallModel:
    """The model, with other weights on each replica until they are broadcast."""
    model = SmallModel(frozen)
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.requires_grad):
            weight += 0.25 * replica
    return model


def plain_loop(frozen: tuple[str, ...]) -> list[SmallModel]:
    """The replicas after training in one process."""
    replicas = [model_of(i, frozen) for i in range(REPLICAS)]
    optimizers = [optimizer_of(replica.parameters()) for replica in replicas]
    trainable = [[weight for weight in each.parameters() if weight.requires_grad] for each in replicas]
    with torch.no_grad():
        theta = [weight.detach().clone() for weight in trainable[0]]
        velocity = [torch.zeros_like(each) for each in theta]
        for weights in trainable:
            torch._foreach_copy_(weights, theta)
    for step in range(STEPS):
        for i, replica in enumerate(replicas):
            rows, target = (each.chunk(REPLICAS)[i] for each in batch(step))
            optimizers[i].zero_grad()
            loss_of(replica(rows), target).backward()
            optimizers[i].step()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for n, weights in enumerate(zip(*trainable)):
                    delta = theta[n] - torch.stack([*weights]).mean(0)  # SGD with Nesterov momentum, by torch's page
                    velocity[n] = 0.9 * velocity[n] + delta
                    theta[n] = theta[n] - 0.7 * (delta + 0.9 * velocity[n])
                    for weight in weights:
                        weight.copy_(theta[n])
    return replicas


def trained(site: Path, kind: str, frozen: tuple[str, ...]) -> None:
    """Train on the mesh, and compare with the plain loop."""
    sizes = {"dp": REPLICAS, "x": 2 if kind else 1}
    with pytest.MonkeyPatch.context() as patch, ProcessGroupMesh(sizes, name=kind or "alone") as mesh:
        patch.syspath_prepend(str(site))
        diloco = parallel.find("diloco")(mesh, "dp", every=EVERY)
        assert Path(sys.modules["pgmesh_diloco"].__file__).parent == site
        others, mine = [partner(mesh, kind, "x")] if kind else [], mesh.index("dp")
        together, model = compose(mesh, diloco, *others), model_of(mine, frozen)
        together.broadcast(model)
        model = together.apply(model)
        optimizer = together.attach(optimizer_of(model.parameters()))
        ways = {"steps": range(STEPS), "optimizer": optimizer, "batch": batch, "loss_of": loss_of}
        found = train_parallel(model, together.share, **ways)
        assert_same("weights", found.weights, weights_of(plain_loop(frozen)[mine]))
        check_sums(groups_of(mesh))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "frozen"), [("", ()), ("sharding", ()), ("tensor", ()), ("two stages", ()), ("pipeline", FIRST_STAGE)]
)
def test_composed_diloco_equals_a_plain_loop(site: Path, kind: str, frozen: tuple[str, ...]):
    world(4 if kind else 2).run(trained, site, kind, frozen)
