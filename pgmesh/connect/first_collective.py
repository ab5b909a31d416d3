"""A group's first collective in ``connect``, and the reasons why it may fail."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pgmesh._util.formatting import name_ranks
from pgmesh.errors import MismatchError, MissingRanksError, PgmeshError
from pgmesh.groups import failures, kept_groups
from pgmesh.groups.connections import endpoints_of
from pgmesh.groups.default_world import device_of
from pgmesh.groups.group import Group
from pgmesh.rendezvous.gloo_store import GlooStore
from pgmesh.rendezvous.group_rounds import GroupRound
from pgmesh.rendezvous.operations import CompareSet, Run
from pgmesh.rendezvous.records import Decision
from pgmesh.rendezvous.statuses import Statuses


class Progress(enum.Enum):
    """The state of a first collective on this rank.

    - *waiting*: this rank has not entered it.
    - *running*: torch has not ended it. Or it has raised an error, and a lost member, which is noticed later, may be
      the reason.
    - *failed*: it has its error.
    - *published*: the other members know of the error.
    - *done*: its sum is right.
    """

    WAITING, RUNNING, FAILED, PUBLISHED, DONE = range(5)


@dataclass(frozen=True)
class _Raised:
    """An error that torch has raised, and the evidence at that time.

    Args:
        error: torch's error.
        time: the time, on the clock of the statuses.
        dead: message about the members whose listeners refused a connection then; "" for none.
    """

    error: Exception
    time: float
    dead: str

    @property
    def reason(self) -> str:
        """The first line of torch's error, which may have none."""
        return next(iter(str(self.error).splitlines()), type(self.error).__name__)


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
        self.met = self.done = 0.0  # the times when all members had arrived, and when it was done
        # From the start on, since another thread may end the group or make it again:
        self._process_group: Any = None
        self._gloo: GlooStore | None = None
        self._work: Any = None
        self._raised: _Raised | None = None

    def start(self) -> None:
        """Enter the collective, unless this rank has done so."""
        if self.state is Progress.WAITING:
            self._process_group, self._gloo = self.group.process_group, self.group.gloo
            self._ones = torch.ones(1, device=device_of(self._process_group))
            self._work = dist.all_reduce(self._ones, group=self._process_group, async_op=True)
            self.state = Progress.RUNNING

    def is_running(self) -> bool:
        """True until it is known whether and why it failed."""
        return self.state is Progress.RUNNING

    def following(self, number: int) -> Sequence[int]:
        """The members after this rank, in a ring. Each member asks the listeners of a few others."""
        place = self._process_group.rank() + 1
        return (*self.group.ranks[place:], *self.group.ranks[: place - 1])[:number]

    def keep_until_done(self) -> None:
        """Keep the group alive if its collective does not end although its connections were shut down."""
        if self._work is not None:
            kept_groups.keep_until_done(self._process_group, endpoints_of(self._gloo), [self._work])

    def poll(self) -> None:
        """Check for the end of a running collective."""
        if not self.is_running() or self._raised is not None or not self._work.is_completed():
            return
        try:
            self._work.wait()
            total = int(self._ones.item())
        except PgmeshError as error:
            error.__traceback__ = None  # its frames refer to this group, and the backend keeps the error
            self._set_error(type(error)(str(error)))
        except Exception as error:
            now = self._statuses.now()
            self._raised = _Raised(error.with_traceback(None), now, failures.describe_dead(self.group))
        else:
            self._check(total)

    def _check(self, total: int) -> None:
        """Compare the sum with the number of members."""
        size = self._process_group.size()
        if total == size:
            self.state, self.done = Progress.DONE, time.monotonic()
        else:
            wrong = f"{self.group.label} has {size} members, but the sum of one from each is {total}."
            self._set_error(MismatchError(wrong))

    def inspect(self, broken: bytes | None) -> None:
        """Set the error of a running collective. The first of these counts:

        1. another member has published a failure;
        2. a member is lost;
        3. torch has raised an error, and a member's listener refused connections then;
        4. torch has raised an error so long ago that a lost member would have been noticed.

        Args:
            broken: what the store has under the ``broken`` key.
        """
        published = None if broken is None else Decision.unpack(self.round.broken_key, broken).error()
        lost, raised = self._statuses.lost(self.group.ranks), self._raised
        if published is not None:
            self._set_error(published)
            self.state = Progress.PUBLISHED
        elif lost:
            reasons = "".join(f"\n  {why}" for why in lost.values())
            text = f"{self.group.label}: {name_ranks(lost)} arrived, and then failed in the first collective.{reasons}"
            self._set_error(MissingRanksError(text))
        elif raised is not None and raised.dead:
            self._set_error(MissingRanksError(f"{raised.dead}\nThe group was in its first collective."))
        elif raised is not None and self._statuses.now() - raised.time >= self._statuses.lost_after + 1.0:
            self.fail(f"failed: {raised.reason}")

    def time_out(self, seconds: float) -> None:
        """Set the error of a collective that still runs some time after the deadline of the call.

        Args:
            seconds: the deadline.
        """
        late = f"did not finish in time: the deadline was {seconds:g} s"
        self.fail(late if self._raised is None else f"failed: {self._raised.reason}")

    def fail(self, reason: str) -> None:
        """Set the error, unless it has one or is done."""
        if self.is_running() or self.state is Progress.WAITING:
            members = name_ranks(self.group.ranks)
            error = MissingRanksError(f"{self.group.label}: its first collective {reason}. Its members are {members}.")
            error.__cause__ = None if self._raised is None else self._raised.error
            self._set_error(error)

    def _set_error(self, error: PgmeshError) -> None:
        self.state, self.error = Progress.FAILED, error

    def publish(self, run: Run) -> None:
        """Publish the error, if the other members have to know of it.

        Args:
            run: performs operations on the store.
        """
        if self.state is Progress.FAILED and self.error is not None:
            run(CompareSet(self.round.broken_key, Decision.of(self.error, str(self.error)).pack()))
            self.state = Progress.PUBLISHED
