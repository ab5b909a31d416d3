"""The watch over a mesh's next rank, which aborts the mesh once that rank is lost.

A collective over TCP fails at once when a member's process ends. A member that is stopped or unreachable closes no
connection, so without this watch the others wait until the timeout of the group.
"""

from __future__ import annotations

import weakref

from pgmesh.connect.group_rounds import following
from pgmesh.elastic.aborts import Aborts, abort
from pgmesh.elastic.state import ElasticState
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.liveness import timing
from pgmesh.liveness.liveness import liveness_of
from pgmesh.liveness.operations import Run


def abort_when_lost(mesh: MeshGroups, lost_after: float | None) -> None:
    """Abort a mesh as soon as the next of its ranks that has a status is lost or leaves.

    It returns once this rank's first heartbeat is in the store, so that the rank can be missed from then on.

    Args:
        lost_after: seconds without a heartbeat after which it is lost; None for the default.
    """
    state = mesh.state_of(ElasticState)
    state.lost_after = lost_after
    looks_already, state.aborts_when_lost = state.aborts_when_lost, True
    if mesh.is_fake():
        return
    liveness_of(mesh.world).wait_for_heartbeat()
    if not looks_already and mesh.rank in mesh.layout and mesh.layout.size() > 1:
        _watch_next_rank(mesh)


def _watch_next_rank(mesh: MeshGroups) -> None:
    """Look at the next rank of a mesh at each heartbeat, until the mesh has ended."""
    world, others = mesh.world, following(mesh.layout.ranks(), mesh.rank)[: timing.LIMITS.statuses]
    statuses = liveness_of(world).statuses
    reference = weakref.ref(mesh)

    def next_rank_lives(run: Run) -> bool:
        """Look at the next rank that has a status; abort the mesh if it is lost. False ends these looks."""
        mesh = reference()
        if mesh is None or mesh.ended is not None:
            return False
        lost_after = mesh.state_of(ElasticState).lost_after
        for rank in others:
            statuses.read(run, [rank])
            if statuses.record(rank).status is not None:
                statuses.find_ended(run, [rank], lost_after)
                lost = statuses.lost([rank], lost_after)
                if lost:
                    world.state_of(Aborts).in_thread(abort, mesh, lost[rank])
                return not lost
        return True

    liveness_of(world).looks.append(next_rank_lives)
