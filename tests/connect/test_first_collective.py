"""The first collective of a group: which error it gets, and what the other members learn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from pgmesh import LifetimeError, MissingRanksError, PgmeshError, ProcessGroupMesh
from pgmesh.connect.decisions import Decision
from pgmesh.connect.first_collective import FirstCollectives
from pgmesh.connect.group_rounds import GroupRound
from pgmesh.groups.group import Group
from pgmesh.liveness.operations import Operation, Read
from pgmesh.liveness.statuses import RankStatus, Statuses, status_key
from tests.support.fake_world import fake_rank
from tests.support.memory_client import round_of

SILENT = Statuses(5.0, lambda: 0.0)
"""The statuses of ranks that have none."""


def no_answers(*operations: Operation) -> list[Any]:
    return [None] * len(operations)


def client_of(run: Callable[..., list[Any]] = no_answers) -> Any:
    """A client with a deadline in a second."""
    start = time.monotonic()
    return SimpleNamespace(run=run, seconds=1.0, pace=1.0, now=lambda: time.monotonic() - start, sleep=time.sleep)


def made_round() -> GroupRound:
    made = round_of()
    made.decision = Decision("made")
    return made


@contextlib.contextmanager
def mesh_and_group(rank: int = 0, size: int = 2) -> Iterator[tuple[ProcessGroupMesh, Group]]:
    with fake_rank(rank, size):
        mesh = ProcessGroupMesh(tp=size, name="actor")
        mesh.group()
        (group,) = mesh._mesh_groups.made()
        yield mesh, group


@contextlib.contextmanager
def work_of_torch(error: Exception | None) -> Iterator[None]:
    """Let an all-reduce fail with an error, or never end."""
    work = SimpleNamespace(is_completed=lambda: error is not None, wait=mock.Mock(side_effect=error))
    with mock.patch.object(dist, "all_reduce", return_value=work):
        yield


def test_group_released_during_its_first_collective_is_named():
    """Another thread releases it after torch has raised an error, of which a lost member could be the cause."""
    with mesh_and_group() as (mesh, group), work_of_torch(RuntimeError("closed by peer")):
        collectives = FirstCollectives(mesh._mesh_groups, client_of(), SILENT)
        made = made_round()
        collectives.add({made: group})
        collectives.by_round[made].start()
        mesh.release()
        with pytest.raises(
            LifetimeError, match=r"^group tp of mesh 'actor' was released at test_first_collective\.py:"
        ):
            collectives.finish()


def error_of_endless(rank: int, size: int, client: Any, statuses: Statuses) -> PgmeshError:
    with mesh_and_group(rank, size) as (mesh, group), work_of_torch(None):
        collectives = FirstCollectives(mesh._mesh_groups, client, statuses)
        collectives.add({made_round(): group})
        collectives.finish()
    (collective,) = collectives.of_made
    assert isinstance(collective.error, MissingRanksError)
    return collective.error


def test_endless_first_collective_fails_at_the_deadline():
    assert str(error_of_endless(0, 2, client_of(), Statuses(0.1, lambda: 0.0))) == (
        "group tp of mesh 'actor': its first collective did not finish in time: the deadline was 1 s. "
        "Its members are ranks 0, 1."
    )


def test_member_far_from_the_front_names_ended_one():
    """It reads the statuses of those after it, whose listeners it asks."""
    status = RankStatus(endpoint=("127.0.0.1", 4000)).pack().encode()

    def run(*operations: Operation) -> list[Any]:
        return [status if operation == Read(status_key(37)) else None for operation in operations]

    statuses = Statuses(5.0, lambda: 0.0, lambda status, seconds, wait: True)
    error = error_of_endless(36, 40, client_of(run), statuses)
    assert "rank 37 has ended: its listener at 127.0.0.1:4000 refuses connections" in str(error)
