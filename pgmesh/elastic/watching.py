"""The watch over a mesh's next rank, which aborts the mesh once that rank is lost.

A collective over TCP fails at once when a member's process ends. A member that is stopped or unreachable closes no
connection, so without this watch the others wait until the timeout of the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from pgmesh.groups.cache import GroupCache
from pgmesh.groups.teardown import in_background
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Operation, Read
from pgmesh.rendezvous.statuses import status_key


def abort_when_lost(cache: GroupCache, lost_after: float | None) -> None:
    """Abort a mesh as soon as the next rank of the mesh is lost. Each rank watches one other rank.

    It returns once this rank's first heartbeat is in the store, so that the rank can be missed from then on.

    Args:
        lost_after: seconds without a heartbeat after which it is lost; None for the default.
    """
    registry, ranks = cache.registry, cache.layout.ranks()
    thread = registry.heartbeat_thread()
    statuses = registry.statuses
    if lost_after is not None:
        cache.lost_after = lost_after
    thread.run(Read(status_key(cache.rank)), seconds=timing.TIMING.late_answer)
    looks_already, cache.aborts_when_lost = cache.aborts_when_lost, True
    if looks_already or cache.rank not in ranks or len(ranks) == 1:
        return
    place = ranks.index(cache.rank)
    next_rank, *others = [*ranks[place + 1 :], *ranks[:place]][: timing.LIMITS.statuses]
    reference = weakref.ref(cache)

    def next_rank_lives(perform: Callable[[Operation], Any]) -> bool:
        """Look at the next rank; abort the mesh if it is lost. False ends these looks."""
        cache = reference()
        if cache is None or cache.ended is not None:
            return False

        def run(*reads: Operation) -> list[Any]:
            return [*map(perform, reads)]

        heard = statuses.heard.get(next_rank)
        statuses.read(run, [next_rank])
        is_silent = statuses.heard.get(next_rank) == heard
        if is_silent:  # its whole host may be lost: the others' silence counts from now on
            statuses.read(run, others)
        watched = [rank for rank in (next_rank, *others) if statuses.get(rank)][:1]
        if is_silent:
            statuses.find_ended(run, watched)
        lost = statuses.lost(watched, cache.lost_after)
        if lost:  # in another thread: this one sends the heartbeats
            in_background(cache.abort, *lost.values())
        return not lost

    registry.at_heartbeat.append(next_rank_lives)
