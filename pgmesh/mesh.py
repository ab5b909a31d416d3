"""ProcessGroupMesh: a layout, this process's rank in it, and the process groups along its axes.

The arithmetic is in ``Layout``. The groups are in a ``MeshGroups``, which a mesh shares with its views and slices.
Verbs that a program may never use (connect, locality, report) are imported when they are first called.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pgmesh import torch_private
from pgmesh._util.formatting import Text, call_site, format_call, format_ranks, other_arguments
from pgmesh._util.validation import Sizes, fill_sizes, is_name, parse_ranks, parse_sizes, whole_number
from pgmesh.errors import AxisError, LifetimeError, MembershipError, OptionsError, RankError, ShapeError
from pgmesh.groups.default_world import world_rank_and_size
from pgmesh.groups.device_meshes import parse_dimensions
from pgmesh.groups.mesh_groups import MeshGroups, find_mesh_groups
from pgmesh.groups.naming import Members
from pgmesh.groups.world import all_worlds
from pgmesh.layout import Axis, Keep, Layout, RankMethods
from pgmesh.options import Timeout, to_timedelta

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from pgmesh.elastic.shrinking import Shrunk
    from pgmesh.launch.joining import World
    from pgmesh.report.report import Held, Report
    from pgmesh.topology.host_mapping import Placement
    from pgmesh.topology.locality import Locality

CONNECT_TIMEOUT = timedelta(seconds=30)
"""Default timeout of ``connect``, ``locality`` and ``hosts``."""


class ProcessGroupMesh(RankMethods):
    """The ranks of a torch.distributed job in an N-D box, with the process group along any of its axes.

    The layout of a mesh never changes. A program may hold any number of meshes, and creating one communicates nothing.
    Views and slices share the groups of the mesh that they were taken from. Other meshes never share groups.

    Args:
        shape: the sizes of numbered axes, outermost first: the last axis varies fastest. Or one mapping of sizes by
            axis, with any names or numbers: ``ProcessGroupMesh({"pp": 2, "dp": -1})``.
        ranks: the ranks to arrange, in this order. Default: the whole world.
        name: the identity of this mesh, the same on every rank. An unnamed mesh is identified by its axes, shape and
            ranks. If another open unnamed mesh with groups has the same, the first ``group`` raises NameTakenError.
        world: a world of ``launch.open_world``. Default: torch's default world.
        sizes: the sizes of named axes, outermost first. At most one size is -1: it is inferred.

    Raises:
        ShapeError: the sizes do not hold the ranks, or the name is invalid.
        OptionsError: a keyword is an option of groups, not an axis.
        RankError: the world does not have one of the ranks.
        NameTakenError: an open mesh that has groups has this name.
        WorldError: torch.distributed is not initialised.

    >>> mesh = ProcessGroupMesh(pp=2, dp=-1, tp=2, name="actor")
    >>> mesh.shape, mesh.axes, mesh.rank, mesh.coord
    ((2, 2, 2), ('pp', 'dp', 'tp'), 5, (1, 0, 1))
    """

    __slots__ = ("__weakref__", "_cached", "_groups", "_mesh_groups", "_path", "_slices", "layout")

    layout: Layout
    """The axes, sizes and ranks of the mesh, without its groups and this rank."""

    _mesh_groups: MeshGroups
    _groups: dict[tuple[Axis, ...], ProcessGroup]
    _slices: dict[Any, ProcessGroupMesh]
    _path: str  # the calls from the root mesh to this slice or view; "" for the root mesh
    _cached: dict[Any, Any]  # cached results: neither the mesh nor its rank changes

    def __init__(
        self,
        /,
        *shape: int | Sizes,
        ranks: Iterable[int] | None = None,
        name: str | None = None,
        world: World | None = None,
        **sizes: int,
    ) -> None:
        who = "ProcessGroupMesh"
        size = world_rank_and_size()[1] if world is None else world.size
        if name is not None and not is_name(name):
            raise ShapeError(f"{who}: a name is a printable string without '/', such as name='actor', not {name!r}.")
        given = None if ranks is None else parse_ranks(who, ranks)
        order = range(size) if given is None else given
        ends = (order[0], order[-1]) if isinstance(order, range) else order
        _check_in_world(who, dict.fromkeys(ends), size)
        more = other_arguments(given, name=name, world=None if world is None else Text(world.name))
        box = parse_sizes(who, shape, sizes, more, len(order))
        count_text = f"the world has {size}" if given is None else f"ranks= has {len(order)}"
        box = fill_sizes(who, box, len(order), count_text, is_world=given is None, more=more)
        layout = Layout.of(box, order)
        self._set(layout, MeshGroups(name, layout, None if world is None else world.core))

    def _set(self, layout: Layout, mesh_groups: MeshGroups, path: str = "") -> None:
        self.layout, self._mesh_groups, self._path = layout, mesh_groups, path
        self._groups, self._slices, self._cached = {}, {}, {}
        mesh_groups.track(self)

    def _clear_groups(self) -> None:
        """Clear the cached groups: some of them were destroyed."""
        self._groups.clear()

    def _derive(self, verb: str, given: Mapping[Any, object], layout: Layout) -> ProcessGroupMesh:
        """The slice or view with this layout. Only the first call makes it, which may wait for the lock of the mesh."""
        found = self._slices.get((verb, layout))
        if found is not None:
            return found
        mesh = object.__new__(ProcessGroupMesh)
        mesh._set(layout, self._mesh_groups, f"{self._path}{format_call(f'.{verb}', given)}")
        return self._slices.setdefault((verb, layout), mesh)

    # -- ranks, coords and indices ------------------------------------------------------------------------------

    @property
    def name(self) -> str | None:
        """The name, which identifies the mesh on every rank; None for an unnamed one."""
        return self._mesh_groups.name

    @property
    def world(self) -> World:
        """The world of the mesh's ranks: torch's default one, or one of ``launch.open_world``.

        >>> mesh.world.name, mesh.world.size
        ('', 8)
        """
        from pgmesh.launch.joining import World  # here: groups need no launcher

        return World(own=False, core=self._mesh_groups.world)

    @property
    def is_closed(self) -> bool:
        """True once the mesh was closed or its world ended: it creates no more groups.

        >>> mesh.is_closed
        False
        """
        return self._mesh_groups.ended is not None

    def shares_groups(self, other: ProcessGroupMesh) -> bool:
        """True if both meshes have the same groups, as views and slices of one mesh do.

        >>> mesh.shares_groups(mesh.at(pp=1)), mesh.shares_groups(ProcessGroupMesh(8, name="other"))
        (True, False)
        """
        return self._mesh_groups is other._mesh_groups

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This process's rank in the world, also if the mesh does not contain it.

        >>> mesh.rank, mesh.rank in mesh, mesh.rank in mesh.at(pp=0)
        (5, True, False)
        """
        return self._mesh_groups.rank

    def size(self, *axes: Axis) -> int:
        try:
            size: int = self._cached["size", axes]
        except (KeyError, TypeError):
            size = self._cached["size", axes] = super().size(*axes)
        return size

    def index(self, *axes: Axis) -> int:
        try:
            index: int = self._cached["index", axes]
        except (KeyError, TypeError):
            index = self._cached["index", axes] = super().index(*axes)
        return index

    def neighbor(self, axis: Axis, step: int = 1, *, wrap: bool = False) -> int | None:
        try:
            rank: int | None = self._cached["neighbor", axis, type(step), step, wrap]
        except (KeyError, TypeError):
            rank = super().neighbor(axis, step, wrap=wrap)
            if type(step) is int and abs(step) == 1:  # a tensor may change in place, and of others there are too many
                self._cached["neighbor", axis, type(step), step, wrap] = rank
        return rank

    def rank_of(self, coord: tuple[int, ...]) -> int:
        """The rank at a coord; the inverse of ``coord_of``.

        Raises:
            RankError: there is no such coord.

        >>> mesh.rank_of((1, 0, 1))
        5
        """
        return self.layout.rank_of(coord)

    def coord_of(self, rank: int) -> tuple[int, ...]:
        """The coord of a rank: its index on every axis. The inverse of ``rank_of``.

        Raises:
            RankError: the rank is not in the mesh.

        >>> mesh.coord_of(6)
        (1, 1, 0)
        """
        return self.layout.coord_of(rank)

    # -- groups -------------------------------------------------------------------------------------------------

    def group(self, *axes: Axis, **options: Any) -> ProcessGroup:
        """The process group of this rank's block along these axes: created on the first call, then cached.

        With NCCL and Gloo the call does not wait for other ranks. Each member may call it at any time and in any order,
        and ranks outside the group do not call. Other backends (MPI, torchcomms, third-party ones) use torch's
        ``new_group``, which every rank of the world has to call in the same order. The group's ranks follow mesh order.

        Args:
            axes: the axes, in any order; none for the whole mesh.
            options: as in ``GroupOptions``. Options that differ from the configured ones make a separate group,
                such as a Gloo group of the same ranks with ``backend="gloo"``. ``tag=`` is a string; groups with
                different tags are separate communicators.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            MembershipError: the mesh does not contain this rank.
            NameTakenError: another unnamed mesh has the same layout.
            OptionsError: the backend does not support an option.
            LifetimeError: the mesh is closed.

        >>> mesh.group("dp", "tp").size(), mesh.group("dp", "tp") is mesh.group("tp", "dp")
        (4, True)
        >>> mesh.group("dp", tag="all-gather") is mesh.group("dp")
        False
        """
        if not options:  # the hot path: a cached group
            try:
                return self._groups[axes]
            except (KeyError, TypeError):  # not cached, or no axis: reported below
                pass
        self._check_member()
        if options:
            return self._mesh_groups.group(self.layout, axes, _tag(options.pop("tag", None)), options)
        self._mesh_groups.check()  # without the lock, which another thread may hold for long
        with self._mesh_groups.lock:  # so that no release intervenes
            return self._groups.setdefault(axes, self._mesh_groups.group(self.layout, axes, "", {}))

    def group_of(self, ranks: Iterable[int], *, tag: str | None = None, **options: Any) -> ProcessGroup:
        """The process group of any ranks of the mesh. Only its members call, in any order.

        Args:
            ranks: the members, including this rank. The group's ranks follow mesh order.
            tag: groups of the same ranks with different tags are separate communicators.
            options: as in ``GroupOptions``.

        Raises:
            RankError: a rank is not in the mesh, or is given twice.
            MembershipError: this rank is not one of them.

        >>> import torch.distributed as dist
        >>> dist.get_process_group_ranks(mesh.group_of([5, 0, 3]))
        [0, 3, 5]
        """
        members = Members(self._members(ranks), _tag(tag))
        group: ProcessGroup = self._mesh_groups.find(members, options).process_group
        return group

    def _members(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Ranks of the mesh in mesh order, checked to include this rank."""
        members = tuple(sorted(map(whole_number, ranks), key=self.layout.coord_of))
        if len(set(members)) != len(members):
            raise RankError(f"each rank is given once, but {list(members)} has one twice.")
        if not members:
            raise RankError("a group needs at least one rank; ranks is empty.")
        if self.rank not in members:
            raise MembershipError(
                f"rank {self.rank} asked for the group of ranks {format_ranks(members)}, but is not one of them.\n\n"
                f"  if mesh.rank in {list(members)}: ...   # only members call"
            )
        return members

    def configure(self, *axes: Axis, tag: str | None = None, **options: Any) -> None:
        """Set the options of the group along these axes, before its first use.

        Args:
            axes: the axes; none for the group of the whole mesh.
            tag: the tag of the group.
            options: as in ``GroupOptions``. Options not given keep their value; the default is that of the world.

        Raises:
            OptionsError: there is no such option, or a group of several ranks was created already.

        >>> mesh.configure("pp", timeout=600)
        """
        self._mesh_groups.configure(self.layout, axes, _tag(tag), options)

    def set_timeout(self, *axes: Axis, timeout: Timeout) -> None:
        """Change the timeout of existing groups on this rank, from the next collective on.

        The group object stays the same. Every member calls it. Use ``configure`` before a group is created. With Gloo,
        ``send`` and ``recv`` keep the timeout that the group was created with.

        Args:
            axes: change every group along these axes, those with tags or other backends included. Without axes, change
                every group whose ranks are all in this mesh.
            timeout: a timedelta or a number of seconds.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            MembershipError: the mesh does not contain this rank.
            OptionsError: the timeout is not more than 0, or there is no group along these axes yet.

        >>> group = mesh.group("tp")
        >>> mesh.set_timeout("tp", timeout=120)
        >>> mesh.group("tp") is group
        True
        """
        self._check_member()
        limit = to_timedelta(timeout)
        if axes:
            block = self.layout.block_of(self.rank, *axes)
            if not self._mesh_groups.set_timeout(limit, lambda ranks: ranks == block):
                words = ", ".join([*map(repr, axes), f"timeout={limit.total_seconds():g}"])
                raise OptionsError(
                    f"this rank has no group along {', '.join(map(str, axes))} yet, so there is no timeout to change."
                    "\n\n"
                    f"  mesh.configure({words})   # on every member, before the group is created"
                )
        else:
            self._mesh_groups.set_timeout(limit, frozenset(self.layout.ranks()).issuperset)

    def adopt(self, axis: Axis, group: ProcessGroup) -> None:
        """Use a group made elsewhere as the group along an axis. The mesh never destroys it.

        Args:
            axis: the axis.
            group: a process group of torch. Its ranks are those of this rank's block, in mesh order. It keeps its
                options.

        Raises:
            LifetimeError: the axis has another group already.
            MembershipError: the mesh does not contain this rank.
            RankError: the group has other ranks than this rank's block.
        """
        self._check_member()
        self._mesh_groups.adopt(self.layout, (axis,), group)

    def connect(
        self,
        *axes: Axis | tuple[Axis, ...],
        tag: str | None = None,
        ranks: Iterable[int] | None = None,
        timeout: Timeout = CONNECT_TIMEOUT,
    ) -> None:
        """Connect and warm up groups with all their members, or raise by the deadline who is missing and why.

        Each member of each group calls it, in any order, and waits for the others. It compares the members'
        descriptions of the mesh and its groups. Then it runs the smallest collective on each group, so that memory is
        allocated now. All members get the same decision; after a failure, a second call tries again. If the smallest
        collective fails on one member only, the others learn it at their next ``connect``. A second call skips the
        groups that are connected.

        Args:
            axes: the axes of each group: "tp", or ("dp", "tp") for one group along two axes. Default: each axis.
            tag: the tag of these groups.
            ranks: the ranks of a group from ``group_of``, in place of axes.
            timeout: maximum wait for the other members: a timedelta or a number of seconds.

        Raises:
            OptionsError: the timeout is not more than 0.
            MissingRanksError: members did not arrive or were lost: the message has the status of each.
            MismatchError: ranks describe the mesh or a group differently. The message has each value with its ranks.
            WorldError: the store has failed.

        >>> mesh.connect("tp", ("dp", "tp"))                    # a fake world has no other ranks
        """
        self._check_member()
        seconds = to_timedelta(timeout).total_seconds()
        if axes and ranks is not None:
            raise AxisError(f"connect takes axes ({', '.join(map(str, axes))}) or ranks, not both.")
        from pgmesh.connect.connecting import connect

        groups = self._mesh_groups
        groups.check()
        if ranks is not None:
            wanted = [Members(self._members(ranks), _tag(tag))]
        else:
            families = [each if isinstance(each, tuple) else (each,) for each in axes or self.axes]
            wanted = [groups.members(self.layout, along, _tag(tag)) for along in families]
        self._join_aborts()
        connect(groups, wanted, seconds)

    def locality(self, *axes: Axis, timeout: Timeout = CONNECT_TIMEOUT) -> Locality:
        """The locality of the groups along these axes: each inside one host, each rank on another host, or mixed.

        Each rank publishes its host, once in a world. Every rank of the mesh calls, in any order.

        Args:
            axes: the axes; none for the group of the whole mesh.
            timeout: maximum wait for the other ranks: a timedelta or a number of seconds.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            MembershipError: the mesh does not contain this rank.
            OptionsError: the timeout is not more than 0.
            MissingRanksError: ranks did not call before the deadline.
            WorldError: the store does not respond.

        >>> mesh.locality("tp").kind                           # a fake world is on one host
        'intra'
        """
        self.layout.size(*axes)
        return self._map_hosts(timeout).locality(self.layout, *axes)

    def hosts(self, *, timeout: Timeout = CONNECT_TIMEOUT) -> tuple[tuple[int, ...], ...]:
        """The ranks of the mesh on each host, ordered by the lowest rank, as ``ReshardPlan(hosts=)`` takes them.

        Each rank publishes its host, once in a world. Every rank of the mesh calls, in any order.

        Args:
            timeout: maximum wait for the other ranks: a timedelta or a number of seconds.

        Raises:
            MembershipError: the mesh does not contain this rank.
            OptionsError: the timeout is not more than 0.
            MissingRanksError: ranks did not call before the deadline.
            WorldError: the store does not respond.

        >>> mesh.hosts()                                       # a fake world is on one host
        ((0, 1, 2, 3, 4, 5, 6, 7),)
        """
        return self._map_hosts(timeout).hosts

    def _map_hosts(self, timeout: Timeout) -> Placement:
        """The host of each rank of the mesh."""
        self._check_member()
        self._mesh_groups.check()
        from pgmesh.topology.host_mapping import map_hosts

        return map_hosts(self.layout.ranks(), timeout=timeout, world=self._mesh_groups.world)

    def report(self, *, thread: threading.Thread | None = None) -> Report:
        """A printable table: where each rank of the mesh is, since when, and who has ended, is silent or is behind.

        Any thread may call it at any time, also from a debugger while another thread hangs. It waits two seconds
        at most for late ranks. A rank is in the table from its first ``connect``, ``report`` or ``abort_when_lost`` on.
        ``pgmesh report`` prints the same table from any shell.

        Args:
            thread: the thread of this process whose place the ranks see from now on. Default: the main thread.

        Raises:
            LifetimeError: the mesh is closed.
            WorldError: the store has failed.

        >>> print(mesh.report())                               # doctest: +ELLIPSIS
        mesh 'example'...
        """
        from pgmesh.report.report import report

        if self._mesh_groups.ended is None and not self._mesh_groups.is_fake():
            self._join_aborts()
        return report(self._mesh_groups, thread)

    def held(self) -> tuple[Held, ...]:
        """The groups that this rank holds of this mesh, its views and slices.

        >>> group = mesh.group("tp")
        >>> [held.ranks for held in mesh.held()]
        [(4, 5)]
        """
        from pgmesh.report.report import held

        return held(self._mesh_groups)

    def release(self, *axes: Axis, ranks: Iterable[int] | None = None) -> None:
        """Destroy this rank's groups along these axes, those with tags or other backends included.

        So it destroys all groups of the same ranks: along an axis of size 1, all groups of this rank alone. Every
        member calls it, and none waits for the others. The next ``group`` creates a new group under a new name.

        Args:
            axes: the axes; none for the group of the whole mesh.
            ranks: the ranks of a group from ``group_of``, in place of axes.

        Raises:
            MembershipError: the mesh or the ranks do not contain this rank.

        >>> old = mesh.group("dp")
        >>> mesh.release("dp")
        >>> mesh.group("dp") is old
        False
        """
        self._check_member()
        if ranks is None:
            self._mesh_groups.release(self.layout.block_of(self.rank, *axes))
        elif axes:
            raise AxisError(f"release takes axes ({', '.join(map(str, axes))}) or ranks, not both.")
        else:
            self._mesh_groups.release(self._members(ranks))

    def close(self) -> None:
        """Destroy every group of this mesh, its views and slices. Their ranks and coords stay available.

        Closing again, or after torch.distributed was destroyed, does nothing.

        Raises:
            LifetimeError: this is a view or a slice; its groups belong to the mesh that it was taken from.
        """
        self._check_root()
        self._mesh_groups.end(f"was closed at {call_site()}.")

    def __enter__(self) -> ProcessGroupMesh:
        self._check_root()
        return self

    # -- going on without lost ranks ------------------------------------------------------------------------------

    def abort(self, why: str = "the program aborted it") -> None:
        """End every group of this mesh, its views and slices at once, without waiting for collectives.

        Blocked collectives raise, in other threads and on the other members; a rank whose message is half sent, or that
        waits for a member to connect, raises at the group's timeout. Members that do not wait for this rank learn it at
        their next heartbeat. Other meshes are not affected. The aborted groups are kept until the process ends. On
        systems without /proc, blocked ranks wait until the timeout. Untested with NCCL.

        Args:
            why: the reason, for the messages.

        Raises:
            LifetimeError: this is a view or a slice.
        """
        self._check_root()
        from pgmesh.elastic.aborts import abort

        if self._mesh_groups.ended is None:
            self._join_aborts()
            abort(self._mesh_groups, why, call_site())

    def abort_when_lost(self, lost_after: Timeout | None = None) -> None:
        """Abort the mesh as soon as a rank is lost: it has left the world, or has sent no heartbeat for a while.

        Each rank watches the next one of the mesh, with one store operation a second. Without it, a rank that is
        stopped or unreachable is noticed at the timeout of a collective.

        Args:
            lost_after: time without a heartbeat, as a timedelta or a number of seconds. It holds for all meshes of this
                rank in this world, and for ``connect``, ``shrink`` and ``stand_by``. Default: 5 s, and more in a world
                of over 1,024 ranks. A process that holds Python's lock for longer, for instance while it compiles,
                sends no heartbeat either.

        Raises:
            LifetimeError: this is a view or a slice, or the mesh is closed.
            OptionsError: it is less than three heartbeats.
            WorldError: the store does not respond.
        """
        self._check_root()
        self._mesh_groups.check()
        from pgmesh.elastic.watching import abort_when_lost

        limit = None if lost_after is None else to_timedelta(lost_after).total_seconds()
        self._join_aborts()
        abort_when_lost(self._mesh_groups, limit)

    def shrink(
        self,
        axis: Axis | None = None,
        *,
        spares: Iterable[int] = (),
        timeout: Timeout = CONNECT_TIMEOUT,
    ) -> ProcessGroupMesh:
        """Agree with the other ranks on those that are lost, and return a mesh of the same axes and name without them.

        Every rank of the mesh that is left calls it with the same arguments, usually after an error in a collective.
        It aborts the mesh, so that ranks that still wait for a lost one raise and can call it too. All get the same
        answer. A rank whose process has ended is lost at once; one that lives is waited for; one that sends no
        heartbeat is lost after 5 s, or after those of ``abort_when_lost``. A lost rank is replaced by a spare, as far
        as there are any; for the others, the indices of ``axis`` that lost a rank are dropped. A living rank that is
        dropped gets a mesh that it is not in (``rank in mesh``), and can stand by. Groups are created anew: call
        ``configure`` again for their options. The new mesh is named ``<name>#<n>``, and ``print(mesh.shrunk)`` says who
        was lost and how that is known.

        Args:
            axis: the axis whose indices may be dropped; None to drop none.
            spares: ranks of the world that may replace lost ones, in this order. They stand by or call this too. A new
                process with the number of a lost rank may be one. Without an axis, such processes are waited for.
            timeout: maximum wait for living ranks: a timedelta or a number of seconds.

        Raises:
            AxisError: there is no such axis.
            LifetimeError: this is a view or a slice, or the mesh was closed.
            MembershipError: the others took this rank for lost and went on, or a new process has its place.
            MismatchError: ranks passed different arguments.
            MissingRanksError: living ranks did not call in time, or too many ranks are lost. All ranks get it, and may
                try again.
            NameTakenError: an earlier call has returned the mesh that replaces this one, and that has groups.
            OptionsError: there is neither an axis nor a spare, so there would be no mesh.
            RankError: the world does not have one of the spares.
            WorldError: the store does not respond.
        """
        self._check_root()
        groups = self._mesh_groups
        spares = tuple(spares)
        if axis is None and not spares:
            raise OptionsError(
                "shrink has neither an axis nor spares, so no rank could be dropped or replaced.\n\n"
                f"  mesh = mesh.shrink({self.axes[0]!r})   # drop the indices of an axis that lost a rank\n"
                f"  mesh = mesh.shrink(spares=range({groups.world.size}))   # or replace lost ranks"
            )
        if axis is not None:  # by its name, which a position is not
            axis = self.axes[self.layout._numbers_of((axis,))[0]]
        places = parse_ranks("shrink", spares) if spares else ()
        _check_in_world("shrink", places, groups.world.size)
        from pgmesh.elastic.records import Request
        from pgmesh.elastic.shrinking import shrink

        self._join_aborts()
        request = Request(axis, tuple(places))
        return _root_mesh(shrink(groups, request, to_timedelta(timeout).total_seconds()))

    def stand_by(self, timeout: Timeout = CONNECT_TIMEOUT) -> ProcessGroupMesh:
        """Wait until the ranks of this mesh call ``shrink``, and return the mesh that replaces it.

        For a spare, for a rank that was dropped or taken for lost, and for a new process in the place of a lost rank.
        Once no rank of the mesh is left, it raises an error: within 5 s if they have left the world, and 10 s if they
        were killed or are stopped.

            while mesh.rank not in mesh:
                mesh = mesh.stand_by(timeout=3600)

        Args:
            timeout: maximum wait: a timedelta or a number of seconds.

        Raises:
            LifetimeError: this is a view or a slice, or the mesh was closed.
            MembershipError: a new process has taken the place of this one.
            MissingRanksError: no rank called ``shrink`` in time, or no other rank of the mesh is left.
            WorldError: the store does not respond.
        """
        self._check_root()
        from pgmesh.elastic.shrinking import stand_by

        self._join_aborts()
        seconds = to_timedelta(timeout).total_seconds()
        return _root_mesh(stand_by(self._mesh_groups, seconds))

    @property
    def shrunk(self) -> Shrunk | None:
        """The change that ``shrink`` made, to print; None for a mesh that the program created."""
        from pgmesh.elastic.state import ElasticState

        change: Shrunk | None = self._mesh_groups.state_of(ElasticState).shrunk
        return change

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- slices and views ---------------------------------------------------------------------------------------

    def at(self, fixed: Mapping[Axis, Keep] | None = None, /, **indices: Keep) -> ProcessGroupMesh:
        """The slice of this mesh at these indices. It shares the groups.

        Args:
            fixed: the same as ``indices``, for numbered axes: ``at({0: 1})``.
            indices: for each axis, one index, which fixes and drops the axis, or a slice or the indices to keep.
                Negative indices count from the end. A repeated index counts once.

        Raises:
            AxisError: there is no such axis.
            RankError: there is no such index.
            ShapeError: no rank is left.

        >>> mesh.at(pp=1)
        ProcessGroupMesh(pp=2, dp=2, tp=2, name='example').at(pp=1)
        >>> mesh.at(pp=[0, -1]).ranks("pp")             # first and last stage: tied embeddings
        (1, 5)
        """
        only_integers = fixed is None and {int}.issuperset(map(type, indices.values()))
        key = (..., *indices.items()) if only_integers else None  # no axis is an ellipsis
        if key in self._slices:
            return self._slices[key]
        layout = self.layout.at(fixed, **indices)
        part = self._derive("at", {**(fixed or {}), **indices}, layout)
        if key is not None:
            self._slices[key] = part
        return part

    def along(self, *axes: Axis) -> ProcessGroupMesh:
        """The slice through this rank along these axes. ``mesh[axes]`` is the same.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            MembershipError: the mesh does not contain this rank.

        >>> mesh.along("dp", "tp").ranks(), mesh["dp", "tp"] is mesh.along("dp", "tp")
        ((4, 5, 6, 7), True)
        """
        try:
            return self._slices[axes]
        except (KeyError, TypeError):  # not cached, or no axis: reported below
            self._check_member()
            layout = self.layout.along(self.rank, *axes)
            if layout == self.layout:
                return self
            fixed = {axis: i for axis, i in zip(self.axes, self.coord or ()) if axis not in layout.axes}
            return self._slices.setdefault(axes, self._derive("at", fixed, layout))

    def view(self, /, *shape: int | Sizes, **sizes: int) -> ProcessGroupMesh:
        """The same ranks in the same order with other axes: split, merged or both. It shares the groups.

        Args:
            shape: the new sizes of numbered axes, or one mapping of sizes by axis.
            sizes: the new sizes by name. At most one size is -1: it is inferred.

        Raises:
            ShapeError: the sizes do not hold the ranks, or the ranks of a slice are not evenly spaced for them.
            OptionsError: a keyword is an option of groups, not an axis.

        >>> moe = mesh.view(pp=2, edp=1, ep=4)
        >>> moe.group("ep") is mesh.group("dp", "tp")
        True
        >>> fsdp = mesh.along("pp", "tp").view(fsdp=4)         # merges two axes that are not adjacent
        >>> fsdp.group("fsdp") is mesh.group("pp", "tp")
        True
        """
        layout = self.layout.view(*shape, **sizes)
        return self._derive("view", dict(zip(layout.axes, layout.shape)), layout)

    # -- torch's DeviceMesh -------------------------------------------------------------------------------------

    def device_mesh(self, /, *axes: Axis, **merged: Axis | Sequence[Axis]) -> DeviceMesh:
        """torch's DeviceMesh along these axes, with the groups of this mesh. torch creates no groups for it.

        FSDP with tensor parallelism may use any DeviceMeshes of one mesh, its views and its slices, from torch 2.13 on.
        Earlier versions combine only slices of one DeviceMesh.

        Args:
            axes: axes that become a dimension each: in mesh order, since placements are by position. Without
                arguments: all axes.
            merged: further dimensions by name, in this order. Each merges one or several axes, adjacent or not, into
                one dimension with the group along them: ``fully_shard`` shards along all of them. Along the first of
                two dimensions it replicates.

        Raises:
            AxisError: there is no such axis, an axis is named twice, axes are not in mesh order, or a dimension has no
                axis.
            MembershipError: the mesh does not contain this rank.

        >>> mesh.device_mesh("dp", "tp").get_group("tp") is mesh.group("tp")
        True
        >>> both = mesh.device_mesh(fsdp=("pp", "dp"), tp="tp")
        >>> both.shape, both["fsdp"].get_group() is mesh.group("pp", "dp")
        ((4, 2), True)
        """
        self._check_member()
        dimensions = parse_dimensions(self.layout, self.rank, axes, merged)
        return self._mesh_groups.device_mesh(self.layout, dimensions)

    # -- text and pickling --------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"{self._mesh_groups.call}{self._path}"

    def __reduce__(self) -> tuple[Any, ...]:
        groups = self._mesh_groups
        root = groups.name, groups.layout, groups.world.name, groups.rank
        return _unpickle, (root, self.layout, self._path)

    def _check_root(self) -> None:
        """Raise LifetimeError for a view or a slice."""
        if self._path:
            raise LifetimeError(
                f"{self!r} is a view or a slice and shares the groups of its mesh. Call the method of that mesh."
            )

    def _join_aborts(self) -> None:
        """Take part in the aborts of the world's meshes."""
        from pgmesh.elastic.aborts import join_aborts

        join_aborts(self._mesh_groups.world)


def abort_with(mesh: ProcessGroupMesh, internal: MeshGroups) -> None:
    """Abort an internal mesh when the mesh that it serves is aborted.

    Raises:
        LifetimeError: it was aborted.
    """
    from pgmesh.elastic import aborts

    aborts.abort_with(mesh._mesh_groups, internal)


def meshes() -> dict[str, ProcessGroupMesh]:
    """The open meshes of this process that have groups, by name, in the order of their first groups.

    The key of an unnamed mesh, and of one in a world beside the default one, is its constructor call. A mesh with
    groups stays open until it is closed, also after the last variable for it is gone.

    >>> import pgmesh
    >>> group = mesh.group("tp")
    >>> pgmesh.meshes()["example"].group("tp") is group
    True
    """
    return {each.title: _root_mesh(each) for world in all_worlds() for each in [*world.with_groups] if not each.ended}


def _tag(tag: object) -> str:
    """A tag as part of a group's identity: the empty string for None."""
    if tag is not None and not isinstance(tag, str):
        raise OptionsError(f"a tag is a string, such as tag='all-gather', not {tag!r}.")
    return tag or ""


def _root_mesh(mesh_groups: MeshGroups) -> ProcessGroupMesh:
    """The root mesh of these groups."""
    mesh = object.__new__(ProcessGroupMesh)
    mesh._set(mesh_groups.layout, mesh_groups)
    return mesh


def _check_in_world(who: str, ranks: Iterable[int], world: int) -> None:
    """Raise RankError for ranks that a world of this size does not have."""
    if foreign := [rank for rank in ranks if rank >= world]:
        raise RankError(f"{who}: the world's ranks are 0 to {world - 1}; there is no rank {format_ranks(foreign)}.")


def _not_a_group(mesh: ProcessGroupMesh) -> str:
    """The message for a mesh in the place of a group."""
    return f"torch takes a process group here, not {mesh!r}.\n\n  {format_call('mesh.group', {}, *mesh.axes)}"


torch_private.not_groups[ProcessGroupMesh] = _not_a_group


def _unpickle(root: tuple[Any, ...], layout: Layout, path: str) -> ProcessGroupMesh:
    """Rebuild a mesh. It uses the open MeshGroups with this identity, or a new one."""
    mesh = object.__new__(ProcessGroupMesh)
    mesh._set(layout, find_mesh_groups(*root), path)
    return mesh
