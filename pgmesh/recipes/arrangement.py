"""Arrangement and Family: the process groups of a training framework, such as Megatron-Core, by its own names.

A *family* is a named set of groups along axes of one mesh. That mesh is the dense mesh, the expert mesh, or a view or
slice of either. A *block* is the ranks of one group along the axes; with ``pick``, a group has only some of them. An
*arrangement* has one or two meshes over the same ranks, and families by name. With a Layout in place of a
ProcessGroupMesh, both have ranks and no processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Union

from pgmesh._util.suggestions import closest_name, did_you_mean
from pgmesh.drawing.styled_text import columns, plain, ranks_in
from pgmesh.errors import AxisError, MembershipError, ShapeError, WorldError
from pgmesh.layout import Axis, Layout
from pgmesh.options import GroupOptions, Timeout, named_timeout
from pgmesh.recipes import nccl

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pgmesh.connect.connecting import Connected
    from pgmesh.mesh import ProcessGroupMesh

Mesh = Union[Layout, "ProcessGroupMesh"]
"""The mesh of an arrangement: a Layout in a plan, otherwise a mesh with groups."""

Pick = Callable[[list[int]], Sequence[int]]
"""A function that selects ranks of a block, at least one, in the order of the group. Repetitions are ignored."""


@dataclass(frozen=True, eq=False)
class Family:
    """All groups along one combination of axes of a mesh, seen from one rank.

    Args:
        name: name of the family in the arrangement.
        mesh: the mesh.
        axes: the axes; empty for all axes.
        rank: the rank to which ``ranks``, ``index``, ``group`` and the like refer; None in a plan.
        pick: selects the ranks of each group from its block, and their order. Default: all ranks, in mesh order.

    >>> from pgmesh import recipes
    >>> tensor = recipes.megatron(8, tp=2, pp=2)["tensor"]         # on rank 5
    >>> tensor.ranks, tensor.size, tensor.index, tensor.source, tensor.group().size()
    ((4, 5), 2, 1, 4, 2)
    """

    name: str
    mesh: Mesh
    axes: tuple[Axis, ...]
    rank: int | None = None
    pick: Pick | None = None

    def __post_init__(self) -> None:
        if self.pick is not None:
            self._select_ranks(self.layout.partition(*self.axes)[0])  # raises at once if the function is invalid

    @property
    def layout(self) -> Layout:
        """The layout of the mesh."""
        return self.mesh if isinstance(self.mesh, Layout) else self.mesh.layout

    # -- all ranks ----------------------------------------------------------------------------------------------

    def partition(self) -> Sequence[tuple[int, ...]]:
        """The ranks of every group.

        >>> from pgmesh import Layout, recipes
        >>> recipes.megatron(8, tp=2, pp=2, of=Layout)["tensor"].partition()
        ((0, 1), (2, 3), (4, 5), (6, 7))
        """
        blocks = self.layout.partition(*self.axes)
        return blocks if self.pick is None else tuple(map(self._select_ranks, blocks))

    def block_of(self, rank: int) -> tuple[int, ...]:
        """All ranks in the same group as ``rank``, in mesh order or in the order of ``pick``.

        Raises:
            MembershipError: the rank has no group in this family.
        """
        if rank not in self:
            raise MembershipError(
                f"rank {rank} has no {self.name!r} group in this arrangement.\n\n"
                f"  if rank in arrangement[{self.name!r}]: ...   # check first"
            )
        return self._select_ranks(self.layout.block_of(rank, *self.axes))

    def __contains__(self, rank: Any) -> bool:
        """True if the rank has a group in this family. Never raises."""
        if self.pick is None or rank not in self.layout:
            return rank in self.layout
        return rank in self._select_ranks(self.layout.block_of(rank, *self.axes))

    def _select_ranks(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of a block that ``pick`` selects."""
        if self.pick is None:
            return block
        chosen, known = list(self.pick(list(block))), {rank: rank for rank in block}
        if not chosen or not set(chosen) <= set(block):
            raise ShapeError(
                f"the function for {self.name!r} must return at least one of the ranks of each pipeline: for "
                f"{list(block)} it returned {chosen}."
            )
        return tuple(dict.fromkeys(known[rank] for rank in chosen))

    # -- own group ----------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's group, in mesh order or in the order of ``pick``.

        Raises:
            MembershipError: this rank has no group in this family, or a plan has no rank.
        """
        if self.rank is None:
            raise MembershipError(
                "a plan has no rank, so it has no group of this rank.\n\n"
                f"  arrangement.seen_by(0)[{self.name!r}]   # of rank 0\n"
                f"  arrangement[{self.name!r}].partition()   # of every rank"
            )
        return self.block_of(self.rank)

    @property
    def size(self) -> int:
        """Number of ranks of a group."""
        return self.layout.size(*self.axes) if self.pick is None else len(self.ranks)

    @property
    def index(self) -> int:
        """Index of this rank in its group.

        Raises:
            MembershipError: this rank has no group in this family.
        """
        return self.ranks.index(self.rank)

    @property
    def first(self) -> int:
        """The first rank of this rank's group."""
        return self.ranks[0]

    @property
    def last(self) -> int:
        """The last rank of this rank's group."""
        return self.ranks[-1]

    @property
    def source(self) -> int:
        """Source of broadcasts in this rank's group: its first rank, as a rank of the world."""
        return self.first

    def next(self, *, wrap: bool) -> int | None:
        """The next rank in the group. After the last rank: the first one with ``wrap``, otherwise None.

        >>> from pgmesh import recipes
        >>> pipeline = recipes.megatron(8, tp=2, pp=2)["pipeline"]     # on rank 5
        >>> pipeline.next(wrap=True), pipeline.next(wrap=False), pipeline.previous(wrap=False)
        (1, None, 1)
        """
        return self._neighbor(+1, wrap)

    def previous(self, *, wrap: bool) -> int | None:
        """The previous rank in the group. Before the first rank: the last one with ``wrap``, otherwise None."""
        return self._neighbor(-1, wrap)

    def _neighbor(self, step: int, wrap: bool) -> int | None:
        ranks, index = self.ranks, self.index + step
        return ranks[index % len(ranks)] if wrap or 0 <= index < len(ranks) else None

    def is_first(self, *, chunk: int = 0) -> bool:
        """True if this rank has the first stage: it is the first of its group, and ``chunk`` is its first chunk.

        Args:
            chunk: number of the chunk on this rank, if ranks have several chunks of the model.
        """
        return self.index == 0 and chunk == 0

    def is_last(self, *, chunk: int = 0, chunks: int = 1) -> bool:
        """True if this rank has the last stage: it is the last of its group, and ``chunk`` is its last chunk.

        Args:
            chunk: number of the chunk on this rank, if ranks have several chunks of the model.
            chunks: number of chunks of each rank.
        """
        return self.index == self.size - 1 and chunk == chunks - 1

    # -- groups -------------------------------------------------------------------------------------------------

    def group(self, **options: Any) -> ProcessGroup:
        """The process group of this rank, created by ``mesh.group`` on the first call.

        Args:
            options: as for ``mesh.group``: ``backend="gloo"`` is a second group of the same ranks, on Gloo;
                ``tag="all-gather"`` is a separate communicator.

        Raises:
            MembershipError: this rank has no group in this family.
            WorldError: this is a plan, which has no processes.
        """
        return self.mesh_of_mine().group(*self.axes, **options)

    def along(self) -> ProcessGroupMesh:
        """The slice of the mesh with the axes and the ranks of this rank's group. It has ``device_mesh()``.

        >>> from pgmesh import recipes
        >>> recipes.olmo(8, dp_replicate=2, tp=2)["model"].along()     # on rank 5
        ProcessGroupMesh(dp_replicate=2, dp_shard=2, tp=2).along('dp_replicate', 'dp_shard')
        """
        return self.mesh_of_mine().along(*self.axes)

    def configure(self, *, tag: str | None = None, sharp: bool | None = None, **options: Any) -> None:
        """Set options of this rank's group before it is created, as ``mesh.configure``. A plan only checks them.

        Args:
            tag: the tag of the group.
            sharp: use InfiniBand SHARP, reduction in the switches, if available: NCCL's ``collnet_enable``. Untested.
            options: as in ``GroupOptions``.

        Raises:
            OptionsError: the option does not exist, or the group already exists.
        """
        if sharp is not None:
            options["nccl"] = {**(options.get("nccl") or {}), "collnet_enable": int(sharp)}
        GroupOptions.of(options)
        if not isinstance(self.mesh, Layout) and self.rank in self:
            self.mesh_of_mine().configure(*self.axes, tag=tag, **options)

    def mesh_of_mine(self) -> ProcessGroupMesh:
        """The mesh, or a slice of it, in which this rank's group is the block along the axes."""
        if isinstance(self.mesh, Layout):
            raise WorldError(
                "a plan has no processes, so it has no groups.\n\n"
                "  recipes.megatron(8, tp=2)   # without of=Layout, in each of 8 processes"
            )
        ranks = self.ranks
        if self.rank != self.mesh.rank:
            raise MembershipError(
                f"rank {self.mesh.rank} asked for the {self.name!r} group of rank {self.rank}, but a process creates "
                f"only groups of its own rank."
            )
        if self.pick is None:
            return self.mesh
        (axis,) = self.axes
        block = self.layout.block_of(self.mesh.rank, axis)
        return self.mesh.at({axis: [block.index(rank) for rank in ranks]})


