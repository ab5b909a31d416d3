"""The process groups of a mesh: create, find, configure, adopt, release and close them.

Views and slices of a mesh share one ``MeshGroups``. Creating a group communicates nothing: its name is computed
(``naming.py``), and its backend connects at its first use, through the store of ``rendezvous/polling_store.py``.

It holds the groups (``group.py``) and the lock that guards them. Its other data has files of its own: the mesh's
numbers (``identity.py``), the configured options (``configuring.py``), and how it ended (``mesh_end.py``).
``world.py`` has all meshes of this process.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh._util.call_sites import call_site
from pgmesh._util.formatting import format_ranks
from pgmesh.errors import LifetimeError, PgmeshError, RankError
from pgmesh.groups import building, connections, ending, naming, teardown
from pgmesh.groups.aborts import publish_abort
from pgmesh.groups.backends import backends_of
from pgmesh.groups.configuring import ConfiguredOptions, OptionData, check_supported, format_verb
from pgmesh.groups.device_meshes import DeviceMeshes, Dimensions
from pgmesh.groups.group import Group, Left, State
from pgmesh.groups.identity import MeshIdentity
from pgmesh.groups.mesh_end import MeshEnd
from pgmesh.groups.naming import Members
from pgmesh.groups.world import World, current_world
from pgmesh.options import GroupOptions
from pgmesh.rendezvous.operations import Run

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from pgmesh.layout import Axis, Layout


S = TypeVar("S")

_Key = tuple[tuple[int, ...], str, str]
"""The ranks of a group, its tag, and the options asked for in the call."""

_NOTHING_ASKED = naming.encode_asked({})

_ABORT_SECONDS = 0.5
"""The longest wait of ``abort`` for the store. The store thread publishes the abort later if there is no answer."""


class MeshGroups:
    """The groups of a mesh, its views and its slices. They are found by their properties and closed together.

    A thread that needs several locks takes first ``Group.connecting``, then ``lock``, and then that of the world.
    ``lock`` is held for long only during torch's ``new_group``.

    Args:
        name: name of the mesh, the same on every rank; None for an unnamed mesh.
        layout: layout of the root mesh, the same on every rank.
        call: the call that created the root mesh, for messages. Default: derived from the layout.
        pickled_number: local number of an unpickled mesh where it was created. It is the same here unless taken.
        outside: rank of an unpickled mesh outside any world; the mesh is then closed.
        identity: identity of a mesh that replaces another one. Default: a new one, from name and layout.
    """

    def __init__(
        self,
        name: str | None,
        layout: Layout,
        call: str | None = None,
        *,
        pickled_number: int | None = None,
        outside: int | None = None,
        identity: MeshIdentity | None = None,
    ) -> None:
        self.layout, self.name = layout, name
        self.world = current_world() if outside is None else World(None, "", outside, 0, GroupOptions())
        self.rank = self.world.rank
        self.identity = identity or MeshIdentity(name, layout, call, self.rank, self.world.size, pickled_number)
        self.call_site = call_site()
        self.lock = threading.RLock()
        self.end = MeshEnd() if outside is None else MeshEnd("was unpickled outside any world.")
        self.creation_seconds = 0.0
        self._groups: dict[_Key, Group] = {}
        self._generations = naming.Generations()
        self._device_meshes = DeviceMeshes(self.rank, layout)
        self._meshes: weakref.WeakSet[Any] = weakref.WeakSet()  # meshes that hold references to groups
        self._dependents: weakref.WeakSet[MeshGroups] = weakref.WeakSet()  # internal meshes that are aborted with it
        self._states: dict[type, Any] = {}
        self.configured = ConfiguredOptions(self.rank, layout, self.world.options)
        if self.ended is None:
            self.world.add(self)

    @property
    def label(self) -> str:
        """Name of the mesh in messages."""
        return self.identity.label

    @property
    def ended(self) -> str | None:
        """The reason why the mesh creates no more groups; None while it is open."""
        return self.end.reason

    def is_fake(self) -> bool:
        """True in a fake world, which has no other processes."""
        return backends_of(self.world.options.backend).fake

    def state_of(self, kind: type[S]) -> S:
        """The state that a verb of other folders, such as ``shrink``, has for this mesh."""
        return self._states.setdefault(kind, kind())  # type: ignore[no-any-return]

    def track(self, mesh: Any) -> None:
        """Register a mesh whose references to groups are cleared when groups end."""
        with self.lock:
            self._meshes.add(mesh)

    def check(self) -> None:
        """Raise LifetimeError if the mesh is closed, the world has ended, or this process is a forked child."""
        if self.ended is not None:
            raise LifetimeError(
                f"{self.label} {self.ended.rstrip('.')}. Its layout can still be used, but it has no groups."
            )

    # -- finding and creating -----------------------------------------------------------------------------------

    def group(self, layout: Layout, axes: tuple[Axis, ...], tag: str, asked: Mapping[str, Any]) -> dist.ProcessGroup:
        """The group of this rank's block along axes of a layout."""
        return self.find(self.members(layout, axes, tag), asked).process_group  # type: ignore[no-any-return]

    def group_of(self, ranks: tuple[int, ...], tag: str, asked: Mapping[str, Any]) -> dist.ProcessGroup:
        """The group of any ranks of the mesh."""
        return self.find(Members(ranks, tag), asked).process_group  # type: ignore[no-any-return]

    def members(self, layout: Layout, axes: tuple[Axis, ...], tag: str = "") -> Members:
        """The ranks of this rank's block along axes of a layout."""
        return Members(layout.block_of(self.rank, *axes), tag, layout, axes)

    def made(self) -> list[Group]:
        """The groups that torch knows. It does not wait for the lock."""
        return [group for group in list(self._groups.values()) if group.is_made]

    def find(self, members: Members, asked: Mapping[str, Any]) -> Group:
        """The group of some members. It is made at its first use.

        Args:
            asked: the options of the call.
        """
        self.check()  # without the lock, which another thread may hold for long: of new_group, or of a slow call
        with self.lock:
            self.check()
            options, differing = self.configured.of_call(members, asked)
            group = self._group(members, differing)
            if not group.is_made:
                self._make(group, members, options, differing)
            self.configured.mark_returned(members)
            if group.created_by == "adopted" and not group.is_known():
                release = format_verb("release", members.axes)
                raise LifetimeError(
                    f"{group.label} was adopted at {group.call_site}, and torch has destroyed it since.\n\n"
                    f"  mesh.{release if members.layout else f'release(ranks={list(members.ranks)})'}   "
                    "# then adopt another, or let the mesh create one"
                )
            return group

    def find_unmade(self, members: Members) -> Group:
        """The group of some members, which this rank may have failed to make."""
        with self.lock:
            group = self._group(members, {})
            if not group.is_made:
                building.set_options(group, self.rank, self.configured.of_ranks(members), {})
            return group

    def _group(self, members: Members, differing: Mapping[str, Any]) -> Group:
        """The group of some members. It may be new.

        Args:
            differing: the options of the call that differ from those configured.
        """
        key = members.ranks, members.tag, naming.encode_asked(differing)
        group = self._groups.get(key)
        if group is None:
            path, releases = self._generations.path(*key), self._generations.releases(members.ranks)
            group = Group(members.label, self.label, members.ranks, path, releases)
            self._groups[key] = group
        return group

    def _make(self, group: Group, members: Members, options: GroupOptions, differing: Mapping[str, Any]) -> None:
        """Make a group. With Gloo and NCCL, this waits for no other member.

        Args:
            differing: the options of the call that differ from those configured.
        """
        start = time.monotonic()
        try:
            if differing and len(members.ranks) > 1:
                self.configured.warn_of_timeout(differing, members.axes, group.label)
            if options is not self.world.options:
                check_supported(options, group.label)
            self.world.keep(self)
            group.mesh_label = self.label  # the number of an unpickled mesh is known now
            building.set_options(group, self.rank, options, differing)
            description = options.description or f"{self.name or 'mesh'}[{members.describe(self.rank)}]"
            if backends_of(options.backend).by_members:
                building.make_by_members(group, self.identity, self.world, description)
            else:
                building.make_collectively(group, members.blocks(), description)
        except BaseException:
            if not self.made():
                self.world.stop_keeping(self)  # a mesh without groups does not block its successor
            raise
        if group.new_timeout is not None:
            building.set_timeout(group, group.new_timeout)
        self.creation_seconds += time.monotonic() - start
        self.check()  # another thread may have ended the mesh, which did not wait for this one

    # -- options ------------------------------------------------------------------------------------------------

    def configure(self, layout: Layout, axes: tuple[Axis, ...], tag: str, options: Mapping[str, Any]) -> None:
        """Set options for the group of this rank's block, before it is created."""
        self.check()
        with self.lock:
            self.configured.configure(layout, axes, tag, options, self._created, call_site())

    def _created(self, members: Members) -> Group | None:
        """The group of some members that has the configured options, if it was created; of one rank, any group."""
        for (ranks, tag, asked), group in self._groups.items():
            if group.is_made and (ranks, tag) == members[:2] and (asked == _NOTHING_ASKED or len(ranks) == 1):
                return group
        return None

    def set_timeout(self, timeout: timedelta, chosen: Callable[[tuple[int, ...]], bool]) -> int:
        """Change the timeout of the existing groups whose ranks are chosen; return their number."""
        self.check()
        with self.lock:
            found = [group for group in self.made() if chosen(group.ranks)]
            for group in found:
                if group.is_known():  # torch may have destroyed an adopted group
                    building.set_timeout(group, timeout)
        return len(found)

    # -- torch's DeviceMesh, and adopted groups ------------------------------------------------------------------

    def device_mesh(self, whole: Layout, layout: Layout, dimensions: Dimensions) -> DeviceMesh:
        """A DeviceMesh of groups along axes of a layout.

        Args:
            whole: a layout with these axes, whose DeviceMesh may be sliced.
        """
        self.check()
        with self.lock:
            return self._device_meshes.find(
                whole, layout, dimensions, lambda layout, axes: self.group(layout, axes, "", {})
            )

    def adopt_device_mesh(self, layout: Layout, device_mesh: DeviceMesh) -> None:
        """Use the DeviceMesh whose groups were adopted."""
        with self.lock:
            self._device_meshes.adopt(layout, device_mesh)

    def adopt(self, layout: Layout, axes: tuple[Axis, ...], process_group: dist.ProcessGroup) -> None:
        """Use an existing group for these axes. pgmesh never destroys it."""
        self.check()
        label = f"group {', '.join(map(str, axes))} of {self.label}"
        if not (isinstance(process_group, dist.ProcessGroup) and torch_private.is_known(process_group)):
            raise RankError(f"{label}: only a process group that torch knows can be adopted, not {process_group!r}.")
        block, members = layout.block_of(self.rank, *axes), tuple(dist.get_process_group_ranks(process_group))
        if members != block:
            raise RankError(f"{label} has ranks {format_ranks(block)}; the group to adopt has {format_ranks(members)}.")
        with self.lock:
            self.check()
            asked = self.members(layout, axes)
            self.configured.check_adopted(asked, label)
            group = self._group(asked, {})
            if not group.is_made:
                self.world.keep(self)
                group.adopt(process_group, call_site(), self.world.options)
            elif not group.holds(process_group):
                how = "adopted" if group.created_by == "adopted" else "created"
                raise LifetimeError(
                    f"{label} was already {how} at {group.call_site}, and may be in use.\n\n"
                    f"  mesh.{format_verb('release', axes)}   # release it first, then adopt"
                )
            self.configured.mark_returned(asked)

    # -- ending -------------------------------------------------------------------------------------------------

    def release(self, ranks: tuple[int, ...]) -> None:
        """Destroy the groups of these ranks. The next call creates new ones under new names."""
        self.check()
        with self.lock:
            # First the table: if an interrupt ends the rest, the next call still creates new groups.
            released = [self._groups.pop(key) for key in list(self._groups) if key[0] == ranks]
            self._generations.release(ranks)
            if len(ranks) == 1:
                self.configured.forget_returned()
            left = self._destroy(released, f"was released at {call_site()}; ask its mesh for it anew.")
        self.world.clean(left)

    def discard(self, groups: Iterable[Group], reason: str) -> None:
        """Destroy the process groups of groups whose first collective failed. The next use makes them again."""
        left = Left()
        with self.lock:
            broken = [group for group in groups if group.state is not State.ENDED]  # by another thread
            if not broken:
                return
            for group in broken:
                left.add(group.break_(reason))
            self._clear_references()
            teardown.destroy(broken, abort=True)
        self.world.clean(left)

    def close(self) -> None:
        """Destroy all groups. The mesh creates no more."""
        self.end.end(self, f"was closed at {call_site()}.", lock_seconds=-1)

    def close_because(self, reason: str) -> None:
        """The same at the end of the world or of the process."""
        self.end.end(self, reason)

    def abort(self, why: str, where: str = "") -> None:
        """Destroy all groups without waiting for their collectives, and publish why.

        Blocked collectives raise, here and on the other members.

        Args:
            why: the reason, for messages.
            where: the line of code that called; "" for a background thread.
        """
        if self.ended is not None:
            return
        mine = f"{self.label} was aborted by rank {self.rank}{f' at {where}' if where else ''}: {why}"

        def publish(run: Run) -> str:
            self.world.registration.register(self.identity, run, rejoin=True)
            return publish_abort(run, self.identity.refusal_key, mine)

        first = None
        with contextlib.suppress(PgmeshError):
            # First, so that a member whose connection ends finds the reason. The first rank to publish one wins.
            first = self.world.heartbeat_thread().insist(publish, _ABORT_SECONDS)
        self.end_aborted(first or mine)

    def add_dependent(self, internal: MeshGroups) -> None:
        """Abort an internal mesh when this one is aborted."""
        self._dependents.add(internal)

    def end_aborted(self, text: str) -> None:
        """Destroy all groups of a mesh that was aborted or replaced.

        Args:
            text: the error message of the mesh.
        """
        self.end.end(self, text.removeprefix(f"{self.label} "), aborted=True)
        for internal in _items(self._dependents):
            internal.abort(text)

    def replacement(self, identity: MeshIdentity, options: OptionData) -> MeshGroups:
        """The mesh that replaces this one.

        Args:
            options: what ``configured.of_root.as_data`` returned on the rank that decided.
        """
        mesh = MeshGroups(self.name, identity.layout, identity=identity)
        mesh.configured.restore(options, call_site())
        return mesh

    def forget_store(self) -> None:
        """Delete what an aborted mesh has left in the store. It was replaced, so no rank reads that any more."""
        rounds = [each for group in list(self._groups.values()) for each in group.take_round()]
        keys = [key for each in rounds for key in each.store_keys()]
        self.world.clean(Left([*keys, *self.identity.store_keys()]))

    def destroy_groups(self) -> Left:
        """Destroy all groups of a mesh that has ended, under the lock; return what they leave in the store."""
        left = self._destroy(self._groups.values(), str(self.ended), abort=self.end.aborted)
        if not self.end.aborted:  # otherwise ``forget_store`` deletes the rest, by these groups
            left.keys += self.identity.store_keys()
            self._groups.clear()
        self.world.stop_keeping(self)
        return left

    def wake_collectives(self) -> None:
        """End the collectives of all groups, which stay until the lock is free."""
        self._clear_references()
        teardown.wake(self.made())
        connections.shut_down([group.endpoints() for group in self.made()])

    def _destroy(self, groups: Iterable[Group], reason: str, *, abort: bool = False) -> Left:
        """End some groups, and return what they leave in the store. The caller drops them.

        Args:
            abort: do not wait for collectives. The groups keep their rounds, for ``forget_store``.
        """
        self._clear_references()
        left = Left()
        for group in groups:
            left.add(group.end(reason, keeps_round=abort))
        teardown.destroy(groups, abort=abort)
        return left

    def forget(self, process_group: Any) -> None:
        """Drop a group that torch destroys. The next group gets another name."""
        found = [item for item in list(self._groups.items()) if item[1].holds(process_group)]
        for key, group in found:  # none without the lock, which another thread may hold while it creates a group
            self._forget(key, group)

    def _forget(self, key: _Key, group: Group) -> None:
        with self.lock:
            self._clear_references()
            if not group.is_made or group.created_by == "adopted":  # of an adopted one, the next call raises an error
                return
            if group.created_by == "pgmesh":  # torch names the groups of new_group
                self._generations.destroy(group.path)
            left = group.end("was destroyed; ask its mesh for it anew.")
            teardown.mark_destroyed(group)
            del self._groups[key]
        self.world.clean(left)

    def _clear_references(self) -> None:
        """Clear the references to groups. It may have no lock, so it repeats while another thread adds a mesh."""
        self._device_meshes.clear()
        for mesh in _items(self._meshes):
            mesh._clear_groups()

    def end_in_child(self, reason: str) -> None:
        """Invalidate all groups in a forked child. They belong to the parent."""
        self.lock = threading.RLock()  # a thread of the parent may hold the old one, and that of the end
        self.end = MeshEnd(reason)
        self._clear_references()
        for group in self.made():
            group.end(reason)
            torch_private.destroyed[group.process_group] = group.unusable
            torch_private.forget_group(group.process_group)
        self._groups.clear()


def _items(meshes: weakref.WeakSet[Any]) -> list[Any]:
    """The members of a set to which another thread may add one meanwhile."""
    while True:
        with contextlib.suppress(RuntimeError):
            return list(meshes)


ending.install()
