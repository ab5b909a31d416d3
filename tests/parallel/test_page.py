"""Three pages: tables name every method, all that a method has, every level and schedule; a program runs as pasted."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pgmesh import parallel
from pgmesh.parallel import Level, Method
from pgmesh.parallel.schedules import SCHEDULES
from tests.support.programs import clean_env

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
        assert row[3:] == ["yes", "no"]
    for name in methods - {"DataParallel", "ShardedDataParallel", "PipelineParallel"}:
        assert "Untested on GPUs." in inspect.getdoc(getattr(parallel, name))


def signature(name: str, function: object) -> str:
    """Name and names of the parameters, as the page writes them."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"{name}({', '.join(stars.get(each.kind, '') + each.name for each in parameters)})"


def test_table_has_each_attribute_of_method():
    functions = {name: each for name, each in vars(Method).items() if inspect.isfunction(each) and name[0] != "_"}
    names = {name for name in {*vars(Method), *Method.__annotations__} if name[0] != "_"} - functions.keys()
    expected = {signature("Method", Method.__init__), *names, *(signature(*each) for each in functions.items())}
    found = [word for row in rows("name") for word in code(row[0])]
    assert len(found) == len({*found})
    assert {*found} == expected


def test_each_level_stands_in_its_place():
    assert [code(row[0]) for row in rows("level")] == [[f"Level.{level.name}"] for level in Level]


def test_each_schedule_has_a_row():
    table = rows("`schedule=`")
    assert [word.strip('"') for row in table for word in code(row[0])] == [*SCHEDULES]
    for row in table:
        for schedule in (SCHEDULES[word.strip('"')] for word in code(row[0])):
            assert (row[2] == "no") == schedule.split_backward


@pytest.mark.long
def test_first_program_prints_losses_of_one_process(tmp_path: Path):
    (program,) = re.findall(r"^# Parallel methods\n.*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    printed = []
    for ranks, text in ((4, program), (1, program.replace("dp=2, cp=2", "dp=1, cp=1"))):
        (tmp_path / "train.py").write_text(text, "utf-8")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command, settings = [*torchrun, str(tmp_path / "train.py")], {"env": clean_env(), "cwd": ROOT}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **settings)
        assert done.returncode == 0, done.stderr
        printed.append(re.findall(r"^\d\.\d\d$", done.stdout, re.MULTILINE))
    assert printed[0] == printed[1]
    assert len(printed[0]) == 3
