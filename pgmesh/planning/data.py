"""The parts of a plan: its combinations of axes, and the findings about them."""

from __future__ import annotations

from dataclasses import dataclass

from pgmesh.layout import Axis
from pgmesh.topology.locality import Locality


@dataclass(frozen=True)
class CombinationPlan:
    """All groups along one combination of axes, such as along ``tp``, or along ``dp`` and ``cp``."""

    view: str  # the name of the view with these axes; "" for the mesh itself
    axes: tuple[Axis, ...]
    size: int  # ranks in each group
    groups: int  # number of groups
    strides: tuple[int, ...]  # distance of neighbours in ranks, outermost first; empty if it is not constant
    sample: tuple[int, ...]  # the first group: all its ranks, or the first seven and the last
    localities: tuple[Locality, ...]  # one for each level of the topology
    same_as: str = ""  # the name of an earlier combination with the same groups, or ""

    @property
    def name(self) -> str:
        """``tp``, ``dp x cp``, ``moe: ep``."""
        axes = " x ".join(map(str, self.axes))
        return f"{self.view}: {axes}" if self.view else axes


@dataclass(frozen=True)
class Finding:
    """A fact about the locality of a plan, as one or more sentences."""

    text: str
    bad: bool
    fix: str = ""  # the command-line option that fixes it, or ""
    result: str = ""  # the effect of the fix
