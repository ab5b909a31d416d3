"""The program of each rank: join, reduce along the axes of a mesh, exchange hosts. It prints PASS, or raises."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, launch
from pgmesh.launch.detect import detect_launcher
from tests.support.worlds import check_sums, groups_of


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    launch.join("gloo", timeout=timedelta(seconds=60))
    rank, found = dist.get_rank(), detect_launcher(os.environ)
    if (found.rank, found.size) != (rank, dist.get_world_size()):
        raise SystemExit(f"rank {rank} of {dist.get_world_size()} was detected as {found.line}")
    with ProcessGroupMesh(dp=2, tp=2, name="real") as mesh:
        check_sums(groups_of(mesh))
        if mesh.hosts() != ((0, 1, 2, 3),):
            raise SystemExit(f"rank {rank}: {mesh.hosts()}")
        if mesh.locality("tp").kind != "intra":
            raise SystemExit(f"rank {rank}: {mesh.locality('tp')}")
        local = [None] * 4
        dist.all_gather_object(local, found.local_rank)
    sys.stdout.write(f"PASS rank {rank} of {found.size}, local ranks {local}\n")  # in one piece
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
