"""Findings: the axes with much traffic whose groups span several hosts or domains, and the order that avoids it.

The order of ``axis_heuristics`` is suggested if the groups then span fewer hosts; at a tie, if their rings leave a host
less often.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pgmesh._util.formatting import count_of, format_sizes, join_words
from pgmesh._util.suggestions import largest_divisor
from pgmesh.layout import Axis, Layout
from pgmesh.planning import axis_heuristics
from pgmesh.planning.combinations import runs_of
from pgmesh.planning.data import CombinationPlan, Finding
from pgmesh.planning.text_report import format_range, format_units
from pgmesh.topology.hosts import HostLevel, Topology
from pgmesh.topology.locality import Locality, locality_of


def findings_of(
    layout: Layout,
    combinations: Sequence[CombinationPlan],
    topology: Topology,
    views: Sequence[tuple[str, Layout]],
) -> list[Finding]:
    """The findings about a mesh and its views, the axis with the most traffic first."""
    if not topology:
        ranks = largest_divisor(layout.size(), 8)
        hosts = f"--nodes {layout.size() // ranks}x{ranks}"
        return [Finding("The hosts are not given, so the locality of the groups is unknown.", False, hosts)]
    number = min(1, len(topology) - 1)  # domains if there are any, else hosts
    level = topology[number]
    findings, good = [], []
    for name, whole in (("", layout), *views):
        mine = {plan.axes[0]: plan for plan in combinations if plan.view == name and len(plan.axes) == 1}
        heavier = 1  # the product of the sizes of the axes with more traffic
        for axis in axis_heuristics.heavy_axes(mine):
            plan = mine[axis]
            if plan.localities[number].high > 1:
                findings.append(_leaving(plan, plan.localities[number], whole, level, heavier))
            elif plan.size > 1:
                good.append(plan.name)
            heavier *= plan.size
    if good and not any(finding.bad for finding in findings):
        verb = "stays" if len(good) == 1 else "stay"
        findings.insert(0, Finding(f"Good: {join_words(good)} {verb} inside one {level.name}.", False))
    return findings


def _leaving(plan: CombinationPlan, locality: Locality, layout: Layout, level: HostLevel, heavier: int) -> Finding:
    """The finding for groups that span several units of a level, such as several hosts.

    Args:
        locality: that of the groups, on the level.
        layout: the mesh or the view with the axis.
        heavier: the product of the sizes of the axes with more traffic.
    """
    text = _description(plan, locality)
    size, largest = plan.size, level.largest
    if fix := _better_order(plan, locality, layout, level):
        return Finding(text, True, *fix)
    if size > largest:
        best = -(-size // largest)
        text += f" A {level.name} holds {count_of(largest, 'rank')} at most, so {size:,} take {best:,} at best."
        return Finding(text, heavier == 1 or locality.high > best)
    if heavier * size > largest:
        return Finding(f"{text} The axes with more traffic fill the {level.name}: no order keeps both on one.", False)
    uneven = sorted({unit for _, unit in level.runs if unit % (heavier * size)})
    if uneven:
        blocks = f"{size} ranks" if heavier == 1 else f"{heavier * size} ranks, with the axes of more traffic,"
        text += f" {blocks} do not divide {level.name}s of {join_words(uneven)}."
    return Finding(text, True)


def _description(plan: CombinationPlan, locality: Locality) -> str:
    """The number of units that the groups span, as a sentence."""
    level = locality.level
    if locality.intra:
        cut = plan.groups - locality.intra
        verb = "spans" if cut == 1 else "span"
        most = f"up to {locality.high}" if locality.high > 2 else "2"
        return f"{cut:,} of {plan.groups:,} {plan.name} groups {verb} {most} {level}s, across an edge."
    hops = f"{format_range(locality.hops_low, locality.hops_high)} of {plan.size} hops of a ring leave"
    if locality.hops_low == plan.size:
        hops = "every hop leaves"
    return f"{plan.name} spans {format_units(locality.low, locality.high, level)}: {hops} the {level}."


def _better_order(
    plan: CombinationPlan, locality: Locality, layout: Layout, level: HostLevel
) -> tuple[str, str] | None:
    """The option of the command line for the order by traffic, and its effect; None if that order is not better."""
    order = axis_heuristics.order_by_traffic([str(axis) for axis in layout.axes])
    if order == layout.axes or runs_of(layout) != ((layout.size(), 1),) or 0 not in layout:
        return None
    sizes: dict[Axis, int] = {axis: layout.size(axis) for axis in order}
    after = locality_of(Layout(sizes), plan.axes, level)
    if (after.high, after.hops_high, -after.intra) >= (locality.high, locality.hops_high, -locality.intra):
        return None
    option = f"--order {shlex.quote(','.join(order))}"
    if plan.view:
        option = f"--view {shlex.quote(f'{plan.view}: {format_sizes(sizes)}')}"
    return option, f"{plan.name} on {format_units(after.low, after.high, level.name)}"
