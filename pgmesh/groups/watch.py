"""The watch over collectives that do not end. It runs in the store thread, at each heartbeat.

Its findings are added to a later error of the same group. They are logged once too, since errors of asynchronous
collectives, FSDP and DDP cannot be replaced.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from pgmesh._util.formatting import name_ranks
from pgmesh.groups import background, teardown
from pgmesh.groups.flight_recorder import FlightRecorder
from pgmesh.groups.group import Group, find_group
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Read, Run
from pgmesh.rendezvous.statuses import RunningCollective, Statuses
from pgmesh.rendezvous.store_thread import warn_from_store_thread

_MOST = 4
"""The number of running collectives that a status lists."""


def did_not_report(statuses: Statuses, rank: int, collective: RunningCollective) -> bool:
    """True if the last status of a rank would list this collective, and does not.

    A status that lists the most collectives may lack others.
    """
    status = statuses.get(rank)
    lists_all = status is None or len(status.running) < _MOST
    return lists_all and not statuses.has_entered(rank, collective)


class Watch:
    """Finds out why collectives of this process do not end.

    Args:
        statuses: the statuses of other ranks.
    """

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses
        self.flight_recorder = FlightRecorder(_label_of)
        self._stuck_since: dict[tuple[str, int], float] = {}  # by name of a group, and number of its collective
        self._logged: set[tuple[str, int]] = set()  # the same
        self._woken: set[tuple[str, int]] = set()  # the same

    def find_running(self, run: Run) -> tuple[RunningCollective, ...]:
        """Examine the collectives that have not ended since the last call, and return the first ones, for the status.

        Args:
            run: performs operations on the store.
        """
        stuck = self.flight_recorder.stuck()
        now, before = time.monotonic(), self._stuck_since
        self._stuck_since = {(each.name, each.number): before.get((each.name, each.number), now) for each in stuck}
        for collective in stuck:
            group = find_group(collective.name)
            if group is not None:
                self._examine(run, group, collective)
                once = (collective.name, collective.number)
                if group.gloo is None or once in self._woken:
                    continue
                if now - self._stuck_since[once] >= group.gloo.timeout.total_seconds():
                    self._woken.add(once)  # Gloo's wait for a connection ignores this timeout
                    background.in_background(teardown.wake, [group])
        return stuck[:_MOST]

    def _examine(self, run: Run, group: Group, collective: RunningCollective) -> None:
        """Record why a collective does not end, and log it once.

        A lost member is logged at once. The others are at ``warn_after``; if they have been in a collective before, a
        rank may be late for a good reason, so half of the timeout has to pass too.
        """
        ranks = group.ranks[: timing.LIMITS.statuses]
        self._statuses.read(run, ranks)
        warn_after = timing.TIMING.warn_after
        if missing := self._statuses.lost(ranks):
            what, warn_after = "sent no heartbeat", 0.0
        elif missing := self._describe(self._absent(run, group)):
            what = "did not reach the first collective"
        elif group.gloo is not None and (missing := self._describe(self._unreported(ranks, collective))):
            what = f"did not report {collective.operation} (collective {collective.number})"
            warn_after = max(warn_after, group.gloo.timeout.total_seconds() / 2)
        else:
            return
        reason = "".join([f"{name_ranks(missing)} {what}", *(f"\n  {line}" for line in missing.values() if line)])
        group.finding = (time.monotonic() + self._statuses.lost_after / 2, f"{group.label}: {reason}")
        once = (collective.name, collective.number)
        if once not in self._logged and collective.seconds >= warn_after:
            self._logged.add(once)
            warn_from_store_thread(f"this rank is {collective}: {reason}")

    def _absent(self, run: Run, group: Group) -> list[int]:
        """The members that have published no address, which each does in its first collective."""
        unread = {} if group.gloo is None else group.gloo.unread_addresses()
        values = run(*map(Read, unread.values())) if unread else ()
        return [rank for rank, value in zip(unread, values) if value is None]

    def _unreported(self, ranks: Sequence[int], collective: RunningCollective) -> list[int]:
        """The members that have not reported the collective, although they had the time to do so."""
        since = self._stuck_since[collective.name, collective.number]
        if time.monotonic() - since < self._statuses.lost_after / 2:
            return []
        return [rank for rank in ranks if did_not_report(self._statuses, rank, collective)]

    def _describe(self, ranks: Sequence[int]) -> dict[int, str]:
        """Each rank with its last status."""
        return {rank: self._statuses.describe(rank) if self._statuses.get(rank) else "" for rank in ranks}


def _label_of(name: str) -> str:
    group = find_group(name)
    return f"torch's group {name}" if group is None else group.label
