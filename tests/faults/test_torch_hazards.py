"""Hazards of torch's own groups that pgmesh avoids. tests/torch_facts.py shows them with torch alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from pgmesh import ProcessGroupMesh, ShapeError, torch_private
from pgmesh.groups.flight_recorder import FlightRecorder
from tests.support.faults import wait_until
from tests.support.releases import check_cycles
from tests.support.resource_counts import CAN_COUNT
from tests.support.torch_tables import count_new_groups
from tests.support.worlds import check_sums, groups_of, on_ranks

# ---- one group waits, the others go on ----


@on_ranks(4)
def test_pending_first_collective_blocks_no_other_group():
    """Rank 0 is in the first collective with rank 1, which begins only when all the rest is done."""
    mesh = ProcessGroupMesh(dp=2, tp=2)
    if mesh.rank == 0:
        one = torch.ones(1)
        work = dist.all_reduce(one, group=mesh.group("tp"), async_op=True)
    if mesh.index("tp") == 0:
        for i in range(5):
            check_sums({"dp": (mesh.group("dp", tag=f"{i}"), mesh.ranks("dp"))})
        check_sums({"pair": (mesh.group_of([0, 2]), [0, 2])})
    dist.barrier()
    if mesh.rank == 0:
        assert not work.is_completed()
    if mesh.rank == 1:
        one = torch.ones(1)
        work = dist.all_reduce(one, group=mesh.group("tp"), async_op=True)
    if mesh.rank < 2:
        work.wait()
        assert one.item() == 2
    check_sums(groups_of(mesh))


# ---- what a group leaves behind ----


@pytest.mark.fault("connect, use, release, 500 times; any fault that a process survives, repeatedly")
@pytest.mark.skipif(not CAN_COUNT, reason="counts in /proc")
def test_releasing_40_times_leaves_nothing_behind():
    check_cycles(40, connects=False)


# ---- checkpoints ----


@on_ranks(2)
def test_checkpoint_is_saved_while_an_error_is_handled(tmp_path: Path):
    """torch asks for the description of a failure when it begins to save and to load."""
    mesh, saved, loaded = ProcessGroupMesh(2), {"weight": torch.ones(2)}, {"weight": torch.zeros(2)}
    group = mesh.group()
    try:
        ProcessGroupMesh(3)
    except ShapeError:
        dcp.save(saved, checkpoint_id=tmp_path, process_group=group)
        dcp.load(loaded, checkpoint_id=tmp_path, process_group=group)
    assert loaded["weight"].tolist() == [1.0, 1.0]


# ---- threads ----


def ask_at_once(mesh: ProcessGroupMesh, tag: str) -> None:
    ready = threading.Barrier(8)

    def ask() -> Any:
        ready.wait(10)
        return mesh.group("tp", tag=tag)

    with ThreadPoolExecutor(8) as pool:
        asked = [running.result() for running in [pool.submit(ask) for _ in range(8)]]
    assert len({*asked}) == 1
    check_sums({tag: (asked[0], mesh.ranks("tp"))})


@on_ranks(4)
def test_threads_get_the_same_group():
    mesh = ProcessGroupMesh(dp=2, tp=2)
    for tag in ("", *map(str, range(10))):
        assert count_new_groups(lambda tag=tag: ask_at_once(mesh, tag)) == 1
    check_sums(groups_of(mesh))


@on_ranks(2)
def test_idle_process_reads_no_flight_record():
    """torch reads it without a lock, so a read may crash the process."""
    mesh, recorder = ProcessGroupMesh(dp=2), FlightRecorder()
    here, flight_record, read = threading.get_ident(), torch_private.flight_record, mock.Mock()

    def count_here(**arguments: Any) -> Any:
        if threading.get_ident() == here:  # the heartbeats of the world read it when a barrier takes long
            read()
        return flight_record(**arguments)

    with mock.patch.object(torch_private, "flight_record", count_here):
        for _ in range(2):
            check_sums({"dp": (mesh.group("dp"), range(2))})
            dist.barrier()
            assert not recorder.stuck()
            assert not read.called  # the group has been used since the last call

        def is_idle() -> bool:
            before = read.call_count
            return not recorder.stuck() and read.call_count == before

        wait_until(is_idle, "torch has recorded the end of all collectives")
        asked = read.call_count
        assert asked
        for _ in range(3):
            assert not recorder.stuck()
        assert read.call_count == asked
    dist.barrier()
