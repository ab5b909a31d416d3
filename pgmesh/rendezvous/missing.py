"""The message about members that did not reach the first collective of a group, from the statuses that they publish."""

from __future__ import annotations

from collections.abc import Sequence

from pgmesh._util.formatting import format_ranks, name_ranks
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Read, Run
from pgmesh.rendezvous.statuses import RankStatus, status_key

ASKED_FOR = " (asked for with "
"""Separates the label of a group from the options that were asked for in the call."""

_IN_FIRST_COLLECTIVE = "in the first collective of "


def activity(subject: str) -> str:
    """What a rank publishes while it waits in the first collective of a group."""
    return f"{_IN_FIRST_COLLECTIVE}{subject}, waiting for its members"


def describe_missing(run: Run, subject: str, ranks: Sequence[int], missing: Sequence[int | str], seconds: str) -> str:
    """The message, with the last statuses of missing ranks and a hint if they wait in a similar group.

    Args:
        run: performs operations on the store.
        subject: the label of the group, with the options asked for.
        ranks: the members' ranks in the world.
        missing: the missing ones; text if it is not known which rank is missing.
        seconds: the timeout that passed.
    """
    known = [rank for rank in missing[: timing.LIMITS.named] if isinstance(rank, int)]
    texts = run(*(Read(status_key(rank)) for rank in known))
    found = {rank: status for rank, text in zip(known, texts) if (status := RankStatus.unpack(rank, text))}
    details = "".join(f"\n  last status of rank {rank}: {status}" for rank, status in found.items())
    details += _hint(subject, [status.activity for status in found.values()])
    return (
        f"{subject}: {name_ranks(missing)} did not reach the first collective in {seconds}. "
        f"The group's ranks are {format_ranks(ranks)}.{details}"
    )


def _hint(subject: str, activities: Sequence[str]) -> str:
    """A hint if missing ranks wait in a different group with the same label."""
    if any(activity(subject) in each for each in activities):  # a rank may have several, one for each thread
        return (
            "\nThese are different groups with the same label: their ranks are in another order, as in a view with "
            "other axes, or the ranks have created their meshes, or released their groups, a different number of "
            "times. Create, release and close the same ones on all ranks."
        )
    label = subject.partition(ASKED_FOR)[0]
    if any(f"{_IN_FIRST_COLLECTIVE}{label}" in each for each in activities):
        return (
            "\nThese are different groups: an option asked for in a call makes a different group. Use "
            "mesh.configure for options, with the same options on all ranks."
        )
    return ""
