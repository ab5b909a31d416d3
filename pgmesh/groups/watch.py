"""The watch over collectives that do not end. It runs in the store thread, at each heartbeat.

Its findings are added to a later error of the same group. They are logged once too, since errors of asynchronous
collectives, FSDP and DDP cannot be replaced.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pgmesh._util.formatting import name_ranks
from pgmesh.groups import background, teardown
from pgmesh.groups.flight_recorder import FlightRecorder
from pgmesh.groups.group import Group, State, find_group
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.heartbeat import warn_from_store_thread
from pgmesh.rendezvous.operations import Read, Run
from pgmesh.rendezvous.statuses import RunningCollective, Statuses

_MOST = 4
"""The number of running collectives that a status lists."""


def did_not_report(statuses: Statuses, rank: int, collective: RunningCollective) -> bool:
    """True if the last status of a rank would list this collective, and does not.

    A status that lists the most collectives may lack others.
    """
    status = statuses.record(rank).status
    lists_all = status is None or len(status.running) < _MOST
    return lists_all and not statuses.has_entered(rank, collective)


@dataclass
class _Stuck:
    """The record of a collective that does not end.

    Args:
        found_at: the time when it was found, one or two heartbeats after it was entered.
        logged: the reason was logged.
        woken: this rank's waits for members to connect were ended.
    """

    found_at: float
    logged: bool = False
    woken: bool = False


class Watch:
    """Finds out why collectives of this process do not end.

    Args:
        statuses: the statuses of other ranks.
    """

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses
        self.flight_recorder = FlightRecorder()
        self._stuck: dict[tuple[str, int], _Stuck] = {}  # by ``_key``

    def find_running(self, run: Run) -> tuple[RunningCollective, ...]:
        """Examine the collectives that have not ended since the last call, and return the first ones, for the status.

        Args:
            run: performs operations on the store.
        """
        running = self.flight_recorder.stuck()
        self._renew(running)
        groups = {each: group for each in running if (group := find_group(each.name)) is not None}
        self._wake(run, groups)
        start = time.monotonic()
        self._statuses.read(run, {rank for group in groups.values() for rank in _watched(group)})
        for collective, group in groups.items():
            self._examine(run, group, collective)
            if time.monotonic() - start > self._statuses.lost_after / 4:
                break  # the store is slow, and the next heartbeat is due
        return running[:_MOST]

    def _renew(self, running: Iterable[RunningCollective]) -> None:
        """Begin to watch the collectives that are stuck since this heartbeat, and forget those that have ended."""
        now, before = time.monotonic(), self._stuck
        self._stuck = {_key(each): before.get(_key(each), _Stuck(now)) for each in running}

    def _wake(self, run: Run, groups: Mapping[RunningCollective, Group]) -> None:
        """End the waits for members to connect that Gloo would not end in time.

        Those are waits that last longer than the timeout of the group. And of a first collective, all waits if a rank
        has published a mismatch: it may never connect, and this rank reads the store no longer.
        """
        now = time.monotonic()
        for collective, group in groups.items():
            stuck, is_first = self._stuck[_key(collective)], collective.number == 1 and group.state is State.MADE
            if stuck.woken:
                continue
            if is_first and any(store.is_refused(run) for store in group.stores.values()):
                stuck.woken = True
                background.in_background(teardown.cut, [group])
            elif now - stuck.found_at >= group.timeout:
                stuck.woken = True
                background.in_background(teardown.wake, [group])

    def _examine(self, run: Run, group: Group, collective: RunningCollective) -> None:
        """Record why a collective does not end, and log it once.

        A lost member is logged at once, and one that did not reach its first collective at ``warn_in_collective``. One
        that did not report this collective may be late for a good reason: half of the timeout has to pass too.
        """
        ranks = _watched(group)
        warn_after = timing.TIMING.warn_in_collective
        if missing := self._statuses.lost(ranks):
            what, warn_after = "left, ended or sent no heartbeat", 0.0
        elif missing := self._describe(self._absent(run, group)):
            what = "did not reach the first collective"
        elif group.gloo is not None and (missing := self._describe(self._unreported(ranks, collective))):
            what = f"did not report {collective.operation} (collective {collective.number})"
            warn_after = max(warn_after, group.timeout / 2)
        else:
            return
        reason = "".join([f"{name_ranks(missing)} {what}", *(f"\n  {line}" for line in missing.values() if line)])
        group.finding = (time.monotonic() + self._statuses.lost_after / 2, f"{group.label}: {reason}")
        stuck = self._stuck[_key(collective)]
        if not stuck.logged and collective.seconds >= warn_after:
            stuck.logged = True
            warn_from_store_thread(f"this rank is {collective}: {reason}")

    def _absent(self, run: Run, group: Group) -> list[int]:
        """The members that have published no address, which each does in its first collective."""
        unread = {} if group.gloo is None else group.gloo.unread_addresses()
        values = run(*map(Read, unread.values())) if unread else ()
        return [rank for rank, value in zip(unread, values) if value is None]

    def _unreported(self, ranks: Sequence[int], collective: RunningCollective) -> list[int]:
        """The members that have not reported the collective, although they had the time to do so."""
        if time.monotonic() - self._stuck[_key(collective)].found_at < self._statuses.lost_after / 2:
            return []
        return [rank for rank in ranks if did_not_report(self._statuses, rank, collective)]

    def _describe(self, ranks: Sequence[int]) -> dict[int, str]:
        """Each rank with its last status."""
        return {rank: self._statuses.describe(rank) if self._statuses.record(rank).status else "" for rank in ranks}


def _key(collective: RunningCollective) -> tuple[str, int]:
    """The name of its group and its number, which stay the same at each heartbeat."""
    return collective.name, collective.number


def _watched(group: Group) -> tuple[int, ...]:
    """The members whose statuses are read."""
    return group.ranks[: timing.LIMITS.statuses]
