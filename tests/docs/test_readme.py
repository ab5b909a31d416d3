"""README's programs are whole: each runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from pgmesh import ProcessGroupMesh
from tests.support.fake_world import fake_rank

ROOT = Path(__file__).parents[2]
PROGRAM, METHOD = (
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    if ">>>" not in block
)


def test_its_program_runs(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run([sys.executable, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[('dp0-tp0', 2), ('dp0-tp1', 2), ('dp1-tp0', 2), ('dp1-tp1', 2)]\n"


def test_its_method_needs_a_mesh_and_a_model_alone():
    with fake_rank(0, 4):  # where a sum adds nothing
        said = {"mesh": ProcessGroupMesh(dp=4, name="readme"), "model": torch.nn.Linear(1, 1, bias=False)}
        exec(METHOD, said)
        said["model"](torch.full((1, 1), 8.0)).sum().backward()
        assert said["model"].weight.grad.item() == 8.0 / 4
