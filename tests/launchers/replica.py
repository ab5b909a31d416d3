"""A rank of one of three replicas. Rank 5 is killed, and the others go on without its replica. It prints PASS."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from pgmesh import MissingRanksError, PgmeshError, ProcessGroupMesh, launch
from tests.support.worlds import check_sums, groups_of

REPLICAS, STEPS = 3, 3


def main(replica: int, port: int) -> None:
    torch.set_num_threads(1)
    minute = timedelta(seconds=60)
    launch.join("gloo", timeout=minute, replica=replica, replicas=REPLICAS, host="127.0.0.1", port=port)
    mesh, text = ProcessGroupMesh(dp=REPLICAS, tp=2, name="train"), ""
    mesh.connect("dp", "tp", ("dp", "tp"), timeout=minute)
    steps = 0
    while steps < STEPS or mesh.shrunk is None:
        try:
            if mesh.rank not in mesh:
                mesh = mesh.stand_by(timeout=minute)
                continue
            check_sums(groups_of(mesh))
            steps += 1
            if (mesh.rank, steps) == (5, STEPS):
                os.kill(os.getpid(), signal.SIGKILL)
        except (PgmeshError, RuntimeError) as error:
            if mesh.rank not in mesh:
                if not isinstance(error, MissingRanksError):
                    raise
                text = "was dropped, and has learnt that no rank is left"
                break
            mesh, steps = mesh.shrink("dp", timeout=minute), 0
            mesh.connect("dp", "tp", ("dp", "tp"), timeout=minute) if mesh.rank in mesh else None
    if mesh.rank in mesh:
        check_sums(groups_of(mesh))  # no rank leaves before the others are done
    sys.stdout.write(f"PASS rank {mesh.rank} {text or [*mesh]}\n")  # in one piece
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
