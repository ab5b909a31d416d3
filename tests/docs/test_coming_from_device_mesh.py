"""docs/coming_from/device_mesh.md: every public name of DeviceMesh, and the values of both columns of each row."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import pgmesh
from pgmesh import ProcessGroupMesh
from tests.support import golden_files
from tests.support.fake_world import fake_rank
from tests.support.programs import run_ranks, script_of

pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page is about torch 2.13")

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from" / "device_mesh.md").read_text(encoding="utf-8")
VALUES: dict[str, str] = json.loads(golden_files.read("values-of-pages.json"))["device_mesh"]
"""By line, what it gives on rank 5 of 8: the repr, the name of the exception, or nothing if that is not compared."""

SPECIAL = {
    "__init__": "DeviceMesh(",
    "__getitem__": "device_mesh[",
    "__eq__": "device_mesh == ",
    "__hash__": "hash(device_mesh)",
    "__repr__": "repr(device_mesh)",
    "__enter__": "with device_mesh:",
    "__exit__": "with device_mesh:",
}
"""How a program calls the special methods of DeviceMesh."""


TABLES = re.findall(r"^\| DeviceMesh \| here \|\n\|---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
ROWS = [re.findall(r"`([^`]+)`", line) for table in TABLES for line in table.splitlines()]
"""What both columns say, of each row."""

COLUMN = "\n".join(theirs for theirs, _ in ROWS)


def given_by(code: str, names: dict[str, Any]) -> str:
    """The repr of an expression, the name of the exception that it raises, or nothing for a statement."""
    try:
        if isinstance(ast.parse(code).body[0], ast.Expr):
            return repr(eval(code, names))
        exec(code, names)
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_both_columns_give_their_values(row: list[str]):
    with fake_rank(5, 8):
        names: dict[str, Any] = {name: getattr(pgmesh, name) for name in pgmesh.__all__}
        names |= {"init_device_mesh": init_device_mesh, "DeviceMesh": DeviceMesh}
        names["device_mesh"] = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        names["mesh"] = ProcessGroupMesh(pp=2, dp=2, tp=2, name="train")
        for code in row:
            # One process alone cannot create a group of Gloo.
            given, expected = given_by(code.replace('"gloo"', '"fake"'), names), VALUES[code]
            if expected:
                assert given == expected
            else:
                assert not given.endswith(("Error", "Exception")), given


@pytest.mark.long
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_both_scripts_print_what_the_page_shows(tmp_path: Path, before: bool):
    (shown,) = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert run_ranks(tmp_path, script_of("device_mesh", before=before), 8) == shown


def test_page_has_each_public_name_of_device_mesh():
    public = {name for name in vars(DeviceMesh) if not name.startswith("_")}
    special = {name for name, value in vars(DeviceMesh).items() if name.startswith("__") and inspect.isfunction(value)}
    assert special - {"__getstate__", "__setstate__"} == {*SPECIAL}  # pickling is no call of a program
    missing = [name for name in public if not re.search(rf"\.{name}\b", COLUMN)]
    missing += [name for name, call in SPECIAL.items() if call not in COLUMN]
    assert missing == []


def test_page_has_each_parameter_of_init_device_mesh():
    parameters = {*inspect.signature(init_device_mesh).parameters} - {"mesh_shape"}  # given in each call
    assert [name for name in parameters if not re.search(rf"\b{name}\b", PAGE)] == []
    assert "init_device_mesh(" in COLUMN