@dataclass(frozen=True, eq=False)
class Arrangement:
    """One or two meshes over the same ranks, with families of groups by name. It prints as a table.

    Args:
        call: the call of the recipe, as text.
        order: the order of the ranks, as text.
        dense: the mesh for all layers but experts.
        expert: a view of the mesh for experts, or None.
        meanings: a pair ``(mesh, names)`` for each mesh, dense first. ``names`` maps names, such as "data", to axes.
            Names of one mesh can be joined by ``+``: "tensor+data" is the family along both axes.
        families: the families by name.
        rank: the rank to which groups refer; None in a plan.
        short: the system's short names for families, as used in its settings.

    >>> from pgmesh import Layout, recipes
    >>> print(recipes.fairscale(8, tp=2, pp=2, of=Layout).seen_by(5))
    recipes.fairscale(8, tp=2, pp=2)
    the last axis varies fastest: dp, pp, cp, tp
    dense   dp=2 pp=2 cp=1 tp=2
    <BLANKLINE>
    group     axes  size  blocks  of rank 5
    tensor    tp       2       4  4, 5
    context   cp       1       8  5
    pipeline  pp       2       4  5, 7
    data      dp       2       4  1, 5
    """

    call: str
    order: str
    dense: Mesh
    expert: Mesh | None
    meanings: Sequence[tuple[Mesh, Mapping[str, Axis]]]
    families: Mapping[str, Family]
    rank: int | None
    short: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        call: str,
        order: str,
        meanings: Sequence[tuple[Mesh, Mapping[str, Axis]]],
        families: Iterable[str | Family],
        short: Mapping[str, Sequence[str]] | None = None,
    ) -> Arrangement:
        """An arrangement of one or two meshes, dense and expert, seen from the rank of this process.

        Args:
            call: as for the class.
            order: as for the class.
            meanings: as for the class; the dense mesh first.
            families: ``Family`` objects, or names such as "tensor" or "tensor+data".
            short: as for the class.
        """
        dense, expert = meanings[0][0], meanings[1][0] if len(meanings) > 1 else None
        rank = None if isinstance(dense, Layout) else dense.rank
        found: dict[str, Family] = {}
        made = cls(call, order, dense, expert, meanings, found, rank, short or {})
        for each in families:
            family = made[each] if isinstance(each, str) else dataclasses.replace(each, rank=rank)
            found[family.name] = family
        return made

    def seen_by(self, rank: int) -> Arrangement:
        """The same arrangement, seen from another rank. A plan has no rank before this call.

        Raises:
            RankError: the rank is not in the arrangement.

        >>> from pgmesh import Layout, recipes
        >>> recipes.megatron(8, tp=2, pp=2, of=Layout).seen_by(5)["pipeline"].ranks
        (1, 5)
        """
        (self.dense if isinstance(self.dense, Layout) else self.dense.layout).coord_of(rank)
        seen = {name: dataclasses.replace(family, rank=rank) for name, family in self.families.items()}
        return dataclasses.replace(self, families=seen, rank=rank)

    # -- by name ------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Family:
        """The family of a name. Words of the same mesh can be joined by ``+`` in any order.

        Raises:
            AxisError: the family does not exist.

        >>> from pgmesh import Layout, recipes
        >>> plan = recipes.megatron(8, tp=2, pp=2, of=Layout).seen_by(5)
        >>> plan["tensor+data"].ranks, plan["pipeline+context+data"].ranks
        ((4, 5, 6, 7), (1, 3, 5, 7))
        """
        if name in self.families:
            return self.families[name]
        asked = sorted(str(name).split("+"))
        for known in self.families:
            if sorted(known.split("+")) == asked:
                return self.families[known]
        for mesh, axes in self.meanings:
            if len(set(asked)) == len(asked) and all(word in axes for word in asked):
                return Family(name, mesh, tuple(axes[word] for word in name.split("+")), self.rank)
        along = [known for known, family in self.families.items() if family.axes == (name,)]
        close = next(iter([*self.short.get(name, ()), *along]), closest_name(name, self.families))
        raise AxisError(f"{self.call} has no group {name!r}.{did_you_mean(close)} It has {', '.join(self.families)}.")

    def __iter__(self) -> Iterator[str]:
        return iter(self.families)

    def __len__(self) -> int:
        return len(self.families)

    # -- several families ---------------------------------------------------------------------------------------

    def configure(self, *names: str, sharp: bool | None = None, **options: Any) -> None:
        """Set options of groups before they are created. A plan only checks them.

        Args:
            names: the families; all if empty.
            sharp: as in ``Family.configure``.
            options: as in ``GroupOptions``.

        Raises:
            AxisError: a family does not exist.
            OptionsError: the option does not exist, or the group already exists.

        >>> from datetime import timedelta
        >>> from pgmesh import recipes
        >>> arrangement = recipes.megatron(8, tp=2, pp=2)
        >>> arrangement.configure(timeout=timedelta(minutes=10))
        >>> arrangement.configure("data", "expert-data", high_priority=True)
        """
        for family in [self[name] for name in names or self]:
            family.configure(sharp=sharp, **options)

    def configure_nccl(self, settings: nccl.Settings) -> None:
        """Set options of NCCL for each family, in the format of Megatron's YAML file. A plan only checks them.

        Args:
            settings: the settings of each family, by our name or the system's short name: settings of NCCL, and
                ``is_high_priority_stream``. Either a mapping, or YAML text, which needs PyYAML.

        Raises:
            OptionsError: a family or a setting does not exist, or the text is not valid YAML.

        >>> from pgmesh import Layout, recipes
        >>> recipes.megatron(8, tp=2, of=Layout).configure_nccl({"dp_cp": {"max_ctas": 8}, "tensor": {"min_ctas": 4}})
        """
        known = {**{name: (name,) for name in self}, **self.short}
        parsed = nccl.parse_settings(settings, known)
        for options in parsed.values():
            GroupOptions.of(options)  # check all before the first is set
        for name, options in parsed.items():
            for each in known[name]:
                self[each].configure(**options)

    def set_timeout(self, *names: str, timeout: Timeout | None = None) -> None:
        """Change the timeout of existing groups on this rank. On a plan it does nothing.

        Args:
            names: the families; if empty, every group of the mesh, its views and its slices.
            timeout: a timedelta or a number of seconds; required, as a keyword.

        Raises:
            AxisError: a family does not exist.
            OptionsError: the timeout is missing or not positive, or a group does not exist yet.

        >>> from pgmesh import recipes
        >>> recipes.megatron(8, tp=2, pp=2).set_timeout(timeout=120)
        """
        limit = named_timeout("arrangement", names, timeout, of="groups", known=list(self))
        if isinstance(self.dense, Layout):
            return
        if not names:
            self.dense.set_timeout(timeout=limit)
        for family in map(self.__getitem__, names):
            if self.dense.rank in family:
                family.mesh_of_mine().set_timeout(*(family.axes or family.layout.axes), timeout=limit)

    def connect(self, *names: str, **how: Any) -> list[Connected]:
        """Connect and warm up this rank's groups, with one call of ``mesh.connect`` for each mesh.

        Every rank must pass the same names. Switches give SHARP to the communicators that are created first, so
        configure one family with ``sharp=True`` and connect it before the others.

        Args:
            names: the families; all if empty.
            how: as for ``mesh.connect``. A timeout applies to each mesh separately.

        >>> from pgmesh import recipes
        >>> len(recipes.megatron(8, tp=2, pp=2).connect("tensor", "expert"))     # in two meshes
        2
        """
        calls: dict[int, tuple[ProcessGroupMesh, list[tuple[Axis, ...]]]] = {}
        for family in [self[name] for name in names or self]:
            if self.rank in family:
                mesh = family.mesh_of_mine()
                calls.setdefault(id(mesh), (mesh, []))[1].append(family.axes)
        return [mesh.connect(*axes, **how) for mesh, axes in calls.values()]

    def close(self) -> None:
        """Destroy every group. A ``with`` statement does the same at its end. On a plan it does nothing."""
        if not isinstance(self.dense, Layout):
            self.dense.close()

    def __enter__(self) -> Arrangement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- text ---------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return self.call

    def __str__(self) -> str:
        heads = [self.call, self.order]
        for name, (mesh, _) in zip(("dense", "expert"), self.meanings):
            heads.append(f"{name:<6}  {' '.join(f'{axis}={size}' for axis, size in zip(mesh.axes, mesh.shape))}")
        rank_header = [] if self.rank is None else [f"of rank {self.rank}"]
        rows = [["group", "axes", "size", "blocks", *rank_header]]
        for name, family in self.families.items():
            sizes = sorted({len(block) for block in family.partition()}) if family.pick else [family.size]
            row = [name, ", ".join(str(axis) for axis in family.layout.axes if axis in family.axes or not family.axes)]
            row += ["-".join(map(str, sizes[:: max(1, len(sizes) - 1)])), str(len(family.partition()))]
            if self.rank is not None:
                row.append(ranks_in(40, family.ranks, len(family.ranks)) if self.rank in family else "-")
            rows.append(row)
        table = columns([[(word, "") for word in row] for row in rows], right=[False, False, True, True, False])
        return "\n".join([*heads, "", plain(table)])


