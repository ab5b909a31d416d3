"""``shrink`` and ``stand_by``: abort a mesh, agree on the survivors, and create the mesh that replaces it."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

from pgmesh._util.call_sites import call_site
from pgmesh._util.formatting import name_ranks
from pgmesh._util.listeners import Listener, is_loopback, refuses
from pgmesh.elastic.agreement import Agreement, Arrival, Outcome, Request
from pgmesh.elastic.successor import successor
from pgmesh.elastic.watching import abort_when_lost
from pgmesh.errors import LifetimeError, MembershipError, MissingRanksError
from pgmesh.groups.cache import GroupCache
from pgmesh.groups.registry import publish_abort
from pgmesh.layout import Layout
from pgmesh.rendezvous.client import CallClient
from pgmesh.rendezvous.operations import Delete
from pgmesh.rendezvous.records import error_text
from pgmesh.rendezvous.statuses import RankStatus
from pgmesh.rendezvous.store_thread import process_label

log = logging.getLogger("pgmesh")


@dataclass(frozen=True)
class Shrunk:
    """The change that ``shrink`` made.

    Args:
        label: the mesh in messages.
        before: ranks of the mesh before it.
        after: ranks of the mesh after it.
        lost: the ranks that were lost, each with how that is known.
        replaced: for each lost rank that a spare replaces, that spare.
        seconds: time of the call of ``shrink`` or, on a spare, ``stand_by``.

    >>> print(Shrunk("mesh 'train'", (0, 1, 2, 3), (0, 1), {3: "rank 3 has ended"}, {}, 0.2))
    mesh 'train': 4 ranks, and now 2, in 0.20 s
      lost: rank 3 has ended
      dropped: rank 2
    """

    label: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    lost: dict[int, str]
    replaced: dict[int, int]
    seconds: float

    @property
    def dropped(self) -> tuple[int, ...]:
        """The living ranks of the mesh before that are not in the mesh after."""
        return tuple(rank for rank in self.before if rank not in self.lost and rank not in self.after)

    def __str__(self) -> str:
        lines = [f"{self.label}: {len(self.before)} ranks, and now {len(self.after)}, in {self.seconds:.2f} s"]
        lines += [f"  lost: {why}" for why in self.lost.values()] or ["  lost: none"]
        if self.dropped:
            lines.append(f"  dropped: {name_ranks(self.dropped)}")
        lines += [f"  rank {spare} came in the place of rank {rank}" for rank, spare in self.replaced.items()]
        return "\n".join(lines)


def shrink(cache: GroupCache, request: Request, seconds: float) -> GroupCache:
    """Abort a mesh, agree with its other ranks on those that are lost, and return the mesh that replaces it.

    Raises:
        MembershipError: the others took this rank for lost.
        MissingRanksError: living ranks did not call in time, or too many are lost.
        MismatchError: ranks passed different arguments.
        WorldError: the store has failed.
    """
    error = sys.exc_info()[1]  # which the caller handles
    after = "" if error is None else f" after {error_text(error).splitlines()[0].rstrip(':')}"
    if cache.rank in cache.layout:  # a spare may call before anything went wrong
        cache.abort(f"it called {request}{after}", call_site())
    return _Call(cache, seconds).replace(request)


def stand_by(cache: GroupCache, seconds: float) -> GroupCache:
    """Wait until the ranks of a mesh shrink it, and return the mesh that replaces it.

    Raises:
        MissingRanksError: no rank called ``shrink`` in time.
        WorldError: the store has failed.
    """
    return _Call(cache, seconds).replace(None)


class _Call:
    """One call of ``shrink`` or ``stand_by`` on one rank."""

    def __init__(self, cache: GroupCache, seconds: float) -> None:
        if cache.ended is not None and not cache.ended.startswith(("was aborted", "was replaced")):
            raise LifetimeError(f"{cache.label} {cache.ended} It cannot be replaced.")
        self.cache, self.seconds = cache, seconds
        self.client = CallClient(cache.registry.heartbeat_thread(), seconds)
        self.statuses = cache.statuses()

    def replace(self, request: Request | None) -> GroupCache:
        """Agree on the mesh that replaces this one, and on the one that replaces that if this rank missed it."""
        cache = self.cache
        cache.identity.register(cache.registry, self.client.timeout(), rejoin=True)
        if cache.identity.rejoined:
            request = None  # a new process in the place of a lost one stands by
        layout, identity = cache.layout, cache.identity
        while True:
            agreement = self._agreement(identity.key, layout, request)
            try:
                outcome = agreement.agree()
            finally:
                cache.shrink_attempts[identity.key] = agreement.number  # a retry begins there
            cache.shrink_attempts[identity.key] += bool(outcome.failed)
            outcome.check()
            before, layout = layout, successor(layout, outcome.lost, outcome.replaced, outcome.axis)
            identity = identity.successor(layout)
            if request is None and agreement.came_late and process_label() not in outcome.processes:
                if cache.rank in layout:  # its former process ended later: the others need not wait for that one
                    text = f"{cache.label} was aborted by rank {cache.rank}, which is a new process and stands by"
                    publish_abort(self.client.run, identity.mismatch_key, text)
                continue  # it was replaced before this rank stood by
            self.client.run(Delete((agreement.arrivals_key,)))
            cache.forget_store()
            if request is not None and cache.rank in outcome.lost:
                raise MembershipError(_taken_for_lost(cache, outcome))
            cache.end_aborted(f"{cache.label} was replaced by shrink.")  # on a rank that stood by
            after = GroupCache(cache.name, layout, identity=identity)
            after.shrunk = Shrunk(
                cache.label,
                before.ranks(),
                layout.ranks(),
                outcome.lost,
                outcome.replaced,
                self.client.now(),
            )
            if cache.aborts_when_lost:
                abort_when_lost(after, cache.abort_after)
            return after

    def _agreement(self, key: str, layout: Layout, request: Request | None) -> Agreement:
        listener = self.client.thread.listener

        def check(outcome: Outcome) -> str:
            try:
                successor(layout, outcome.lost, outcome.replaced, outcome.axis)
            except MissingRanksError as error:
                return str(error)
            return ""

        return Agreement(
            key,
            self.cache.label,
            layout.ranks(),
            Arrival(self.cache.rank, process_label(), request),
            self.client,
            self.seconds,
            self.statuses,
            has_ended=lambda status: _has_ended(listener, status),
            check=check,
            warn=lambda text: log.warning("%s", text),
            number=self.cache.shrink_attempts.get(key, 0),
        )


def _has_ended(mine: Listener | None, status: RankStatus) -> bool:
    """True if the process that published a status has ended: its listener refuses a connection."""
    if not status.endpoint or mine is None:
        return False
    # A rank that reaches the store over its loopback is on the store's host. Elsewhere that address means another host.
    return is_loopback(status.endpoint[0]) == is_loopback(mine.host) and refuses(status.endpoint)


def _taken_for_lost(cache: GroupCache, outcome: Outcome) -> str:
    return (
        f"{cache.label}: the other ranks went on without rank {cache.rank}: {outcome.lost[cache.rank]}. It can come "
        "back as a spare:\n\n"
        "  mesh = mesh.stand_by()   # until a later shrink(..., spares=[...]) names this rank"
    )
