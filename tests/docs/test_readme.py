"""README: its script runs under torchrun, and each row of its table is observed on real processes."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import pgmesh
from pgmesh import Layout, MethodError, MismatchError, MissingRanksError, ProcessGroupMesh
from pgmesh.groups.world import current_world
from pgmesh.parallel import Composition, DataParallel, compose, verify
from tests.support.faults import wait_until
from tests.support.programs import clean_env, run_programs, run_ranks
from tests.support.torch_tables import count_new_groups, table_sizes
from tests.support.worlds import World, check_sums, fresh_world, groups_of, on_ranks, world

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
STILL_WAITS = 5.0  # seconds, as the table says
ROWS = {
    cells[0]: cells
    for cells in ([cell.strip() for cell in line.strip("|").split(" | ")] for line in README.splitlines())
    if len(cells) == 3
}

of_torch_2_13 = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is about torch 2.13")


((PROGRAM, SHOWN),) = re.findall(
    r"```python\n(.*?)```\n\n```console\n\$ torchrun .*? script.py\n(.*?)```", README, re.DOTALL
)


def test_its_script_prints_what_it_shows(tmp_path: Path):
    assert len(list(filter(None, PROGRAM.splitlines()))) == 7
    # The processes share the pipe, so line ends may come late; Gloo of torch 2.9 prints too.
    lines = re.findall(r"dp\d-tp\d: \(\d, \d\) sum to \d+\.0", run_ranks(tmp_path, PROGRAM, 4))
    assert sorted(lines) == SHOWN.splitlines()


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
    assert (ROOT / re.search(r"PIP_CONSTRAINT=\$PWD/(\S+)", README)[1]).is_file()


def in_two_orders(make: Callable[[tuple[int, int]], Any]) -> None:
    """Two meshes, and the sums of their groups. Rank 3 makes the meshes in the other order."""
    shapes = [(2, 2), (1, 4)]
    meshes = {shape: make(shape) for shape in (shapes if dist.get_rank() != 3 else reversed(shapes))}
    for shape in shapes:
        of = ProcessGroupMesh(*shape, name=f"expected {shape}")
        group_of = getattr(meshes[shape], "get_group", None) or meshes[shape].group
        check_sums({str(axis): (group_of(axis), of.ranks(axis)) for axis in of.axes})


def without_rank_3(make: Callable[[], Any]) -> None:
    if dist.get_rank() != 3:
        make()


@functools.cache
def cube() -> Any:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


def start() -> None:
    """Create what a call needs that must return on some ranks."""
    if dist.get_world_size() == 8:
        cube()


def flatten_without_rank_3() -> None:
    without_rank_3(cube()["dp", "tp"]._flatten)


def device_mesh(shape: tuple[int, int] = (2, 2)) -> Any:
    return init_device_mesh("cpu", shape)


def own_mesh(shape: tuple[int, int]) -> ProcessGroupMesh:
    return ProcessGroupMesh(*shape)


def device_mesh_of_another_shape(folder: str) -> None:
    mesh = init_device_mesh("cpu", (4, 1) if dist.get_rank() == 3 else (2, 2))
    Path(folder, f"rank {dist.get_rank()} has created it").touch()
    dist.all_reduce(torch.ones(1), group=mesh.get_group(0))


def all_reduce_without_rank_3() -> None:
    group = device_mesh((1, 4)).get_group(1)
    without_rank_3(lambda: dist.all_reduce(torch.ones(1), group=group))


FOLDER = "a temporary folder"
"""An argument in place of that folder."""

HANGS: dict[str, tuple[int, Callable[..., Any], tuple[Any, ...]]] = {
    "two orders": (4, in_two_orders, (device_mesh,)),
    "flatten": (8, flatten_without_rank_3, ()),
    "never comes": (4, without_rank_3, (device_mesh,)),
    "another shape": (4, device_mesh_of_another_shape, (FOLDER,)),
    "skips": (4, all_reduce_without_rank_3, ()),
}
"""The size of a world, and a call with its arguments, that DeviceMesh does not return from on some ranks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("waiting")


