"""The end of a mesh: why it creates no more groups, and whether its groups are destroyed."""

from __future__ import annotations

import threading


class MeshEnd:
    """How a mesh ended. The first end counts, of those in several threads.

    A mesh is open, until ``set``. Then it has ended, and creates no more groups. Whoever holds ``MeshGroups.lock`` next
    destroys its groups.

    Args:
        reason: for messages; they begin with the label of the mesh. None while the mesh is open.
        aborted: by ``abort``, or it was replaced: it may be shrunk.
        groups_destroyed: guarded by ``MeshGroups.lock``.
    """

    def __init__(self, reason: str | None = None, *, groups_destroyed: bool = False) -> None:
        self.reason, self.aborted = reason, False
        self.groups_destroyed = groups_destroyed
        self._lock = threading.Lock()

    def set(self, reason: str, *, aborted: bool) -> bool:
        """End the mesh. False if it has ended before."""
        with self._lock:
            if self.reason is not None:
                return False
            self.aborted, self.reason = aborted, reason
            return True
