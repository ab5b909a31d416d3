"""The watch over a mesh's next rank, which aborts the mesh once that rank is lost.

A collective over TCP fails at once when a member's process ends. A member that is stopped or unreachable closes no
connection, so without this watch the others wait until the timeout of the group.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pgmesh.groups.background import in_background
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.client import CallClient
from pgmesh.rendezvous.operations import Read, Run
from pgmesh.rendezvous.statuses import status_key


@dataclass
class ElasticState:
    """What a mesh remembers of its verbs for lost ranks.

    Args:
        shrunk: the change, if ``shrink`` created this mesh.
        attempts: by prefix of a mesh's store keys, the number of the attempt at which a retry of ``shrink`` begins.
        replaced: a call has returned the mesh that replaces this one.
        aborts_when_lost: ``abort_when_lost`` was called.
        lost_after: seconds of silence after which a lost rank aborts the mesh; None for the default.
    """

    shrunk: Any = None
    attempts: Counter[str] = field(default_factory=Counter)
    replaced: bool = False
    aborts_when_lost: bool = False
    lost_after: float | None = None


def wait_for_heartbeat(mesh: MeshGroups, seconds: float) -> None:
    """Wait until this rank's first heartbeat is in the store, so that the rank can be missed from then on."""
    client = CallClient(mesh.world.heartbeat_thread(), seconds)
    while client.run(Read(status_key(mesh.rank))) == [None]:  # the first one failed; the next one is due in a period
        if client.now() >= seconds:
            raise client.thread.store.error(f"no heartbeat of this rank in {seconds:g} s")
        client.sleep(timing.TIMING.longest_pause)


def abort_when_lost(mesh: MeshGroups, lost_after: float | None) -> None:
    """Abort a mesh as soon as the next of its ranks that has a status is lost or leaves. Each rank watches one other.

    Args:
        lost_after: seconds without a heartbeat after which it is lost; None for the default.
    """
    world, ranks = mesh.world, mesh.layout.ranks()
    statuses = world.statuses
    state = mesh.state_of(ElasticState)
    state.lost_after = lost_after
    looks_already, state.aborts_when_lost = state.aborts_when_lost, True
    if looks_already or mesh.rank not in ranks or len(ranks) == 1:
        return
    place = ranks.index(mesh.rank)
    next_rank, *others = [*ranks[place + 1 :], *ranks[:place]][: timing.LIMITS.statuses]
    reference = weakref.ref(mesh)

    def next_rank_lives(run: Run) -> bool:
        """Look at the next rank; abort the mesh if it is lost. False ends these looks."""
        mesh = reference()
        if mesh is None or mesh.ended is not None:
            return False

        heard = statuses.record(next_rank).heard
        statuses.read(run, [next_rank])
        watched = [next_rank]
        if statuses.record(next_rank).heard == heard:  # it is silent, and its whole host may be lost
            statuses.read(run, others)  # whose silence counts from now on
            watched = [rank for rank in (next_rank, *others) if statuses.record(rank).status][:1]
            statuses.find_ended(run, watched, state.lost_after)
        lost = statuses.lost(watched, state.lost_after)
        if lost:  # in another thread: this one sends the heartbeats
            in_background(mesh.abort, next(iter(lost.values())))
        return not lost

    world.at_heartbeat.append(next_rank_lives)
