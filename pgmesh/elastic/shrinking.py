"""``shrink`` and ``stand_by``: abort a mesh, agree on the survivors, and create the mesh that replaces it.

For example, rank 3 of a mesh is lost, and rank 4 stands by. In order of time:

    ranks 0 to 2 call ``shrink``        they abort the mesh, arrive at its round, and find that rank 3 is lost
    one of them decides                 a decision: rank 3 is lost, rank 4 replaces it
    all read that                       each creates the mesh that follows from the layout and the decision

Rank 4 may *miss* a decision: the others made it before rank 4 arrived (it *came late*), or they counted an earlier
process of its rank. Then it stands by for the mesh that follows from that decision, and so on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from pgmesh._util.formatting import call_site
from pgmesh.connect.rounds import Rounds
from pgmesh.elastic.aborts import abort, end_aborted, is_aborted, publish_abort
from pgmesh.elastic.judging import MeshRound, SurvivorJudge
from pgmesh.elastic.records import Outcome, Request
from pgmesh.elastic.shrink_judge import ShrinkJudge
from pgmesh.elastic.stand_by_judge import StandByJudge
from pgmesh.elastic.state import ElasticState, Generation, Shrunk as Shrunk, generation_of
from pgmesh.elastic.watching import abort_when_lost
from pgmesh.errors import LifetimeError, MembershipError
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.processes import process_id
from pgmesh.liveness.records import error_text


def shrink(mesh: MeshGroups, request: Request, seconds: float) -> MeshGroups:
    """Abort a mesh, agree with its other ranks on those that are lost, and return the mesh that replaces it.

    Raises:
        LifetimeError: the mesh was closed, or an earlier call has returned the mesh that replaces it.
        MembershipError: the others took this rank for lost, or a new process has its place.
        MissingRanksError: living ranks did not call in time, or too many are lost.
        MismatchError: ranks passed different arguments.
        WorldError: the store has failed.
    """
    client = _client(mesh, seconds)  # first: the abort counts towards the timeout
    error = sys.exc_info()[1]  # which the caller handles
    after = "" if error is None else f" after {error_text(error).splitlines()[0].rstrip(':')}"
    if mesh.rank in mesh.layout:  # a spare may call before anything went wrong
        mesh.state_of(ElasticState).called_shrink = True
        abort(mesh, f"it called {request}{after}", call_site())
    judge_of = functools.partial(ShrinkJudge, process=process_id(), lost_after=request.lost_after, request=request)
    return agree(mesh, client, judge_of)


def stand_by(mesh: MeshGroups, seconds: float, lost_after: float | None) -> MeshGroups:
    """Wait until the ranks of a mesh shrink it, and return the mesh that replaces it.

    Args:
        lost_after: seconds without a heartbeat after which a rank is lost; None for the default.

    Raises:
        LifetimeError: the mesh was closed, or an earlier call has returned the mesh that replaces it.
        MembershipError: a new process has the place of this one.
        MissingRanksError: no rank called ``shrink`` in time, or none is left that could.
        WorldError: the store has failed.
    """
    client = _client(mesh, seconds)
    client.liveness.set_activity(generation_of(mesh).standing_by)
    try:
        return agree(mesh, client, functools.partial(StandByJudge, process=process_id(), lost_after=lost_after))
    finally:
        client.liveness.set_activity("")


def _client(mesh: MeshGroups, seconds: float) -> CallClient:
    """The store and the clock of one call. It ends when another thread closes or replaces the mesh."""
    _check_replaceable(mesh)
    client = CallClient(mesh.world, seconds)
    client.on_sleep = functools.partial(_check_replaceable, mesh)
    return client


def _check_replaceable(mesh: MeshGroups) -> None:
    """Raise LifetimeError if the mesh was closed or replaced. One that was aborted can be replaced."""
    if mesh.ended is not None and not is_aborted(mesh):
        raise LifetimeError(f"{mesh.label} {mesh.ended} It cannot be replaced.")
    if mesh.state_of(ElasticState).replaced:  # the new mesh may be closed, or have lost ranks since
        raise LifetimeError(f"{mesh.label} was replaced already. Use the mesh that shrink or stand_by returned.")


def agree(mesh: MeshGroups, client: CallClient, judge_of: Callable[..., SurvivorJudge]) -> MeshGroups:
    """Take part in the decision on a mesh, and create the mesh that follows from it.

    A process that stands by may have missed that. Then it takes part in the decision on the next mesh, and so on. The
    layouts of the meshes in between follow from the decisions in the store.

    Args:
        judge_of: makes the judge of a generation.
    """
    old, rank = generation_of(mesh), mesh.rank
    while True:
        judge = judge_of(mesh.label, old, rank, client)
        outcome = decide(mesh, judge)
        _check_place(mesh, judge, outcome)
        new = Generation(old.first, outcome.successor(old.layout), old.number + 1)
        if not judge.missed(outcome):
            return _replace(mesh, judge, outcome, new)
        if rank in new.layout:  # as an earlier process: the other ranks shall shrink that mesh
            text = f"mesh {new.name!r} was aborted by rank {rank}, which is a new process and stands by"
            publish_abort(client.run, new, text)
        old = new


def decide(mesh: MeshGroups, judge: SurvivorJudge) -> Outcome:
    """Take part in the decision on a generation, and return it.

    Raises:
        MissingRanksError, MismatchError: the attempt failed.
    """
    attempts, key = mesh.state_of(ElasticState).attempts, judge.generation.key
    each = MeshRound(f"{key}/shrink", number=attempts[key])
    try:
        Rounds([each], judge).run()
    finally:
        attempts[key] = each.number  # a retry begins there
    outcome = each.decision
    assert outcome is not None
    attempts[key] += bool(outcome.failed)
    outcome.check()
    return outcome


def _check_place(mesh: MeshGroups, judge: SurvivorJudge, outcome: Outcome) -> None:
    """Raise MembershipError if the others took this process for lost and went on, and it has not stood by."""
    rank = mesh.rank
    if rank not in outcome.lost or judge.process in outcome.processes:
        return
    if outcome.replaced.get(rank) == rank and mesh.state_of(ElasticState).called_shrink:
        raise MembershipError(
            f"{mesh.label}: a new process has taken the place of this one as rank {rank}, so this one cannot come "
            "back. End it."
        )
    if judge.call:
        raise MembershipError(
            f"{mesh.label}: the other ranks went on without rank {rank}: {outcome.lost[rank]}. It can come back as a "
            "spare:\n\n"
            "  mesh = mesh.stand_by()   # until a later shrink(..., spares=[...]) names this rank"
        )


def _replace(mesh: MeshGroups, judge: SurvivorJudge, outcome: Outcome, new: Generation) -> MeshGroups:
    """Create the mesh that was agreed on."""
    _check_replaceable(mesh)  # by another thread meanwhile
    end_aborted(mesh, f"{mesh.label} was replaced by shrink.")  # on a rank that stood by
    after, state = MeshGroups(new.name, new.layout, mesh.world), mesh.state_of(ElasticState)
    ranks, seconds = (judge.generation.layout.ranks(), new.layout.ranks()), judge.client.now()
    change = Shrunk(mesh.label, *ranks, outcome.lost, outcome.replaced, seconds, stood_by=not judge.call)
    new_state = after.state_of(ElasticState)
    new_state.generation, new_state.shrunk = new, change
    if state.aborts_when_lost:
        abort_when_lost(after, state.lost_after)
    state.replaced = True
    return after
