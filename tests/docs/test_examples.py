"""Every example runs, and says so itself."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = sorted(EXAMPLES.glob("[0-9]*.py"))
LARGER = [EXAMPLES / f"{name}.py" for name in ("mixture_of_experts", "survive", "torchtitan_meshes", "weight_sync")]
NEEDS = {"11_accelerate": "accelerate", "torchtitan_meshes": "torchtitan"}


def run(*command: str, deadline: float) -> list[str]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=deadline, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()


@pytest.mark.parametrize("path", [*SMALL, *LARGER], ids=lambda path: path.stem)
def test_an_example_passes(path):
    needed = NEEDS.get(path.stem)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    assert run(str(path), deadline=180)[-1] == "PASS"


@pytest.mark.parametrize(("stem", "needed"), NEEDS.items())
def test_an_example_says_what_it_needs(stem, needed):
    hide = f"import runpy, sys; sys.modules[{needed!r}] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", hide, str(EXAMPLES / f"{stem}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    said = f"this example needs {needed}: pip install {needed}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_the_examples_are_numbered_and_small():
    assert [path.name[:2] for path in SMALL] == [f"{i:02}" for i in range(1, len(SMALL) + 1)]
    others = {EXAMPLES / f"{name}.py" for name in ("elastic", "gpt", "train_gpt")}
    assert {*EXAMPLES.glob("*.py")} == {*SMALL, *LARGER, *others}
    for path in SMALL:
        lines = path.read_text().splitlines()
        assert len(lines) < 60, path
        assert lines[0].startswith('"""'), path


def test_the_demo_passes_under_torchrun():
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "8")
    said = run(*torchrun, str(EXAMPLES / "train_gpt.py"), "--tied", deadline=300)
    assert said[-1].startswith("PASS")
    steps = [line.strip() for line in said if line.startswith("  ")]
    assert {f"{what}: step {n} of 40" for what in ("on the mesh", "alone") for n in (10, 20, 30, 40)} <= {*steps}
    on_mesh, alone = map(
        float, re.search(r"40 steps took (\S+) s on the mesh and (\S+) s alone", "\n".join(said)).groups()
    )
    assert any(line.startswith("The mesh is slower here: its eight processes used ") for line in said) == (
        on_mesh > alone
    )
