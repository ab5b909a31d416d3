"""The wheel and the source archive: their contents, and a program in an environment that has only the wheel of us."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import pgmesh
from tests.support import release

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys, sysconfig
import pgmesh
from pgmesh import launch

def main():
    mesh = pgmesh.ProcessGroupMesh(dp=2, tp=2)
    return mesh.group("tp").size(), mesh.ranks("tp")

if __name__ == "__main__":
    assert pgmesh.__file__.startswith(sysconfig.get_path("purelib")), pgmesh.__file__
    print(launch.spawn(main, 4))
"""


def run(*words: object, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the source archive from a copy of the tracked files."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("package")
    tracked = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=folder / "source")
    (path,) = (folder / "dist").glob("*.whl")
    return path


def test_wheel_holds_only_the_package(wheel: Path):
    assert wheel.name == f"pgmesh-{pgmesh.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"pgmesh-{pgmesh.__version__}.dist-info"
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert {name.partition("/")[0] for name in names} == {"pgmesh", info}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pgmesh").rglob("*.py")}
    assert {name for name in names if name.startswith("pgmesh/")} == {*modules, "pgmesh/py.typed"}
    assert "pgmesh = pgmesh.__main__:main" in entry_points
    assert "tensor = pgmesh.parallel.tensor:TensorParallel" in entry_points
    assert 'Requires-Dist: rich; extra == "rich"' in metadata
    assert "License-File: LICENSE" in metadata
    assert "# pgmesh" in metadata  # the README, which the index shows
    assert wheel.stat().st_size < 500_000


def test_wheel_runs_in_a_separate_environment(wheel: Path, tmp_path: Path):
    """The environment has the wheel, and what torch and cachetools bring, through a path file."""
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    install = ["--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    run(sys.executable, "-m", "pip", *install, wheel, cwd=tmp_path)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(__import__('torch').__file__).parents[1]}\n")
    (tmp_path / "script.py").write_text(PROGRAM)
    assert run(python, "script.py", cwd=tmp_path) == "[(2, (0, 1)), (2, (0, 1)), (2, (2, 3)), (2, (2, 3))]\n"
    command = tmp_path / "env" / "bin" / "pgmesh"
    assert run(command, "--version", cwd=tmp_path).strip().endswith(pgmesh.__version__)
    assert "tp=2" in run(command, "plan", "dp=2", "tp=2", cwd=tmp_path)


def test_all_files_state_the_same_version():
    assert release.problems() == []
    assert set(release.versions().values()) == {pgmesh.__version__}


def test_pre_commit_hooks_match_make_test():
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert len(entries) == 3
    for entry in entries:
        assert f"\t{entry.replace('.venv/bin/python', '$(RUN)')}\n" in makefile
