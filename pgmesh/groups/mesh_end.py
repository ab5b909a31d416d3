"""The end of a mesh: it creates no more groups, and then its groups are destroyed.

    ended by                              waits for its lock   collectives of NCCL   its keys in the store
    ``close``                             without limit        are not aborted       are deleted
    the end of the world                  for a second         are not aborted       end with the world
    the end of the process                for a second         are aborted           end with the world
    ``abort``, here or on another rank    for a second         are aborted           stay until it was replaced
    ``shrink`` on a rank that stood by    for a second         are aborted           stay until it was replaced
    ``os.fork``, in the child             not at all           are the parent's      are the parent's

Collectives of Gloo end with an error in all cases but the last, since their connections do.

Another thread holds that lock for long only during torch's ``new_group``. If it is not free after the second, a
background thread waits for it, perhaps for ever, and destroys the groups then.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

from pgmesh.groups import background
from pgmesh.groups.group import Left


class EndingMesh(Protocol):
    """What the end of a mesh needs to know of it.

    Args:
        lock: guards its groups.
        world: its world.
    """

    lock: Any
    world: Any

    def destroy_groups(self) -> Left:
        """Destroy all groups, under the lock; return what they leave in the store."""

    def wake_collectives(self) -> None:
        """End the collectives of all groups, which stay until the lock is free."""


class MeshEnd:
    """How a mesh ended. Of the ends in several threads, the first counts.

    Args:
        reason: for messages; they begin with the label of the mesh. None while the mesh is open.
        aborted: by ``abort``, or it was replaced: it may be shrunk.
        groups_destroyed: guarded by the lock of the mesh.
    """

    def __init__(self, reason: str | None = None) -> None:
        self.reason, self.aborted = reason, False
        self.groups_destroyed = reason is not None
        self._lock = threading.Lock()

    def end(self, mesh: EndingMesh, reason: str, *, aborted: bool = False, lock_seconds: float = 1.0) -> None:
        """End the mesh and destroy all groups, unless that was done before.

        Args:
            lock_seconds: timeout for the lock of the mesh; -1 for none.
        """
        if not mesh.lock.acquire(timeout=lock_seconds):
            self._end_later(mesh, reason, aborted)
            return
        left = Left()
        try:
            self._set(reason, aborted)
            if not self.groups_destroyed:
                left = mesh.destroy_groups()
                self.groups_destroyed = True  # only now: after an interrupt, the next end destroys the others
        finally:
            mesh.lock.release()
        mesh.world.clean(left)

    def _end_later(self, mesh: EndingMesh, reason: str, aborted: bool) -> None:
        """End the mesh while another thread holds its lock."""
        if not self._set(reason, aborted):
            return  # whoever has ended it destroys the groups
        if aborted:
            mesh.wake_collectives()
        if not background.exiting.is_set():  # nothing waits for threads of a process that exits
            background.in_background(functools.partial(self.end, mesh, reason, lock_seconds=-1))

    def _set(self, reason: str, aborted: bool) -> bool:
        """Let the mesh create no more groups. False if it has ended before."""
        with self._lock:
            if self.reason is not None:
                return False
            self.aborted, self.reason = aborted, reason
            return True
