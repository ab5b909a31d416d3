"""The groups that one call of ``connect`` connects. Meanwhile, no other thread of this process connects them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Union

from pgmesh.errors import WorldError
from pgmesh.groups.group import Group, State
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.groups.naming import Members
from pgmesh.rendezvous.client import CallClient
from pgmesh.rendezvous.operations import Read

if TYPE_CHECKING:
    from pgmesh.layout import Axis

GroupAxes = Union["Axis", "tuple[Axis, ...]"]
"""Axes as in the call: "tp", or ("dp", "tp")."""

Wanted = Mapping[GroupAxes, Members]
"""The members that a call of ``connect`` asks for, by axes."""

Table = dict[Group, "list[GroupAxes]"]
"""Groups, each with its axes."""


class GroupLocks(contextlib.ExitStack):
    """The locks (``Group.connecting``) that one call holds."""

    def take(self, group: Group, seconds: float) -> bool:
        """Keep other threads from connecting a group. False if one still does after that time."""
        self.callback(_release, group)  # first: an interrupt may end the next line with the lock taken
        return bool(group.connecting.acquire(timeout=max(0.0, seconds)))


def _release(group: Group) -> None:
    """Release the lock of a group, unless this thread has not got it."""
    with contextlib.suppress(RuntimeError):
        group.connecting.release()


def lock_groups(mesh: MeshGroups, wanted: Wanted, client: CallClient, locks: GroupLocks) -> Table:
    """Find or make the groups, lock those that pgmesh connects, and return those that are not connected.

    Raises:
        WorldError: another thread has not finished before the deadline.
    """
    while True:
        found: Table = {}
        for axes, members in wanted.items():
            group = mesh.find(members, {})
            if group.fingerprint is not None:
                found.setdefault(group, []).append(axes)
        for group in sorted(found, key=lambda each: each.path):
            if not locks.take(group, client.deadline - time.monotonic()):
                raise WorldError(f"{mesh.label}: another thread of this process still connects the same group.")
        # While this thread waited, another one may have connected, broken or released them, or adopted others.
        if all(group.is_made and group.fingerprint for group in found) and not discard_broken(mesh, found, client):
            return {group: axes for group, axes in found.items() if group.state is State.MADE}
        locks.close()


def discard_broken(mesh: MeshGroups, groups: Iterable[Group], client: CallClient) -> bool:
    """Discard groups whose first collective failed. True if there are any.

    Another member has set their ``broken`` key, or an earlier call of this process has: a second interrupt ended it.
    """
    connected = {each: each.round for each in groups if each.state is State.CONNECTED and each.round}
    answers = client.run(*(Read(each.broken_key) for each in connected.values())) if connected else []
    broken = [group for group, answer in zip(connected, answers) if answer is not None]
    broken += [group for group in groups if group.state is State.CONNECTING]
    mesh.discard(broken, "failed on another member; ask its mesh for it anew.")
    return bool(broken)
