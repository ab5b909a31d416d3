"""An arrangement: a few meshes, and by name the groups along their axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Union

from pgmesh.drawing.styled_text import columns, plain, ranks_in
from pgmesh.errors import AxisError, MembershipError, ShapeError, WorldError
from pgmesh.layout import Axis, Layout, alike
from pgmesh.options import GroupOptions, Timeout, named_timeout
from pgmesh.recipes import nccl

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pgmesh.connect.connecting import Connected
    from pgmesh.mesh import ProcessGroupMesh

Mesh = Union[Layout, "ProcessGroupMesh"]
"""What a recipe is made of: a plan, or a mesh with groups."""

Pick = Callable[[list[int]], Sequence[int]]
"""Which of the ranks of a block belong, in this order: some of them, at least one. One named twice counts once."""


@dataclass(frozen=True, eq=False)
class Family:
    """The groups along some axes of a mesh, one for each block, seen from one rank.

    Args:
        name: what the arrangement calls it.
        mesh: whose axes they are.
        axes: which; none for all.
        rank: whose group is "mine".
        pick: which ranks of each block belong, and in which order; all, unless given.

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
            self._select_ranks(self.layout.partition(*self.axes)[0])  # a function that cannot do is found out at once

    @property
    def layout(self) -> Layout:
        """Where each rank sits."""
        return self.mesh if isinstance(self.mesh, Layout) else self.mesh.layout

    # -- of every rank ------------------------------------------------------------------------------------------

    def partition(self) -> Sequence[tuple[int, ...]]:
        """Every block, each the ranks of one group.

        >>> from pgmesh import Layout, recipes
        >>> recipes.megatron(8, tp=2, pp=2, of=Layout)["tensor"].partition()
        ((0, 1), (2, 3), (4, 5), (6, 7))
        """
        blocks = self.layout.partition(*self.axes)
        return blocks if self.pick is None else tuple(map(self._select_ranks, blocks))

    def block_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that share a group with a rank, in the order of the mesh, or as picked.

        Raises:
            MembershipError: the rank has no such group.
        """
        ranks = self._select_ranks(self.layout.block_of(rank, *self.axes)) if rank in self.layout else ()
        if rank not in ranks:
            raise MembershipError(
                f"rank {rank} has no {self.name!r} group in this arrangement.\n\n"
                f"  if rank in arrangement[{self.name!r}]: ...   # ask first"
            )
        return ranks

    def __contains__(self, rank: object) -> bool:
        """Whether a rank has such a group. Never an error."""
        if self.pick is None or rank not in self.layout or not isinstance(rank, int):
            return rank in self.layout
        return rank in self._select_ranks(self.layout.block_of(rank, *self.axes))

    def _select_ranks(self, block: tuple[int, ...]) -> tuple[int, ...]:
        if self.pick is None:
            return block
        chosen, known = list(self.pick(list(block))), {rank: rank for rank in block}
        if not chosen or not set(chosen) <= set(block):
            raise ShapeError(
                f"the ranks of {self.name!r} are some of each pipeline's ranks, at least one: of {list(block)} your "
                f"function chose {chosen}."
            )
        return tuple(dict.fromkeys(known[rank] for rank in chosen))

    # -- of mine ------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of my group, in the order of the mesh, or as picked.

        Raises:
            MembershipError: this rank has no such group.
        """
        if self.rank is None:
            raise MembershipError(
                "a plan is seen by no rank, so no group of it is mine.\n\n"
                f"  arrangement.seen_by(0)[{self.name!r}]   # as rank 0 sees it\n"
                f"  arrangement[{self.name!r}].partition()   # every block"
            )
        return self.block_of(self.rank)

    @property
    def size(self) -> int:
        """How many ranks a group has."""
        return self.layout.size(*self.axes) if self.pick is None else len(self.ranks)

    @property
    def index(self) -> int:
        """My place in my group.

        Raises:
            MembershipError: this rank has no such group.
        """
        ranks = self.ranks
        return ranks.index(self._own_rank)

    @property
    def _own_rank(self) -> int:
        assert self.rank is not None  # whoever asked for ranks has learnt of it
        return self.rank

    @property
    def first(self) -> int:
        """The first rank of my group."""
        return self.ranks[0]

    @property
    def last(self) -> int:
        """The last rank of my group."""
        return self.ranks[-1]

    @property
    def source(self) -> int:
        """The rank that broadcasts in my group: its first, in numbers of the world."""
        return self.first

    def next(self, *, wrap: bool) -> int | None:
        """The rank after mine in my group; after the last comes the first with ``wrap``, else None.

        >>> from pgmesh import recipes
        >>> pipeline = recipes.megatron(8, tp=2, pp=2)["pipeline"]     # on rank 5
        >>> pipeline.next(wrap=True), pipeline.next(wrap=False), pipeline.previous(wrap=False)
        (1, None, 1)
        """
        return self._neighbor(+1, wrap)

    def previous(self, *, wrap: bool) -> int | None:
        """The rank before mine in my group; before the first comes the last with ``wrap``, else None."""
        return self._neighbor(-1, wrap)

    def _neighbor(self, step: int, wrap: bool) -> int | None:
        ranks = self.ranks
        there = ranks.index(self._own_rank) + step
        return ranks[there % len(ranks)] if wrap or 0 <= there < len(ranks) else None

    def is_first(self, *, chunk: int = 0) -> bool:
        """Whether I am first, and so hold the first stage: with several chunks of the model on a rank, in its first.

        Args:
            chunk: which chunk of this rank is asked for. A schedule knows; a mesh does not.
        """
        return self.index == 0 and chunk == 0

    def is_last(self, *, chunk: int = 0, chunks: int = 1) -> bool:
        """Whether I am last, and so hold the last stage: with several chunks of the model on a rank, in its last.

        Args:
            chunk: which chunk of this rank is asked for. A schedule knows; a mesh does not.
            chunks: how many chunks a rank holds.
        """
        return self.index == self.size - 1 and chunk == chunks - 1

    # -- groups -------------------------------------------------------------------------------------------------

    def group(self, **options: Any) -> ProcessGroup:
        """My process group, as ``mesh.group`` makes it: on the first call, waiting for nobody.

        Args:
            options: as there. ``backend="gloo"`` is the CPU twin, ``tag="all-gather"`` a communicator of its own.

        Raises:
            MembershipError: this rank has no such group.
            WorldError: this is a plan, which has no processes.
        """
        return self.mesh_of_mine().group(*self.axes, **options)

    def along(self) -> ProcessGroupMesh:
        """The slice of the mesh that my group is, with its axes: what ``device_mesh()`` is asked of.

        >>> from pgmesh import recipes
        >>> recipes.olmo(8, dp_replicate=2, tp=2)["model"].along()     # on rank 5
        ProcessGroupMesh(dp_replicate=2, dp_shard=2, tp=2).along('dp_replicate', 'dp_shard')
        """
        return self.mesh_of_mine().along(*self.axes)

    def configure(self, *, tag: str | None = None, sharp: bool | None = None, **options: Any) -> None:
        """Set what my group will be made with, as ``mesh.configure`` does; a plan checks the options alone.

        Args:
            sharp: let switches reduce, where they can (InfiniBand SHARP): NCCL's ``collnet_enable``. Untested.
            options: as in ``GroupOptions``.

        Raises:
            OptionsError: no such option, or it is too late: the group was made.
        """
        if sharp is not None:
            options["nccl"] = {**(options.get("nccl") or {}), "collnet_enable": int(sharp)}
        GroupOptions.of(options)
        if not isinstance(self.mesh, Layout) and self.rank in self:
            self.mesh_of_mine().configure(*self.axes, tag=tag, **options)

    def mesh_of_mine(self) -> ProcessGroupMesh:
        """The mesh whose block along these axes is my group."""
        if isinstance(self.mesh, Layout):
            raise WorldError(
                "a plan of layouts has no processes, so it makes no groups.\n\n"
                "  recipes.megatron(8, tp=2)   # without of=Layout, in each of 8 processes"
            )
        ranks = self.ranks
        if self.rank != self.mesh.rank:
            raise MembershipError(
                f"rank {self.mesh.rank} asked for the {self.name!r} group as rank {self.rank} sees it: a process makes "
                f"groups of its own rank alone."
            )
        if self.pick is None:
            return self.mesh
        (axis,) = self.axes
        block = self.layout.block_of(self._own_rank, axis)
        return self.mesh.at({axis: [block.index(rank) for rank in ranks]})


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Meshes over the same ranks, and by name the families of groups along their axes. Print it: it is a table.

    Args:
        call: the recipe's call that made it.
        order: in which order ranks are counted, in words.
        dense: the mesh that was made.
        expert: a view of it for experts, where there is one.
        meanings: for each mesh the axes that the words of a name such as ``"tensor+data"`` mean.
        families: the groups by name.
        short: the system's own short names, for settings that were written for it.

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
            families: those to list, by a name made of words, or whole.
        """
        dense, expert = meanings[0][0], meanings[1][0] if len(meanings) > 1 else None
        rank = None if isinstance(dense, Layout) else dense.rank
        made = cls(call, order, dense, expert, meanings, {}, rank, short or {})
        for each in families:
            family = made[each] if isinstance(each, str) else dataclasses.replace(each, rank=rank)
            made = dataclasses.replace(made, families={**made.families, family.name: family})
        return made

    def seen_by(self, rank: int) -> Arrangement:
        """The same as another rank sees it: what a plan needs before a group of it is "mine".

        Raises:
            PlaceError: the rank is not in it.

        >>> from pgmesh import Layout, recipes
        >>> recipes.megatron(8, tp=2, pp=2, of=Layout).seen_by(5)["pipeline"].ranks
        (1, 5)
        """
        (self.dense if isinstance(self.dense, Layout) else self.dense.layout).coord_of(rank)
        seen = {name: dataclasses.replace(family, rank=rank) for name, family in self.families.items()}
        return dataclasses.replace(self, families=seen, rank=rank)

    # -- by name ------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Family:
        """The groups of a name. Words joined by ``+`` stand in any order, and any that are of one mesh go together.

        Raises:
            AxisError: there is none.

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
        close = next(iter([*self.short.get(name, ()), *along]), None) or alike(name, list(self.families))
        hint = f" Did you mean {close!r}?" if close else ""
        raise AxisError(f"{self.call} has no group {name!r}.{hint} It has {', '.join(self.families)}.")

    def __iter__(self) -> Iterator[str]:
        return iter(self.families)

    def __len__(self) -> int:
        return len(self.families)

    # -- all of them, or some -----------------------------------------------------------------------------------

    def configure(self, *names: str, sharp: bool | None = None, **options: Any) -> None:
        """Set what groups will be made with, before they are; a plan checks the options alone.

        Args:
            names: which; none for all.
            sharp: as for a family.
            options: as in ``GroupOptions``.

        Raises:
            AxisError: there is no such group.
            OptionsError: no such option, or it is too late: the group was made.

        >>> from datetime import timedelta
        >>> from pgmesh import recipes
        >>> arrangement = recipes.megatron(8, tp=2, pp=2)
        >>> arrangement.configure(timeout=timedelta(minutes=10))
        >>> arrangement.configure("data", "expert-data", high_priority=True)
        """
        for family in [self[name] for name in names or self]:
            family.configure(sharp=sharp, **options)

    def configure_nccl(self, settings: nccl.Settings) -> None:
        """Set NCCL's settings by group, as Megatron's YAML file has them; a plan checks them alone.

        Args:
            settings: for each group, by our name or by the system's own short one, its settings: those of NCCL,
                and ``is_high_priority_stream``. Or the same as YAML text, which takes PyYAML.

        Raises:
            OptionsError: a group or a setting that does not exist, or text that is no such YAML.

        >>> from pgmesh import Layout, recipes
        >>> recipes.megatron(8, tp=2, of=Layout).configure_nccl({"dp_cp": {"max_ctas": 8}, "tensor": {"min_ctas": 4}})
        """
        known = {**{name: (name,) for name in self}, **self.short}
        read = nccl.parse_settings(settings, known)
        for options in read.values():
            GroupOptions.of(options)  # all are checked before one is set
        for name, options in read.items():
            for each in known[name]:
                self[each].configure(**options)

    def set_timeout(self, *names: str, timeout: Timeout | None = None) -> None:
        """Change how long collectives of groups that were made may wait, on this rank; a plan has none.

        Args:
            names: which; none for every group of the mesh, its views and slices.
            timeout: a timedelta or a number of seconds. Always given, by name.

        Raises:
            AxisError: there is no such group.
            OptionsError: no timeout, one that is not more than 0, or a group that was not made yet.

        >>> from pgmesh import recipes
        >>> recipes.megatron(8, tp=2, pp=2).set_timeout(timeout=120)
        """
        limit = named_timeout("arrangement", names, timeout, of="groups", known=())
        if isinstance(self.dense, Layout):
            return
        if not names:
            self.dense.set_timeout(timeout=limit)
        for family in map(self.__getitem__, names):
            if self.dense.rank in family:
                family.mesh_of_mine().set_timeout(*(family.axes or family.layout.axes), timeout=limit)

    def connect(self, *names: str, **how: Any) -> list[Connected]:
        """Connect and warm my groups now, as ``mesh.connect`` does, in one call for each mesh.

        Every rank connects the same names. To let one family have SHARP, which goes to the communicators that are made
        first, configure it with ``sharp=True`` and connect it before the others.

        Args:
            names: which; none for all.
            how: as for ``mesh.connect``; a timeout is for each mesh anew.

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
        """Destroy every group; a plan has none. ``with`` does the same at the end of a block."""
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
    """The mesh read so that the blocks along some axes are cut into slices, each of so many ranks that follow.

    Returns:
        The view, the axes that tell slices of a block apart and those inside a slice; None where a slice would begin
        and end inside of axes that stand apart.

    >>> view, outer, inner = split_axes(Layout(pp=2, dp=4, cp=3, tp=2), ("dp", "cp"), 6)
    >>> view, outer, inner
    (Layout(pp=2, instance=2, member=6, tp=2), ('instance',), ('member',))
    """
    box = dict(zip(mesh.axes, mesh.shape))
    left, outer, inner, anew = size, list[Axis](), list[Axis](), dict[Any, int]()
    wide = [axis for axis in reversed(box) if axis in axes or box[axis] > 1]
    for chosen, run in groupby(wide, key=lambda axis: axis in axes):
        if not chosen:
            anew.update((axis, box[axis]) for axis in run)
            continue
        whole = math.prod(box[axis] for axis in run)
        if whole % left and left % whole:
            return None
        number = len(inner) + 1 if inner else ""
        within = min(whole, left)
        anew[f"member{number}"], anew[f"instance{number}"] = within, whole // within
        inner.append(f"member{number}")
        outer.append(f"instance{number}")
        left //= within
    return mesh.view(dict(reversed(anew.items()))), tuple(outer), tuple(inner)