def split_axes(mesh: Any, axes: Sequence[Axis], size: int) -> tuple[Any, tuple[Axis, ...], tuple[Axis, ...]] | None:
    """A view of a mesh in which each block along some axes is split into pieces of ``size`` consecutive ranks.

    Args:
        mesh: a Layout or a mesh.
        axes: the axes to split.
        size: number of ranks of a piece; it divides the size of the block.

    Returns:
        The view, the axes that number the pieces of a block (``instance``), and the axes that number the ranks in a
        piece (``member``). None if no view has such axes.

    >>> view, outer, inner = split_axes(Layout(pp=2, dp=4, cp=3, tp=2), ("dp", "cp"), 6)
    >>> view, outer, inner
    (Layout(pp=2, instance=2, member=6, tp=2), ('instance',), ('member',))
    """
    box = dict(zip(mesh.axes, mesh.shape))
    remaining, outer, inner, new_sizes = size, list[Axis](), list[Axis](), dict[Any, int]()
    relevant = [axis for axis in reversed(box) if axis in axes or box[axis] > 1]
    # The axes to split may not be adjacent. Each run of adjacent ones, innermost first, takes as much of ``size`` as it
    # can, so there may be several pairs of new axes: member and instance, member2 and instance2.
    for is_split, run in groupby(relevant, key=lambda axis: axis in axes):
        if not is_split:
            new_sizes.update((axis, box[axis]) for axis in run)
            continue
        run_size = math.prod(box[axis] for axis in run)
        if run_size % remaining and remaining % run_size:
            return None
        number = len(inner) + 1 if inner else ""
        within = min(run_size, remaining)
        new_sizes[f"member{number}"], new_sizes[f"instance{number}"] = within, run_size // within
        inner.append(f"member{number}")
        outer.append(f"instance{number}")
        remaining //= within
    return mesh.view(dict(reversed(new_sizes.items()))), tuple(outer), tuple(inner)
