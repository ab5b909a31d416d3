"""A trainer and two engines, each with a default world of its own, and one world over all six ranks.

python examples/two_engines.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pgmesh import ProcessGroupMesh, launch


def main(rank: int, port: int) -> None:
    """Job 0 is the trainer, and jobs 1 and 2 are engines. Each has two ranks."""
    job, place = divmod(rank, 2)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"job {job}", store), rank=place, world_size=2)
    own = ProcessGroupMesh(tp=2)
    with launch.open_world("sync", rank=rank, size=6, store=store, backend="gloo") as world:
        sync = ProcessGroupMesh(job=3, tp=2, world=world)
        weights = torch.full((4,), 1.0 + place) if job == 0 else torch.zeros(4)
        dist.broadcast(weights, src=sync.ranks("job")[0], group=sync.group("job"))  # from the trainer's part
        dist.all_reduce(weights, group=own.group("tp"))  # within each job
        least = weights.min()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=sync.group())
        if rank == 0:
            print(f"{sync}\n\n{'PASS' if least == 3 else 'FAIL'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with launch.StoreProcess() as store:
        mp.spawn(main, (store.port,), nprocs=6)
