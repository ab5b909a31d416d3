"""The process group along any axes: created on the first call, and then the same object on each call."""

import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, launch


def total(mesh: ProcessGroupMesh, *axes: str) -> int:
    """Sum every rank's number over the group along these axes."""
    number = torch.tensor([mesh.rank])
    dist.all_reduce(number, group=mesh.group(*axes))
    return int(number)


def main() -> bool:
    mesh = ProcessGroupMesh(dp=2, tp=2)
    for axes in (["dp"], ["tp"], ["dp", "tp"]):
        assert total(mesh, *axes) == sum(mesh.ranks(*axes))
        assert mesh.group(*axes) is mesh.group(*reversed(axes))  # the order of the axes does not matter
        if mesh.rank == 0:
            print(f"{' x '.join(axes):7}  blocks {mesh.partition(*axes)}, my sum {total(mesh, *axes)}")
        elif mesh.rank in mesh.along(*axes) and 0 in mesh.ranks(*axes):
            total(mesh, *axes)
    return True


if __name__ == "__main__":
    assert all(launch.spawn(main, 4))
    print("PASS")
