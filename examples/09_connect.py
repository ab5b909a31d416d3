"""connect: connect groups now, or get an error within seconds with the missing ranks and their status."""

import time
from datetime import timedelta

import torch.distributed as dist

from pgmesh import PgmeshError, ProcessGroupMesh, launch


def why_not(mesh: ProcessGroupMesh, *axes: str) -> str:
    try:
        for axis in axes:  # one axis after another
            mesh.connect(axis, timeout=timedelta(seconds=2))
    except PgmeshError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> tuple[str, str]:
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    if mesh.rank == 3:
        time.sleep(3)  # for example, reads its data
    late = why_not(mesh, "dp")  # ranks 1 and 3 are one group, 0 and 2 the other
    dist.barrier()

    crossed = ProcessGroupMesh(dp=2, tp=2, name="crossed")
    circle = why_not(crossed, *(("dp", "tp") if mesh.rank in (0, 3) else ("tp", "dp")))
    dist.barrier()

    connected = mesh.connect("dp", "tp")  # both at once: now in any order
    if mesh.rank == 1:
        print(late, circle, connected, mesh.report(), sep="\n\n")
    return late, circle


if __name__ == "__main__":
    late, circle = zip(*launch.spawn(main, 4))
    assert [bool(said) for said in late] == [False, True, False, True]
    assert "rank 3 did not arrive in 2 s" in late[1]
    assert "rank 1 did not arrive in 2 s" in late[3]  # rank 3 logged the first failure, and waited for another try
    assert all("MissingRanksError" in said and "waiting for rank" in said for said in circle)  # what the other does
    print("PASS")
