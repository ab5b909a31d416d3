"""Connect, use and release groups again and again: nothing stays behind."""

from __future__ import annotations

import torch.distributed as dist

from pgmesh import ProcessGroupMesh
from tests.support.resource_counts import count_with_keys, growth, resident_kib
from tests.support.worlds import check_sums, groups_of, world


def cycles(times: int, connects: bool) -> tuple[dict[str, int], int]:
    """What is held more at the end than early, and by how many KiB of memory both halves between grow at least.

    The allocator takes memory from the system in large pieces, so one half may grow without a leak.
    """
    with ProcessGroupMesh(dp=2, tp=2, name="before") as before:
        before.connect()  # each rank publishes its status, whose key stays
        dist.barrier()
    mesh, memory = ProcessGroupMesh(dp=2, tp=2), []
    for cycle in range(times + 1):
        if cycle in (times // 5, times * 3 // 5, times):
            memory.append(resident_kib())
            dist.barrier()
            if cycle == times // 5:
                early = count_with_keys()
            elif cycle == times:
                more = growth([early], count_with_keys)
            dist.barrier()
        if connects:
            mesh.connect(*mesh.axes, mesh.axes)
        groups = [("dp",), ("tp",), mesh.axes]
        check_sums({f"{axes}": (mesh.group(*axes), mesh.ranks(*axes)) for axes in groups})
        for axes in groups:
            mesh.release(*axes)
    check_sums(groups_of(mesh))
    return more, min(memory[1] - memory[0], memory[2] - memory[1])


def check_cycles(times: int, connects: bool) -> None:
    """Assert that four ranks hold no more, and hardly more memory."""
    for more, kib in world(4).run(cycles, times, connects, deadline=240.0):
        assert not more
        assert kib < 2 * 1024, f"{kib} KiB more twice, after {3 * times} groups that cost 175 KiB each"
