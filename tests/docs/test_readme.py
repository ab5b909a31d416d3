"""README: its script runs under torchrun, and each row of its table is observed on real processes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pgmesh
from pgmesh import Layout, MismatchError, MissingRanksError, ProcessGroupMesh
from pgmesh.groups.world import current_world
from tests.support.programs import clean_env, run_ranks
from tests.support.torch_tables import table_sizes
from tests.support.worlds import check_sums, groups_of, on_ranks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = {
    cells[0]: cells
    for cells in ([cell.strip() for cell in line.strip("|").split(" | ")] for line in README.splitlines())
    if len(cells) == 3
}

((PROGRAM, SHOWN),) = re.findall(
    r"```python\n(.*?)```\n\n```console\n\$ torchrun .*? script.py\n(.*?)```", README, re.DOTALL
)


def check_shown(output: str) -> None:
    # The processes share the pipe, so line ends may come late; Gloo of torch 2.9 prints too.
    lines = re.findall(r"dp\d-tp\d: \(\d, \d\) sum to \d+\.0", output)
    assert sorted(lines) == SHOWN.splitlines()


def test_its_script_prints_what_it_shows(tmp_path: Path):
    """With the variables of torchrun."""
    assert len(list(filter(None, PROGRAM.splitlines()))) == 7
    check_shown(run_ranks(tmp_path, PROGRAM, 4))


def test_readme_names_version_in_under_100_lines():
    assert f"| status of {pgmesh.__version__} |" in README
    assert README.index(PROGRAM) < README.index("| NCCL | not tried") < README.index("## Install")
    assert len(README.splitlines()) < 100


def test_commands_of_a_fresh_machine_are_targets():
    first = README.partition("## Seven lines")[0]
    (commands,) = re.findall(r"^```\n(.*?)^```", first, re.MULTILINE | re.DOTALL)
    targets = re.findall(r"^make ([\w-]+)", commands, re.MULTILINE)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [target for target in targets if not re.search(f"^{target}:", makefile, re.MULTILINE)] == []
    assert (ROOT / re.search(r"PIP_CONSTRAINT=(\S+)", README)[1]).is_file()


# ---- why not just init_device_mesh? ----


@on_ranks(4)
def test_who_calls_and_in_which_order():
    """Rank 3 makes the meshes in the other order."""
    assert "every sum right" in ROWS["Who calls, and in which order?"][2]
    shapes = [(2, 2), (1, 4)]
    meshes = {shape: ProcessGroupMesh(*shape) for shape in (shapes if dist.get_rank() != 3 else reversed(shapes))}
    for shape in shapes:
        check_sums(groups_of(meshes[shape]))


@on_ranks(4)
def test_a_group_along_two_axes():
    assert "is the same object" in ROWS["A group along two axes?"][2]
    mesh = ProcessGroupMesh(pp=1, dp=2, tp=2, name="two axes")
    if mesh.rank != 3:
        mesh.group("dp", "tp")
    dist.barrier()
    check_sums({"dp, tp": (mesh.group("dp", "tp"), mesh.ranks("dp", "tp"))})
    assert mesh.group("dp", "tp") is mesh.group("tp", "dp")


@on_ranks(4)
def test_many_meshes():
    ours = ROWS["Many meshes?"][2]
    assert "share groups; a mesh with another `name=` has its own; `mesh.close()` destroys them" in ours
    before = table_sizes()["pg_map"]
    actor, critic = (ProcessGroupMesh(dp=2, tp=2, name=name) for name in ("actor", "critic"))
    assert actor.view(pp=1, ep=4).group("ep") is actor.group()
    assert actor.along("tp").group() is actor.group("tp") is not critic.group("tp")
    check_sums(groups_of(actor) | {"critic": (critic.group("tp"), critic.ranks("tp"))})
    actor.close()
    critic.close()
    assert table_sizes()["pg_map"] == before


@on_ranks(4)
def test_a_rank_that_never_comes():
    (shown,) = re.findall(r"raises `([^`]+)`", ROWS["A rank never comes?"][2])
    if dist.get_rank() != 3:
        mesh = ProcessGroupMesh(2, 2, name="never comes")
        mesh.group(0)
        with pytest.raises(MissingRanksError) as caught:
            mesh.connect((0, 1), timeout=2)
        assert shown in str(caught.value)


@on_ranks(4)
def test_ranks_with_different_shapes():
    ours = ROWS["Ranks have different shapes?"][2]
    mesh = ProcessGroupMesh(*((4, 1) if dist.get_rank() == 3 else (2, 2)), name="shapes")
    with pytest.raises(MismatchError) as caught:
        mesh.connect((0, 1))
    assert "`mesh.connect((0, 1))` raises on all ranks, with each shape and its ranks" in ours
    (shown,) = re.findall(r"`(\[[^`]+)`", ours)
    assert re.search(r"\n  shape: \[2, 2\] on ranks? [0-2, ]+, ", str(caught.value))
    assert shown in str(caught.value)


@on_ranks(4)
def test_a_job_that_hangs():
    ours = ROWS["The job hangs?"][2]
    assert "each rank's host, PID, line, function and group, for how long, and `behind: rank 3`" in ours
    mesh = ProcessGroupMesh(4, name="hangs")
    mesh.connect()
    if mesh.rank == 3:
        time.sleep(2.5)  # until the others have said for two heartbeats that they are in the all-reduce
        command = [sys.executable, "-m", "pgmesh", "report", current_world().address]
        shown = subprocess.run(command, cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=60).stdout
        place = r"at test_readme.py:\d+ in test_a_job_that_hangs: torch.distributed.all_reduce, group 0 of mesh 'hangs'"
        waiting = re.findall(rf"^([012]) +\S+ +(\d+) +runs +(\d+) s +{place}$", shown, re.MULTILINE)
        assert len({pid for _, pid, _ in waiting}) == 3, shown
        assert re.search(r"^group 0 of mesh 'hangs': .*; behind: rank 3 with \d+$", shown, re.MULTILINE), shown
    dist.all_reduce(torch.ones(1), group=mesh.group(0))


def test_before_there_are_gpus():
    assert "need no processes and no torch" in ROWS["Before you have GPUs?"][2]
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pgmesh import Layout; from pgmesh.__main__ import main\n"
        "print(Layout(dp=8, tp=8).block_of(9, 'tp')); sys.exit(main(['plan', 'dp=8', 'tp=8']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{Layout(dp=8, tp=8).block_of(9, 'tp')}\n64 ranks: dp=8 tp=8\n"), done.stdout


def test_each_row_has_a_test():
    rows = {question for question in ROWS if question.endswith("?")}
    asked = set(re.findall(r'ROWS\["([^"]+)"\]', Path(__file__).read_text(encoding="utf-8")))
    assert rows == asked


# ---- the first page of the site ----


def test_first_page_shows_the_same_script_and_output():
    page = (ROOT / "index.md").read_text(encoding="utf-8")
    included = r'^```\{include\} README.md\n:start-after: "(.+)"\n:end-before: "(.+)"\n```$'
    ((start, end),) = re.findall(included, page, re.MULTILINE)
    assert README.count(start) == README.count(end) == 1
    shown = README.partition(start)[2].partition(end)[0]
    assert PROGRAM in shown
    assert SHOWN in shown
    status = page.index("**NCCL and several hosts are untested.**")
    assert status < page.index("![") < page.index("## Seven lines") < page.index("## Where to go")
