"""reshard and Resharder over Gloo: the values of the whole tensor, bit by bit, and values that would be lost."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.torch_version import TorchVersion

from pgmesh import Layout, MismatchError, PgmeshError, ProcessGroupMesh, WorldError, launch
from pgmesh.resharding import Resharder, reshard
from pgmesh.topology.host_mapping import HostInfo
from tests.support.faults import attempt
from tests.support.transfer_oracle import resharder, shard_of
from tests.support.worlds import on_ranks

torch.set_num_threads(1)  # on ranks too, which import this: others share their cores


@on_ranks(4)
def test_weights_of_fsdp_go_to_a_slice():
    """Linear layers sharded by FSDP2 and tensor parallelism."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    trainer = ProcessGroupMesh(dp=2, tp=2, name="trainer")
    rollout = ProcessGroupMesh(tp=3, ranks=[3, 1, 2], name="rollout").at(tp=[0, 2])
    for size in (8, 7):
        torch.manual_seed(size)
        layer = torch.nn.Linear(3, size)
        expected = layer.weight.detach().clone()
        parallelize_module(layer, trainer.device_mesh("dp", "tp")["tp"], ColwiseParallel())
        fully_shard(layer, mesh=trainer.device_mesh("dp", "tp")["dp"])
        result = reshard(layer.weight, rollout, {"tp": 0}, source=trainer)
        if TorchVersion(torch.__version__) >= "2.10":  # before, torch's own values were wrong where sizes are uneven
            assert torch.equal(layer.weight.full_tensor(), expected)
        if result is not None:
            assert torch.equal(result.to_local(), shard_of(expected, rollout.layout, [Shard(0)], rollout.rank))
            assert torch.equal(result.full_tensor(), expected)
        assert repr(layer.weight.placements) == "(_StridedShard(dim=0, sf=2), Shard(dim=0))"


@on_ranks(4)
def test_rank_outside_the_source_needs_only_its_ranks():
    """Disjoint meshes: ranks 0, 1 send a plain tensor, ranks 2, 3 receive it."""
    target = ProcessGroupMesh(tp=2, ranks=[3, 2], name="target")
    source = Layout(2, ranks=[1, 0])
    tensor = torch.arange(6).view(3, 2) > 2
    if dist.get_rank() in source:
        assert reshard(tensor, target, {"tp": 1}, source=source) is None
        return
    result = reshard(None, target, {"tp": 1}, source=source)
    assert result.to_local().equal(tensor[:, [target.index("tp")]])
    assert (result.placements, result.shape, result.dtype) == ((Shard(1),), (3, 2), torch.bool)
    assert result.device_mesh == target.device_mesh()


