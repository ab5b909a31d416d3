"""The first collectives of the groups that one call of ``connect`` connects: they run at once, and each may fail."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pgmesh._util.formatting import name_ranks
from pgmesh.connect.decisions import Decision
from pgmesh.connect.group_rounds import GroupRound, following
from pgmesh.connect.rounds import INSPECTION, pauses
from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError
from pgmesh.groups.backends import connects_in_background
from pgmesh.groups.default_world import device_of
from pgmesh.groups.group import Group
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.operations import CompareSet, Read
from pgmesh.liveness.statuses import Statuses

MOST_ASKED = 8
"""The number of members whose listeners a member asks. They have little room."""


class Progress(enum.Enum):
    """The state of a first collective on this rank.

    - *waiting*: this rank has not entered it.
    - *running*: torch has not ended it. Or it has raised an error, and a lost member, which is noticed later, may be
      the reason.
    - *failed*: it has its error.
    - *done*: its sum is right.
    """

    WAITING, RUNNING, FAILED, DONE = range(4)


class FirstCollective:
    """A group's first collective: an all-reduce of one number, which allocates memory and whose sum is checked.

    Args:
        group: the group.
        round: its round. A member that fails publishes that under its ``broken`` key.
        statuses: the last statuses of the other ranks.
    """

    def __init__(self, group: Group, round: GroupRound, statuses: Statuses) -> None:
        self.group, self.round, self._statuses = group, round, statuses
        self.state = Progress.WAITING
        self.error: PgmeshError | None = None  # if it failed
        self.ones: Any = None
        self._work: Any = None
        self._raised: Exception | None = None  # torch's error
        self._raised_at = 0.0  # on the clock of the statuses

    def start(self) -> None:
        """Enter the collective, unless this rank has done so."""
        if self.state is Progress.WAITING:
            process_group = self.group.process_group
            self.ones = torch.ones(1, device=device_of(process_group))
            self._work = dist.all_reduce(self.ones, group=process_group, async_op=True)
            self.state = Progress.RUNNING

    def is_running(self) -> bool:
        """True until it is known whether and why it failed."""
        return self.state is Progress.RUNNING

    def poll(self) -> None:
        """Check for the end of a running collective."""
        if not self.is_running() or self._raised is not None or not self._work.is_completed():
            return
        try:
            self._work.wait()
            total = int(self.ones.item())
        except Exception as error:
            self._raised, self._raised_at = error.with_traceback(None), self._statuses.now()
        else:
            size = len(self.group.ranks)
            if total == size:
                self.state = Progress.DONE
            else:
                wrong = f"{self.group.label} has {size} members, but the sum of one from each is {total}."
                self._set_error(MismatchError(wrong))

    def learn(self, broken: bytes | None) -> None:
        """Take the failure of another member, if there is one.

        Args:
            broken: what the store has under the ``broken`` key.
        """
        error = None if broken is None else Decision.unpack(broken).error()
        if error is not None:
            self._set_error(error)

    def inspect(self) -> None:
        """Set the error of a running collective.

        The reason is a lost member; or the error that torch has raised, so long ago that one would have been noticed.
        """
        lost = self._statuses.lost(self.group.ranks)
        if lost:
            reasons = "".join(f"\n  {why}" for why in lost.values())
            text = f"{self.group.label}: {name_ranks(lost)} arrived, and then failed in the first collective.{reasons}"
            self._set_error(MissingRanksError(text))
        elif self._raised and self._statuses.now() - self._raised_at >= self._statuses.lost_after + 1.0:
            self.fail(self.why_raised)

    @property
    def why_raised(self) -> str:
        """The first line of torch's error, as a reason; "" for none."""
        reason = next(iter(str(self._raised).splitlines()), type(self._raised).__name__)
        return f"failed: {reason}" if self._raised else ""

    def fail(self, reason: str) -> None:
        """Set the error, unless it has one or is done."""
        if self.is_running() or self.state is Progress.WAITING:
            members = name_ranks(self.group.ranks)
            error = MissingRanksError(f"{self.group.label}: its first collective {reason}. Its members are {members}.")
            error.__cause__ = self._raised
            self._set_error(error)

    def _set_error(self, error: PgmeshError) -> None:
        self.state, self.error = Progress.FAILED, error


