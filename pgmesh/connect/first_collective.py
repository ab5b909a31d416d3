"""A group's first collective in ``connect``, and the reasons why it may fail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pgmesh._util.formatting import name_ranks
from pgmesh.errors import MismatchError, MissingRanksError, PgmeshError
from pgmesh.groups import background, failures
from pgmesh.groups.default_world import device_of
from pgmesh.groups.group import Group
from pgmesh.rendezvous.operations import CompareSet, Operation
from pgmesh.rendezvous.records import Decision
from pgmesh.rendezvous.statuses import Statuses


class FirstCollective:
    """A group's first collective: an all-reduce of one number, which allocates memory and whose sum is checked.

    Args:
        group: the group.
        broken_key: store key under which a member publishes that it failed.
        statuses: the last statuses of the other ranks.
    """

    def __init__(self, group: Group, broken_key: str, statuses: Statuses) -> None:
        self.group, self.broken_key, self._statuses = group, broken_key, statuses
        self._process_group: Any = None  # from the start on: another thread may end the group
        self.error: PgmeshError | None = None
        self.done = 0.0  # the time
        self.published = False  # the error is in the store
        self._work: Any = None
        self._failure: Exception | None = None  # raised by torch
        self._failed_at = 0.0
        self._dead = ""  # message about members whose listeners refused a connection then

    def start(self) -> None:
        """Enter the collective, unless this rank has done so."""
        if self._work is None:
            self._process_group = self.group.process_group
            self._ones = torch.ones(1, device=device_of(self._process_group))
            self._work = dist.all_reduce(self._ones, group=self._process_group, async_op=True)

    def is_running(self) -> bool:
        return self._work is not None and not self.done and self.error is None

    def following(self, number: int) -> Sequence[int]:
        """The members after this rank, in a ring. Each member asks the listeners of a few others."""
        place = self._process_group.rank() + 1
        return (*self.group.ranks[place:], *self.group.ranks[: place - 1])[:number]

    def keep_until_done(self) -> None:
        """Keep the group alive if its collective does not end although its connections were shut down."""
        if self._work is not None:
            background.keep_until_done(self._process_group, self.group.endpoints(), [self._work])

    def poll(self) -> None:
        """Check for the end of a running collective."""
        if self._failure is not None or not self._work.is_completed():
            return
        try:
            self._work.wait()
            total = int(self._ones.item())
        except PgmeshError as error:
            self.error = type(error)(str(error))
            error.__traceback__ = None  # its frames refer to this group, and the backend keeps the error
            return
        except Exception as error:
            self._failure, self._failed_at = error.with_traceback(None), self._statuses.now()
            self._dead = failures.describe_dead(self.group)
            return
        size = self._process_group.size()
        if total == size:
            self.done = time.monotonic()
        else:
            self.error = MismatchError(
                f"{self.group.label} has {size} members, but the sum of one from each is {total}."
            )

    def inspect(self, broken: bytes | None) -> None:
        """Set the error of a running collective if another member published a failure, is lost or refuses connections.

        Otherwise set torch's error, once so much time has passed that a lost member would have been noticed.

        Args:
            broken: what the store has under ``broken_key``.
        """
        lost = self._statuses.lost(self.group.ranks)
        if broken is not None:
            self.error, self.published = Decision.unpack(self.broken_key, broken).error(), True
        elif lost:
            details = "".join(f"\n  {text}" for text in lost.values())
            self.error = MissingRanksError(
                f"{self.group.label}: {name_ranks(lost)} arrived, and then failed in the first collective.{details}"
            )
        elif self._dead:
            self.error = MissingRanksError(f"{self._dead}\nThe group was in its first collective.")
        elif self._failure is not None and self._statuses.now() - self._failed_at >= self._statuses.lost_after + 1.0:
            self._fail_by_torch()

    def time_out(self, seconds: float) -> None:
        """Set the error of a collective that still runs some time after the deadline of the call.

        Args:
            seconds: the deadline.
        """
        if self._failure is None:
            self.fail(f"did not finish in time: the deadline was {seconds:g} s")
        else:
            self._fail_by_torch()

    def _fail_by_torch(self) -> None:
        self.fail(f"failed: {str(self._failure).splitlines()[0]}")

    def fail(self, reason: str) -> None:
        """Set the error, unless there is one."""
        if self.error is None:
            members = name_ranks(self.group.ranks)
            self.error = MissingRanksError(
                f"{self.group.label}: its first collective {reason}. Its members are {members}."
            )
            self.error.__cause__ = self._failure

    @property
    def has_news(self) -> bool:
        """True if the other members have to know of an error."""
        return self.error is not None and not self.published

    def failure(self) -> Operation:
        """The store operation that publishes the error."""
        assert self.error is not None
        return CompareSet(self.broken_key, Decision.of(self.error, str(self.error)).pack())