@pytest.fixture(scope="module")
def waiting_ranks(folder: Path) -> dict[str, list[int]]:
    """The ranks that still wait after STILL_WAITS seconds, for all of HANGS at the same time. No rank raises."""

    def run(own: World, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[int]:
        given = [str(folder) if each is FOLDER else each for each in args]
        outcomes = own.outcomes(fn, *given, deadline=STILL_WAITS)
        assert all(outcome.timed_out or not outcome.error for outcome in outcomes), outcomes
        return [outcome.rank for outcome in outcomes if outcome.timed_out]

    with ExitStack() as stack, ThreadPoolExecutor(len(HANGS)) as pool:
        worlds = [stack.enter_context(fresh_world(size)) for size, *_ in HANGS.values()]
        for own in worlds:
            own.run(start)
        calls = [pool.submit(run, own, fn, args) for own, (_, fn, args) in zip(worlds, HANGS.values())]
        return dict(zip(HANGS, [call.result() for call in calls]))


@of_torch_2_13
def test_who_calls_and_in_which_order(waiting_ranks: dict[str, list[int]]):
    _, theirs, ours = ROWS["Who calls, and in which order?"]
    orders = "If rank 3 creates `(1, 4)` before `(2, 2)`, and the others `(2, 2)` first"
    assert f"{orders}, all still wait after 5 s" in theirs
    assert waiting_ranks["two orders"] == [0, 1, 2, 3]
    assert "every sum right" in ours
    world(4).run(in_two_orders, own_mesh)


@of_torch_2_13
@on_ranks(8)
def test_a_group_along_two_axes(waiting_ranks: dict[str, list[int]]):
    _, theirs, ours = ROWS["A group along two axes?"]
    assert '`mesh["dp", "tp"].get_group()` raises `RuntimeError`' in theirs
    both = cube()["dp", "tp"]
    with pytest.raises(RuntimeError) as caught:
        both.get_group()
    assert type(caught.value) is RuntimeError
    mesh = ProcessGroupMesh(pp=2, dp=2, tp=2, name="two axes")
    if mesh.rank != 3:
        mesh.group("dp", "tp")
    dist.barrier()
    check_sums({"dp, tp": (mesh.group("dp", "tp"), mesh.ranks("dp", "tp"))})
    assert "is the same object" in ours
    assert mesh.group("dp", "tp") is mesh.group("tp", "dp")
    assert "`_flatten` creates one, and waits for the other ranks in it" in theirs
    assert both._flatten().get_group().size() == 4
    assert waiting_ranks["flatten"] == [0, 1, 2]


@of_torch_2_13
@on_ranks(4)
def test_many_meshes():
    _, theirs, ours = ROWS["Many meshes?"]
    assert "An equal mesh creates all groups again. No method destroys them" in theirs
    first = init_device_mesh("cpu", (2, 2))
    assert first == init_device_mesh("cpu", (2, 2))
    assert count_new_groups(lambda: init_device_mesh("cpu", (2, 2))) == 2
    assert not [name for name in dir(first) if re.search("destroy|close|release|shutdown|free", name)]
    assert "share groups; a mesh with another `name=` has its own; `mesh.close()` destroys them" in ours
    before = table_sizes()["pg_map"]
    actor, critic = (ProcessGroupMesh(dp=2, tp=2, name=name) for name in ("actor", "critic"))
    assert actor.view(pp=1, ep=4).group("ep") is actor.group()
    assert actor.along("tp").group() is actor.group("tp") is not critic.group("tp")
    check_sums(groups_of(actor) | {"critic": (critic.group("tp"), critic.ranks("tp"))})
    actor.close()
    critic.close()
    assert table_sizes()["pg_map"] == before


@of_torch_2_13
@on_ranks(4)
def test_a_rank_that_never_comes(waiting_ranks: dict[str, list[int]]):
    _, theirs, ours = ROWS["A rank never comes?"]
    assert "The others still wait after 5 s" in theirs
    assert waiting_ranks["never comes"] == [0, 1, 2]
    (shown,) = re.findall(r"raises `([^`]+)`", ours)
    if dist.get_rank() != 3:
        mesh = ProcessGroupMesh(2, 2, name="never comes")
        mesh.group(0)
        with pytest.raises(MissingRanksError) as caught:
            mesh.connect((0, 1), timeout=2)
        assert shown in str(caught.value)


@of_torch_2_13
@on_ranks(4)
def test_ranks_with_different_shapes(waiting_ranks: dict[str, list[int]], folder: Path):
    _, theirs, ours = ROWS["Ranks have different shapes?"]
    shapes = "With `(4, 1)` on rank 3 and `(2, 2)` on the others"
    assert f"{shapes}, these still wait after 5 s, and rank 3 in its first all-reduce" in theirs
    assert waiting_ranks["another shape"] == [0, 1, 2, 3]
    assert [each.name for each in folder.iterdir()] == ["rank 3 has created it"]
    mesh = ProcessGroupMesh(*((4, 1) if dist.get_rank() == 3 else (2, 2)), name="shapes")
    with pytest.raises(MismatchError) as caught:
        mesh.connect((0, 1))
    assert "`mesh.connect((0, 1))` raises on all ranks, with each shape and its ranks" in ours
    (shown,) = re.findall(r"`(\[[^`]+)`", ours)
    assert re.search(r"\n  shape: \[2, 2\] on ranks? [0-2, ]+, ", str(caught.value))
    assert shown in str(caught.value)


@of_torch_2_13
@on_ranks(4)
def test_a_job_that_hangs(waiting_ranks: dict[str, list[int]]):
    _, theirs, ours = ROWS["The job hangs?"]
    assert "If rank 3 skips an all-reduce, the others still wait after 5 s" in theirs
    assert waiting_ranks["skips"] == [0, 1, 2]
    assert "each rank's host, PID, line, function and group, for how long, and `behind: rank 3`" in ours
    mesh = ProcessGroupMesh(4, name="hangs")
    mesh.connect()
    if mesh.rank == 3:
        command = [sys.executable, "-m", "pgmesh", "report", current_world().address]
        place = r"at test_readme.py:\d+ in test_a_job_that_hangs: torch.distributed.all_reduce, group 0 of mesh 'hangs'"

        def is_told() -> bool:
            text = subprocess.run(command, cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=60).stdout
            waiting = re.findall(rf"^([012]) +\S+ +(\d+) +runs +(\d+) s +{place}$", text, re.MULTILINE)
            behind = re.search(r"^group 0 of mesh 'hangs': .*; behind: rank 3 with \d+$", text, re.MULTILINE)
            return behind is not None and len({pid for _, pid, _ in waiting}) == 3

        wait_until(is_told, "the report says where three ranks are, and that rank 3 is behind")
    dist.all_reduce(torch.ones(1), group=mesh.group(0))


@on_ranks(4)
def test_a_training_step_that_is_wrong():
    _, theirs, ours = ROWS["Is a training step right?"]
    assert theirs == "No check"
    assert "trains on the mesh and on one rank, and names the parameter whose gradient differs most" in ours

    def step(together: Composition, model: torch.nn.Module, batch: torch.Tensor) -> None:
        model(together.share(batch)).square().sum().backward()  # not together.mean: a quarter of the gradient

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(3, 1, bias=False)

    mesh = ProcessGroupMesh(dp=4, name="wrong step")
    together = compose(mesh, DataParallel(mesh, "dp"))
    with pytest.raises(MethodError, match=r"the gradient of weight differs by 7\.5e-01"):
        verify(together, build, [torch.ones(8, 3)], step=step)


@of_torch_2_13
def test_before_there_are_gpus(tmp_path: Path):
    _, theirs, ours = ROWS["Before you have GPUs?"]
    no_launcher, world_of_1 = re.findall(r"`([^`]+)`", theirs)
    program = (
        "import os, torch.distributed as dist\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "if 'ALONE' in os.environ: dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "init_device_mesh('cpu', (8, 8))"
    )
    ends = run_programs(tmp_path, program, environs=[clean_env(), clean_env(ALONE="")], statuses=(1,))
    for (_, errors), shown in zip(ends, (no_launcher, world_of_1)):
        assert shown in errors
    assert "need no processes and no torch" in ours
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


def test_first_page_shows_the_same_script_and_output():
    page = (ROOT / "index.md").read_text(encoding="utf-8")
    included = r'^```\{include\} README.md\n:start-after: "(.+)"\n:end-before: "(.+)"\n```$'
    ((start, end),) = re.findall(included, page, re.MULTILINE)
    assert README.count(start) == README.count(end) == 1
    shown = README.partition(start)[2].partition(end)[0]
    assert PROGRAM in shown
    assert SHOWN in shown
    status = page.index("**NCCL and several hosts are untested**")
    assert status < page.index("![") < page.index("## Seven lines") < page.index("## Where to go")
