"""accelerate and torchtitan over our meshes, where they are installed."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from tests.support.fake_world import fake_rank
from tests.support.torch_tables import count_new_groups

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"


def needs(name: str) -> pytest.MarkDecorator:
    reason = f"{name} is not installed"
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=reason)


def flatten(whole: Any) -> None:
    """The names that accelerate gives to axes together. torch makes a group for each."""
    names = whole.mesh_dim_names
    for name, parts in {
        "dp": ("dp_replicate", "dp_shard"),
        "dp_shard_cp": ("dp_shard", "cp"),
        "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    }.items():
        axes = tuple(part for part in parts if part in names)
        if axes:
            whole[axes]._flatten(name)


@needs("accelerate")
@pytest.mark.parametrize("sizes", [{"dp_replicate": 2, "dp_shard": 4}, {"dp_shard": 4, "cp": 2}], ids=str)
def test_accelerate_would_make_the_same_device_mesh(sizes: dict[str, int]):
    from accelerate.utils import ParallelismConfig

    config = ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})
    for rank in range(8):
        with fake_rank(rank, 8):
            theirs, ours = config.build_device_mesh("cpu"), ProcessGroupMesh(**sizes).device_mesh()
            flatten(ours)
            assert (theirs.mesh_dim_names, theirs.mesh.tolist()) == (ours.mesh_dim_names, ours.mesh.tolist())
            assert theirs._flatten_mapping.keys() == ours._flatten_mapping.keys()
            for name in [*sizes, *ours._flatten_mapping]:
                left, right = (dist.get_process_group_ranks(each.get_group(name)) for each in (theirs, ours))
                assert left == right


@needs("torchtitan")
@pytest.mark.parametrize(
    "sizes", [{"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2}, {"pp": 2, "dp_shard": 2, "cp": 2, "ep": 2}], ids=str
)
def test_torchtitan_meshes_hold_the_same_ranks(sizes: dict[str, int]):
    """And there are fewer groups: of the same ranks, one."""
    given = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, **sizes}
    example = runpy.run_path(str(EXAMPLES / "torchtitan_meshes.py"))
    for rank in range(8):
        with fake_rank(rank, 8):
            made, meshes = [], []
            for kind in (example["ParallelDims"], example["Dims"]):
                dims = kind(**given, world_size=8, spmd_backend="partial_dtensor")
                made.append(count_new_groups(dims.build_mesh))
                meshes.append({name: each.mesh.tolist() for name, each in dims._single_axis_meshes.items()})
                for name in ("fsdp", "batch", "loss", "tp", "cp", "pp", "ep", "efsdp", "dp_replicate"):
                    found = dims.get_optional_mesh(name)
                    meshes[-1][f"optional {name}"] = found and found.mesh.tolist()
                pair = dims.get_optional_mesh(["dp_replicate", "fsdp"])
                meshes[-1]["pair"] = pair and pair.mesh.tolist()
            theirs, ours = meshes
            assert {name: ours[name] for name in theirs} == theirs
            assert made[1] < made[0]
