"""What a mesh remembers of its aborts, and of the meshes that replace it.

The mesh "train" of a program is replaced by "train#1", that one by "train#2", and so on. Each is a *generation*.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pgmesh import torch_private
from pgmesh._util.formatting import name_ranks
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.layout import Layout


@dataclass(frozen=True)
class Generation:
    """One of the meshes that replace each other. All ranks compute the same store keys for it, without the store.

    Args:
        first: the name of the mesh that the program made; the key of its groups if it has none, or if it is a later
            mesh of this name.
        layout: the layout of this generation.
        number: how often the mesh was replaced before: 0 for the one that the program made.

    >>> Generation("train", Layout(dp=2)).key, Generation("train", Layout(dp=1), 1).key
    ('pgmesh/train', 'pgmesh/train#1')
    """

    first: str
    layout: Layout
    number: int = 0

    @property
    def name(self) -> str:
        """The name of the mesh, if it replaces another one."""
        return f"{self.first}#{self.number}" if self.number else self.first

    @property
    def key(self) -> str:
        """Prefix of the store keys of its decision and its abort."""
        return f"{torch_private.PREFIX}{self.name}"

    @property
    def standing_by(self) -> str:
        """The activity in the status of a rank that stands by for any generation."""
        return f"standing by for mesh {self.first!r}"


@dataclass(frozen=True)
class Shrunk:
    """The change that ``shrink`` made.

    Args:
        label: the mesh before it, in messages.
        old_ranks: ranks of the mesh before it.
        new_ranks: ranks of the mesh after it.
        lost: the ranks that were lost, each with how that is known.
        replaced_by: for each lost rank that a spare replaces, that spare.
        seconds: time of the call of ``shrink`` or, on a rank that stood by, of ``stand_by``.
        stood_by: True on a rank that stood by.

    >>> print(Shrunk("mesh 'train'", (0, 1, 2, 3), (0, 1), {3: "rank 3 has ended"}, {}, 0.2))
    mesh 'train': 4 ranks, and now 2, in 0.20 s
      lost: rank 3 has ended
      dropped: rank 2
    """

    label: str
    old_ranks: tuple[int, ...]
    new_ranks: tuple[int, ...]
    lost: dict[int, str]
    replaced_by: dict[int, int]
    seconds: float
    stood_by: bool = False

    @property
    def dropped(self) -> tuple[int, ...]:
        """The living ranks of the old mesh that are not in the new one."""
        kept = {*self.lost, *self.new_ranks}
        return tuple(rank for rank in self.old_ranks if rank not in kept)

    def __str__(self) -> str:
        took = f"{'after standing by for' if self.stood_by else 'in'} {self.seconds:.2f} s"
        lines = [f"{self.label}: {len(self.old_ranks)} ranks, and now {len(self.new_ranks)}, {took}"]
        lines += [f"  lost: {why}" for why in self.lost.values()] or ["  lost: none"]
        if self.dropped:
            lines.append(f"  dropped: {name_ranks(self.dropped)}")
        lines += [f"  rank {spare} came in the place of rank {rank}" for rank, spare in self.replaced_by.items()]
        return "\n".join(lines)


@dataclass
class ElasticState:
    """The state of one mesh.

    Args:
        generation: its generation, if it replaces another mesh.
        shrunk: the change that made it, if it replaces another mesh.
        abort_reasons: the reasons with which this process has tried to end it. It may have ended before.
        dependents: internal meshes, which are aborted with it.
        aborts_when_lost: ``abort_when_lost`` was called.
        lost_after: seconds of silence after which a lost rank aborts it; None for the default.
        attempts: by key of a generation, the number of the attempt at which a retry of ``shrink`` begins.
        called_shrink: this process has called ``shrink`` as a member of it.
        replaced: a call has returned the mesh that replaces it.
    """

    generation: Generation | None = None
    shrunk: Shrunk | None = None
    abort_reasons: set[str] = field(default_factory=set)
    dependents: set[MeshGroups] = field(default_factory=set)
    aborts_when_lost: bool = False
    lost_after: float | None = None
    attempts: Counter[str] = field(default_factory=Counter)
    called_shrink: bool = False
    replaced: bool = False


def generation_of(mesh: MeshGroups) -> Generation:
    """The generation of a mesh."""
    first = mesh.key.removeprefix(torch_private.PREFIX).removesuffix(".0")
    return mesh.state_of(ElasticState).generation or Generation(first, mesh.layout)
