"""Values that would be lost: plain shards taken for replicas, and dtypes that cannot have the values."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from pgmesh import MismatchError, ProcessGroupMesh
from pgmesh.resharding import reshard
from tests.support.transfer_oracle import resharder
from tests.support.worlds import on_ranks

torch.set_num_threads(1)  # on ranks too, which import this: others share their cores

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def error_of(source: torch.Tensor | None, target: torch.Tensor | None, **options: bool) -> str:
    """The error of a Resharder from ranks 0 and 1 to ranks 2 and 3; empty if it moves the tensor."""
    try:
        resharder({"x": source}, {"x": target}, **options)()
    except MismatchError as error:
        return str(error)
    return ""


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
    result = reshard(torch.full((3,), 1.5), mesh, None, source=mesh, dtype=FLOAT8[0])
    assert result.to_local().float().tolist() == [1.5] * 3
    with pytest.raises(MismatchError, match=r"values of torch\.float32 in the source do not fit into torch\.int64"):
        reshard(torch.full((3,), 1.5), mesh, None, source=mesh, dtype=torch.int64)
