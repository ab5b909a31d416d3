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
from collections.abc import Callable

from pgmesh._util.formatting import call_site, count_of
from pgmesh.connect.rounds import Rounds
from pgmesh.elastic.aborts import abort, check_replaceable, end_aborted
from pgmesh.elastic.judging import SurvivorJudge
from pgmesh.elastic.records import MeshRound, Outcome, Request
from pgmesh.elastic.shrink_judge import ShrinkJudge
from pgmesh.elastic.stand_by_judge import StandByJudge
from pgmesh.elastic.state import ElasticState, Generation, Shrunk as Shrunk, generation_of
from pgmesh.elastic.watching import abort_when_lost
from pgmesh.errors import MembershipError, MismatchError, MissingRanksError
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.liveness.client import CallClient


def shrink(mesh: MeshGroups, request: Request, seconds: float) -> MeshGroups:
    """Abort a mesh, agree with its other ranks on those that are lost, and return the mesh that replaces it.

    Raises:
        LifetimeError: the mesh was closed.
        MembershipError: the others took this rank for lost, or a new process has its place.
        MissingRanksError: living ranks did not call in time, or too many are lost.
        MismatchError: ranks passed different arguments.
        NameTakenError: an earlier call has returned the mesh that replaces it, which has groups.
        WorldError: the store has failed.
    """
    check_replaceable(mesh)
    client = CallClient(mesh.world, seconds)  # first: the abort counts towards the timeout
    if mesh.rank in mesh.layout:  # a spare may call before anything went wrong
        mesh.state_of(ElasticState).called_shrink = True
        abort(mesh, f"it called {request}", call_site())
    return agree(mesh, client, functools.partial(ShrinkJudge, request=request))


def stand_by(mesh: MeshGroups, seconds: float) -> MeshGroups:
    """Wait until the ranks of a mesh shrink it, and return the mesh that replaces it.

    Raises:
        LifetimeError: the mesh was closed.
        MembershipError: a new process has the place of this one.
        MissingRanksError: no rank called ``shrink`` in time, or none is left that could.
        NameTakenError: an earlier call has returned the mesh that replaces it, which has groups.
        WorldError: the store has failed.
    """
    check_replaceable(mesh)
    client = CallClient(mesh.world, seconds)
    client.pace *= 4  # there may be many such ranks, waiting for days
    return agree(mesh, client, StandByJudge)


def agree(mesh: MeshGroups, client: CallClient, judge_of: Callable[..., SurvivorJudge]) -> MeshGroups:
    """Take part in the decision on a mesh, and create the mesh that follows from it.

    A process that stands by may have missed that. Then it takes part in the decision on the next mesh, and so on. The
    layouts of the meshes in between follow from the decisions in the store.

    Args:
        judge_of: makes the judge of a generation.
    """
    old = generation_of(mesh)
    while True:
        judge = judge_of(mesh, old, client)
        outcome = decide(judge)
        _check_place(mesh, judge, outcome)
        new = Generation(old.first, outcome.successor(old.layout), old.number + 1)
        if not judge.missed(outcome):
            return _replace(mesh, judge, outcome, new)
        old = new


def decide(judge: SurvivorJudge) -> Outcome:
    """Take part in the decision on a generation, and return it.

    Raises:
        MissingRanksError, MismatchError: the attempt failed.
    """
    key = judge.generation.key
    each = judge.mesh.state_of(ElasticState).rounds.setdefault(key, MeshRound(f"{key}/shrink"))
    while True:
        if each.decision is not None and each.decision.failed:
            each.go_on()
        each.decision = None  # of an earlier call, which this one reads again
        Rounds([each], judge).run()
        outcome = each.decision
        assert outcome is not None
        if not outcome.failed:
            return outcome
        if not judge.goes_on_after(outcome):
            raise (MismatchError if outcome.error == "mismatch" else MissingRanksError)(outcome.failed)


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
    check_replaceable(mesh)  # by another thread meanwhile
    end_aborted(mesh, f"{mesh.label} was replaced by shrink.")  # on a rank that stood by
    after, state = MeshGroups(new.name, new.layout, mesh.world), mesh.state_of(ElasticState)
    summary = f"{mesh.label}: {count_of(judge.generation.layout.size(), 'rank')}, and now {new.layout.size()}"
    new_state = after.state_of(ElasticState)
    new_state.generation, new_state.shrunk = new, Shrunk(summary, outcome.lost, outcome.replaced)
    if state.aborts_when_lost:
        abort_when_lost(after)
    return after
