"""The parts of a plan: its combinations of axes, and the findings about them."""

from __future__ import annotations

from dataclasses import dataclass

from pgmesh.layout import Axis
from pgmesh.topology.locality import Locality


@dataclass(frozen=True)
class CombinationPlan:
    """All groups along one combination of axes, such as along ``tp``, or along ``dp`` and ``cp``.

    Args:
        view: the name of the view with these axes; "" for the mesh itself.
        axes: the axes, in the order of the mesh.
        size: the number of ranks in each group.
        groups: the number of groups.
        strides: the distance of neighbours in ranks, outermost first; empty if it is not constant.
        sample: the first group: all its ranks, or the first seven and the last.
        localities: the hosts that a group spans, then the domains, ...; empty if the hosts are unknown.
        same_as: the name of an earlier combination with the same groups, or "".

    >>> tp = plan(layout, nodes="2x4")["tp"]
    >>> tp.size, tp.groups, tp.strides, tp.sample, tp.localities[0].kind
    (2, 4, (1,), (0, 1), 'intra')
    """

    view: str
    axes: tuple[Axis, ...]
    size: int
    groups: int
    strides: tuple[int, ...]
    sample: tuple[int, ...]
    localities: tuple[Locality, ...]
    same_as: str = ""

    @property
    def name(self) -> str:
        """``tp``, ``dp x cp``, ``moe: ep``."""
        axes = " x ".join(map(str, self.axes))
        return f"{self.view}: {axes}" if self.view else axes


@dataclass(frozen=True)
class Finding:
    """A fact about the locality of a plan.

    Args:
        text: the fact, as one or more sentences.
        bad: True for a problem.
        fix: the option of the command line that fixes it, or "".
        result: the effect of the fix, or "".

    >>> plan(Layout(tp=2, dp=4), nodes="4x2").findings[0].fix
    '--order dp,tp'
    """

    text: str
    bad: bool
    fix: str = ""
    result: str = ""
