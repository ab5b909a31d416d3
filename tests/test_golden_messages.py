"""A dozen whole messages as users see them, one of each kind. Elsewhere only the facts of a message are asserted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pgmesh import Layout, MismatchError, PgmeshError, ProcessGroupMesh
from pgmesh.parallel import DataParallel, compose
from pgmesh.rendezvous.records import Fingerprint
from pgmesh.rendezvous.statuses import PendingConnect, RankStatus, status_key
from tests.support import golden_files
from tests.support.fake_world import fake_rank
from tests.support.memory_client import MemoryClient, attempt_of, participant_of

BOX = Layout(pp=2, dp=2, tp=2)


def connect_without_rank_1(status: RankStatus) -> None:
    """Connect a group of ranks 0 and 1 as rank 0, until the deadline."""
    attempt = attempt_of()
    participant_of(MemoryClient(values={status_key(1): status.pack().encode()}), attempt).connect()
    assert attempt.decision is not None
    error = attempt.decision.error()
    assert error is not None
    raise error


def use_a_released_group(mesh: ProcessGroupMesh) -> None:
    group = mesh.group("tp")
    mesh.release("tp")
    dist.all_reduce(torch.ones(1), group=group)


def compare_options(rank: int, other: int) -> None:
    hint = "On every rank, configure its axes with the same options or pass the same options in the call."
    label = "group tp of mesh 'actor'"
    mine = Fingerprint(rank, {"backend": "gloo", "timeout": 30.0}, label, hint)
    other_one = Fingerprint(other, {"backend": "gloo", "timeout": 60.0}, label, hint)
    raise MismatchError(mine.mismatch([other_one.encoded]))


WAITING = PendingConnect("other/0", "group dp", "mesh 'actor'", "0, 1", "train.py:12", (0,))

CALLS: dict[str, Callable[[ProcessGroupMesh], object]] = {
    "sizes that do not fit": lambda mesh: ProcessGroupMesh(dp=2, tp=3),
    "an option as an axis": lambda mesh: ProcessGroupMesh(dp=2, tp=4, timeout=30),
    "an unknown axis": lambda mesh: mesh.group("tpp"),
    "an index that an axis lacks": lambda mesh: BOX.at(pp=2),
    "a rank outside a slice": lambda mesh: mesh.at(pp=0).index("tp"),
    "options for a group that exists": lambda mesh: mesh.group("dp") and mesh.configure("dp", timeout=60),
    "a name that is taken": lambda mesh: ProcessGroupMesh(8, name="actor"),
    "a group that was released": use_a_released_group,
    "options that differ": lambda mesh: compare_options(0, 3),
    "a rank that never comes": lambda mesh: connect_without_rank_1(RankStatus(1, 3)),
    "ranks that wait for each other": lambda mesh: connect_without_rank_1(
        RankStatus(1, 3, pending=(WAITING._replace(name="group tp/1"),))
    ),
    "two methods on one axis": lambda mesh: compose(mesh, DataParallel(mesh, "dp"), DataParallel(mesh, "dp")),
}
"""A call for each message, on the mesh pp=2, dp=2, tp=2 named "actor", as rank 5."""


def message(call: Callable[[ProcessGroupMesh], object]) -> str:
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(pp=2, dp=2, tp=2, name="actor")
        with pytest.raises(PgmeshError) as caught:
            call(mesh)
        mesh.close()
    text = re.sub(rf"{Path(__file__).name}:\d+", "train.py:12", str(caught.value))
    return f"{type(caught.value).__name__}: {text}"


def test_twelve_messages_equal_the_reviewed_ones():
    golden_files.check(
        "messages.txt", "\n\n".join(f"== {what}\n{message(call)}" for what, call in CALLS.items()) + "\n"
    )
