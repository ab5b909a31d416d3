"""Three pages: tables name every method, level and schedule; a program runs as pasted."""

from __future__ import annotations

import inspect
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pgmesh import MethodError, ProcessGroupMesh, parallel
from pgmesh.parallel import ExpertParallel, Level, Method, PipelineParallel, compose, verify
from pgmesh.parallel.schedules import SCHEDULES
from tests.support.expert_models import expert_layer
from tests.support.own_methods import AverageLater, Rows
from tests.support.parallel_models import TOLERANCE
from tests.support.pipelines import needs_pipelines
from tests.support.programs import clean_env
from tests.support.small_model import FIRST_STAGE, SmallModel, batch, loss_of, partner
from tests.support.worlds import check_sums, groups_of, on_ranks

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / "docs" / f"{page}.md").read_text("utf-8") for page in ("parallel", "methods", "own_methods"))


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
    assert [code(row[0]) for row in rows("level")] == [[f"Level.{level.name}"] for level in Level]
    table = rows("`schedule=`")
    assert [word.strip('"') for row in table for word in code(row[0])] == [*SCHEDULES]
    for row in table:
        for schedule in (SCHEDULES[word.strip('"')] for word in code(row[0])):
            assert (row[2] == "no") == schedule.split_backward


def run_ranks(folder: Path, text: str, *words: str) -> str:
    """The output of a program, started by ``words``."""
    (folder / "train.py").write_text(text, "utf-8")
    command = [sys.executable, *words, str(folder / "train.py")]
    settings = {"env": clean_env(), "cwd": ROOT}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]


@pytest.mark.long
def test_first_program_prints_losses_of_one_process(tmp_path: Path):
    found = r"^# Parallel methods\n.*?^```python\n(.*?)^```\n\n```console\n\$ torchrun .*? train.py\n(.*?)^```"
    ((program, shown),) = re.findall(found, PAGE, re.MULTILINE | re.DOTALL)
    alone = program.replace("dp=2, tp=2", "dp=1, tp=1")
    outputs = run_ranks(tmp_path, program, *TORCHRUN), run_ranks(tmp_path, alone)
    printed = [re.findall(r"^\d\.\d\d$", each, re.MULTILINE) for each in outputs]
    assert printed[0] == printed[1] == shown.split()
    assert len(printed[0]) == 3


@pytest.mark.long
def test_verify_prints_the_table_of_the_page(tmp_path: Path):
    """But for the numbers, and the order of the parameters."""
    program, call = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[:2]
    (shown,) = re.findall(r"^```console\n(Composition.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    compose = "".join(re.findall(r"^    ((?:tensor|together) = .*\n)", program, re.MULTILINE))
    setup = f"mesh = ProcessGroupMesh(dp=2, tp=2)\n{compose}{call}"
    printed = run_ranks(tmp_path, program.replace("train(ProcessGroupMesh(dp=2, tp=2))", setup), *TORCHRUN)
    title, header, *table = shown.splitlines()
    assert printed.splitlines()[:2] == [title, header]
    assert {line.split()[0] for line in printed.splitlines()[2:]} == {line.split()[0] for line in table}
    assert max(float(each) for each in re.findall(r"\d\.\de[-+]\d\d", printed.partition("\n")[2])) < 1e-13


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
@on_ranks(4)
def test_documented_methods_compose_with_others():
    average, split = of_markdown(), runpy.run_path(str(ROOT / "examples" / "10_own_method.py"))["Split"]
    for own, kind, frozen in (
        (average, "tensor", ()),
        (average, "pipeline", FIRST_STAGE),
        (split, "sharding", ()),
        (split, "two stages", ()),
    ):
        with ProcessGroupMesh(x=2, own=2, name=f"{own.__name__}, {kind}") as mesh:
            together, build = compose(mesh, partner(mesh, kind, "x"), own(mesh, "own")), partial(SmallModel, frozen)
            assert verify(together, build, map(batch, range(2)), loss=loss_of) <= TOLERANCE
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
