"""The members of a group that a rank watches while it connects, and the message about the missing ones.

A member watches those that have not arrived, and the next one after it that has. So each member that waits is watched
by another, and the first of several lost ones in a row is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from pgmesh._util.formatting import name_ranks
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Run
from pgmesh.rendezvous.statuses import Statuses


class Arriving(Protocol):
    """A group whose members arrive: a ``GroupRound``."""

    @property
    def label(self) -> str: ...
    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def missing(self) -> Sequence[int]: ...


class WatchedMembers(NamedTuple):
    """The members of groups that one rank watches.

    Args:
        rank: this rank.
        call_site: the line of code that connects.
        statuses: the statuses of the other ranks.
    """

    rank: int
    call_site: str
    statuses: Statuses

    def of(self, each: Arriving) -> list[int]:
        """The members of a group that this rank watches: the next one that has arrived, and the missing ones."""
        place, missing = each.ranks.index(self.rank), {*each.missing}
        others = (*each.ranks[place + 1 :], *each.ranks[:place])
        return [*[rank for rank in others if missing and rank not in missing][:1], *each.missing]

    def to_ask(self, groups: Iterable[Arriving]) -> list[int]:
        """The ranks whose listeners this rank asks. The first members that have arrived ask for all others."""
        ranks: list[int] = []
        for each in groups:
            before = {*each.ranks[: each.ranks.index(self.rank)]} - {*each.missing}
            ranks += self.of(each) if len(before) < timing.LIMITS.asking else ()
        return [*dict.fromkeys(ranks)][: timing.LIMITS.statuses]

    def read_statuses(self, run: Run, groups: Iterable[Arriving]) -> None:
        """Read the statuses of the ranks that this one watches.

        Args:
            run: performs operations on the store.
        """
        watched = dict.fromkeys(rank for each in groups for rank in self.of(each))
        self.statuses.read(run, [*watched][: timing.LIMITS.statuses])

    def lost(self, each: Arriving) -> dict[int, str]:
        """The members that are lost, each with the reason."""
        return self.statuses.lost(self.of(each))

    def describe_missing(self, each: Arriving, when: str = "") -> str:
        """Message about the missing ranks and the last status of each."""
        lost = self.lost(each)
        named = [*dict.fromkeys((*lost, *each.missing))][: timing.LIMITS.named]
        lines = [f"\n  {self.statuses.describe(rank)}" for rank in named]
        arrived = [f", and rank {rank} was lost after it had arrived" for rank in lost if rank not in each.missing]
        missing = f"{each.label}: {name_ranks(each.missing)} did not arrive{when}{''.join(arrived)}."
        return f"{missing}{''.join(lines)}\n\nRank {self.rank} waited at {self.call_site}."
