"""examples/tour.ipynb: its cells run, a second time too, and show what is stored. ``GOLDEN=write`` stores it anew."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import golden_files

nbclient = pytest.importorskip(
    "nbclient", reason="nbclient is not installed: `make docs` and `make test-long` do that, from Python 3.11 on"
)
nbformat = pytest.importorskip("nbformat")

pytestmark = pytest.mark.long

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"
IMPORTS = "torch.distributed.fsdp torch.distributed.tensor.parallel pgmesh.parallel pgmesh.resharding"  # of the ranks


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The cells of code with their outputs, after a first and after a second run in the same kernel."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    once = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells = copy.deepcopy(once) + copy.deepcopy(once)
    folder = tmp_path_factory.mktemp("notebook")
    first = f"--IPKernelApp.exec_lines=from pgmesh.launch import processes; processes.PRELOAD += '{IMPORTS}'.split()"
    nbclient.execute(notebook, str(folder), timeout=120, extra_arguments=[first])
    return [notebook.cells[: len(once)], notebook.cells[len(once) :]]


def texts(cell: Any) -> str:
    return "".join(out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in cell.outputs)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the stored losses are of torch 2.13")
def test_stored_outputs_are_those_of_a_run(rounds: list[list[Any]]):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, (cell, run) in enumerate(zip(cells, rounds[0], strict=True), 1):
        cell.outputs, cell.execution_count = run.outputs, number
    text = nbformat.writes(notebook) + "\n"
    golden_files.check(NOTEBOOK, text)
    assert "site-packages" not in text  # no path of a machine


def test_a_second_run_shows_the_same_numbers(rounds: list[list[Any]]):
    numbers = [re.findall(r"(?:losses of|sum to|ranks: ).*", "\n".join(map(texts, cells))) for cells in rounds]
    assert numbers[0] == numbers[1] != []
    assert not [out for cell in rounds[1] for out in cell.outputs if out.get("name") == "stderr"]
