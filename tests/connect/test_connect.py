"""connect with real ranks. What goes wrong on purpose is in test_faults.py."""

from __future__ import annotations

from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist

from pgmesh import LifetimeError, ProcessGroupMesh, WorldError
from pgmesh.connect import first_collective
from pgmesh.groups.world import current_world
from tests.support.faults import LONG_TIMEOUT, attempt, last_status, wait_until
from tests.support.logs import logged_lines
from tests.support.worlds import check_sums, groups_of, on_ranks


@on_ranks(2)
def test_close_by_another_thread_ends_the_wait():
    """Rank 1 does not call. It creates the meshes too: later tests use their name."""
    for wait in (ProcessGroupMesh.connect, ProcessGroupMesh.stand_by):
        mesh = ProcessGroupMesh(2, name="actor")
        if mesh.rank == 0:
            with ThreadPoolExecutor(1) as threads:
                waits = threads.submit(wait, mesh, timeout=LONG_TIMEOUT)
                assert futures.wait([waits], timeout=0.2).not_done
                mesh.close()
                with pytest.raises(LifetimeError, match="actor' was closed at"):
                    waits.result(timeout=5.0)
        mesh.close()
    dist.barrier()


@on_ranks(4)
def test_failed_call_leaves_rounds_of_other_threads():
    """Another thread of rank 0 connects dp. Meanwhile a call of the main thread fails."""
    mesh = ProcessGroupMesh(dp=2, tp=2, name="two threads")
    if mesh.rank == 0:
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(mesh.connect, "dp")
            wait_until(lambda: (status := last_status(0)) and status.pending, "it waits")
            with pytest.raises(WorldError, match="another thread of this process connects the same group"):
                mesh.connect("tp", "dp")
            dist.barrier()
            other.result()
    else:
        dist.barrier()
        mesh.connect("dp")
    check_sums({"dp": (mesh.group("dp"), mesh.ranks("dp"))})


def connect_and_release(times):
    """The number of the store's keys after some turns."""
    mesh = ProcessGroupMesh(dp=2, tp=2, name="again")
    for _ in range(times):
        mesh.connect("dp", "tp")
        mesh.release("dp")
        mesh.release("tp")
    mesh.close()
    dist.barrier()
    return current_world().store().num_keys()


@on_ranks(4)
def test_connect_and_release_keeps_number_of_keys():
    connect_and_release(2)
    before = connect_and_release(2)
    dist.barrier()
    assert connect_and_release(20) - before < 20


@on_ranks(4)
def test_connect_keeps_connected_groups_and_recreates_released_ones():
    """Also those with a tag, and of any ranks."""
    mesh = ProcessGroupMesh(dp=2, tp=2, name="actor")
    mesh.connect()
    mesh.connect("dp", "tp", tag="second")
    first = mesh.group("dp")
    if mesh.rank == 0:  # it waits for no other rank
        mesh.connect("dp")
    if mesh.rank != 1:
        mesh.connect(ranks=[0, 2, 3])
        check_sums({"three": (mesh.group_of([0, 2, 3]), [0, 2, 3])})
    assert mesh.group("dp") is first
    check_sums({"tp": (mesh.group("tp", tag="second"), mesh.ranks("tp")), **groups_of(mesh)})
    mesh.release("dp")
    mesh.connect("dp")
    assert mesh.group("dp") is not first
    check_sums(groups_of(mesh))


@on_ranks(4)
def test_blocking_backends_start_in_one_order():
    """As NCCL, which connects in the calling thread: in the same order on all ranks, once all groups are decided."""
    mesh, entered, all_reduce = ProcessGroupMesh(dp=2, tp=2, name="actor"), [], dist.all_reduce

    def record(*arguments, **more):
        entered.append(more["group"].group_name)
        return all_reduce(*arguments, **more)

    families = ["dp", "tp", ("dp", "tp")]
    turn = mesh.rank % 3
    blocking = mock.patch.object(first_collective, "connects_in_background", return_value=False)
    with blocking, mock.patch.object(dist, "all_reduce", record):
        mesh.connect(*families[turn:], *families[:turn])
    assert len(entered) == 3
    assert entered == sorted(entered)
    check_sums(groups_of(mesh))


@on_ranks(4)
def test_retry_skips_groups_that_are_connected():
    """Rank 3 arrived late. It logs at once that the others have failed, and connects with their retry."""
    mesh = ProcessGroupMesh(dp=2, tp=2)
    if mesh.rank != 3:
        failed = attempt(lambda: mesh.connect("dp", "tp", timeout=0.5))
        assert failed.kind == ("MissingRanksError" if mesh.rank else "")
    dist.barrier()
    with logged_lines() as lines:
        if mesh.rank != 0:  # its groups are connected: it does not call again
            mesh.connect("dp", "tp", timeout=20)
        check_sums(groups_of(mesh))
    assert len(lines) == (2 if mesh.rank == 3 else 0)
    assert all("failed before rank 3 arrived" in line.text for line in lines)
    assert all("rank 3 did not arrive in 0.5 s" in line.text for line in lines)
