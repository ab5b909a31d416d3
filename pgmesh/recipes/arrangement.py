"""Arrangement: the process groups of a training framework, such as Megatron-Core, by its own names.

An arrangement has one or two meshes over the same ranks, dense and expert. Each name stands for the groups along some
axes of one of them. In a plan, the meshes are Layouts: it has ranks and no processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pgmesh._util.formatting import format_ranks, format_sizes
from pgmesh._util.suggestions import closest_name, did_you_mean
from pgmesh.drawing.styled_text import columns, plain
from pgmesh.errors import AxisError, MembershipError, ShapeError
from pgmesh.layout import Axis, Layout, RankView
from pgmesh.recipes import nccl

Mesh = Any
"""A ProcessGroupMesh; in a plan a Layout, or a RankView if a rank sees the plan. All have axes, slices and views."""

Pick = Callable[[list[int]], Sequence[int]]
"""A function that selects ranks of a block, at least one, in the order of the group. Repetitions are ignored."""


class Along(NamedTuple):
    """The groups of a name: those along some axes of a mesh, or some ranks of each.

    >>> from pgmesh import Layout, recipes
    >>> recipes.megatron(8, tp=2, pp=2, of=Layout).names["tensor+data"]
    Along(mesh=Layout(pp=2, dp=2, cp=1, tp=2), axes=('tp', 'dp'), pick=None)
    """

    mesh: Mesh
    """The dense mesh, the expert mesh, or a view of either."""
    axes: tuple[Axis, ...]
    """The axes."""
    pick: Pick | None = None
    """Selects the ranks of each group from its block, and their order. Default: all ranks, in mesh order."""

    def part(self) -> Mesh:
        """The slice with the ranks of this rank's group; the whole mesh on a rank that is outside it."""
        if self.mesh.rank not in self.mesh:
            return self.mesh
        block = self.mesh.along(*self.axes)
        if self.pick is None:
            return block
        ranks = block.ranks()
        return block.at({self.axes[0]: [*map(ranks.index, self.ranks_of(ranks))]})

    def ranks_of(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of the group in a block.

        Raises:
            ShapeError: ``pick`` returned no rank, or ranks outside the block.
        """
        if self.pick is None:
            return block
        chosen = [*self.pick([*block])]
        if not chosen or not set(chosen) <= {*block}:
            raise ShapeError(f"a function for embeddings returns at least one of {[*block]}, but it returned {chosen}.")
        return tuple(dict.fromkeys(chosen))


@dataclass(frozen=True, eq=False)
class Arrangement:
    """One or two meshes over the same ranks, with groups by name. It prints as a table.

    ``arrangement["tensor"]`` is an ordinary mesh: the slice of this rank's group. A rank that has no such group is not
    in it: ``arrangement.rank in arrangement["embedding"]`` is False.

    Args:
        dense: the mesh for all layers but experts. Its ``close`` destroys all groups of the arrangement.
        names: the groups of each name.
        expert: a view of the mesh for experts, or None.
        order: the order of the ranks, as text. Default: the last axis varies fastest.
        short: the system's short names, as used in its settings, and the names that each stands for.
        call: the call of the recipe, as text.

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
    >>> tensor = recipes.megatron(8, tp=2, pp=2)["tensor"]         # on rank 5
    >>> tensor.ranks(), tensor.size(), tensor.index(), tensor.group().size()
    ((4, 5), 2, 1, 2)
    """

    dense: Mesh
    names: Mapping[str, Along]
    expert: Mesh | None = None
    order: str = ""
    short: Mapping[str, Sequence[str]] = field(default_factory=dict)
    call: str = ""

    @property
    def rank(self) -> int | None:
        """The rank whose groups the names stand for; None in a plan."""
        return None if isinstance(self.dense, Layout) else self.dense.rank

    def _over(self, mesh: Mesh) -> Arrangement:
        """The same arrangement over another mesh with the sizes of ``dense``."""

        def same(view: Mesh) -> Mesh:
            return mesh if view.axes == mesh.axes else mesh.view(dict(zip(view.axes, view.shape)))

        names = {name: along._replace(mesh=same(along.mesh)) for name, along in self.names.items()}
        return dataclasses.replace(self, dense=mesh, expert=self.expert and same(self.expert), names=names)

    def seen_by(self, rank: int) -> Arrangement:
        """The plan of this arrangement, seen from a rank. A plan has no rank before this call.

        Raises:
            RankError: the rank is not in the arrangement.

        >>> from pgmesh import Layout, recipes
        >>> recipes.megatron(8, tp=2, pp=2, of=Layout).seen_by(5)["pipeline"].ranks()
        (1, 5)
        """
        layout = self.dense if isinstance(self.dense, Layout) else self.dense.layout
        return self._over(layout.seen_by(rank))

    # -- by name ------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Mesh:
        """The slice with the ranks of this rank's group. Names can be joined by ``+`` in any order.

        In a plan that is seen by a rank it is a RankView: the same without groups.

        Raises:
            AxisError: the name does not exist.
            MembershipError: a plan has no rank.

        >>> from pgmesh import Layout, recipes
        >>> plan = recipes.megatron(8, tp=2, pp=2, of=Layout).seen_by(5)
        >>> plan["tensor+data"].ranks(), plan["pipeline+context+data"].ranks()
        ((4, 5, 6, 7), (1, 3, 5, 7))
        """
        along = self._find(name)
        if isinstance(self.dense, Layout):
            raise MembershipError(
                "a plan has no rank, so it has no group of this rank.\n\n"
                f"  arrangement.seen_by(0)[{name!r}]   # of rank 0\n"
                f"  arrangement.partition({name!r})   # of every rank"
            )
        return along.part()

    def partition(self, name: str) -> Sequence[tuple[int, ...]]:
        """The ranks of every group of a name.

        Raises:
            AxisError: the name does not exist.

        >>> from pgmesh import Layout, recipes
        >>> recipes.megatron(8, tp=2, pp=2, of=Layout).partition("tensor")
        ((0, 1), (2, 3), (4, 5), (6, 7))
        """
        along = self._find(name)
        blocks = along.mesh.partition(*along.axes)
        return blocks if along.pick is None else tuple(map(along.ranks_of, blocks))

    def _find(self, name: str) -> Along:
        """The groups of a name, or of names joined by ``+`` whose axes one mesh has."""
        if name in self.names:
            return self.names[name]
        words = str(name).split("+")
        parts = [each for each in map(self.names.get, words) if each and each.pick is None]
        axes = tuple(axis for part in parts for axis in part.axes)
        meshes = [part.mesh for part in parts if {*axes} <= {*part.mesh.axes}]
        if meshes and len(parts) == len(words):
            return Along(meshes[0], axes)
        along = [known for known, each in self.names.items() if each.axes == (name,)]
        close = next(iter([*self.short.get(name, ()), *along]), closest_name(name, self.names))
        raise AxisError(f"{self.call} has no group {name!r}.{did_you_mean(close)} It has {', '.join(self.names)}.")

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def configure_nccl(self, settings: nccl.Settings) -> None:
        """Set options of NCCL for groups by name, in the format of Megatron's YAML file. A plan only checks them.

        Args:
            settings: the settings of each group, by our name or the system's short name: settings of NCCL, and
                ``is_high_priority_stream``. Either a mapping, or YAML text, which needs PyYAML.

        Raises:
            OptionsError: a group or a setting does not exist, or the group was created already.

        >>> from pgmesh import Layout, recipes
        >>> recipes.megatron(8, tp=2, of=Layout).configure_nccl({"dp_cp": {"max_ctas": 8}, "tensor": {"min_ctas": 4}})
        """
        known = {**{name: (name,) for name in self.names}, **self.short}
        options = nccl.parse_settings(settings, known)
        if isinstance(self.dense, (Layout, RankView)):
            return
        for given, each in options.items():
            for name in known[given]:
                self[name].configure(**each)  # on a rank outside the group it does nothing

    # -- text ---------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return self.call

    def __str__(self) -> str:
        lines = [self.call, self.order or f"the last axis varies fastest: {', '.join(map(str, self.dense.axes))}"]
        for word, mesh in {"dense": self.dense, "expert": self.expert}.items():
            if mesh is not None:
                lines.append(f"{word:<6}  {format_sizes(dict(zip(mesh.axes, mesh.shape)))}")
        lines.append("")
        rank = "" if self.rank is None else f"of rank {self.rank}"
        rows = [["group", "axes", "size", "blocks", rank], *map(self._row, self.names)]
        table = columns([[(cell, "") for cell in row] for row in rows], [False, False, True, True, False])
        return "\n".join([*lines, plain(table)])

    def _row(self, name: str) -> list[str]:
        """The cells of a name in the table."""
        axes = ", ".join(map(str, self.names[name].axes))
        blocks = self.partition(name)
        if self.rank is None:
            return [name, axes, str(len(blocks[0])), str(len(blocks)), ""]
        ranks = self[name].ranks()
        return [name, axes, str(len(ranks)), str(len(blocks)), format_ranks(ranks) if self.rank in ranks else "-"]


def build(plan: Arrangement, of: Any, name: str | None) -> Arrangement:
    """The arrangement of a plan over a new mesh.

    Args:
        plan: it was checked, so that an error creates no mesh.
        of: class of the mesh. Default: ProcessGroupMesh. With Layout, the result is the plan.
        name: name of the mesh.

    Raises:
        RankError: the world has fewer ranks.
    """
    if of is Layout:
        return plan
    from pgmesh.mesh import ProcessGroupMesh  # only here, since plans need no torch

    of, dense = of or ProcessGroupMesh, plan.dense
    return plan._over(of(dict(zip(dense.axes, dense.shape)), ranks=dense.ranks_in_order(), name=name))
