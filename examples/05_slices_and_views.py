"""Slices and views of a mesh: a part of it, and the same ranks with other axes. Both share its groups."""

import torch.distributed as dist

from pgmesh import ProcessGroupMesh, launch


def main() -> bool:
    mesh = ProcessGroupMesh(pp=2, dp=1, tp=2)

    stage = mesh.along("dp", "tp")  # this rank's pipeline stage; mesh["dp", "tp"] is the same
    assert stage.group("tp") is mesh.group("tp")

    first = mesh.at(pp=0)  # the first stage, possibly without this rank
    assert (mesh.rank in first) == (mesh.index("pp") == 0)

    ends = mesh.at(pp=[0, -1])  # first and last stage, for tied embeddings
    assert ends.ranks("pp") == mesh.ranks("pp")

    moe = mesh.view(pp=2, ep=2)  # the experts' axes, over the same ranks
    assert moe.group("ep") is mesh.group("dp", "tp")  # the same ranks: the same group

    odd = [0, 1, 3]  # not a block of any axes
    if mesh.rank in odd:
        assert dist.get_process_group_ranks(mesh.group_of(odd)) == odd

    if mesh.rank == 0:
        print(f"{mesh!r}\n{mesh}\nread as {moe!r}\n{moe}")
    return True


if __name__ == "__main__":
    assert all(launch.spawn(main, 4))
    print("PASS")
