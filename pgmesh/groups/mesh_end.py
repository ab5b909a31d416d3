"""The end of a mesh: it creates no more groups, and then its groups are destroyed.

    ended by                              waits for its lock   collectives of NCCL   its keys in the store
    ``close``                             without limit        are not aborted       are deleted
    the end of the world                  for a second         are not aborted       end with the world
    the end of the process                for a second         are aborted           end with the world
    ``abort``, here or on another rank    for a second         are aborted           stay until it was replaced
    ``shrink`` on a rank that stood by    for a second         are aborted           stay until it was replaced
    ``os.fork``, in the child             not at all           are the parent's      are the parent's

Collectives of Gloo end with an error in all cases but the last, since their connections do.

Another thread holds that lock for long during torch's ``new_group``, or while it destroys groups: NCCL may wait up to
its timeout. If it is not free after the second, a background thread waits for it, perhaps for ever, and destroys the
groups then.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any

from pgmesh import torch_private
from pgmesh._util.call_sites import call_site
from pgmesh.errors import LifetimeError, PgmeshError
from pgmesh.groups import background, teardown
from pgmesh.groups.aborts import publish_abort
from pgmesh.groups.device_meshes import DeviceMeshes
from pgmesh.groups.group import Group, Left
from pgmesh.groups.identity import MeshIdentity
from pgmesh.groups.world import World
from pgmesh.rendezvous.operations import Run

GroupKey = tuple[tuple[int, ...], str, str]
"""The ranks of a group, its tag, and the options asked for in the call."""

_ABORT_SECONDS = 0.5
"""The longest wait of ``abort`` for the store. The store thread publishes the abort later if there is no answer."""


class EndableMesh:
    """A mesh that can end, with its groups. If several threads end it, the first one counts.

    ``MeshGroups`` makes the groups. It reads and changes ``_groups`` and ``_device_meshes`` under ``lock``, and sets no
    other field of this class.

    Args:
        world: its world.
        identity: its name and its numbers.
        ended: why it has ended, for messages, which begin with its label; None for an open mesh.
    """

    def __init__(self, world: World, identity: MeshIdentity, ended: str | None) -> None:
        self.world, self.identity, self.ended = world, identity, ended
        self.aborted = False  # it has ended by ``abort``, or was replaced: it may be shrunk
        self._first_end = threading.Lock()  # guards ``ended`` and ``aborted``
        self.lock = threading.RLock()  # guards the rest
        self._groups: dict[GroupKey, Group] = {}
        self._groups_destroyed = False  # after its end
        self._device_meshes = DeviceMeshes(world.rank, identity.layout)
        self._meshes: weakref.WeakSet[Any] = weakref.WeakSet()  # meshes that hold references to groups
        self._dependents: weakref.WeakSet[EndableMesh] = weakref.WeakSet()  # internal meshes that are aborted with it

    @property
    def label(self) -> str:
        """Name of the mesh in messages."""
        return self.identity.label

    def check(self) -> None:
        """Raise LifetimeError if the mesh is closed, the world has ended, or this process is a forked child."""
        if self.ended is not None:
            raise LifetimeError(
                f"{self.label} {self.ended.rstrip('.')}. Its layout can still be used, but it has no groups."
            )

    def made(self) -> list[Group]:
        """The groups that torch knows. It does not wait for the lock."""
        return [group for group in list(self._groups.values()) if group.is_made]

    def track(self, mesh: Any) -> None:
        """Register a mesh whose references to groups are cleared when groups end."""
        with self.lock:
            self._meshes.add(mesh)

    # -- the whole mesh -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Destroy all groups. The mesh creates no more."""
        self._end(f"was closed at {call_site()}.", lock_seconds=-1)

    def close_because(self, reason: str) -> None:
        """The same at the end of the world or of the process."""
        self._end(reason)

    def abort(self, why: str, where: str = "") -> None:
        """Destroy all groups without waiting for their collectives, and publish why.

        Blocked collectives raise, here and on the other members.

        Args:
            why: the reason, for messages.
            where: the line of code that called; "" for a background thread.
        """
        if self.ended is not None:
            return
        mine = f"{self.label} was aborted by rank {self.world.rank}{f' at {where}' if where else ''}: {why}"

        def publish(run: Run) -> str:
            self.world.registration.register(self.identity, run, rejoin=True)
            return publish_abort(run, self.identity.refusal_key, mine)

        first = None
        with contextlib.suppress(PgmeshError):
            # First, so that a member whose connection ends finds the reason. The first rank to publish one wins.
            first = self.world.heartbeat_thread().insist(publish, _ABORT_SECONDS)
        self.end_aborted(first or mine)

    def add_dependent(self, internal: EndableMesh) -> None:
        """Abort an internal mesh when this one is aborted."""
        self._dependents.add(internal)

    def end_aborted(self, text: str) -> None:
        """Destroy all groups of a mesh that was aborted or replaced.

        Args:
            text: the error message of the mesh.
        """
        self._end(text.removeprefix(f"{self.label} "), aborted=True)
        for internal in _items(self._dependents):
            internal.abort(text)

    def forget_store(self) -> None:
        """Delete what an aborted mesh has left in the store. It was replaced, so no rank reads that any more."""
        rounds = [each for group in list(self._groups.values()) for each in group.take_round()]
        keys = [key for each in rounds for key in each.store_keys()]
        self.world.clean(Left([*keys, *self.identity.store_keys()]))

    def end_in_child(self, reason: str) -> None:
        """Invalidate all groups in a forked child. They belong to the parent."""
        self.lock, self._first_end = threading.RLock(), threading.Lock()  # the parent's threads may hold the old ones
        self.ended, self.aborted, self._groups_destroyed = reason, False, True
        self._clear_references()
        for group in self.made():
            group.end(reason)
            torch_private.destroyed[group.process_group] = group.unusable
            torch_private.forget_group(group.process_group)
        self._groups.clear()

    def _end(self, reason: str, *, aborted: bool = False, lock_seconds: float = 1.0) -> None:
        """End the mesh and destroy all groups, unless that was done before.

        Args:
            lock_seconds: timeout for ``lock``; -1 for none.
        """
        is_first = self._set_ended(reason, aborted)
        if self._destroy_all(lock_seconds) or not is_first:
            return
        if aborted:  # end the collectives at once
            self._clear_references()
            teardown.cut(self.made())
        if not background.exiting.is_set():  # nothing waits for threads of a process that exits
            background.in_background(self._destroy_all, -1)

    def _set_ended(self, reason: str, aborted: bool) -> bool:
        """Let the mesh create no more groups. False if it has ended before."""
        with self._first_end:
            if self.ended is not None:
                return False
            self.aborted, self.ended = aborted, reason
            return True

    def _destroy_all(self, lock_seconds: float) -> bool:
        """Destroy all groups of a mesh that has ended, unless that was done before. False if its lock is not free."""
        if not self.lock.acquire(timeout=lock_seconds):
            return False
        try:
            if self._groups_destroyed:
                return True
            reason, aborted = str(self.ended), self.aborted
            groups = [*self._groups.values()]
            left = self._destroy(groups, lambda group: group.end(reason, keeps_round=aborted), abort=aborted)
            if not aborted:  # otherwise ``forget_store`` deletes the rest, by these groups
                left.keys += self.identity.store_keys()
                self._groups.clear()
            self.world.stop_keeping(self)
            self._groups_destroyed = True  # only now: after an interrupt, the next end destroys the others
        finally:
            self.lock.release()
        self.world.clean(left)
        return True

    # -- some groups --------------------------------------------------------------------------------------------

    def _destroy(self, groups: Collection[Group], end: Callable[[Group], Left], *, abort: bool) -> Left:
        """Destroy the process groups of some groups, under the lock.

        Args:
            end: changes the state of a group, and returns what it leaves.
            abort: do not wait for collectives.

        Returns:
            What they leave in the store. The caller cleans it without the lock.
        """
        self._clear_references()
        left = Left()
        for group in groups:
            left.add(end(group))
        teardown.destroy(groups, abort=abort)
        return left

    def _clear_references(self) -> None:
        """Clear the references to groups. It may have no lock, so it repeats while another thread adds a mesh."""
        self._device_meshes.clear()
        for mesh in _items(self._meshes):
            mesh._clear_groups()


def _items(meshes: weakref.WeakSet[Any]) -> list[Any]:
    """The members of a set to which another thread may add one meanwhile."""
    while True:
        with contextlib.suppress(RuntimeError):
            return list(meshes)
