"""The first collectives of the groups that one call of ``connect`` connects: they run at once, and each may fail."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

from pgmesh.connect.first_collective import FirstCollective
from pgmesh.errors import LifetimeError
from pgmesh.groups.backends import connects_in_background
from pgmesh.groups.group import Group, State
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.client import CallClient
from pgmesh.rendezvous.group_rounds import GroupRound
from pgmesh.rendezvous.operations import Read
from pgmesh.rendezvous.rounds import pauses
from pgmesh.rendezvous.statuses import Statuses


def _poll(by_round: Mapping[GroupRound, FirstCollective]) -> list[FirstCollective]:
    """Poll those that run; return those that still run then."""
    for collective in by_round.values():
        collective.poll()
    return [collective for collective in by_round.values() if collective.is_running()]


def _check_groups(by_round: Mapping[GroupRound, FirstCollective]) -> None:
    """Raise LifetimeError if another thread has ended a group."""
    for each in by_round.values():
        if each.group.state is State.ENDED:
            raise LifetimeError(each.group.unusable)


def _pause(by_round: Mapping[GroupRound, FirstCollective]) -> None:
    """Check the groups, and poll those that run."""
    _check_groups(by_round)
    _poll(by_round)


class FirstCollectives:
    """The first collectives of one call, by round. They are polled in each pause of its client.

    Args:
        client: the store and the clock of the call.
        statuses: the last statuses of the other ranks.
        rank: this rank.
    """

    def __init__(self, client: CallClient, statuses: Statuses, rank: int) -> None:
        self._client, self._statuses, self._rank = client, statuses, rank
        self.by_round: dict[GroupRound, FirstCollective] = {}
        # Not a method: the reference cycle would keep the groups until the next garbage collection.
        client.on_sleep = functools.partial(_pause, self.by_round)

    @property
    def of_made(self) -> list[FirstCollective]:
        """Those of the groups whose members have all arrived."""
        return [collective for each, collective in self.by_round.items() if each.is_made()]

    def add(self, groups: Mapping[GroupRound, Group]) -> None:
        """Add the first collectives of groups. An interrupt finds all of them, or none."""
        self.by_round.update({each: FirstCollective(group, each, self._statuses) for each, group in groups.items()})

    def start(self, made: GroupRound) -> None:
        """Start the first collective of a group whose members have all arrived.

        Gloo connects in a background thread. NCCL connects in this one, so it waits until all rounds are decided, and
        then uses the same order on all ranks.
        """
        collective = self.by_round[made]
        collective.met = time.monotonic()
        if connects_in_background(collective.group.process_group):
            collective.start()

    def finish(self) -> None:
        """Run every first collective to its end, and publish those that failed."""
        for collective in sorted(self.of_made, key=lambda each: each.group.name):
            collective.start()
        # The last member may have arrived at the deadline. This leaves time to detect ranks that were lost since.
        deadline = max(self._client.deadline, time.monotonic() + self._statuses.lost_after + 1.0)
        inspection = time.monotonic() + timing.TIMING.inspection
        for pause in pauses():
            running = _poll(self.by_round)
            if not running:
                break
            now = time.monotonic()
            if now >= inspection:
                inspection = now + timing.TIMING.inspection * self._client.thread.pace
                self._inspect(running)
            if now >= deadline:
                for collective in _poll(self.by_round):
                    collective.time_out(self._client.seconds)
            _check_groups(self.by_round)
            time.sleep(pause)
        self._publish_failures()

    def cancel(self, why: str) -> None:
        """Publish that this rank stopped before the collectives were done."""
        for collective in self.of_made:
            collective.fail(f"was cancelled because {why}")
        self._publish_failures()

    def _inspect(self, running: Sequence[FirstCollective]) -> None:
        """Read whether another member failed, and the statuses of the members."""
        members = {rank for each in running for rank in each.group.ranks[: timing.LIMITS.statuses + 1]}
        following = {rank for each in running for rank in each.following(timing.LIMITS.asking)}
        self._statuses.read(self._client.run, (members | following) - {self._rank})
        self._statuses.find_ended(self._client.run, following, all_of_them=True)
        broken = dict(zip(running, self._client.run(*(Read(each.round.broken_key) for each in running))))
        for collective in _poll(self.by_round):  # again, since a member whose collective is done may have left
            collective.inspect(broken[collective])

    def _publish_failures(self) -> None:
        for collective in self.of_made:
            collective.publish(self._client.run)
