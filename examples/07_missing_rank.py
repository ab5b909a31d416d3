"""A missing rank: the error names its rank in the world, at the timeout of the group."""

from datetime import timedelta

import torch
import torch.distributed as dist

from pgmesh import MissingRanksError, ProcessGroupMesh, launch


def main() -> str:
    mesh = ProcessGroupMesh(dp=4, ranks=[3, 1, 2, 0], name="actor")
    mesh.configure("dp", timeout=timedelta(seconds=5))
    said = ""
    if mesh.rank != 2:  # rank 2 does not create the group
        try:
            dist.all_reduce(torch.ones(1), group=mesh.group("dp"))
        except MissingRanksError as error:
            said = str(error)
    dist.barrier()
    return said


if __name__ == "__main__":
    said = [line for line in launch.spawn(main, 4) if line]
    print(f"MissingRanksError: {said[0]}")
    assert "rank 2 did not make this group in 5 s" in said[0]
    print("PASS")
