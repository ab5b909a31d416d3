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
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from pgmesh._util.call_sites import call_site
from pgmesh._util.formatting import name_ranks
from pgmesh.elastic.judging import MeshRound, SurvivorJudge, standing_by
from pgmesh.elastic.records import Outcome, Request
from pgmesh.elastic.shrink_judge import ShrinkJudge
from pgmesh.elastic.stand_by_judge import StandByJudge
from pgmesh.elastic.successor import successor
from pgmesh.elastic.watching import ElasticState, abort_when_lost
from pgmesh.errors import LifetimeError, MembershipError
from pgmesh.groups.aborts import publish_abort
from pgmesh.groups.identity import MeshIdentity
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.layout import Layout
from pgmesh.rendezvous.client import CallClient
from pgmesh.rendezvous.operations import Read
from pgmesh.rendezvous.processes import process_id, process_key, process_label, without_token
from pgmesh.rendezvous.records import error_text
from pgmesh.rendezvous.rounds import Rounds

log = logging.getLogger("pgmesh")


@dataclass(frozen=True)
class Shrunk:
    """The change that ``shrink`` made.

    Args:
        label: the mesh in messages.
        old_ranks: ranks of the mesh before it.
        new_ranks: ranks of the mesh after it.
        lost: the ranks that were lost, each with how that is known.
        replaced_by: for each lost rank that a spare replaces, that spare.
        seconds: time of the call of ``shrink`` or, on a rank that stood by, of ``stand_by``.
        stood_by: True on a rank that stood by.

    >>> print(Shrunk("mesh 'train'", (0, 1, 2, 3), (0, 1), {3: "rank 3 has ended"}, {}, 0.2))
    mesh 'train': 4 ranks, and now 2, in 0.20 s
      lost: rank 3 has ended
      dropped: rank 2
    """

    label: str
    old_ranks: tuple[int, ...]
    new_ranks: tuple[int, ...]
    lost: dict[int, str]
    replaced_by: dict[int, int]
    seconds: float
    stood_by: bool = False

    @property
    def dropped(self) -> tuple[int, ...]:
        """The living ranks of the old mesh that are not in the new one."""
        kept = {*self.lost, *self.new_ranks}
        return tuple(rank for rank in self.old_ranks if rank not in kept)

    def __str__(self) -> str:
        took = f"{'after standing by for' if self.stood_by else 'in'} {self.seconds:.2f} s"
        lines = [f"{self.label}: {len(self.old_ranks)} ranks, and now {len(self.new_ranks)}, {took}"]
        lines += [f"  lost: {why}" for why in self.lost.values()] or ["  lost: none"]
        if self.dropped:
            lines.append(f"  dropped: {name_ranks(self.dropped)}")
        lines += [f"  rank {spare} came in the place of rank {rank}" for rank, spare in self.replaced_by.items()]
        return "\n".join(lines)


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
        mesh.abort(f"it called {request}{after}", call_site())
    return ShrinkCall(mesh, request, client, request.lost_after).run()


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
    return ShrinkCall(mesh, None, _client(mesh, seconds), lost_after).run()


def _client(mesh: MeshGroups, seconds: float) -> CallClient:
    """The store and the clock of one call. It ends when another thread closes or replaces the mesh."""
    _check_replaceable(mesh)
    client = CallClient(mesh.world.heartbeat_thread(), seconds)
    client.on_sleep = functools.partial(_check_replaceable, mesh)
    return client


def _check_replaceable(mesh: MeshGroups) -> None:
    """Raise LifetimeError if the mesh was closed or replaced. One that was aborted can be replaced."""
    if mesh.ended is not None and not mesh.aborted:
        raise LifetimeError(f"{mesh.label} {mesh.ended} It cannot be replaced.")
    if mesh.state_of(ElasticState).replaced:  # the new mesh may be closed, or have lost ranks since
        raise LifetimeError(f"{mesh.label} was replaced already. Use the mesh that shrink or stand_by returned.")


