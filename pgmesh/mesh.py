"""A mesh: a layout, this process's rank in it, and the process groups along its axes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pgmesh._util import missing_attributes
from pgmesh._util.formatting import Text, format_call, format_ranks, other_arguments
from pgmesh._util.validation import Sizes, fill_sizes, fill_sizes_for, parse_ranks, parse_sizes, whole_number
from pgmesh.drawing import plain_text
from pgmesh.errors import AxisError, LifetimeError, MembershipError, OptionsError, PlaceError, ShapeError
from pgmesh.groups.cache import GroupCache, find_cache, living
from pgmesh.groups.world import world_rank_and_size
from pgmesh.layout import Axis, Keep, Layout, Partition, at_call, taken
from pgmesh.options import Timeout, named_timeout, to_timedelta

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from pgmesh.connect.connecting import Connected
    from pgmesh.connect.report import Held, Report, Stats
    from pgmesh.topology.locality import Locality

CONNECT = timedelta(seconds=30)
"""How long ``connect`` waits for the others."""

LONGEST_NAME = 1024
"""Bytes of a mesh's name. It begins keys of the store, and TCPStore closes the connection at a key of 8,192 bytes."""


class ProcessGroupMesh:
    """The ranks of a torch.distributed job in an N-D box, with the process group along any of its axes.

    A mesh is a value: it never changes, and a program holds as many as it likes. Making one sends nothing. Views
    and slices share the groups of the mesh they came from; other meshes never do.

    Args:
        shape: the sizes of numbered axes, outermost first: the last axis varies fastest. Or one mapping of sizes by
            axis, with any names or numbers: ``ProcessGroupMesh({"pp": 2, "dp": -1})``.
        ranks: the ranks to arrange, in this order; the whole world unless given.
        name: what tells this mesh from others on every rank. Unnamed meshes are told apart by their ranks and by
            how many were made on them, so two that are alike need names.
        sizes: the sizes of named axes, outermost first. At most one size is -1: what is left.

    Raises:
        ShapeError: the sizes do not hold the ranks, or the name is none.
        OptionsError: an option of groups in place of a size.
        PlaceError: a rank that the world does not have.
        NameTakenError: a living mesh has this name.
        WorldError: torch.distributed is not initialised.

    >>> mesh = ProcessGroupMesh(pp=2, dp=-1, tp=2, name="actor")
    >>> mesh.shape, mesh.axes, mesh.rank, mesh.coord
    ((2, 2, 2), ('pp', 'dp', 'tp'), 5, (1, 0, 1))
    """

    __slots__ = ("__weakref__", "_answers", "_cache", "_groups", "_part_of", "_parts", "_way", "layout")

    layout: Layout  # where each rank sits, without processes
    _cache: GroupCache
    _part_of: Layout  # the layout whose device mesh ours is a slice of
    _groups: dict[tuple[Axis, ...], ProcessGroup]
    _parts: dict[Any, ProcessGroupMesh]
    _way: tuple[tuple[str, Layout], ...]  # the calls that took it from its mesh: each verb, and the layout it was of
    _answers: dict[Any, Any]  # what was asked before: a mesh and its rank never change

    def __init__(
        self, /, *shape: int | Sizes, ranks: Iterable[int] | None = None, name: str | None = None, **sizes: int
    ) -> None:
        who = "ProcessGroupMesh"
        _, world = world_rank_and_size()
        if name is not None:
            _check_name(who, name)
        given = None if ranks is None else parse_ranks(who, ranks)
        order = range(world) if given is None else given
        ends = (order[0], order[-1]) if isinstance(order, range) else order
        foreign = [rank for rank in dict.fromkeys(ends) if rank >= world]
        if foreign:
            raise PlaceError(
                f"{who}: the world's ranks are 0 to {world - 1}; there is no rank {format_ranks(foreign)}."
            )
        more = other_arguments(given, name=name)
        box = parse_sizes(who, shape, sizes, more, len(order))
        if given is None:
            box = fill_sizes(who, box, world, f"the world has {world}", more=more)
        else:
            box = fill_sizes_for(who, box, order, more)
        layout = Layout.of(box, order)
        self._set(layout, GroupCache(name, layout), way=(), part_of=layout)

    def _set(self, layout: Layout, cache: GroupCache, *, way: tuple[tuple[str, Layout], ...], part_of: Layout) -> None:
        self.layout, self._cache, self._way, self._part_of = layout, cache, way, part_of
        self._groups, self._parts, self._answers = {}, {}, {}
        cache.track(self)

    def forget(self) -> None:
        """Ask the family again for every group: some were let go of."""
        self._groups.clear()

    def _part(self, verb: str, layout: Layout, *, part_of: Layout | None = None) -> ProcessGroupMesh:
        mesh = object.__new__(ProcessGroupMesh)
        mesh._set(layout, self._cache, way=(*self._way, (verb, self.layout)), part_of=part_of or layout)
        return mesh

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, outermost first: names, or numbers where none were given.

        >>> mesh.axes
        ('pp', 'dp', 'tp')
        """
        return self.layout.axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, outermost first: the last axis varies fastest.

        >>> mesh.shape
        (2, 2, 2)
        """
        return self.layout.shape

    @property
    def name(self) -> str | None:
        """What tells this mesh from others on every rank."""
        return self._cache.name

    @property
    def is_closed(self) -> bool:
        """Whether the mesh has ended and makes no more groups: it was closed, or its world ended.

        >>> mesh.is_closed
        False
        """
        return self._cache.ended is not None

    def shares_groups(self, other: ProcessGroupMesh) -> bool:
        """Whether another mesh has the same groups: one is a view or a slice of the other, or both are of a third.

        >>> mesh.shares_groups(mesh.at(pp=1)), mesh.shares_groups(ProcessGroupMesh(8, name="other"))
        (True, False)
        """
        return self._cache is other._cache

    @property
    def rank(self) -> int:
        """This process's rank in the world, in the mesh or not.

        >>> mesh.rank, mesh.rank in mesh, mesh.rank in mesh.at(pp=0)
        (5, True, False)
        """
        return self._cache.rank

    @property
    def coord(self) -> tuple[int, ...] | None:
        """This rank's place on every axis; None where the rank is not in the mesh.

        >>> mesh.coord, mesh.at(pp=0).coord
        ((1, 0, 1), None)
        """
        return self.layout.coord_of(self.rank) if self.rank in self.layout else None

    def size(self, *axes: Axis) -> int:
        """How many ranks along these axes; along none, how many in all.

        Raises:
            AxisError: there is no such axis, or it is named twice.

        >>> mesh.size("dp", "tp"), mesh.size()
        (4, 8)
        """
        try:
            size: int = self._answers["size", axes]
        except (KeyError, TypeError):
            size = self._answers["size", axes] = self.layout.size(*axes)
        return size

    def index(self, *axes: Axis) -> int:
        """This rank's place along these axes, which is its rank inside the group along them.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            MembershipError: this rank is not in the mesh.

        >>> mesh.index("dp", "tp"), mesh.index("pp")
        (1, 1)
        """
        try:
            index: int = self._answers["index", axes]
        except (KeyError, TypeError):
            self._check_member()
            index = self._answers["index", axes] = self.layout.index_of(self.rank, *axes)
        return index

    def ranks(self, *axes: Axis) -> tuple[int, ...]:
        """The ranks that share this rank's group along these axes, in the order of the mesh; along none, all.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            MembershipError: this rank is not in the mesh, and so in no block of it.

        >>> mesh.ranks("dp", "tp"), mesh.ranks("pp")
        ((4, 5, 6, 7), (1, 5))
        """
        if not axes:
            return self.layout.ranks()
        self._check_member()
        return self.layout.block_of(self.rank, *axes)

    def label(self) -> str:
        """This rank's place as a word for logs and file names.

        >>> mesh.label()
        'pp1-dp0-tp1'
        """
        self._check_member()
        return self.layout.label_of(self.rank)

    def partition(self, *axes: Axis) -> Partition:
        """Every block along these axes. They tile the mesh; none is made before it is looked at.

        >>> mesh.partition("tp")
        ((0, 1), (2, 3), (4, 5), (6, 7))
        """
        return self.layout.partition(*axes)

    def rank_of(self, coord: tuple[int, ...]) -> int:
        """The rank at a coord; the inverse of ``coord_of``.

        Raises:
            PlaceError: there is no such place.

        >>> mesh.rank_of((1, 0, 1))
        5
        """
        return self.layout.rank_of(coord)

    def coord_of(self, rank: int) -> tuple[int, ...]:
        """The place of a rank on every axis; the inverse of ``rank_of``.

        Raises:
            PlaceError: the rank is not in the mesh.

        >>> mesh.coord_of(6)
        (1, 1, 0)
        """
        return self.layout.coord_of(rank)

    def neighbor(self, axis: Axis, step: int = 1, *, wrap: bool = False) -> int | None:
        """The rank so many steps on along an axis; None past the edge.

        Args:
            step: how many indices on; negative for back.
            wrap: go round, as a ring does, in place of None.

        Raises:
            AxisError: there is no such axis.
            MembershipError: this rank is not in the mesh.

        >>> mesh.neighbor("pp", -1), mesh.neighbor("pp", +1), mesh.neighbor("pp", +1, wrap=True)
        (1, None, 1)
        """
        try:
            rank: int | None = self._answers["neighbor", axis, type(step), step, wrap]
        except (KeyError, TypeError):
            self._check_member()
            rank = self.layout.neighbor_of(self.rank, axis, step, wrap=wrap)
            if type(step) is int:  # others change in place (tensors)
                self._answers["neighbor", axis, type(step), step, wrap] = rank
        return rank

    def __iter__(self) -> Iterator[int]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def __contains__(self, rank: object) -> bool:
        return rank in self.layout

    # -- groups -------------------------------------------------------------------------------------------------

    def group(self, *axes: Axis, **options: Any) -> ProcessGroup:
        """The process group of this rank's block along these axes: made on the first call, the same ever after.

        It waits for nobody: any rank asks at any time, in any order, whether or not the others have. A rank
        outside the block does nothing and need not call. Ranks stand in the group in the order of the mesh.
        Only a backend that cannot be made member by member (MPI, torchcomms, one of your own) is different: its
        groups come from torch's new_group, which every rank of the world has to call, in one order.

        Args:
            axes: which; none for the whole mesh. Their order makes no difference.
            options: as in ``GroupOptions``. What differs from what was configured makes another group:
                ``backend="gloo"`` is the CPU twin. And ``tag=``, a word that makes this a communicator of its own
                on the same ranks.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            MembershipError: this rank is not in the mesh.
            MismatchError: another rank described this mesh or this group differently.
            OptionsError: options that the backend cannot honour.
            LifetimeError: the mesh is closed.

        >>> mesh.group("dp", "tp").size(), mesh.group("dp", "tp") is mesh.group("tp", "dp")
        (4, True)
        >>> mesh.group("dp", tag="all-gather") is mesh.group("dp")
        False
        """
        if not options:  # the hot path: what was answered before is remembered
            try:
                return self._groups[axes]
            except (KeyError, TypeError):  # or it is no axis, which is told below
                pass
        self._check_member()
        if options:
            return self._cache.group(self.layout, axes, _tag(options.pop("tag", None)), options)
        with self._cache.lock:  # so that no release comes between
            return self._groups.setdefault(axes, self._cache.group(self.layout, axes, "", {}))

    def group_of(self, ranks: Iterable[int], *, tag: str | None = None, **options: Any) -> ProcessGroup:
        """The process group of any ranks of the mesh; the members alone call, in any order.

        Args:
            ranks: the members, this rank among them. They stand in the group in the order of the mesh.
            tag: a word that makes this a communicator of its own on the same ranks.
            options: as in ``GroupOptions``.

        Raises:
            PlaceError: a rank that the mesh does not have, or that is named twice.
            MembershipError: this rank is not among them.

        >>> import torch.distributed as dist
        >>> dist.get_process_group_ranks(mesh.group_of([5, 0, 3]))
        [0, 3, 5]
        """
        return self._cache.group_of(self._members(ranks), _tag(tag), options)

    def _members(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Ranks of the mesh in its order, this rank among them."""
        try:
            members = tuple(sorted(map(whole_number, ranks), key=self.layout.coord_of))
        except TypeError:
            raise PlaceError(f"ranks are whole numbers, such as [0, 3], not {ranks!r}.") from None
        if len(set(members)) != len(members):
            raise PlaceError(f"each rank is named once, but {list(members)} names one twice.")
        if not members:
            raise PlaceError("there is no rank to make a group of; ranks is empty.")
        if self.rank not in members:
            raise MembershipError(
                f"rank {self.rank} asked for the group of ranks {format_ranks(members)}, of which it is no member.\n\n"
                f"  if mesh.rank in ranks: mesh.group_of(ranks)   # members alone call"
            )
        return members

    def configure(self, *axes: Axis, tag: str | None = None, **options: Any) -> None:
        """Set what the group along these axes will be made with; the owner of the axes does, before the first use.

        Args:
            axes: which; none for the group of the whole mesh.
            tag: which of the communicators on these ranks.
            options: as in ``GroupOptions``; those not given stay as they were, in the end as the world has them.

        Raises:
            OptionsError: no such option, or it is too late: the group was made.

        >>> mesh.configure("pp", timeout=600)
        """
        self._cache.configure(self.layout, axes, _tag(tag), options)

    def set_timeout(self, *axes: Axis, timeout: Timeout | None = None) -> None:
        """Change how long collectives of groups that were made may wait, from the next one on, on this rank.

        The group object stays the same. Every member sets its own. Use ``configure`` for groups that are not made yet.

        Args:
            axes: of the groups along these axes, twins and tagged ones too; none for every group whose ranks are all
                in this mesh, its views and slices.
            timeout: a timedelta or a number of seconds. Always given, by name.

        Raises:
            MembershipError: this rank is not in the mesh.
            OptionsError: no timeout, one that is not more than 0, or no group along these axes was made yet.

        >>> group = mesh.group("tp")
        >>> mesh.set_timeout("tp", timeout=120)
        >>> mesh.group("tp") is group
        True
        """
        self._check_member()
        limit = named_timeout("mesh", axes, timeout, of="axes", known=self.axes)
        if axes:
            block = self.layout.block_of(self.rank, *axes)
            if not self._cache.set_timeout(limit, lambda ranks: ranks == block):
                words = ", ".join([*map(repr, axes), f"timeout={limit.total_seconds():g}"])
                raise OptionsError(
                    f"this rank has no group along {', '.join(map(str, axes))} yet, whose timeout could be changed.\n\n"
                    f"  mesh.configure({words})   # on every member: the group is made so"
                )
        else:
            self._cache.set_timeout(limit, frozenset(self.layout.ranks()).issuperset)

    def adopt(self, axis: Axis, group: ProcessGroup) -> None:
        """Take a group that was made elsewhere for the one along an axis; it is never destroyed from here.

        Args:
            axis: which.
            group: a process group of torch, of the ranks of this rank's block, in the order of the mesh.

        Raises:
            LifetimeError: another group was made or adopted there.
            MembershipError: this rank is not in the mesh.
            OptionsError: the axis was configured, which this group does not follow.
            PlaceError: the group's ranks are not those of this rank's block.
        """
        self._check_member()
        if hasattr(axis, "group_name"):
            raise PlaceError(f"adopt takes an axis and then a group.\n\n  mesh.adopt({group!r}, group)")
        self._cache.adopt(self.layout, (axis,), group)

    def connect(self, *axes: Axis | tuple[Axis, ...], timeout: Timeout = CONNECT, progress: bool = False) -> Connected:
        """Connect and warm groups now, with all their members, or say within seconds who is missing and why.

        The one verb that waits for others: each member of each group calls it, in any order. It compares what they
        mean by the mesh and its groups, and runs the smallest collective on each group, so that memory is taken now.
        What one member gives up is given up for all; calling again tries again. What is connected stays so, and is
        not met again.

        Args:
            axes: the axes of each group: "tp", or ("dp", "tp") for one along two. Each axis, if none are given.
            timeout: how long to wait for the others: a timedelta or a number of seconds.
            progress: show a bar.

        Raises:
            OptionsError: a timeout that is not more than 0.
            MissingRanksError: members that did not come, each with what it is doing; or that were lost.
            MismatchError: ranks mean different things, each value with its ranks.
            CircleError: ranks that wait for each other, each with its group and line.
            WorldError: the store does not answer.

        >>> print(mesh.connect("tp", ("dp", "tp")))            # in a dry world there is nobody to meet
        0 store operations
        """
        self._check_member()
        seconds = to_timedelta(timeout).total_seconds()
        for each in axes:
            if isinstance(each, (list, set)):
                raise AxisError(
                    f"a family is an axis or a tuple of axes, not the {type(each).__name__} {each!r}.\n\n"
                    f"  mesh.connect({tuple(each)})   # one group along all of them\n"
                    f"  mesh.connect(*{tuple(each)})  # a group along each"
                )
        from pgmesh.connect.connecting import connect

        combinations = [each if isinstance(each, tuple) else (each,) for each in axes or self.axes]
        return connect(self._cache, self.layout, combinations, seconds, progress=progress)

    def locality(self, *axes: Axis, timeout: Timeout = CONNECT) -> Locality:
        """How the groups along these axes lie on the hosts: each inside one, each rank on another, or mixed.

        The ranks say themselves where they are, once in a world: every rank of the mesh calls it, in any order.

        Args:
            axes: which; none for the group of the whole mesh.
            timeout: how long to wait for the others: a timedelta or a number of seconds.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            MembershipError: this rank is not in the mesh.
            OptionsError: a timeout that is not more than 0.
            MissingRanksError: some did not call it in time.
            WorldError: the store does not answer.

        >>> mesh.locality("tp").kind                           # a dry world is this process, on one host
        'intra'
        """
        self._check_member()
        self._cache.check()
        self.layout.size(*axes)
        from pgmesh.topology.host_mapping import place

        return place(self.layout.ranks(), timeout=timeout).spread(self.layout, *axes)

    def report(self) -> Report:
        """What this rank holds of the mesh, and what every other rank of it last said. Print it.

        Any thread may ask at any time, also from a debugger while another thread hangs; it waits a second at most.

        >>> mesh.group("tp")                                   # doctest: +ELLIPSIS
        <torch.distributed...
        >>> print(mesh.report())                               # doctest: +ELLIPSIS
        rank 5 of ProcessGroupMesh(pp=2, dp=2, tp=2, name='example') holds 1 group:
          group tp of mesh 'example': ranks 4, 5; created, at ...
        last status of the other ranks:
          none
        """
        from pgmesh.connect.report import report

        return report(self._cache)

    def report_on(self, number: int) -> None:
        """Print the report to stderr whenever this signal comes: ``mesh.report_on(signal.SIGUSR1)``.

        It is printed by a thread, so also while the main thread waits for a collective that hangs.

        Raises:
            LifetimeError: this is not the main thread, which alone may take signals.
        """
        from pgmesh.connect.report import print_on, report

        cache = weakref.ref(self._cache)
        print_on(number, lambda: report(there) if (there := cache()) else "a mesh that is gone")

    def held(self) -> tuple[Held, ...]:
        """The groups that this rank holds of this mesh, its views and slices.

        >>> group = mesh.group("tp")
        >>> [(held.ranks, held.used) for held in mesh.held()]
        [((4, 5), None)]
        """
        from pgmesh.connect.report import held

        return held(self._cache)

    def stats(self) -> Stats:
        """Counts of this mesh, its views and slices on this rank.

        >>> mesh.stats().groups, mesh.stats().operations
        (0, 0)
        """
        from pgmesh.connect.report import stats

        return stats(self._cache)

    def release(self, *axes: Axis, ranks: Iterable[int] | None = None) -> None:
        """Destroy this rank's groups along these axes, tagged ones and twins too, with all they hold.

        Every member releases; none waits for the others. A group asked for afterwards is a new one, with a name
        that was never used.

        Args:
            axes: which; none for the group of the whole mesh.
            ranks: in place of axes, the ranks that ``group_of`` was given.

        Raises:
            MembershipError: this rank is not in the mesh, or not among the ranks.

        >>> old = mesh.group("dp")
        >>> mesh.release("dp")
        >>> mesh.group("dp") is old
        False
        """
        self._check_member()
        if ranks is None:
            self._cache.release(self.layout.block_of(self.rank, *axes))
        elif axes:
            raise AxisError(f"release either axes ({', '.join(map(str, axes))}) or ranks, not both at once.")
        else:
            self._cache.release(self._members(ranks))

    def close(self) -> None:
        """Destroy every group of this mesh, its views and slices; they go on to know every rank's place.

        Closing twice, or after torch.distributed was destroyed, does nothing.

        Raises:
            LifetimeError: this is a view or a slice, whose groups belong to the mesh it came from.
        """
        self._check_root()
        self._cache.close()

    def __enter__(self) -> ProcessGroupMesh:
        self._check_root()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- smaller, and read with other axes ----------------------------------------------------------------------

    def at(self, fixed: Mapping[Axis, Keep] | None = None, /, **indices: Keep) -> ProcessGroupMesh:
        """The part of this mesh at these indices, sharing its groups.

        Args:
            fixed: the same as ``indices``, for numbered axes: ``at({0: 1})``.
            indices: for each axis one index, which fixes and drops it, or a slice or indices to keep of it.
                Negative ones count from the end; an index that is named twice counts once.

        Raises:
            AxisError: there is no such axis.
            PlaceError: there is no such index.
            ShapeError: nothing is left.

        >>> mesh.at(pp=1)
        ProcessGroupMesh(pp=2, dp=2, tp=2, name='example').at(pp=1)
        >>> mesh.at(pp=[0, -1]).ranks("pp")             # first and last stage: tied embeddings
        (1, 5)
        """
        seen = None if fixed is not None else _plain(indices)
        if seen in self._parts:
            return self._parts[seen]
        layout = self.layout.at(fixed, **indices)
        if ("at", layout) not in self._parts:
            only_fixes = len(layout.axes) + len(fixed or ()) + len(indices) == len(self.axes)
            through_me = only_fixes and self.rank in layout
            self._parts["at", layout] = self._part("at", layout, part_of=self._part_of if through_me else None)
        if seen is not None:
            self._parts[seen] = self._parts["at", layout]
        return self._parts["at", layout]

    def along(self, *axes: Axis) -> ProcessGroupMesh:
        """The slice through this rank along these axes: the others fixed where it is. ``mesh[axes]`` is the same.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            MembershipError: this rank is not in the mesh.

        >>> mesh.along("dp", "tp").ranks(), mesh["dp", "tp"] is mesh.along("dp", "tp")
        ((4, 5, 6, 7), True)
        """
        try:
            return self._parts[axes]
        except (KeyError, TypeError):  # or it is no axis, which is told below
            self._check_member()
            layout = self.layout.along(self.rank, *axes)
            if layout == self.layout:
                return self
            return self._parts.setdefault(axes, self._part("along", layout, part_of=self._part_of))

    def __getitem__(self, axes: Axis | tuple[Axis, ...]) -> ProcessGroupMesh:
        return self.along(*axes) if isinstance(axes, tuple) else self.along(axes)

    def view(self, /, *shape: int | Sizes, **sizes: int) -> ProcessGroupMesh:
        """The same ranks in the same order, read with other axes, sharing the groups: split, merged or both.

        Args:
            shape: the new sizes, for numbered axes, or one mapping of sizes by axis.
            sizes: the new sizes by name. At most one size is -1: what is left.

        Raises:
            ShapeError: the sizes do not hold the ranks, or would cut an uneven slice.
            OptionsError: an option of groups in place of a size.

        >>> moe = mesh.view(pp=2, edp=1, ep=4)
        >>> moe.group("ep") is mesh.group("dp", "tp")
        True
        >>> fsdp = mesh.along("pp", "tp").view(fsdp=4)         # one axis of two that do not touch
        >>> fsdp.group("fsdp") is mesh.group("pp", "tp")
        True
        """
        layout = self.layout.view(*shape, **sizes)
        if ("view", layout) not in self._parts:
            self._parts["view", layout] = self._part("view", layout)
        return self._parts["view", layout]

    # -- torch's DeviceMesh -------------------------------------------------------------------------------------

    def device_mesh(self, *axes: Axis) -> DeviceMesh:
        """torch's DeviceMesh along these axes, over the very groups of this mesh; torch makes none of its own.

        All of them are slices of one DeviceMesh for the whole mesh, as FSDP with tensor parallelism needs. Its
        axes stand in the order of the mesh, in whatever order they are asked for.

        Args:
            axes: which; none for all.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            MembershipError: this rank is not in the mesh.

        >>> mesh.device_mesh("dp", "tp").get_group("tp") is mesh.group("tp")
        True
        """
        self._check_member()
        names = tuple(str(axis) for axis in self.layout.along(self.rank, *axes).axes)
        return self._cache.device_mesh(self._part_of, names)

    def adopt_device_mesh(self, device_mesh: DeviceMesh) -> None:
        """Return slices of this DeviceMesh from ``device_mesh`` from now on. Its groups were adopted before.

        Args:
            device_mesh: torch's, with the ranks and the axes of this mesh.

        >>> mesh.adopt_device_mesh(mesh.device_mesh())
        """
        self._check_member()
        self._cache.adopt_device_mesh(self.layout, device_mesh)

    # -- text and travel ----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        layouts = [*(layout for _, layout in self._way), self.layout]
        calls = map(_call_of, (verb for verb, _ in self._way), layouts, layouts[1:])
        return self._cache.call + "".join(calls)

    def __str__(self) -> str:
        return plain_text.text(self.layout, mark=self.rank)

    def _repr_html_(self) -> str:
        from pgmesh.drawing import svg  # for notebooks alone

        return svg.of(self.layout, mark=self.rank)

    def __reduce__(self) -> tuple[Any, ...]:
        root = (self._cache.name, self._cache.number, self._cache.layout, self._cache.call, self._cache.rank)
        return _revive, (root, self.layout, self._way, self._part_of)

    def _check_root(self) -> None:
        if self._way:
            raise LifetimeError(
                f"{self!r} is a view or a slice and shares the groups of its mesh: close that one, or\n\n"
                f"  release({', '.join(map(repr, self.axes[:1]))})   # to let go of the groups along an axis"
            )

    def _check_member(self) -> None:
        if self.rank not in self.layout:
            raise MembershipError(
                f"rank {self.rank} is not in {self!r}, so it has no place and no group there.\n\n"
                f"  if mesh.rank in mesh: ...   # ask first"
            )


def meshes() -> dict[str, ProcessGroupMesh]:
    """The living meshes of this process by name, in the order in which they were made; unnamed ones by their call.

    Where one call made several, all but the first have a number after it. A mesh that holds groups lives until it is
    closed, also when no variable holds it any more.

    >>> import pgmesh
    >>> pgmesh.meshes()["example"].group("tp") is mesh.group("tp")
    True
    """
    found: dict[str, ProcessGroupMesh] = {}
    for key, cache in living().items():
        found[key] = mesh = object.__new__(ProcessGroupMesh)
        mesh._set(cache.layout, cache, way=(), part_of=cache.layout)
    return found


def _check_name(who: str, name: object) -> None:
    if not (isinstance(name, str) and name and name.isprintable() and "/" not in name):
        raise ShapeError(f"{who}: a name is a word without '/', such as name='actor', not {name!r}.")
    size = len(name.encode())
    if size > LONGEST_NAME:
        raise ShapeError(
            f"{who}: a name has at most {LONGEST_NAME:,} bytes in UTF-8, and {name[:16]!r}... has {size:,}."
        )


def _plain(indices: Mapping[str, Keep]) -> tuple[object, ...] | None:
    """What is asked for as a key to remember the answer by; None unless it is all plain ints, which equal no others."""
    key: list[object] = [...]  # which no axis is called
    for axis, keep in indices.items():
        parts = (keep.start, keep.stop, keep.step) if type(keep) is slice else keep
        if type(parts) is int:
            key += axis, parts
        elif type(parts) in (list, tuple) and _PLAIN.issuperset(map(type, parts)):  # type: ignore[arg-type]
            key += axis, type(keep), *parts  # type: ignore[misc]
        else:
            return None
    return tuple(key)


_PLAIN = frozenset({int, type(None)})

_OF_LAYOUT = {name: f"mesh.layout.{name}" for name in missing_attributes.public(Layout)}
missing_attributes.answer(ProcessGroupMesh, "mesh", {**_OF_LAYOUT, **missing_attributes.MESH})


def _tag(tag: object) -> str:
    """A tag as part of what a group is; none is the empty one."""
    if tag is not None and not isinstance(tag, str):
        raise OptionsError(f"a tag is a word, such as tag='all-gather', not {tag!r}.")
    return tag or ""


def _call_of(verb: str, before: Layout, after: Layout) -> str:
    """The call that takes one layout from another, as text."""
    if verb == "along":
        return f".along({', '.join(map(repr, after.axes))})"
    if verb == "view":
        return format_call(".view", dict(zip(after.axes, after.shape)))
    return "." + at_call({axis: Text(_kept(keep)) for axis, keep in taken(before, after).items()})


def _kept(keep: int | range | tuple[int, ...]) -> str:
    """An index, or the indices that are kept of an axis, as text."""
    if isinstance(keep, tuple):
        return f"[{format_ranks(keep, 32)}]"
    if isinstance(keep, int):
        return str(keep)
    end = keep[-1] + (1 if keep.step > 0 else -1)
    ends = f"{keep[0]}, {end if end >= 0 else None}"
    return f"slice({ends})" if keep.step == 1 else f"slice({ends}, {keep.step})"


def _revive(
    root: tuple[Any, ...], layout: Layout, way: tuple[tuple[str, Layout], ...], part_of: Layout
) -> ProcessGroupMesh:
    """A mesh that travelled: of its family where that lives here, else of one made anew."""
    mesh = object.__new__(ProcessGroupMesh)
    cache = find_cache(*root)
    if cache.rank != root[-1]:  # along its own rank is another slice
        way = tuple(("at" if verb == "along" else verb, before) for verb, before in way)
    mesh._set(layout, cache, way=way, part_of=part_of)
    return mesh