@on_ranks(4)
def test_mistakes_are_errors_on_every_rank():
    mesh, tensor = ProcessGroupMesh(dp=2, tp=2, name="mesh"), torch.ones(4, 4)
    partial = DTensor.from_local(tensor, mesh.device_mesh(), [Partial(), Replicate()], run_check=False)
    calls = [
        lambda: reshard(partial, mesh, {"tp": 0}),
        lambda: reshard(tensor, mesh, {"tp": 0}),
        lambda: reshard(tensor, mesh, {"pp": 0}, source=mesh),
        lambda: reshard(tensor, mesh, {"tp": Partial()}, source=mesh),
        lambda: reshard(tensor, mesh, {"tp": 2}, source=mesh),
        lambda: reshard(tensor.to("meta"), mesh, {"tp": 0}, source=mesh),
        lambda: reshard(tensor[: mesh.rank // 2 + 1], mesh, {"tp": 0}, source=mesh),
        lambda: reshard(None, mesh, {"tp": 0}, source=mesh),
        lambda: reshard(None, ProcessGroupMesh(1, ranks=[(mesh.rank + 1) % 4]), None, source=Layout(1, ranks=[9])),
    ]
    wanted = [
        "redistribute(placements=",
        "source=mesh)",
        "no axis 'pp'",
        "its ranks hold summands",
        "ShapeError: axis tp shards dimension 2",
        "ShapeError: tensor is on the meta device",
        "(1, 4) and torch.float32 on ranks 0, 1, (2, 4) and torch.float32 on ranks 2, 3",
        "no rank has passed one",
        "is in neither the source nor the target",
    ]
    for call, text in zip(calls, wanted, strict=True):
        with pytest.raises(PgmeshError) as error:
            call()
        assert text in f"{error.typename}: {error.value}"
    assert torch.equal(reshard(tensor, mesh, {"tp": 0}, source=mesh).full_tensor(), tensor)  # it still works


@on_ranks(4)
def test_rank_serves_ranks_of_its_host_first():
    """Ranks 0, 1 hold what ranks 2, 3 want. Ranks 0 and 2 are on one host, ranks 1 and 3 on another."""
    info = HostInfo(f"host {dist.get_rank() % 2}", "")
    target = ProcessGroupMesh(dp=2, ranks=[2, 3], name="target")
    with mock.patch("pgmesh.resharding.resharder.this_host", return_value=info):
        side = {"x": torch.full((40_000,), 1.0 if dist.get_rank() < 2 else 0.0)}
        name = "source" if dist.get_rank() < 2 else "target"
        sync = Resharder(Layout(2), target, timeout=20, **{name: side})
    sync()
    assert side["x"].tolist() == [1.0] * 40_000
    peers = [each.peer for job in sync._jobs for each in (*job.plan.sends, *job.plan.receives)]
    assert peers == [(dist.get_rank() + 2) % 4]


def test_resharding_in_a_fake_world_is_an_error():
    with launch.fake_world(0, 4):
        mesh = ProcessGroupMesh(tp=4)
        with pytest.raises(WorldError, match=r"a fake world has no other ranks.*\n\n.*print\(ReshardPlan\("):
            reshard(torch.ones(4), mesh, {"tp": 0}, source=mesh)
        with pytest.raises(WorldError, match="a fake world has no other ranks"):
            Resharder(mesh, mesh, source={}, target={})


# ---- values that would be lost: plain shards taken for replicas, and dtypes that cannot have them ----


def error_of(source: torch.Tensor | None, target: torch.Tensor | None, **options: bool) -> str:
    """The error of a Resharder from ranks 0 and 1 to ranks 2 and 3; empty if it moves the tensor."""
    failed = attempt(lambda: resharder({"x": source}, {"x": target}, **options)())
    assert failed.kind in ("", "MismatchError")
    return failed.text


@on_ranks(4)
def test_plain_shards_of_equal_shape_are_refused():
    """Each rank has other columns of one matrix, as plain tensors."""
    shard = torch.arange(16.0).view(4, 4).chunk(2, 1)[dist.get_rank() % 2]
    text = error_of(shard, torch.zeros(4, 2))
    assert "x: whole on each rank of the source that has it, but with other values on rank 0 than on rank 1" in text
    assert "Shards have to be DTensors" in text
    assert error_of(torch.arange(8.0), torch.zeros(8)) == ""
    with pytest.raises(MismatchError, match="with other values on ranks 0, 2 than on ranks 1, 3"):
        reshard(shard, ProcessGroupMesh(tp=4), None, source=ProcessGroupMesh(4, name="source"))


@on_ranks(4)
def test_replicas_with_other_values_are_refused():
    """Of a DTensor, and of a weight that two stages have under one name."""
    for shape in ({"tp": 2}, {"pp": 2, "tp": 1}):
        with ProcessGroupMesh(**shape, ranks=range(2), name=f"{shape}") as mesh:
            x = None
            if mesh.rank in mesh:
                device_mesh = mesh.device_mesh("tp")
                x = DTensor.from_local(torch.full((4,), float(mesh.rank)), device_mesh, [Replicate()], run_check=False)
            assert "with other values on rank 0 than on rank 1" in error_of(x, torch.zeros(4))


@on_ranks(4)
def test_values_that_the_target_cannot_have_are_refused():
    for held, wanted in itertools.product([torch.bfloat16, torch.int64], [torch.int8, torch.bool]):
        text = error_of(torch.full((3,), 300).to(held), torch.zeros(3, dtype=wanted))
        assert f"x: values of {held} in the source do not fit into {wanted} in the target" in text
    narrow = torch.float8_e4m3fn
    hint = (
        "x: values of torch.float32 in the source do not fit into torch.float8_e4m3fn in the target without float8=True"
    )
    assert hint in error_of(torch.full((3,), 1.5), torch.zeros(3, dtype=narrow))
    target = torch.zeros(3, dtype=narrow)
    assert error_of(torch.full((3,), 1.5), target, float8=True) == ""
    assert dist.get_rank() < 2 or target.float().tolist() == [1.5] * 3
    assert "float8: True on rank 0, False on ranks 1, 2, 3" in error_of(
        torch.ones(3), torch.ones(3), float8=dist.get_rank() == 0
    )


@on_ranks(1)
def test_reshard_casts_to_the_dtype_of_its_call():
    mesh = ProcessGroupMesh(1)
    result = reshard(torch.full((3,), 1.5), mesh, None, source=mesh, dtype=torch.float8_e4m3fn)
    assert result.to_local().float().tolist() == [1.5] * 3
    with pytest.raises(MismatchError, match=r"values of torch\.float32 in the source do not fit into torch\.int64"):
        reshard(torch.full((3,), 1.5), mesh, None, source=mesh, dtype=torch.int64)
