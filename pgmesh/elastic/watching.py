"""The watch over a mesh's next rank, which aborts the mesh once that rank is lost.

A collective over TCP fails at once when a member's process ends. A member that is stopped or unreachable closes no
connection, so without this watch the others wait until the timeout of the group.
"""

from __future__ import annotations

from pgmesh.connect.group_rounds import following
from pgmesh.elastic.state import ElasticState
from pgmesh.errors import OptionsError
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.liveness import timing
from pgmesh.liveness.liveness import liveness_of
from pgmesh.liveness.operations import Run


def abort_when_lost(mesh: MeshGroups, lost_after: float | None = None) -> None:
    """Abort a mesh as soon as the next of its ranks that has a status is lost or leaves.

    It returns once this rank's first heartbeat is in the store, so that the rank can be missed from then on.

    Args:
        lost_after: seconds without a heartbeat after which ranks of this world are lost; None for those until now.

    Raises:
        OptionsError: these are too few.
    """
    least = 3 * timing.heartbeat_period(mesh.world.size)
    if lost_after is not None and lost_after < least:
        raise OptionsError(f"lost_after={lost_after:g} s is less than three heartbeats, which take {least:g} s here.")
    if not mesh.is_fake():
        liveness = liveness_of(mesh.world)
        if lost_after is not None:
            liveness.lost_after = liveness.statuses.lost_after = lost_after
        liveness.wait_for_heartbeat()
        mesh.state_of(ElasticState).aborts_when_lost = True


def watched_rank(mesh: MeshGroups, run: Run) -> int | None:
    """The next rank of a mesh that has a status, if the mesh is aborted when that is lost."""
    statuses = liveness_of(mesh.world).statuses
    if mesh.state_of(ElasticState).aborts_when_lost and mesh.rank in mesh.layout:
        for rank in following(mesh.layout.ranks(), mesh.rank)[: timing.MOST_STATUSES]:
            if statuses.record(rank).status is None:
                statuses.read(run, [rank])
            if statuses.record(rank).status is not None:
                return rank
    return None
