"""The data of a plan: its layout, its topology, its families and the findings about them.

A *family* is all groups along one combination of axes, such as all groups along ``tp``, or along ``dp`` and ``cp``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgmesh.errors import RankError
from pgmesh.layout import Axis, Layout
from pgmesh.topology.hosts import Topology
from pgmesh.topology.locality import Locality


@dataclass(frozen=True)
class FamilyPlan:
    """One family: all groups along some axes."""

    view: str  # the name of the view with these axes; "" for the mesh itself
    axes: tuple[Axis, ...]
    size: int  # ranks in each group
    groups: int  # number of groups
    strides: tuple[int, ...]  # distance of neighbours in ranks, outermost first; empty if it is not constant
    sample: tuple[int, ...]  # the first group: all its ranks, or the first seven and the last
    localities: tuple[Locality, ...]  # one for each level of the topology
    same_as: str  # the name of an earlier family with the same groups, or ""

    @property
    def name(self) -> str:
        """``tp``, ``dp x cp``, ``moe: ep``."""
        return f"{self.view}: " * bool(self.view) + " x ".join(map(str, self.axes))

    @property
    def is_whole(self) -> bool:
        """True if the sample is the whole group."""
        return len(self.sample) == self.size


@dataclass(frozen=True)
class Finding:
    """A fact about the locality of a plan, as one or more sentences."""

    text: str
    bad: bool
    fix: str = ""  # the command-line option that fixes it, or ""
    result: str = ""  # the effect of the fix


@dataclass(frozen=True)
class PlanData:
    """A plan without its text, JSON and figures."""

    layout: Layout
    topology: Topology
    families: tuple[FamilyPlan, ...]
    findings: tuple[Finding, ...]
    views: tuple[tuple[str, Layout], ...] = ()

    def __getitem__(self, name: str) -> FamilyPlan:
        for family in self.families:
            if family.name == name:
                return family
        raise RankError(f"there is no family {name!r}; there are {', '.join(f.name for f in self.families)}.")

    @property
    def order(self) -> str:
        """The axes, outermost first, in the notation of the command line.

        >>> plan(layout).order
        'pp,dp,tp'
        """
        return ",".join(map(str, self.layout.axes))

    @property
    def communicators(self) -> int:
        """The number of communicators of a rank that uses each family once. Groups of one rank are not counted.

        >>> plan(layout, views={"moe": {"ep": 4, "edp": 2}}).communicators  # edp's groups are tp's
        4
        """
        return sum(family.size > 1 and not family.same_as for family in self.families)
