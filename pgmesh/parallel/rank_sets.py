"""The sets of ranks over which a composition takes means, norms and comparisons.

Example: replicas that average later along ``late=2``, data along ``dp=2``, context along ``cp=2``, tensor parallelism
along ``tp=2``, so 16 ranks. Methods may be on views and slices of the mesh, so ranks are found by blocks and not by the
names of axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Method, blocks_of
from pgmesh.parallel.blocks import connected_ranks


@dataclass(frozen=True)
class RankSets:
    """Sets of ranks around this one, each in mesh order."""

    all: list[int]
    """The ranks of the composition, which compare weights and inputs: here 16."""
    replica: list[int]
    """The ranks that train one replica, over which norms are taken: the 8 ranks along dp, cp and tp."""
    tokens: list[int]
    """The ranks of a replica that read different tokens; the gradient is a mean over them: the 4 along dp and cp."""
    rows: list[int]
    """The ranks that read different rows, also in other replicas: the 4 along late and dp."""

    @classmethod
    def of(cls, mesh: ProcessGroupMesh, methods: Iterable[Method]) -> RankSets:
        """The sets that follow from what differs along the axes of each method."""
        methods = [*methods]
        return cls(
            all=ranks_along(mesh, methods),
            replica=ranks_along(mesh, [each for each in methods if not each.averages_later]),
            tokens=ranks_along(mesh, token_readers(methods)),
            rows=ranks_along(mesh, [each for each in methods if each.differs == "rows"]),
        )


def token_readers(methods: Iterable[Method]) -> list[Method]:
    """The methods along whose axes the ranks of a replica read different tokens."""
    return [each for each in methods if each.differs in ("rows", "positions") and not each.averages_later]


def ranks_along(mesh: ProcessGroupMesh, methods: Iterable[Method]) -> list[int]:
    """The ranks that are connected with this one along the axes of methods, in mesh order."""
    return sorted(connected_ranks(mesh.rank, blocks_of(methods)), key=mesh.coord_of)
