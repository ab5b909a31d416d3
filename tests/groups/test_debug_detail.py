"""TORCH_DISTRIBUTED_DEBUG=DETAIL: a mixed-up collective raises torch's error, as on groups of ``new_group``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import MismatchError, MissingRanksError, ProcessGroupMesh
from pgmesh.groups.group import find_group
from pgmesh.torch_private import KEEPS_ORDER
from tests.support.faults import SLACK, attempt, wait_until
from tests.support.logs import logged_lines
from tests.support.worlds import STARVED, check_sums, groups_of, on_ranks

T = 20.0 if STARVED else 1.0  # seconds; the timeout of a group whose member does not come
AT_ONCE = 0.1  # seconds
PERMUTED = [2, 0, 3, 1]
ODD = 3  # the rank that makes a mistake

MISTAKES: dict[str, Callable[[Any], object]] = {
    "another operation": lambda group: dist.barrier(group=group),
    "another shape": lambda group: dist.all_reduce(torch.ones(5), group=group),
    "another dtype": lambda group: dist.all_reduce(torch.ones(4, dtype=torch.int64), group=group),
}


@contextmanager
def detail() -> Iterator[None]:
    """Ask torch for its checks of each collective, as TORCH_DISTRIBUTED_DEBUG=DETAIL does."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


GROUPS: dict[str, Callable[[ProcessGroupMesh], Any]] = {
    "axes": lambda mesh: mesh.group("dp", "tp"),
    "any ranks": lambda mesh: mesh.group_of(range(4), tag="any"),
    "a device mesh": lambda mesh: mesh.view(pp=4).device_mesh("pp").get_group(),
}


def right(group: Any) -> None:
    """What the other ranks do."""
    dist.all_reduce(torch.ones(4), group=group)


def errors_of(group: Any) -> list[str]:
    """The first line of the error of each mistake, made as the first uses of a group."""
    found = []
    for mistake in MISTAKES.values():
        call = mistake if dist.get_rank() == ODD else right
        dist.barrier()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="Detected mismatch between collectives") as caught:
            call(group)
        assert time.monotonic() - start < AT_ONCE + SLACK
        found.append(str(caught.value).splitlines()[0])
    return found


@pytest.mark.fault("`TORCH_DISTRIBUTED_DEBUG=DETAIL`, and one rank in another operation, shape or dtype")
@pytest.mark.parametrize("kind", GROUPS)
@on_ranks(4)
def test_detail_names_rank_and_operation_as_torch(kind: str):
    with detail():
        mesh = ProcessGroupMesh(dp=2, tp=2, ranks=PERMUTED if KEEPS_ORDER else None, name="actor")
        group, of_torch = GROUPS[kind](mesh), dist.new_group([*mesh.ranks()], **KEEPS_ORDER)
        assert errors_of(group) == errors_of(of_torch)
        check_sums({kind: (group, mesh.ranks()), "torch": (of_torch, mesh.ranks())})
        dist.barrier()
        dist.destroy_process_group(of_torch)


@on_ranks(2)
def test_start_of_pairs_counts_as_no_operation():
    """torch compares the numbers of the operations. The members start the pairs at slightly different times."""
    with detail():
        mesh = ProcessGroupMesh(2, name="actor")
        group: Any = mesh.group()
    record = find_group(group.group_name)
    assert record is not None
    assert record.store is not None
    wait_until(lambda: record.store.own_operations, "the pairs are started")
    assert group._get_backend(torch.device("cpu"))._get_sequence_number_for_group() == 0
    dist.barrier()
    check_sums(groups_of(mesh))


@on_ranks(2)
def test_detail_names_missing_member_and_other_options():
    with detail(), logged_lines():
        mesh = ProcessGroupMesh(2, name="actor")
        mesh.configure(0, timeout=T)
        if mesh.rank == 0:
            group = mesh.group()
            error = attempt(lambda: dist.all_reduce(torch.ones(1), group=group))
            assert error.kind in (MissingRanksError.__name__, "RuntimeError"), error
            assert "rank 1 did not make this group" in error.text
            assert error.took < 2 * T + SLACK
        dist.barrier()
        mesh.release()
        check_sums(groups_of(mesh))
        dist.barrier()
        mesh.release()
        mesh.configure(0, timeout=60 + mesh.rank)
        error = attempt(lambda: dist.all_reduce(torch.ones(1), group=mesh.group()))
        assert error.kind in (MismatchError.__name__, "RuntimeError"), error
        assert "timeout: 60.0 on rank 0, 61.0 on rank 1" in error.text