class FirstCollectives:
    """The first collectives of one call, by round.

    Args:
        mesh: the mesh. If it ends, the call does.
        client: the store and the clock of the call.
        statuses: the last statuses of the other ranks.
    """

    def __init__(self, mesh: MeshGroups, client: CallClient, statuses: Statuses) -> None:
        self._mesh, self._client, self._statuses = mesh, client, statuses
        self.by_round: dict[GroupRound, FirstCollective] = {}

    @property
    def of_made(self) -> list[FirstCollective]:
        """The collectives of groups whose members have all arrived."""
        return [collective for each, collective in self.by_round.items() if each.is_made()]

    def add(self, groups: Mapping[GroupRound, Group]) -> None:
        """Add the first collectives of groups. An interrupt finds all of them, or none."""
        self.by_round.update({each: FirstCollective(group, each, self._statuses) for each, group in groups.items()})

    def poll(self) -> list[FirstCollective]:
        """Check for the end of those that run; return those that still run then.

        Raises:
            LifetimeError: the mesh or a group has ended, as by an abort or in another thread.
        """
        self._mesh.check()
        for collective in self.by_round.values():
            if not collective.group.is_made:
                raise LifetimeError(collective.group.unusable)
            collective.poll()
        return [collective for collective in self.by_round.values() if collective.is_running()]

    def start(self, made: GroupRound) -> None:
        """Start the first collective of a group whose members have all arrived.

        Gloo connects in a background thread. NCCL connects in this one, so it waits until all rounds are decided, and
        then uses the same order on all ranks.
        """
        collective = self.by_round[made]
        if connects_in_background(collective.group.process_group):
            collective.start()

    def finish(self) -> None:
        """Run every first collective to its end, and publish those that failed."""
        for collective in sorted(self.of_made, key=lambda each: each.group.name):
            collective.start()
        # The last member may have arrived at the deadline. This leaves time to detect ranks that were lost since.
        late = f"did not finish in time: the deadline was {self._client.seconds:g} s"
        deadline = max(self._client.seconds, self._client.now() + self._statuses.lost_after + 1.0)
        inspection = self._client.now() + INSPECTION
        for pause in pauses():
            running = self.poll()
            if not running:
                break
            now = self._client.now()
            if now >= inspection:
                inspection = now + INSPECTION * self._client.pace
                self._inspect(running)
            if now >= deadline:
                for collective in running:
                    collective.fail(collective.why_raised or late)
            self._client.sleep(pause)
        self._learn(self.of_made)
        self._publish_failures()

    def cancel(self, why: str) -> None:
        """Publish that this rank stopped before the collectives were done."""
        for collective in self.of_made:
            collective.fail(f"was cancelled because {why}")
        self._publish_failures()

    def _inspect(self, running: Sequence[FirstCollective]) -> None:
        """Read whether another member failed, and the statuses of the members after this one."""
        self._statuses.find_lost(
            self._client.run,
            {rank for each in running for rank in following(each.group.ranks, self._mesh.rank)[:MOST_ASKED]},
        )
        running = self.poll()  # again, since a member whose collective is done may have left
        self._learn(running)
        for collective in filter(FirstCollective.is_running, running):
            collective.inspect()

    def _learn(self, collectives: Sequence[FirstCollective]) -> None:
        """Read whether other members failed."""
        answers = self._client.run(*(Read(each.round.broken_key) for each in collectives))
        for collective, broken in zip(collectives, answers):
            collective.learn(broken)

    def _publish_failures(self) -> None:
        for collective in self.of_made:
            if collective.error is not None:
                failure = Decision.of(collective.error, str(collective.error))
                self._client.run(CompareSet(collective.round.broken_key, failure.pack()))
