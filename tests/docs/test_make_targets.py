"""The target of the Makefile that needs a GPU, and the workflow that runs `make test`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.programs import run_programs

ROOT = Path(__file__).parents[2]
RUNNER = "import sys; from tests.gpu.__main__ import main; sys.exit(main(sys.argv[1:]))"


def test_gpu_tests_are_skipped_without_a_gpu(tmp_path):
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environ.pop("PGMESH_TEST_DEVICE", None)
    ((out, err),) = run_programs(tmp_path, RUNNER, environs=[environ])  # which exits with 0
    assert out == f"test-gpu: skipped, torch {torch.__version__} of {sys.executable} sees no GPU.\n"
    assert err == ""


@pytest.mark.long
def test_gpu_tests_pass_on_a_cpu(tmp_path):
    program = f"import tests.support.worlds; from tests.support.forking import fork_server; fork_server(); {RUNNER}"
    words = "-q", "-k", "one_rank or send or sharded or checkpoint"
    environ = {**os.environ, "PGMESH_TEST_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    ((out, _),) = run_programs(tmp_path, program, *words, environs=[environ], deadline=300)
    rows = [line for line in out.splitlines() if line.startswith("|")]
    header, _, row = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    record = dict(zip(header, row, strict=True))
    assert (record["GPU"], record["torch"], record["failed"]) == ("none", torch.__version__, "0")
    assert int(record["passed"]) >= 25
    assert int(record["skipped"]) == len(re.findall(r"^skipped test_\w+.*: .*NCCL$", out, re.MULTILINE)) == 2


def test_workflow_runs_each_supported_python():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))["jobs"]["test"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert job["strategy"]["matrix"]["python"] == re.findall(r"Python :: (3\.\d+)", project)
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make test PYTHON=python"]
