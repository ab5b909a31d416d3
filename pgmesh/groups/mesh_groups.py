"""The process groups of a mesh: create, find, configure, adopt and release them.

Views and slices of a mesh share one ``MeshGroups``. Creating a group communicates nothing: its name is computed
(``naming.py``), and its backend connects at its first use, through the store of ``rendezvous/polling_store.py``.

The table of the groups (``group.py``), the lock that guards it and the end of the whole mesh are in ``mesh_end.py``.
Other data has files of its own: the mesh's numbers (``identity.py``) and the configured options (``configuring.py``).
``world.py`` has all meshes of this process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from pgmesh._util.call_sites import call_site
from pgmesh.errors import OptionsError
from pgmesh.groups import adoption, building, ending, naming, teardown
from pgmesh.groups.backends import backends_of
from pgmesh.groups.configuring import ConfiguredOptions, OptionData, axes_of_root, check_supported
from pgmesh.groups.device_meshes import Dimensions
from pgmesh.groups.group import Group, State
from pgmesh.groups.identity import MeshIdentity
from pgmesh.groups.mesh_end import EndableMesh, GroupKey
from pgmesh.groups.naming import Members
from pgmesh.groups.world import World, current_world
from pgmesh.options import GroupOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from pgmesh.layout import Axis, Layout


S = TypeVar("S")

_NOTHING_ASKED = naming.encode_asked({})


class MeshGroups(EndableMesh):
    """The groups of a mesh, its views and its slices. They are found by their properties and closed together.

        method                               takes ``lock``        and then waits for
        group, find, configure, adopt, ...   yes                   nothing; torch's ``new_group``, if it is needed
        track, for a new view or slice       yes                   nothing
        release, discard, close              yes                   the end of the groups; then, without the lock, the
                                                                   store: 2 s for each round
        forget, when torch destroys a group  if it has the group   the same
        close_because, end_aborted           if free within 1 s    the same; if it is not free, a thread does it
        abort                                if free within 1 s    before that, 0.5 s for the store; then the same
        check, made, end_in_child            no                    nothing

    So other threads wait for the lock during ``new_group``, and while groups end: their connections for up to 0.2 s,
    and NCCL up to its timeout. A thread that needs several locks takes first ``Group.connecting``, then ``lock``, and
    then that of the world.

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
        world = current_world() if outside is None else World(None, "", outside, 0, GroupOptions())
        super().__init__(
            world,
            identity or MeshIdentity(name, layout, call, world.rank, world.size, pickled_number),
            ended=None if outside is None else "was unpickled outside any world, or in a forked process.",
        )
        self.layout, self.name, self.rank, self.call_site = layout, name, world.rank, call_site()
        self.creation_seconds = 0.0
        self._generations = naming.Generations()
        self._states: dict[type, Any] = {}
        self.configured = ConfiguredOptions(self.rank, world.options)
        self._options_by_axes: dict[tuple[tuple[Axis, ...], str], GroupOptions] = {}  # and by tag
        if self.ended is None:
            world.add(self)

    def is_fake(self) -> bool:
        """True in a fake world, which has no other processes."""
        return backends_of(self.world.options.backend).fake

    def state_of(self, kind: type[S]) -> S:
        """The state that a verb of other folders, such as ``shrink``, has for this mesh."""
        return self._states.setdefault(kind, kind())  # type: ignore[no-any-return]

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

    def find(self, members: Members, asked: Mapping[str, Any]) -> Group:
        """The group of some members. It is made at its first use.

        Args:
            asked: the options of the call.
        """
        self.check()  # before waiting for the lock
        with self.lock:
            self.check()
            options, differing = self.configured.of_call(members, asked)
            group = self._group(members, differing)
            if not group.is_made:
                self._make(group, members, options, differing)
            adoption.check_exists(group, members)
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
        elif group.state is State.BROKEN and group.has_process_group:  # ``discard`` was interrupted
            teardown.destroy([group], abort=True)
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
        GroupOptions.of(options)  # raises OptionsError, on ranks outside the mesh too
        layout.size(*axes)  # raises AxisError
        with self.lock:
            if self.rank in layout:
                members = self.members(layout, axes, tag)
                self.configured.configure(members, options, self._created(members), call_site())
                if len(members.ranks) == 1:
                    self._clear_references()  # the next call gives another group
                for (ranks, each_tag, _), group in self._groups.items():
                    if (ranks, each_tag) == members[:2] and not group.is_made and "timeout" in options:
                        group.new_timeout = None  # of an earlier ``set_timeout``, before it broke
            # That raised no OptionsError, so the mesh that replaces this one gets these options too.
            root_axes = axes_of_root(self.layout, layout, axes, self.rank)
            if root_axes is not None:
                before = self._options_by_axes.pop((root_axes, tag), GroupOptions())  # the last one counts: at the end
                self._options_by_axes[root_axes, tag] = before.but(options)

    def _created(self, members: Members) -> Group | None:
        """The group of some members that has the configured options, if it was created."""
        group = self._groups.get((members.ranks, members.tag, _NOTHING_ASKED))
        return group if group is not None and group.is_made else None

    def set_timeout(self, timeout: timedelta, chosen: Callable[[tuple[int, ...]], bool]) -> int:
        """Change the timeout of the existing groups whose ranks are chosen; return their number."""
        self.check()
        with self.lock:
            groups = [group for group in self._groups.values() if chosen(group.ranks)]
            found = [group for group in groups if group.is_made or group.state is State.BROKEN]
            for group in found:
                if group.is_known():  # torch may have destroyed an adopted group
                    building.set_timeout(group, timeout)
                elif group.state is State.BROKEN:
                    group.new_timeout = timeout  # it gets it when it is made again
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
        members = self.members(layout, axes)
        label = f"{members.label} of {self.label}"
        adoption.check_process_group(process_group, members, label)
        with self.lock:
            self.check()
            self.configured.check_adopted(members, label)
            group = self._group(members, {})
            if not group.is_made:
                self.world.keep(self)
                group.adopt(process_group, call_site(), self.world.options)
            adoption.check_is_same(group, process_group, members)

    # -- ends of some groups, and the mesh that replaces this one -------------------------------------------------

    def release(self, ranks: tuple[int, ...]) -> None:
        """Destroy the groups of these ranks. The next call creates new ones under new names."""
        self.check()
        reason = f"was released at {call_site()}; ask its mesh for it anew."
        with self.lock:
            # First the table: if an interrupt ends the rest, the next call still creates new groups.
            released = [self._groups.pop(key) for key in [*self._groups] if key[0] == ranks]
            self._generations.release(ranks)
            left = self._destroy(released, lambda group: group.end(reason), abort=False)
        self.world.clean(left)

    def discard(self, groups: Iterable[Group], reason: str) -> None:
        """Destroy the process groups of groups whose first collective failed. The next use makes them again."""
        with self.lock:
            broken = [group for group in groups if group.state is not State.ENDED]  # by another thread
            if not broken:
                return
            left = self._destroy(broken, lambda group: group.break_(reason), abort=True)
        self.world.clean(left)

    def forget(self, process_group: Any) -> None:
        """Drop a group that torch destroys. The next group gets another name."""
        for key, group in list(self._groups.items()):  # without the lock, which a thread that creates groups may hold
            if group.holds(process_group):
                self._forget(key, group)

    def _forget(self, key: GroupKey, group: Group) -> None:
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

    def options_for_replacement(self) -> OptionData:
        """The options that were configured without an error: the groups of the replacement have other ranks."""
        return [([*axes], tag, options.given) for (axes, tag), options in list(self._options_by_axes.items())]

    def replacement(self, identity: MeshIdentity, options: OptionData) -> MeshGroups:
        """The mesh that replaces this one.

        Args:
            options: ``options_for_replacement`` of the rank that decided.
        """
        mesh = MeshGroups(self.name, identity.layout, identity=identity)
        for axes, tag, given in options:
            with contextlib.suppress(OptionsError):  # other axes have the same ranks now: the first ones count
                mesh.configure(mesh.layout, tuple(axes), tag, given)
        return mesh


ending.install()
