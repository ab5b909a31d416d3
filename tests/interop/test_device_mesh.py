"""torch's own parallelism over the groups of a mesh: the numbers of one process, and no group more than the mesh's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pgmesh import AxisError, LifetimeError, ProcessGroupMesh, RankError, from_device_mesh
from tests.support.fake_world import fake_rank
from tests.support.parallel_models import full_tensor
from tests.support.pipelines import needs_pipelines
from tests.support.torch_tables import count_new_groups, root_of, table_sizes
from tests.support.worlds import check_sums, groups_of, on_ranks

TOLERANCES = {"rtol": 1e-5, "atol": 1e-6}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def make_net() -> Net:
    """The model, with the same weights in every process."""
    torch.manual_seed(7)
    return Net()


def batch(rows: int = 8) -> torch.Tensor:
    """The whole batch, the same in every process."""
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(11))


def train(model: nn.Module, x: torch.Tensor, *, clip: float | None = None) -> dict[str, torch.Tensor]:
    """Train two steps; return the parameters and the norm of the last gradient."""
    optimizer, norm = torch.optim.SGD(model.parameters(), lr=0.5), torch.zeros(())
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {"norm": full_tensor(norm), **{name: full_tensor(each) for name, each in model.named_parameters()}}


def own_rows(mesh: ProcessGroupMesh, *axes: str) -> torch.Tensor:
    """This rank's rows of the batch, which is split along these axes."""
    return batch().chunk(mesh.size(*axes))[mesh.index(*axes)]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that both have the same tensors, up to rounding."""
    torch.testing.assert_close(found, expected, **TOLERANCES)


@contextmanager
def no_more_groups() -> Iterator[None]:
    """torch makes no group meanwhile."""
    before = table_sizes()
    yield
    after = table_sizes()
    assert after == before, f"torch made groups: {before} became {after}"


# ---- the mesh itself ----


@on_ranks(4)
def test_device_mesh_uses_the_groups_of_the_mesh():
    mesh = ProcessGroupMesh(pp=2, dp=1, tp=2, ranks=[3, 1, 2, 0])
    assert count_new_groups(mesh.device_mesh) == len({mesh.group(axis) for axis in mesh.axes})
    whole = mesh.device_mesh()
    with no_more_groups():
        assert (whole.mesh.flatten().tolist(), whole.mesh_dim_names) == ([3, 1, 2, 0], mesh.axes)
        assert tuple(whole.get_coordinate() or ()) == mesh.coord
        for axis in mesh.axes:
            assert whole.get_group(axis) is mesh.group(axis)
            assert mesh.device_mesh(axis).get_group() is mesh.group(axis)
            assert whole[axis].get_local_rank() == mesh.index(axis) == mesh.group(axis).rank()
        part = mesh.device_mesh("dp", "tp")
        assert part.mesh_dim_names == ("dp", "tp")
        assert tuple(part.mesh.flatten().tolist()) == mesh.ranks("dp", "tp")
        assert [part.get_group(axis) for axis in ("dp", "tp")] == [mesh.group("dp"), mesh.group("tp")]
        assert mesh.along("dp", "tp").device_mesh("tp").get_group() is mesh.group("tp")
        assert mesh.device_mesh() is whole
    check_sums(groups_of(mesh))


@on_ranks(4)
def test_device_mesh_on_meta_device_has_ranks():
    mesh = ProcessGroupMesh(dp=2, tp=2)
    with torch.device("meta"):
        whole, part = mesh.device_mesh(), mesh.device_mesh("tp", flat="dp")
        strided = mesh.at(tp=mesh.index("tp")).device_mesh("dp")
    assert (whole.mesh.tolist(), whole["tp"].mesh.tolist()) == ([[0, 1], [2, 3]], list(mesh.ranks("tp")))
    assert (part.size(), strided.mesh.tolist()) == (4, list(mesh.ranks("dp")))
    assert part.get_group("flat") is strided.get_group() is mesh.group("dp")


# ---- what torch builds on it ----


def dtensor(mesh: ProcessGroupMesh) -> None:
    whole = mesh.device_mesh("dp", "tp")
    left, right = batch(16), batch(8)
    product = distribute_tensor(left, whole, [Shard(0), Replicate()]) @ distribute_tensor(
        right, whole, [Replicate(), Shard(1)]
    )
    assert product.placements == (Shard(0), Shard(1))
    turned = product.redistribute(whole, [Shard(1), Replicate()])
    torch.testing.assert_close(turned.full_tensor(), left @ right, **TOLERANCES)


def hsdp(mesh: ProcessGroupMesh) -> None:
    model = make_net()
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh.device_mesh("dp", "tp"))
    assert_same(train(model, own_rows(mesh, "dp", "tp")), train(make_net(), batch()))


def tensor_parallel(tp: DeviceMesh) -> nn.Module:
    return parallelize_module(make_net(), tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp_and_tp(mesh: ProcessGroupMesh) -> None:
    model = fully_shard(tensor_parallel(mesh.device_mesh("tp")), mesh=mesh.device_mesh("dp"))
    expected = train(make_net(), batch(), clip=0.01)
    assert expected["norm"] > 0.01
    assert_same(train(model, own_rows(mesh, "dp"), clip=0.01), expected)


def ddp(mesh: ProcessGroupMesh) -> None:
    for over in ({"process_group": mesh.group("dp")}, {"device_mesh": mesh.device_mesh("dp")}):
        model = DistributedDataParallel(make_net(), **over)
        assert model.process_group is mesh.group("dp")
        found = {name.removeprefix("module."): value for name, value in train(model, own_rows(mesh, "dp")).items()}
        assert_same(found, train(make_net(), batch()))


def pipeline(mesh: ProcessGroupMesh) -> None:
    """The first axis is the pipeline; each stage holds a layer, and the gradients are those of the whole."""
    whole, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), batch(4)
    torch.manual_seed(3)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    index, expected = mesh.index("dp"), copy.deepcopy(whole)
    expected(x).square().mean().backward()
    stage = PipelineStage(whole[index], index, 2, torch.device("cpu"), group=mesh.group("dp"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
    if index == 0:
        schedule.step(x)
    else:
        schedule.step(target=torch.zeros(4, 8))
    for found, right in zip(whole[index].parameters(), expected[index].parameters()):
        torch.testing.assert_close(found.grad, right.grad, **TOLERANCES)


@pytest.mark.parametrize("use", [dtensor, hsdp, fsdp_and_tp, ddp, pytest.param(pipeline, marks=needs_pipelines)])
@on_ranks(4)
def test_torch_computes_over_a_mesh_like_one_process(use: Callable[[ProcessGroupMesh], None]):
    mesh = ProcessGroupMesh(dp=2, tp=2, ranks=[3, 1, 2, 0])
    mesh.device_mesh()
    with no_more_groups():
        use(mesh)
    check_sums(groups_of(mesh))


def group_names(model: nn.Module) -> set[str]:
    """The groups that a forward pass goes through. torch remembers, for each DeviceMesh, what an operator does."""
    seen: set[str] = set()
    real = torch.ops._c10d_functional.all_reduce

    def watch(tensor: torch.Tensor, operation: str, name: str) -> torch.Tensor:
        seen.add(name)
        return real(tensor, operation, name)

    with mock.patch.object(torch.ops._c10d_functional, "all_reduce", watch):
        model(batch())
    return seen


@on_ranks(4)
def test_two_equal_meshes_compute_over_own_groups():
    actor, critic = ProcessGroupMesh(dp=2, tp=2, name="actor"), ProcessGroupMesh(dp=2, tp=2, name="critic")
    for mesh, model in [(mesh, tensor_parallel(mesh.device_mesh("tp"))) for mesh in (actor, critic)]:
        assert group_names(model) == {mesh.group("tp").group_name}
    check_sums({**groups_of(actor), **groups_of(critic)})


@on_ranks(4)
def test_mesh_computes_after_close_and_release():
    for name in ("named", None, None):
        with ProcessGroupMesh(dp=2, tp=2, name=name) as mesh:
            dtensor(mesh)
            dist.barrier()
            mesh.release("tp")
            dtensor(mesh)
            check_sums(groups_of(mesh))
            dist.barrier()


# ---- from torch's ----


def test_from_device_mesh_keeps_numbered_axes():
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(2, 2, 2, name="actor")
        again = from_device_mesh(mesh.device_mesh(), name="again")
        assert (again.axes, again.ranks()) == (mesh.axes, mesh.ranks())
        assert all(again.group(axis) is mesh.group(axis) for axis in mesh.axes)
        plane = from_device_mesh(mesh.device_mesh(0, 2), name="plane")
        assert (plane.axes, plane.group(1)) == ((0, 1), mesh.group(2))
        assert plane.device_mesh(1).get_group() is mesh.group(2)


@on_ranks(4)
def test_from_device_mesh_returns_the_groups_of_torch():
    """torch's groups along the axes, ours along both; closing leaves torch's alone."""
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = from_device_mesh(theirs)
    of_torch = {f"torch's {axis}": (theirs.get_group(axis), mesh.ranks(axis)) for axis in ("dp", "tp")}
    assert [mesh.group(axis) for axis in mesh.axes] == [theirs.get_group(axis) for axis in ("dp", "tp")]
    before = table_sizes()["pg_map"]
    both, twin = mesh.group(), mesh.group("dp", tag="other")
    assert table_sizes()["pg_map"] - before == 2
    assert twin is not mesh.group("dp")
    assert both.group_desc == f"group dp, tp of {mesh!r}"
    assert mesh.device_mesh("tp").get_group() is mesh.view(a=2, b=2).group("b") is theirs.get_group("tp")
    check_sums({**groups_of(mesh), "twin": (twin, mesh.ranks("dp"))})
    dist.barrier()
    mesh.close()
    assert table_sizes()["pg_map"] == before
    check_sums(of_torch)
    for i in range(2):
        dist.destroy_process_group(theirs.get_group(i))


def test_device_mesh_of_adopted_groups_equals_torchs():
    with fake_rank(0, 8):
        theirs = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        mesh = from_device_mesh(theirs, name="theirs")
        assert mesh.device_mesh() == theirs
        assert mesh.device_mesh("tp").get_group() is theirs.get_group("tp")
        mesh.release("tp")
        ours = mesh.device_mesh()
        assert ours != theirs  # DTensor would use the groups of one for the other
        assert ours.get_group("tp") is mesh.group("tp") is not theirs.get_group("tp")
        assert ours.get_group("dp") is theirs.get_group("dp")


@on_ranks(4)
def test_group_is_adopted_or_refused_with_reason():
    """Each case in which another group would be handed out, or none, in place of the one that is adopted."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = {axis: whole.get_group(axis) for axis in ("dp", "tp")}
    again = dist.new_group(dist.get_process_group_ranks(theirs["tp"]), use_local_synchronization=True)
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    own = mesh.group("tp")
    with pytest.raises(LifetimeError, match=r"(?s)tp of mesh 'actor' already exists since .*mesh\.release\('tp'\)"):
        mesh.adopt("tp", theirs["tp"])
    assert mesh.group("tp") is own
    check_sums(groups_of(mesh))
    dist.barrier()
    mesh.release("tp")
    mesh.adopt("tp", theirs["tp"])
    mesh.adopt("tp", theirs["tp"])  # the same again changes nothing
    with pytest.raises(LifetimeError, match=r"(?s)tp of mesh 'actor' already exists since .*mesh\.release\('tp'\)"):
        mesh.adopt("tp", again)
    assert mesh.group("tp") is theirs["tp"]
    check_sums(groups_of(mesh))
    dist.barrier()
    dist.destroy_process_group(theirs["tp"])
    mesh.set_timeout(timeout=30)  # of the others
    mesh.release("tp")
    mesh.adopt("tp", again)
    check_sums(groups_of(mesh))
    dist.barrier()
    mesh.release("tp")
    assert mesh.group("tp") not in (theirs["tp"], again)
    check_sums(groups_of(mesh))
    for group in (again, theirs["dp"]):
        dist.destroy_process_group(group)


