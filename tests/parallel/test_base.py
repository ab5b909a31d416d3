"""The interface of every parallel method, the checks of compose, and methods found by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pgmesh import AxisError, MethodError, ProcessGroupMesh, ShapeError, parallel
from pgmesh.layout import Axis
from pgmesh.parallel import DataParallel, ExpertParallel, Method, ShardedDataParallel, compose, find, mix
from tests.support.fake_world import fake_rank
from tests.support.message_assertions import assert_raises
from tests.support.own_methods import AverageLater, Positions, Rows, Weights
from tests.support.worlds import check_sums, groups_of, on_ranks


class Experts(Rows):
    """May overlap the ranks of other methods, except those of pipeline stages."""

    differs = "experts"


class Pipeline(Rows):
    """Appends to the list before and after the other methods are applied."""

    differs = "weights"
    level = parallel.Level.PIPELINE

    def around(self, module: nn.Module, inner: Callable[[nn.Module], nn.Module]) -> nn.Module:
        module.signed = ["cut"]
        return self.apply(inner(module))


def test_method_keeps_axes_in_mesh_order(mesh: ProcessGroupMesh):
    method = Rows(mesh, "tp", "dp")
    assert (method.mesh, method.owns, method.average_axes) == (mesh, ("dp", "tp"), ("dp", "tp"))
    assert str(method) == "Rows along dp, tp"
    assert Rows(mesh, -1).owns == ("tp",)
    assert Rows(mesh.view(4, 2), 1, 0).owns == (0, 1)
    assert Rows(mesh.at(pp=1), "dp").owns == ("dp",)


def hybrid(mesh: ProcessGroupMesh, options: dict[str, Any]) -> list[dist.ProcessGroup]:
    ShardedDataParallel(mesh, "pp", "dp", replicate="pp", options=options)
    return [mesh.group("pp"), mesh.group("dp"), mesh.group("pp", "dp")]


def experts(mesh: ProcessGroupMesh, options: dict[str, Any]) -> list[dist.ProcessGroup]:
    compose(mesh, Rows(mesh, "pp"), ExpertParallel(mesh, "dp", options=options), unowned=["dp", "tp"])
    return [mesh.group("pp"), mesh.group("dp"), mesh.group("pp", "dp")]


def both_ends(mesh: ProcessGroupMesh, options: dict[str, Any]) -> list[dist.ProcessGroup]:
    stages = mesh.view(pp=4, tp=2)
    parallel.PipelineParallel(stages, "pp", layers="blocks", loss=None, microbatches=4, options=options)
    return [stages.group("pp"), *([stages.at(pp=[0, -1]).group("pp")] if stages.index("pp") in (0, 3) else [])]


@pytest.mark.parametrize("rank", [5, 7])
@pytest.mark.parametrize("made", [hybrid, experts, both_ends])
def test_options_apply_to_every_group_of_a_method(made: Callable[..., Any], rank: int):
    minutes = timedelta(minutes=3)
    with fake_rank(rank, 8), ProcessGroupMesh(pp=2, dp=2, tp=2, name="actor") as mesh:
        ranks = {tuple(dist.get_process_group_ranks(each)) for each in made(mesh, {"timeout": minutes})}
        timeouts = {each.ranks: each.options.timeout for each in mesh._mesh_groups.made()}
        assert timeouts == dict.fromkeys(ranks, minutes)


def test_apply_follows_levels_in_any_argument_order(mesh: ProcessGroupMesh):
    mesh = mesh.view(pp=2, dp=1, cp=2, tp=2)
    methods = [Pipeline(mesh, "pp"), Rows(mesh, "dp"), Positions(mesh, "cp"), Weights(mesh, "tp")]
    inside_out = ["cut", "Weights along tp", "Positions along cp", "Rows along dp", "Pipeline along pp"]
    for given in (methods, methods[::-1]):
        module = compose(mesh, *given).apply(nn.Identity())
        assert module.signed == inside_out
    assert repr(compose(mesh, *methods)) == f"Composition({'; '.join(inside_out[1:])})"


def test_a_composition_says_what_a_data_loader_needs(mesh: ProcessGroupMesh):
    one = compose(mesh, Weights(mesh, "tp"), Rows(mesh, "dp"), Pipeline(mesh, "pp"))
    assert (one.num_replicas, one.rank) == (2, 0)
    two = compose(mesh, Rows(mesh, "tp"), AverageLater(mesh, "pp"), unowned=["dp"])
    assert (two.num_replicas, two.rank) == (mesh.size("pp", "tp"), mesh.index("pp", "tp")) == (4, 3)
    none = compose(mesh, unowned=mesh.axes)
    assert (none.num_replicas, none.rank) == (1, 0)
    rows = torch.arange(8)
    assert two.share(rows).tolist() == [6, 7]
    assert none.share(rows).equal(rows)


class Batch(NamedTuple):
    codes: torch.Tensor
    name: str


@dataclass(frozen=True)
class Example:
    codes: torch.Tensor
    rows: int = field(init=False, default=4)


def test_share_cuts_all_tensors_of_a_nest(mesh: ProcessGroupMesh):
    """Rank 5 has the first half of the rows, and the second half of the positions."""
    context = parallel.ContextParallel(mesh, "tp", attention="ulysses")
    together = compose(mesh, Rows(mesh, "dp"), context, unowned=["pp"])
    codes, weight = torch.arange(16).view(4, 4), torch.arange(4)
    mine = codes[:2, 2:]
    assert together.share(codes).equal(mine)
    nest = {"pair": (codes, codes), "more": [weight, None], "batch": Batch(codes, "one"), "example": Example(codes)}
    shared = together.share(nest)
    assert {name: type(each) for name, each in shared.items()} == {name: type(each) for name, each in nest.items()}
    for found in (*shared["pair"], shared["batch"].codes, shared["example"].codes):
        assert found.equal(mine)
    assert shared["more"][0].equal(weight[:2])
    assert (shared["more"][1], shared["batch"].name, shared["example"].rows) == (None, "one", 4)
    assert nest["example"].codes is codes
    rows = compose(mesh, Rows(mesh, "dp"), unowned=["pp", "tp"])
    assert [each.shape for each in rows.share((codes, torch.ones(4, 6)))] == [(2, 4), (2, 6)]
    assert rows.share(("one", 2, 3.0, None, b"4", True)) == ("one", 2, 3.0, None, b"4", True)
    assert rows.share((weight, torch.tensor(3.0)))[1].item() == 3.0


def test_average_axes_are_those_of_rows_and_positions(mesh: ProcessGroupMesh):
    def average_axes(data: Method, *others: Method) -> tuple[Axis, ...]:
        compose(mesh, data, *others, unowned=mesh.axes)
        return data.average_axes

    assert average_axes(Rows(mesh, "dp"), Weights(mesh, "tp"), Pipeline(mesh, "pp")) == ("dp",)
    assert average_axes(Rows(mesh, "dp"), Positions(mesh, "tp")) == ("dp", "tp")
    assert average_axes(Rows(mesh, "dp"), Positions(mesh, "tp"), AverageLater(mesh, "pp")) == ("dp", "tp")
    assert average_axes(ShardedDataParallel(mesh, "tp"), Positions(mesh, "pp", "dp")) == ("pp", "dp", "tp")
    one, two = mesh.at(pp=1), mesh.along("dp", "tp")
    assert average_axes(Rows(one, "dp"), Positions(two, "tp")) == ("dp", "tp")


def test_experts_do_not_lie_across_stages():
    """Ranks 0, 4 and 8 are along one axis of a view, and rank 8 has the second stage. No pair is along both axes."""
    with fake_rank(0, 12), ProcessGroupMesh(pp=2, dp=6) as mesh:
        crossing, stages = Experts(mesh.view(ep=3, rest=4), "ep"), Pipeline(mesh, "pp")
        for methods in ([crossing, stages], [stages, crossing]):
            assert_raises(
                AxisError,
                lambda methods=methods: compose(mesh, *methods, unowned=["dp"]),
                f"ranks 4 and 8 are in one block of Experts along ep, but hold different weights of {stages}.\n\n"
                "  mesh.view(...)   # with axes that do not cross pp",
            )
        compose(mesh, Experts(mesh.view(pp=2, ep=3, rest=2), "ep"), stages, unowned=["dp"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.mix, self.experts = nn.Linear(2, 2), mix, nn.ModuleList([nn.Linear(2, 2)])


def test_trainable_weights_need_a_method_that_averages(mesh: ProcessGroupMesh):
    alone = compose(mesh, Positions(mesh, "dp"), unowned=["pp", "tp"])
    alone.apply(nn.Linear(2, 2).requires_grad_(False))
    alone.apply(nn.Identity())
    both = compose(mesh, Positions(mesh, "dp"), Experts(mesh, "dp"), unowned=["pp", "tp"])
    model = Model()
    with pytest.raises(
        AxisError, match=r"^ranks along dp=2 read .* of 2 trainable parameters, for example head\.weight"
    ):
        both.apply(model)
    model.head.requires_grad_(False)
    with pytest.raises(AxisError, match=r"of 2 trainable parameters, for example experts\.0\.weight"):
        alone.apply(model)
    both.apply(model)  # experts are averaged by their method
    one = mesh.view(rows=1, pp=2, dp=2, tp=2)
    compose(one, Positions(one, "dp"), Rows(one, "rows"), unowned=["pp", "tp"]).apply(nn.Linear(2, 2))
    compose(mesh, AverageLater(mesh, "dp"), unowned=["pp", "tp"]).apply(nn.Linear(2, 2))


def test_experts_may_overlap_all_methods_except_pipelines(mesh: ProcessGroupMesh):
    dense = [Rows(mesh, "dp"), Weights(mesh, "tp"), Pipeline(mesh, "pp")]
    for sizes, senders in [
        ({"pp": 2, "ep": 4}, ("ep",)),  # over dp and tp
        ({"pp": 2, "edp": 2, "ep": 2}, ("edp", "ep")),  # over tp
        ({"pp": 2, "ep": 2, "same": 2}, ("ep",)),  # over dp
    ]:
        experts = ExpertParallel(mesh.view(**sizes), "ep")
        compose(mesh, *dense, experts)
        assert experts.average_axes == senders


def test_methods_own_the_axes_of_their_slices(mesh: ProcessGroupMesh):
    rest = [Pipeline(mesh, "pp")]
    compose(mesh, Rows(mesh.at(pp=1), "dp"), Weights(mesh, "tp"), *rest)
    both = "dp=2 x tp=2, so their 4"
    experts, rows = Experts(mesh.view(pp=2, ep=4), "ep"), Rows(mesh.at(pp=1), "dp")
    for half, bare in ((experts, both), (rows, "tp=2, so its 2")):
        with pytest.raises(AxisError, match=f"^no method owns {bare} ranks would do the same work"):
            compose(mesh, half, *rest)
    with pytest.raises(AxisError, match=r"^no method owns pp=2"):
        compose(mesh, Rows(mesh.at(pp=1), "dp", "tp"))


class Fails(Method):
    """Raises an error or returns None on some ranks, before an all-reduce that the others enter, or after it."""

    differs = "rows"
    before = False
    failing = range(8)
    error: BaseException | None = ShapeError("3 heads cannot be shared out along dp=2.")

    def apply(self, module: nn.Module) -> Any:
        fails = self.mesh.rank in self.failing
        if not (self.before and fails):
            dist.all_reduce(torch.ones(()), group=self.mesh.group(*self.owns))
        if fails and self.error is not None:
            raise self.error
        return None if fails else module


class Sums(Method):
    differs = "weights"

    def apply(self, module: nn.Module) -> nn.Module:
        dist.all_reduce(torch.ones(()), group=self.mesh.group(*self.average_axes))
        return module


FAILED = """
Fails along dp failed in apply: ShapeError: 3 heads cannot be shared out along dp=2.

