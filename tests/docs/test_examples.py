"""Every example runs, and says so itself."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.forking import PYTHON, TORCHRUN
from tests.support.programs import clean_env, run_programs

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = sorted(EXAMPLES.glob("[0-9]*.py"))
NAMES = "mixture_of_experts ray_actors rl_weight_sync survive torchtitan_meshes two_engines weight_sync"
LARGER = [EXAMPLES / f"{name}.py" for name in NAMES.split()]
NEEDS = {"11_accelerate": "accelerate", "ray_actors": "ray", "torchtitan_meshes": "torchtitan"}
NEEDS |= dict.fromkeys(["rl_weight_sync", "train_llama"], "transformers")


def run_example(folder: Path, path: Path, words: str = "") -> list[str]:
    """Run an example with these arguments, and return the lines that it prints."""
    needed = NEEDS.get(path.stem)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    ((out, _),) = run_programs(folder, PYTHON, str(path), *words.split(), environs=[clean_env()], deadline=180)
    return out.splitlines()


@pytest.mark.parametrize("path", [*SMALL, *LARGER], ids=lambda path: path.stem)
def test_an_example_passes(path, tmp_path):
    assert run_example(tmp_path, path)[-1] == "PASS"


@pytest.mark.parametrize("words", ["--tied", "--experts"])
def test_weights_reach_the_engine_of_another_model(words, tmp_path):
    lines = run_example(tmp_path, EXAMPLES / "rl_weight_sync.py", words)
    assert [line.partition(":")[0] for line in lines[::3]] == ["step 10", "step 20", "PASS"]


@pytest.mark.parametrize("words", ["", "--experts 4", "--compile aot_eager --steps 0"])
def test_llama_trains_as_one_rank_and_resumes(words, tmp_path):
    lines = run_example(tmp_path, EXAMPLES / "train_llama.py", words)
    steps = [line.partition(":")[0] for line in lines if line.startswith("step ")]
    assert steps == [f"step {i}" for i in (1, 2, 3, 4, 3, 4) if "--steps 0" not in words]
    assert any(line.endswith("one rank, 1 step: greatest relative differences, 1.5e-08 allowed") for line in lines)
    assert lines[-1] == "PASS"


@pytest.mark.parametrize(("stem", "needed"), NEEDS.items())
def test_an_example_says_what_it_needs(stem, needed, tmp_path):
    hidden = f"import sys; sys.modules[{needed!r}] = None\n{PYTHON}"
    ends = run_programs(tmp_path, hidden, str(EXAMPLES / f"{stem}.py"), environs=[clean_env()], statuses=(1,))
    assert ends == [("", f"this example needs {needed}: pip install {needed}\n")]


def test_the_examples_are_numbered_and_small():
    assert [path.name[:2] for path in SMALL] == [f"{i:02}" for i in range(1, len(SMALL) + 1)]
    others = {EXAMPLES / f"{name}.py" for name in ("elastic", "gpt", "train_gpt", "train_llama", "vllm_model")}
    assert {*EXAMPLES.glob("*.py")} == {*SMALL, *LARGER, *others}
    for path in SMALL:
        lines = path.read_text().splitlines()
        assert len(lines) < 60, path
        assert lines[0].startswith('"""'), path


def test_the_demo_passes_under_torchrun(tmp_path):
    words = "8", str(EXAMPLES / "train_gpt.py"), "--tied"
    ((out, _),) = run_programs(tmp_path, TORCHRUN, *words, environs=[clean_env()], deadline=180)
    said = out.strip().splitlines()
    assert said[-1].startswith("PASS")
    steps = [line.strip() for line in said if line.startswith("  ")]
    assert {f"{what}: step {n} of 40" for what in ("on the mesh", "alone") for n in (10, 20, 30, 40)} <= {*steps}
    on_mesh, alone = map(float, re.search(r"40 steps took (\S+) s on the mesh and (\S+) s alone", out).groups())
    is_slower = any(line.startswith("The mesh is slower here: its eight processes used ") for line in said)
    assert is_slower == (on_mesh > alone)
