"""Members that have not made a group, or have made it with other options: what a plain first collective raises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pgmesh import LifetimeError, MismatchError, MissingRanksError, ProcessGroupMesh
from pgmesh.groups.group import find_group
from pgmesh.torch_private import KEEPS_ORDER
from tests.support.faults import SLACK, WAIT_TIMEOUT, Attempt, attempt, meanwhile, wait_until
from tests.support.logs import logged_lines
from tests.support.message_assertions import facts
from tests.support.torch_tables import address_is_published
from tests.support.worlds import STARVED, check_sums, groups_of, on_ranks, world

T = 20.0 if STARVED else 1.0  # seconds; the timeout of a group whose members do not come
AT_ONCE = 0.1  # seconds
PERMUTED = [2, 0, 3, 1]
ODD = 3  # the rank that differs

CALLS: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "asynchronous all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group, async_op=True).wait(),
    "barrier": lambda group: dist.barrier(group=group),
    "broadcast_object_list": lambda group: dist.broadcast_object_list([1], group_src=0, group=group),
    "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(
        torch.zeros(group.size()), torch.ones(1), group=group
    ),
}


summed = CALLS["all_reduce"]


@pytest.mark.parametrize("call", CALLS)
@on_ranks(4)
def test_first_collective_names_missing_ranks(call: str):
    mesh = ProcessGroupMesh(dp=2, tp=2, ranks=PERMUTED, name="actor")
    mesh.configure("dp", "tp", timeout=T)
    if mesh.rank != 1:
        group = mesh.group()
    dist.barrier()
    if mesh.rank in (0, 3):
        start = time.monotonic()
        with pytest.raises(MissingRanksError, match=r"rank 1 did not make this group") as caught:
            CALLS[call](group)
        assert T <= time.monotonic() - start < T + AT_ONCE + SLACK
        assert facts(str(caught.value)) == facts(f"of mesh 'actor': rank 1 in {T:g} s. 2, 0, 3, 1")
    dist.barrier()
    mesh.release()
    check_sums(groups_of(mesh))


@on_ranks(2)
def test_error_quotes_the_wait_in_another_group():
    """Rank 1 has asked for another option in the call. Both errors say where the other rank waits."""
    mesh = ProcessGroupMesh(dp=2, name="actor")
    mesh.configure("dp", timeout=3 * T)
    options = {"timeout": 3.5 * T} if mesh.rank else {}
    with logged_lines() as lines:
        group = mesh.group("dp", **options)
        dist.barrier()
        with pytest.raises(MissingRanksError) as caught:
            summed(group)
    other, asked = 1 - mesh.rank, f" (asked for with timeout={3.5 * T})" if mesh.rank == 0 else ""
    group_text = f"group dp of mesh 'actor'{asked} with ranks 0, 1"
    said = [f"  rank {other} {does} in {group_text}" for does in ("waits", "waited, until it gave up,")]
    assert str(caught.value).splitlines()[1:] in ([each] for each in said)
    assert any(f"rank {mesh.rank} waits" in line.text for line in lines)
    dist.barrier()
    mesh.release("dp")
    check_sums(groups_of(mesh))


@on_ranks(2)
def test_error_quotes_no_wait_that_has_ended():
    """Rank 1 has waited for rank 0 in another group, for long enough that it left a note, and does so no longer."""
    mesh = ProcessGroupMesh(2, name="actor")
    mesh.configure(0, tag="first", timeout=3 * T)
    mesh.configure(0, tag="second", timeout=T)
    if mesh.rank == 1:
        with logged_lines() as lines, meanwhile(lambda: summed(mesh.group(0, tag="first"))):
            wait_until(lambda: any("rank 1 waits" in line.text for line in lines), "the note")
            dist.barrier()
    else:
        dist.barrier()
        summed(mesh.group(0, tag="first"))
    dist.barrier()
    if mesh.rank == 0:
        with pytest.raises(MissingRanksError, match="rank 1 did not make this group") as caught:
            summed(mesh.group(0, tag="second"))
        assert "waits" not in str(caught.value)
    dist.barrier()
    check_sums({"second": (mesh.group(0, tag="third"), [0, 1])})


@on_ranks(2)
def test_group_continues_after_late_member():
    """A member that comes before the timeout is no fault, however old the group is."""
    mesh = ProcessGroupMesh(2, name="actor")
    if mesh.rank == 0:
        work = dist.all_reduce(torch.ones(1), group=mesh.group(), async_op=True)
        wait_until(lambda: address_is_published(mesh.group()), "the address")
        time.sleep(T)
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        summed(mesh.group())
    check_sums(groups_of(mesh))


DIFFERING = {
    "configured timeout": f"timeout: {WAIT_TIMEOUT} on ranks 0, 1, 2, {WAIT_TIMEOUT + 1} on rank 3",
    "shape": "shape: [2, 2] on ranks 0, 1, 2, [4, 1] on rank 3",
}


def differing(what: str) -> tuple[float, Attempt, list[str]]:
    """When this rank has made the group of the whole mesh, its first collective, and what was logged."""
    odd = what if dist.get_rank() == ODD else ""
    sizes = {"dp": 4, "tp": 1} if odd == "shape" else {"dp": 2, "tp": 2}
    mesh = ProcessGroupMesh(sizes, ranks=PERMUTED, name="actor")
    mesh.configure("dp", "tp", timeout=WAIT_TIMEOUT + (odd == "configured timeout"))
    with logged_lines() as lines:
        for rank in range(4):  # one after the other
            if rank == mesh.rank:
                group = mesh.group()
            dist.barrier()
        made = time.monotonic()
        tried = attempt(lambda: CALLS["all_reduce" if mesh.rank % 2 else "asynchronous all_reduce"](group))
    dist.barrier()
    mesh.close()
    check_sums(groups_of(ProcessGroupMesh(dp=2, tp=2, ranks=PERMUTED, name="actor")))  # a corrected retry
    return made, tried, [line.text for line in lines]


@pytest.mark.parametrize("what", DIFFERING)
def test_mismatch_is_raised_on_every_member(what: str):
    results = world(4).run(differing, what)
    complete = max(made for made, _, _ in results)
    for _, tried, lines in results:
        assert tried.kind == MismatchError.__name__, tried
        assert DIFFERING[what] in tried.text
        assert tried.end < complete + AT_ONCE + SLACK
        assert any(DIFFERING[what] in line for line in lines)


@pytest.mark.parametrize("verb", ["release", "close"])
@on_ranks(2)
def test_end_of_group_ends_wait_for_members(verb: str):
    mesh = ProcessGroupMesh(2, name="actor")
    if mesh.rank == 0:
        group = mesh.group()
        tried: list[Attempt] = []
        with meanwhile(lambda: tried.append(attempt(lambda: summed(group)))):
            wait_until(lambda: find_group(group.group_name).store.waiting_since, "the wait")
            end = time.monotonic()
            getattr(mesh, verb)()
        assert tried[0].kind == LifetimeError.__name__, tried
        assert tried[0].end < end + AT_ONCE + SLACK
        assert "mesh 'actor'" in tried[0].text


# ---- TORCH_DISTRIBUTED_DEBUG=DETAIL: torch's error, as on groups of new_group ----

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