New groups along its axes were released. The module may be partly changed: build it again.
"""


@pytest.mark.fault("a plugin raises half-way")
@on_ranks(4)
def test_failed_apply_releases_its_groups():
    mesh = ProcessGroupMesh(dp=2, tp=2)
    kept = mesh.group("tp")
    check_sums(groups_of(mesh))
    mesh.release("dp")
    dist.barrier()
    for _ in range(2):
        minutes = timedelta(minutes=3)
        failing = compose(mesh, Sums(mesh, "tp"), Fails(mesh, "dp", options={"timeout": minutes}))
        assert_raises(MethodError, lambda failing=failing: failing.apply(nn.Identity()), FAILED)
        assert mesh.group("tp") is kept
        again = Sums(mesh, "dp", options={"timeout": timedelta(minutes=4)})  # it is free: not too late to configure
        compose(mesh, Sums(mesh, "tp"), again).apply(nn.Identity())
        check_sums(groups_of(mesh))
        dist.barrier()
        mesh.release("dp")


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (MethodError("weights are wanted."), MethodError, r"MethodError: weights are wanted\.\n\nNew groups"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
        (None, MethodError, "TypeError: apply returned None, not the module"),
    ],
)
def test_failed_apply_wraps_errors_once(mesh: ProcessGroupMesh, error: Any, raised: Any, text: str):
    method = Fails(mesh, "dp")
    method.error = error
    match = f"^Fails along dp failed in apply: {text}" if text else "^$"
    with pytest.raises(raised, match=match) as caught:
        compose(mesh, method, Pipeline(mesh, "pp"), unowned=["tp"]).apply(nn.Identity())
    assert "Pipeline" not in str(caught.value)
    assert mesh.held() == ()  # without the group of all, which compared weights


def test_name_of_no_or_two_packages_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours = sorted(f"{point.name} ({point.value})" for point in metadata.entry_points(group="pgmesh.parallel"))
    assert find("data") is DataParallel
    assert "data (pgmesh.parallel.data:DataParallel)" in ours
    assert_raises(
        MethodError,
        lambda: find("ring"),
        f"""
        no installed packages provide a parallel method 'ring'; available: {", ".join(ours)}.

          [project.entry-points."pgmesh.parallel"]   # in the pyproject.toml of the package
          ring = "its_module:ItsMethod"
        """,
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for package in ("one", "two"):
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[pgmesh.parallel]\nring = {package}:Ring\n")
    with pytest.raises(MethodError) as caught:
        find("ring")
    text = str(caught.value)
    assert text.startswith("2 installed packages provide a parallel method 'ring'; available: ")
    assert "ring (one:Ring), ring (two:Ring)" in text
    assert text.endswith("\n\n  from one import Ring\n  from two import Ring")


def test_importing_pgmesh_parallel_loads_no_method():
    code = "import sys, pgmesh.parallel; print([m for m in sys.modules if m.startswith(('torch', 'pgmesh.parallel.'))])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.fault("a plugin raises half-way")
@pytest.mark.parametrize("before", [True, False])
@on_ranks(4)
def test_apply_failing_on_one_rank_raises_everywhere(before: bool):
    with ProcessGroupMesh(dp=2, tp=2) as mesh:
        kept = mesh.group()
        short = {"timeout": timedelta(seconds=3)}
        method, other = Fails(mesh, "tp", options=short), Sums(mesh, "dp", options=short)
        method.before, method.failing = before, [1]
        text = "Fails along tp failed in apply: ShapeError: 3 heads cannot be shared out along dp=2."
        with pytest.raises(MethodError) as caught:
            compose(mesh, method, other).apply(nn.Identity())
        assert str(caught.value).partition("\n")[0] == (text if mesh.rank == 1 else f"on rank 1, {text}")
        dist.barrier(group=kept)
        assert {held.ranks for held in mesh.held()} == {(0, 1, 2, 3)}
