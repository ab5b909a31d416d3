"""The process groups of a mesh: create, find, configure, adopt, replace, release and close them.

Views and slices of a mesh share one ``MeshGroups``. Creating a group communicates nothing but this member's address:
its name is computed (``naming.py``), and its members are found in the background (``connecting.py``).

The lock guards the table of the groups. A thread that needs several locks takes that of the mesh first, and then that
of the world. Other threads wait for it during torch's ``new_group`` and while groups end.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh._util.formatting import Text, call_site, format_call, format_ranks
from pgmesh.errors import LifetimeError, OptionsError, RankError
from pgmesh.groups import building, ending, naming
from pgmesh.groups.backends import backends_of
from pgmesh.groups.configuring import ConfiguredOptions, check_supported
from pgmesh.groups.device_meshes import DeviceMeshes, Dimensions
from pgmesh.groups.group import Group
from pgmesh.groups.naming import Fingerprint, Members
from pgmesh.groups.world import World, current_world, world_named
from pgmesh.options import GroupOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from pgmesh.layout import Axis, Layout


S = TypeVar("S")

GroupKey = tuple[tuple[int, ...], str]
"""The ranks of a group; and what tells it from others of the same ranks."""


class MeshGroups:
    """The groups of a mesh, its views and its slices. They are found by their properties and closed together.

    Args:
        name: name of the mesh, the same on every rank; None for an unnamed mesh.
        layout: layout of the root mesh, the same on every rank.
        world: its world. Default: torch's default one.
        outside: rank of an unpickled mesh outside any world; the mesh is then closed.
    """

    def __init__(
        self, name: str | None, layout: Layout, world: World | None = None, *, outside: int | None = None
    ) -> None:
        self.name, self.layout, self.call_site = name, layout, call_site()
        self.ended: str | None = None  # why it has ended, for messages, which begin with its label
        self.lock = threading.RLock()
        self._groups: dict[GroupKey, Group] = {}
        self._ends: Counter[Any] = Counter()  # releases by ranks, and ends through torch by key: no name is used twice
        self._meshes: weakref.WeakSet[Any] = weakref.WeakSet()  # meshes that hold references to groups
        self._states: dict[Any, Any] = {}
        if outside is None:
            self.world = world or current_world()
            self.number = self.world.add(self, self.prefix)
        else:
            self.world, self.number = World(None, outside, 0, GroupOptions()), 0
            self.ended = "was unpickled outside any world, or in a forked process."
            self.world.ended = "this process is in no world"
        self.rank = self.world.rank
        self.configured = ConfiguredOptions(self.rank, self.world.options)
        self._device_meshes = DeviceMeshes(self.rank, layout)

    # -- identity ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def prefix(self) -> str:
        """The part of its key before the number, such as "pgmesh/train". Names have no "/"."""
        return f"{torch_private.PREFIX}{self.name or f'layout/{naming.encode_layout(self.layout)}'}"

    @property
    def key(self) -> str:
        """Prefix of the names of its groups and of its store keys, the same on every rank, such as "pgmesh/train.0"."""
        return f"{self.prefix}.{self.number}"

    @property
    def shown(self) -> str:
        """Its name as a program may give it; "" for an unnamed mesh, and for what replaces one."""
        return "" if self.name is None or "/" in self.name else self.name

    @functools.cached_property
    def call(self) -> str:
        """The call that created the root mesh."""
        named = {"name": self.shown} if self.shown else {}
        where = {"world": Text(self.world.name)} if self.world.name else {}
        return self.layout.spell("ProcessGroupMesh", world_size=self.world.size, **named, **where)

    @property
    def title(self) -> str:
        """Its key among all meshes with groups of this process."""
        return self.shown if self.shown and not self.world.name else self.call

    @property
    def label(self) -> str:
        """Name of the mesh in messages."""
        return f"mesh {self.shown!r}" if self.shown else self.call

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the mesh on this rank."""
        fields = {
            "axes": list(self.layout.axes),
            "shape": list(self.layout.shape),
            "ranks": naming.describe_ranks(self.layout.ranks_in_order()),
            "size of the world": self.world.size,
            **self.world.options.given,
        }
        hint = "Close it on every rank and create the same mesh on all, or give different meshes different names."
        return Fingerprint(self.rank, fields, self.label, hint)

    def is_fake(self) -> bool:
        """True in a fake world, which has no other processes."""
        return backends_of(self.world.options.backend).fake

    def state_of(self, kind: Callable[[], S]) -> S:
        """The state of a layer about this mesh: ``kind()``, made at its first use."""
        return self._states.setdefault(kind, kind())  # type: ignore[no-any-return]

    def check(self) -> None:
        """Raise LifetimeError if the mesh is closed, the world has ended, or this process is a forked child."""
        if self.ended is not None:
            raise LifetimeError(
                f"{self.label} {self.ended.rstrip('.')}. Its layout can still be used, but it has no groups."
            )

    def track(self, mesh: Any) -> None:
        """Register a mesh whose references to groups are cleared when groups end."""
        with self.lock:
            self._meshes.add(mesh)

    # -- finding and creating -----------------------------------------------------------------------------------

    def group(self, layout: Layout, axes: tuple[Axis, ...], tag: str, asked: Mapping[str, Any]) -> dist.ProcessGroup:
        """The group of this rank's block along axes of a layout."""
        return self.find(self.members(layout, axes, tag), asked).process_group  # type: ignore[no-any-return]

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
            options, differing = self.world.options, dict[str, Any]()
            if asked or self.configured.table:
                options, differing = self.configured.of_call(members, asked)
            group = self._group(members, options, differing)
            if not group.is_made:
                self._make(group, members, options, differing)
            if self.world.name and not group.is_known():  # torch's default world was destroyed
                group.register()
            return group

    def made(self) -> list[Group]:
        """The groups that torch knows. It does not wait for the lock."""
        return [group for group in list(self._groups.values()) if group.is_made]

    def _group(self, members: Members, options: GroupOptions, differing: Mapping[str, Any]) -> Group:
        """The group of some members. It may be new.

        Args:
            differing: the options of the call that differ from those configured.
        """
        variant = naming.variant_of(options.backend, members.tag, differing)
        key = members.ranks, variant
        group = self._groups.get(key)
        if group is None:  # a look-up hashes all ranks, which may be many
            releases, destroyed = (self._ends[members.ranks], self._ends[key]) if self._ends else (0, 0)
            path = f"{naming.encode_ranks(members.ranks)}/{variant}.{releases}.{destroyed}"
            self._groups[key] = group = Group(members.label, self.label, members.ranks, path)
        return group

    def _make(self, group: Group, members: Members, options: GroupOptions, differing: Mapping[str, Any]) -> None:
        """Make a group. With Gloo and NCCL, this waits for no other member.

        Args:
            differing: the options of the call that differ from those configured.
        """
        try:
            if options is not self.world.options:
                check_supported(options, group.label)
            self.world.keep(self)
            group.options, group.fingerprint, backends = options, None, backends_of(options.backend)
            if len(group.ranks) > 1 and backends.by_members and not backends.fake:
                group.fingerprint = self._fingerprint_of(group, differing)
            if backends.by_members:
                building.make_by_members(group, self.key, self.world)
            else:
                self._check_default("new_group")
                building.make_collectively(group, members.blocks())
        except BaseException:
            if not self.made():
                self.world.with_groups.pop(self, None)  # a mesh without groups does not block its successor
            raise

    def _fingerprint_of(self, group: Group, differing: Mapping[str, Any]) -> Fingerprint:
        """The fingerprint of a group on this rank."""
        asked_for = ", ".join(f"{name}={value!r}" for name, value in differing.items())
        subject = f"{group.label} (asked for with {asked_for})" if differing else group.label
        hint = (
            "Create the same mesh on all ranks, configure its axes with the same options, and pass the same options "
            "in calls. Give different meshes different names."
        )
        return Fingerprint(self.rank, {**self.fingerprint.fields, **group.options.given}, subject, hint)

    # -- options ------------------------------------------------------------------------------------------------

    def configure(self, layout: Layout, axes: tuple[Axis, ...], tag: str, options: Mapping[str, Any]) -> None:
        """Set options for the group of this rank's block, before it is created."""
        self.check()
        GroupOptions.of(options)  # raises OptionsError, on ranks outside the mesh too
        layout.size(*axes)  # raises AxisError
        if self.rank not in layout:
            return
        with self.lock:
            members = self.members(layout, axes, tag)
            self.configured.configure(members, options, self._created(members))
            if len(members.ranks) == 1:
                self.clear_references()  # the next call gives another group

    def _created(self, members: Members) -> Group | None:
        """The group of some members that has the configured options, if it was created."""
        variant = naming.variant_of(self.configured.of_ranks(members).backend, members.tag, {})
        group = self._groups.get((members.ranks, variant))
        return group if group is not None and group.is_made else None

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

    def device_mesh(self, layout: Layout, dimensions: Dimensions) -> DeviceMesh:
        """A DeviceMesh of groups along axes of a layout."""
        self.check()
        self._check_default("DeviceMesh")
        with self.lock:
            return self._device_meshes.find(layout, dimensions, lambda layout, axes: self.group(layout, axes, "", {}))

    def adopt(self, layout: Layout, axes: tuple[Axis, ...], process_group: dist.ProcessGroup) -> None:
        """Use an existing group for these axes. pgmesh never destroys it."""
        self.check()
        self._check_default("new_group")
        members = self.members(layout, axes)
        ranks = tuple(dist.get_process_group_ranks(process_group)) if torch_private.is_known(process_group) else ()
        if ranks != members.ranks:
            raise RankError(
                f"{members.label} of {self.label} has ranks {format_ranks(members.ranks)}; the group to adopt has "
                f"{format_ranks(ranks) or 'none, as torch does not know it'}."
            )
        with self.lock:
            self.check()
            options, differing = self.configured.of_call(members, {})
            group = self._group(members, options, differing)
            if not group.is_made:
                self.world.keep(self)
                group.adopt(process_group, call_site(), self.world.options)
            if not group.holds(process_group):
                raise LifetimeError(
                    f"{group.label} already exists since {group.call_site}, and may be in use.\n\n"
                    f"  {format_call('mesh.release', {}, *axes)}   # release it first, then adopt"
                )

    def _check_default(self, what: str) -> None:
        """Raise OptionsError in a world beside torch's default one."""
        if self.world.name:
            raise OptionsError(
                f"{self.label} is in world {self.world.name!r}. torch has {what} only in its default world."
            )

    # -- ends -------------------------------------------------------------------------------------------------------

    def release(self, ranks: tuple[int, ...]) -> None:
        """Destroy the groups of these ranks. The next call creates new ones under new names."""
        self.check()
        reason = f"was released at {call_site()}; ask its mesh for it anew."
        with self.lock:
            # First the table: if an interrupt ends the rest, the next call still creates new groups.
            released = [self._groups.pop(key) for key in [*self._groups] if key[0] == ranks]
            self._ends[ranks] += 1
            self._destroy(released, reason)

    def replace(self, group: Group, number: int, reason: str) -> None:
        """Destroy the process group of a group that could not be used. The next ``find`` makes it again.

        Args:
            number: a number that all members give. The name of the next process group has it.
        """
        with self.lock:
            if group.is_made:
                group.attempt = number
                self._destroy([group], reason, seconds=0.1)  # its operations are not waited for

    def end(self, reason: str, *, abort: ending.Abort | None = None) -> None:
        """Destroy all groups. The mesh creates no more. The first reason counts.

        Args:
            reason: why, to follow the name of the mesh.
            abort: ends the backends of groups at once. Without it, their operations go on.
        """
        with self.lock:
            if self.ended is not None:
                return
            self.ended = reason
            groups = [*self._groups.values()]
            self._groups.clear()
            self._destroy(groups, reason, abort=abort)
            self.world.with_groups.pop(self, None)

    def end_in_child(self) -> None:
        """Invalidate all groups in a forked child. They belong to the parent."""
        self.lock = threading.RLock()  # the parent's threads may hold the old one
        self.ended = self.ended or "was created before this process was forked."
        self.clear_references()
        for group in self.made():
            process_group = group.process_group
            torch_private.destroyed[process_group] = f"{group.label} {self.ended}"
        self._groups.clear()

    def forget(self, process_group: Any) -> None:
        """Drop a group that torch destroys. The next group gets another name."""
        for key, group in list(self._groups.items()):  # without the lock, which a thread that creates groups may hold
            if group.holds(process_group):
                self._forget(key, group)

    def _forget(self, key: GroupKey, group: Group) -> None:
        with self.lock:
            self.clear_references()
            if not group.is_made:
                return
            if group.created_by == "pgmesh":  # torch names the groups of new_group
                self._ends[key] += 1
            del self._groups[key]
            torch_private.unregister_tag(group.process_group)
            group.end("was destroyed; ask its mesh for it anew.")
            ending.destroy(self.world, [group], by_torch=True)

    def _destroy(
        self,
        groups: Sequence[Group],
        reason: str,
        *,
        seconds: float = ending.DRAIN_SECONDS,
        abort: ending.Abort | None = None,
    ) -> None:
        """Destroy the process groups of some groups, under the lock."""
        self.clear_references()
        made = [group for group in groups if group.is_made]
        for group in groups:
            group.end(reason)
        if abort is None:
            ending.destroy(self.world, made, seconds=seconds)
        else:
            ending.abort(self.world, made, abort)

    def clear_references(self) -> None:
        """Clear the references to groups of meshes and DeviceMeshes: the next call looks the group up again."""
        with self.lock:
            self._device_meshes.clear()
            for mesh in list(self._meshes):
                mesh._clear_groups()


def find_mesh_groups(name: str | None, layout: Layout, world: str, rank: int) -> MeshGroups:
    """The groups of an unpickled mesh: those of the open mesh with its name and layout, or new ones.

    Outside any world the new mesh is closed and has only the rank that pickled it.
    """
    here = world_named(world)
    if here is None or here.ended:
        return MeshGroups(name, layout, outside=rank)
    if (highest := max(layout.ranks_in_order())) >= here.size:
        raise RankError(
            f"{layout.spell('ProcessGroupMesh')} was unpickled with rank {highest}, but the world's ranks are 0 to "
            f"{here.size - 1}."
        )
    with here.lock:  # another thread may unpickle it too
        found = [mesh for mesh in here.open_meshes() if (mesh.name, mesh.layout) == (name, layout)]
        found.sort(key=lambda mesh: mesh in here.with_groups)  # another rank may refer to fewer meshes without groups
        return found[-1] if found else MeshGroups(name, layout, here)
