"""The data of a plan: the groups along each combination of axes, and what was found out about them."""

from __future__ import annotations

from dataclasses import dataclass

from pgmesh.errors import PlaceError
from pgmesh.layout import Axis, Layout
from pgmesh.topology.hosts import Topology
from pgmesh.topology.locality import Locality


@dataclass(frozen=True)
class FamilyPlan:
    """The groups along some axes, all of them."""

    view: str  # the view they are of; "" for the mesh itself
    axes: tuple[Axis, ...]
    size: int
    groups: int
    strides: tuple[int, ...]  # how many ranks apart, outermost first; none where that differs from place to place
    sample: tuple[int, ...]  # the first group: its ranks, or the first seven and the last
    localities: tuple[Locality, ...]  # one for each level of the machine
    same_as: str  # the family before this one that has the same groups, if there is one

    @property
    def name(self) -> str:
        """``tp``, ``dp x cp``, ``moe: ep``."""
        return f"{self.view}: " * bool(self.view) + " x ".join(map(str, self.axes))

    @property
    def is_whole(self) -> bool:
        """Whether the sample is a whole group."""
        return len(self.sample) == self.size


@dataclass(frozen=True)
class Finding:
    """One fact about an arrangement, in a sentence."""

    text: str
    bad: bool
    fix: str = ""  # the option that would mend it, as on the command line
    result: str = ""  # and what it would be like then


@dataclass(frozen=True)
class PlanData:
    """A plan without its texts and pictures."""

    layout: Layout
    topology: Topology
    families: tuple[FamilyPlan, ...]
    findings: tuple[Finding, ...]
    views: tuple[tuple[str, Layout], ...] = ()

    def __getitem__(self, name: str) -> FamilyPlan:
        for family in self.families:
            if family.name == name:
                return family
        raise PlaceError(f"there is no family {name!r}; there are {', '.join(f.name for f in self.families)}.")

    @property
    def order(self) -> str:
        """The axes, outermost first, as on the command line.

        >>> plan(layout).order
        'pp,dp,tp'
        """
        return ",".join(map(str, self.layout.axes))

    @property
    def communicators(self) -> int:
        """How many a rank holds that uses each family once; groups of one rank are not counted.

        >>> plan(layout, views={"moe": {"ep": 4, "edp": 2}}).communicators  # edp's groups are tp's
        4
        """
        return sum(family.size > 1 and not family.same_as for family in self.families)
