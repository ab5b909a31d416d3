"""A part of a mesh, and the same ranks read with other axes: both share the groups of the mesh."""

import torch.distributed as dist

from pgmesh import ProcessGroupMesh, launch


def main() -> bool:
    mesh = ProcessGroupMesh(pp=2, dp=1, tp=2)

    stage = mesh.along("dp", "tp")  # my pipeline stage; mesh["dp", "tp"] is the same
    assert stage.group("tp") is mesh.group("tp")

    first = mesh.at(pp=0)  # a stage that may not be mine
    assert (mesh.rank in first) == (mesh.index("pp") == 0)

    ends = mesh.at(pp=[0, -1])  # first and last stage, for tied embeddings
    assert ends.ranks("pp") == mesh.ranks("pp")

    moe = mesh.view(pp=2, ep=2)  # the experts' axes, over the same ranks
    assert moe.group("ep") is mesh.group("dp", "tp")  # a group is what it is, not what it is called

    odd = [0, 1, 3]  # ranks that no axis joins
    if mesh.rank in odd:
        assert dist.get_process_group_ranks(mesh.group_of(odd)) == odd

    if mesh.rank == 0:
        print(f"{mesh!r}\n{mesh}\nread as {moe!r}\n{moe}")
    return True


if __name__ == "__main__":
    assert all(launch.spawn(main, 4))
    print("PASS")
