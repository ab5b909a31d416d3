"""Targets of the Makefile that install or need much, and the workflow that runs `make test`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.programs import run_programs
from tests.support.torch_version import check

ROOT = Path(__file__).parents[2]
RUNNER = "import sys; from tests.gpu.__main__ import main; sys.exit(main([]))"

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def recipe(*words: str) -> list[str]:
    """The commands that make would run, whatever the make that runs these tests was given."""
    environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = ["make", "--dry-run", *words]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.replace("\\\n", " ").splitlines()


# ---- test-gpu ----


def test_gpu_tests_are_skipped_without_a_gpu(tmp_path):
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environ.pop("PGMESH_TEST_DEVICE", None)
    ((out, err),) = run_programs(tmp_path, RUNNER, environs=[environ])  # which exits with 0
    assert out == f"test-gpu: skipped, torch {torch.__version__} of {sys.executable} sees no GPU.\n"
    assert err == ""


@needs_make
def test_own_python_for_gpu_tests_installs_nothing():
    assert [line.rstrip() for line in recipe("test-gpu", "GPU_PYTHON=python9")] == [
        "RES_OPTIONS=attempts:0 python9 -m tests.gpu"
    ]


@pytest.mark.long
def test_gpu_tests_pass_on_a_cpu():
    command = [sys.executable, "-m", "tests.gpu", "-q", "-k", "one_rank or send or sharded or checkpoint"]
    environ = {**os.environ, "PGMESH_TEST_DEVICE": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    header, _, row = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in done.stdout.splitlines()
        if line.startswith("|")
    ]
    record = dict(zip(header, row, strict=True))
    assert (record["GPU"], record["torch"], record["failed"]) == ("none", torch.__version__, "0")
    assert int(record["passed"]) >= 25
    assert int(record["skipped"]) == len(re.findall(r"^skipped test_\w+.*: .*NCCL$", done.stdout, re.MULTILINE)) == 2


# ---- test-torch ----


@needs_make
def test_other_torch_is_asserted_and_never_replaced():
    commands = recipe("test-torch", "TORCH=9.8.7", "TESTS=tests/test_x.py")
    installs = [line for line in commands if "pip install" in line]
    assert len(installs) == 3
    assert all(line.startswith("env -u PIP_CONSTRAINT .venv-torch-9.8.7/bin/python -m pip") for line in installs)
    assert installs[0].endswith(" install --quiet torch==9.8.7")  # which alone takes what it depends on
    assert all(" --no-deps " in line for line in installs[1:])
    assert installs[1].endswith(" --editable .")
    asserted, tested = commands[-2:]
    assert asserted == ".venv-torch-9.8.7/bin/python -m tests.support.torch_version 9.8.7"
    assert " PGMESH_TORCH=9.8.7 .venv-torch-9.8.7/bin/python -m pytest -q -p tests.support.torch_version " in tested
    assert tested.endswith(" -m 'not long' tests/test_x.py")


def test_unexpected_torch_version_is_an_error():
    version = str(torch.__version__).partition("+")[0]
    check(version)
    check(str(torch.__version__))
    for other in (version.rpartition(".")[0], f"{version}0", "0.0.1"):
        with pytest.raises(pytest.UsageError, match=rf"^this is torch {version}.* and not torch {other}, which"):
            check(other)


# ---- package and release-check ----


@needs_make
@pytest.mark.parametrize("target", ["package", "release-check"])
def test_package_installs_only_build_and_twine(target: str):
    commands = recipe("--always-make", target)
    installs = [line for line in commands if " pip install " in line]
    assert set(installs) == {".venv-package/bin/python -m pip install --quiet build twine"}
    assert not [line for line in commands if ".venv/" in line or "upload" in line]
    assert commands[-1] == ".venv-package/bin/python -m twine check --strict dist/*"
    assert (".venv-package/bin/python -m tests.support.release" in commands) == (target == "release-check")


# ---- the workflow ----


def test_workflow_runs_each_supported_python():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))["jobs"]["test"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert job["strategy"]["matrix"]["python"] == re.findall(r"Python :: (3\.\d+)", project)
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make test PYTHON=python"]


# ---- test-upstream ----


@needs_make
def test_upstream_without_a_checkout_asks_for_one():
    command = ["make", "--no-print-directory", "test-upstream"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTORCH" and not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    says = r"test-upstream: give a checkout of pytorch near torch [\d.]+: make test-upstream PYTORCH=../pytorch\n"
    assert re.fullmatch(says, done.stdout)


@needs_make
def test_upstream_installs_what_the_tests_import():
    commands = recipe("--always-make", "test-upstream", "PYTORCH=../pytorch", "ARGS=--only tensor/")
    assert ".venv/bin/python -m pip install --quiet expecttest" in commands
    assert commands[-1].endswith('.venv/bin/python -m tests.upstream "../pytorch" --only tensor/')