@on_ranks(4)
def test_device_mesh_of_sorted_ranks_is_refused():
    permuted = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("dp", "tp"))  # torch sorts the ranks of its groups
    for _ in range(2):
        with pytest.raises(RankError, match="group tp of mesh 'same' has ranks"):
            from_device_mesh(permuted, name="same")
    straight = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = from_device_mesh(straight, name="same")
    assert ours.device_mesh() == straight
    check_sums(groups_of(ours))
    for theirs in (permuted, straight):
        for i in range(2):
            dist.destroy_process_group(theirs.get_group(i))


# ---- dimensions of several axes ----

COMBINES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Earlier torches combine only slices of one DeviceMesh."""


@on_ranks(4)
def test_fully_shard_shards_along_all_merged_axes():
    """fully_shard over two dimensions replicates along the first; over one merged dimension it shards along both."""
    mesh = ProcessGroupMesh(dp_shard=2, cp=2, ranks=[3, 1, 2, 0])
    merged = mesh.device_mesh(fsdp=("dp_shard", "cp"))
    assert merged is mesh.device_mesh(fsdp=["dp_shard", "cp"])
    with no_more_groups():
        model = fully_shard(make_net(), mesh=merged)
        for sharded, whole in zip(model.parameters(), make_net().parameters()):
            assert (sharded.placements, sharded.to_local().numel()) == ((Shard(0),), whole.numel() // 4)
        assert_same(train(model, own_rows(mesh, "dp_shard", "cp")), train(make_net(), batch()))
    check_sums({"fsdp": (mesh.group("dp_shard", "cp"), mesh.ranks())})


@on_ranks(4)
def test_device_meshes_of_views_and_slices_combine():
    """Each pair below but the first is of two calls, of which the second is about other axes, a view or a slice."""
    mesh = ProcessGroupMesh(pp=1, dp=2, tp=2, cp=1, ranks=[3, 1, 2, 0])
    both = mesh.device_mesh(fsdp=("dp", "cp"), tp="tp")
    pairs = [(both["tp"], both["fsdp"])]
    if COMBINES:
        merged, view = mesh.along("dp", "cp").view(fsdp=2), mesh.along("dp", "tp").view(data=2, tensor=2)
        assert merged.device_mesh().get_group() is merged.group("fsdp") is merged.group() is mesh.group("dp", "cp")
        pairs += [
            (mesh.device_mesh("tp"), merged.device_mesh()),
            (view.device_mesh("tensor"), mesh.device_mesh("dp")),
            (mesh.device_mesh("tp"), view.device_mesh("data")),
        ]
    for tp, fsdp in pairs:
        model = fully_shard(tensor_parallel(tp), mesh=fsdp)
        assert_same(train(model, own_rows(mesh, "dp", "cp")), train(make_net(), batch()))


@pytest.mark.parametrize("ranks", [None, [5, 3, 1, 7, 0, 2, 4, 6, *range(15, 7, -1)]], ids=["in order", "permuted"])
@pytest.mark.parametrize("merged", [("dp", "cp"), ("cp", "pp"), ("tp",), ("pp", "dp", "tp", "cp")])
def test_merged_dimension_has_the_order_of_its_group(merged: tuple[str, ...], ranks: list[int] | None):
    for rank in range(0, 16, 3):
        with fake_rank(rank, 16):
            mesh = ProcessGroupMesh(pp=2, dp=2, tp=2, cp=2, ranks=ranks)
            rest = [axis for axis in ("cp", "tp", "pp") if axis not in merged]
            before = table_sizes()["pg_map"]
            whole = mesh.device_mesh(flat=merged, **{axis: axis for axis in rest})
            assert table_sizes()["pg_map"] == before + 1 + len(rest)
            assert whole.mesh_dim_names == ("flat", *rest)
            for name, axes in {"flat": merged, **{axis: (axis,) for axis in rest}}.items():
                assert whole.get_group(name) is whole[name].get_group() is mesh.group(*axes)
                assert tuple(whole[name].mesh.tolist()) == mesh.ranks(*axes)
                assert whole[name].get_local_rank() == whole[name].get_coordinate()[0] == mesh.index(*axes)
            assert sorted(whole.mesh.flatten().tolist()) == sorted(mesh.ranks(*merged, *rest))


def test_device_mesh_mixes_axes_and_merged_dimensions():
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(pp=2, dp=2, tp=2)
        assert mesh.device_mesh("dp", flat=("pp", "tp")).mesh_dim_names == ("dp", "flat")
        assert mesh.device_mesh(dp="dp", tp="tp") == mesh.device_mesh("dp", "tp")
        assert root_of(mesh.device_mesh(tp="tp")) is mesh.device_mesh()
        assert mesh.device_mesh(tp="tp", dp="dp").mesh.tolist() == [[4, 6], [5, 7]]
        assert mesh["tp"].device_mesh(mine="tp").get_group() is mesh.group("tp")
        with pytest.raises(AxisError, match="the order of these axes is dp, tp") as caught:
            mesh.device_mesh("tp", "dp")  # placements are by position
        swapped = eval(str(caught.value).splitlines()[2].partition("#")[0], {"mesh": mesh})
        assert (swapped.mesh_dim_names, swapped.mesh.tolist()) == (("tp", "dp"), [[4, 6], [5, 7]])
        numbered = ProcessGroupMesh(2, 2, 2)
        with pytest.raises(AxisError, match="the order of these axes is 0, 1") as caught:
            numbered.device_mesh(1, 0)
        eval(str(caught.value).splitlines()[2].partition("#")[0], {"mesh": numbered})
        assert numbered.device_mesh(1, flat=(0, 2)).mesh.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_device_mesh_of_uneven_indices_keeps_its_ranks():
    """torch describes ranks by strides, which these have not."""
    for kept, rank in (([0, 2, 3], 12), ([1, 2], 5), ([0, 3], 0), ([0, 2], 8)):
        with fake_rank(rank, 16):
            part = ProcessGroupMesh(pp=4, dp=2, tp=2).at(pp=kept)
            assert tuple(part.device_mesh().mesh.flatten().tolist()) == part.ranks()
            flat = part.device_mesh(flat=("pp", "tp"), dp="dp")
            assert tuple(flat["flat"].mesh.tolist()) == part.ranks("pp", "tp")
            assert flat["flat"].get_group() is part.group("pp", "tp")