@dataclass
class ShrinkCall:
    """One call of ``shrink`` or ``stand_by``, after it has aborted the mesh.

    Args:
        request: the arguments of ``shrink``; None to stand by.
        client: the store and the clock of this call.
        lost_after: seconds without a heartbeat after which a rank is lost; None for the default.
        process: a word that no other process of this rank has.
        warn: called with text for the log.
        shrinks, stands_by: the judges of a call of ``shrink`` and of ``stand_by``; a model checker passes others.
    """

    mesh: MeshGroups
    request: Request | None
    client: CallClient
    lost_after: float | None = None
    process: str = field(default_factory=process_id)
    warn: Callable[[str], None] = field(default=lambda text: log.warning("%s", text))
    shrinks: Callable[..., SurvivorJudge] = ShrinkJudge
    stands_by: Callable[..., SurvivorJudge] = StandByJudge

    def run(self) -> MeshGroups:
        """Agree on the mesh that replaces this one, and create it."""
        mesh, thread = self.mesh, self.client.thread
        mesh.world.registration.register(mesh.identity, self.client.run, rejoin=True, seconds=self.client.timeout())
        _check_process(mesh, self.client)
        if mesh.identity.rejoined:  # a new process in the place of a lost one stands by
            self.request = None
        if self.request is not None:
            return self.agree()
        thread.set_status(standing_by(mesh.label))
        try:
            return self.agree()
        finally:
            thread.set_status("")

    def agree(self) -> MeshGroups:
        """Take part in the decision on this mesh, and create the mesh that follows from it.

        A process that stands by may have missed that. Then it takes part in the decision on the next mesh, and so on.
        The layouts of the meshes in between follow from the decisions in the store.
        """
        old = self.mesh.identity
        while True:
            outcome, missed = self.decide(old)
            new = old.successor(successor(old.layout, outcome))
            if not missed:
                return self._replace(old.layout, new, outcome)
            if self.mesh.rank in new.layout:
                self._abort_for_this_process(new)
            old = new

    def _abort_for_this_process(self, identity: MeshIdentity) -> None:
        """Abort a mesh that has an earlier process of this rank, so that its other ranks shrink it."""
        mesh = self.mesh
        _check_process(mesh, self.client)
        text = f"{mesh.label} was aborted by rank {mesh.rank}, which is a new process and stands by"
        publish_abort(self.client.run, identity.refusal_key, text)

    def decide(self, identity: MeshIdentity) -> tuple[Outcome, bool]:
        """Take part in the decision on a mesh.

        Returns:
            The decision, and whether this process stands by and has missed it.
        """
        mesh, key, judge_of = self.mesh, identity.key, self.stands_by
        if self.request is not None:
            judge_of = functools.partial(self.shrinks, request=self.request, options=mesh.options_for_replacement())
        judge = judge_of(
            mesh.label,
            identity.layout,
            mesh.rank,
            self.process,
            self.client,
            self.client.seconds,
            mesh.world.statuses,
            self.lost_after,
            self.warn,
            self.client.thread.pace,
        )
        attempts = mesh.state_of(ElasticState).attempts
        each = MeshRound(f"{key}/shrink", number=attempts[key])
        try:
            Rounds([each], judge).run()
        finally:
            attempts[key] = each.number  # a retry begins there
        outcome = each.decision
        assert outcome is not None
        attempts[key] += bool(outcome.failed) and outcome.error != "withdrawn"
        outcome.check()
        return outcome, judge.missed(outcome)

    def _replace(self, old: Layout, identity: MeshIdentity, outcome: Outcome) -> MeshGroups:
        """Create the mesh that was agreed on.

        Args:
            old: the layout of the mesh before it.
            identity: that of the new mesh.
            outcome: the decision.
        """
        mesh, state = self.mesh, self.mesh.state_of(ElasticState)
        _check_replaceable(mesh)  # by another thread meanwhile
        mesh.forget_store()
        if self.request is not None and mesh.rank in outcome.lost:
            raise MembershipError(
                f"{mesh.label}: the other ranks went on without rank {mesh.rank}: {outcome.lost[mesh.rank]}. It can "
                "come back as a spare:\n\n"
                "  mesh = mesh.stand_by()   # until a later shrink(..., spares=[...]) names this rank"
            )
        mesh.end_aborted(f"{mesh.label} was replaced by shrink.")  # on a rank that stood by
        after = mesh.replacement(identity, outcome.options)
        after.state_of(ElasticState).shrunk = Shrunk(
            mesh.label,
            old.ranks(),
            identity.layout.ranks(),
            outcome.lost,
            outcome.replaced,
            self.client.now(),
            stood_by=self.request is None,
        )
        if state.aborts_when_lost:
            abort_when_lost(after, state.lost_after)
        state.replaced = True
        return after


def _check_process(mesh: MeshGroups, client: CallClient) -> None:
    """Raise MembershipError if a new process has this rank: the mesh may have that one."""
    (newest,) = client.run(Read(process_key(mesh.rank)))
    if newest is not None and newest.decode() != process_label():
        raise MembershipError(
            f"{mesh.label}: {without_token(newest.decode())} has taken the place of this process as rank {mesh.rank}, "
            "so this one cannot come back. End it."
        )
