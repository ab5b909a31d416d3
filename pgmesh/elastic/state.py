"""The record of a mesh: its aborts, and of the meshes that replace it.

The mesh "train" of a program is replaced by "train#1", that one by "train#2", and so on. Each is a *generation*.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pgmesh import torch_private
from pgmesh.elastic.records import MeshRound
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.layout import Layout


@dataclass(frozen=True)
class Generation:
    """One of the meshes that replace each other. All ranks compute the same store keys for it, without the store.

    Args:
        first: the key of the mesh that the program made, without the prefix.
        layout: the layout of this generation.
        number: how often the mesh was replaced before: 0 for the one that the program made.

    >>> Generation("train.0", Layout(dp=2)).key, Generation("train.0", Layout(dp=1), 1).name
    ('pgmesh/train.0', 'train#1')
    """

    first: str
    layout: Layout
    number: int = 0

    @property
    def name(self) -> str:
        """The name of the mesh, if it replaces another one: of the first mesh of a name, without its number."""
        return f"{self.first.removesuffix('.0')}#{self.number}"

    @property
    def key(self) -> str:
        """Prefix of the store keys of its decision and its abort."""
        return f"{torch_private.PREFIX}{self.first}" + (f"#{self.number}" if self.number else "")


@dataclass(frozen=True)
class Shrunk:
    """The change that ``shrink`` made.

    Args:
        summary: the mesh before, and the numbers of ranks before and after it.
        lost: the ranks that were lost, each with how that is known.
        replaced_by: for each lost rank that a spare replaces, that spare.

    >>> print(Shrunk("mesh 'train': 4 ranks, and now 2", {3: "rank 3 has ended"}, {}))
    mesh 'train': 4 ranks, and now 2
      lost: rank 3 has ended
    """

    summary: str
    lost: dict[int, str]
    replaced_by: dict[int, int]

    def __str__(self) -> str:
        lines = [self.summary, *([f"  lost: {why}" for why in self.lost.values()] or ["  lost: none"])]
        lines += [f"  rank {spare} came in the place of rank {rank}" for rank, spare in self.replaced_by.items()]
        return "\n".join(lines)


@dataclass
class ElasticState:
    """The state of one mesh.

    Args:
        generation: its generation, if it replaces another mesh.
        shrunk: the change that made it, if it replaces another mesh.
        dependents: internal meshes, which are aborted with it.
        aborts_when_lost: ``abort_when_lost`` was called.
        rounds: by key of a generation, this rank's part in the decision on its survivors. A retry goes on with it.
        called_shrink: this process has called ``shrink`` as a member of it.
    """

    generation: Generation | None = None
    shrunk: Shrunk | None = None
    dependents: set[MeshGroups] = field(default_factory=set)
    aborts_when_lost: bool = False
    rounds: dict[str, MeshRound] = field(default_factory=dict)
    called_shrink: bool = False


def generation_of(mesh: MeshGroups) -> Generation:
    """The generation of a mesh."""
    first = Generation(mesh.key.removeprefix(torch_private.PREFIX), mesh.layout)
    return mesh.state_of(ElasticState).generation or first
