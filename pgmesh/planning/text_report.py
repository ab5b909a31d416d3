"""The text report of a plan: a table of its families, the costs of the communicators, and the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from pgmesh._util.formatting import count_of
from pgmesh.drawing.styled_text import Line, columns, columns_with_ranks, width_taken, wrapped
from pgmesh.planning import axis_heuristics, costs

if TYPE_CHECKING:
    from pgmesh.layout import Axis
    from pgmesh.planning.data import FamilyPlan, PlanData
    from pgmesh.topology.hosts import HostLevel
    from pgmesh.topology.locality import Locality

P = TypeVar("P", bound="PlanData")

MAX_SAMPLE = 8
"""The number of ranks that are listed of a group."""

STYLES = {"intra": "green", "mixed": "yellow", "inter": ""}


def full_report(plan: PlanData, width: int = 80) -> list[Line]:
    """The whole report."""
    return [[(title(plan), "bold")], [], *table(plan, width), [], *cost_report(plan, width), [], *findings(plan, width)]


def title(plan: PlanData) -> str:
    """``64 ranks: pp=2 dp=4 cp=2 tp=4 on 8 hosts of 8``."""
    layout = plan.layout
    where = f" on {' in '.join(map(str, plan.topology))}" if plan.topology else ""
    axes = f": {format_sizes(dict(zip(layout.axes, layout.shape)))}" if layout.axes else ""
    return f"{count_of(len(layout), 'rank')}{axes}{where}"


def table(plan: PlanData, width: int = 80) -> list[Line]:
    """A row for each family. Headers and columns are shortened to fit the width."""
    if not plan.families:
        return [[("No axes, so no groups.", "")]]
    names = [level.name for level in plan.topology]
    for hops, with_total in (("ring hops that leave", True), ("hops out", True), ("hops out", False)):
        hops = hops if len(names) < 2 else "hops out"
        head = ["family", "size", "groups", "stride", *(word for name in names for word in (f"{name}s", "", hops))]
        table = [[(word, "dim") for word in head], *rows(plan, with_total)]
        left = width - width_taken(table)
        if left >= -2:
            break
    right = [False, True, True, True, *([True, False, True] * len(names))]
    if left < len("one group"):
        return columns(table, right)
    groups = [(family.sample, family.size) for family in plan.families]
    return columns_with_ranks(table, right, "one group", groups, width)


def rows(plan: PlanData, with_total: bool = True) -> list[list[tuple[str, str]]]:
    """The cells of each family: name, size, groups, stride; then units, kind and hops for each level.

    Args:
        with_total: True for hops as ``2 of 4``, False for ``2``.
    """
    rows = []
    for family in plan.families:
        row = [(family.name, "bold"), (f"{family.size:,}", ""), (f"{family.groups:,}", ""), (_stride(family), "")]
        for locality in family.localities:
            hops = format_range(locality.hops_low, locality.hops_high) + f" of {family.size:,}" * with_total
            units = format_range(locality.low, locality.high)
            row += [(units, ""), (_kind(locality), STYLES[locality.kind]), (hops if family.size > 1 else "-", "")]
        rows.append(row)
    return rows


def cost_report(plan: PlanData, width: int = 80) -> list[Line]:
    """The number of communicators of a rank, and their costs."""
    count = plan.communicators
    if not count:
        return [[("Each group has one rank: no communicators.", "")]]
    threads, descriptors = costs.GLOO_THREADS * count, costs.GLOO_DESCRIPTORS * count
    gloo = f"{threads} threads, {descriptors} descriptors and {costs.GLOO.times(count)}"
    held = count_of(count, "communicator")
    lines: list[Line] = [
        [(f"A rank that uses each family holds {held}, the world's not counted:", "")],
        [(f"  NCCL  {costs.NCCL.times(count)}, by NVIDIA/nccl issues 2363, 964 and 1685", "")],
        [(f"  Gloo  {gloo}, as measured", "")],
    ]
    same = [f"{family.name} is {family.same_as}" for family in plan.families if family.same_as]
    if same:
        lines += wrapped(f"One group under two names is one communicator: {'; '.join(same)}.", width, "", "  ")
    alone = [family.name for family in plan.families if family.size == 1]
    if alone:
        text = f"Groups of one rank are not counted ({', '.join(alone)})."
        lines += wrapped(f"{text} NCCL allocates memory for them when they are used.", width, "", "  ")
    return lines


def findings(plan: PlanData, width: int = 80) -> list[Line]:
    """The findings, problems in red; then the fixes."""
    lines: list[Line] = []
    for finding in plan.findings:
        style = "red" if finding.bad else "green" if finding.text.startswith("Good") else ""
        lines += wrapped(finding.text, width, style)
    for fix in dict.fromkeys(finding.fix for finding in plan.findings if finding.fix):
        results = [finding.result for finding in plan.findings if finding.fix == fix]
        lines.append([(f"  {fix}", "bold"), (f"   # {'; '.join(filter(None, results))}".rstrip(" #"), "dim")])
    if any(not locality.exact for family in plan.families for locality in family.localities):
        lines += wrapped("~ Counted on a sample of the groups, because the ranks or the hosts are irregular.", width)
    return lines


def comparison(plans: Sequence[PlanData]) -> list[Line]:
    """A row for each family and a column for each plan: the hosts that a group spans, and the hops that leave one."""
    names = list(dict.fromkeys(family.name for plan in plans for family in plan.families))
    levels = [level.name for level in plans[0].topology]
    rows = [[("", ""), *((plan.order, "bold") for plan in plans)]]
    for name in names:
        for i in range(max(1, len(levels))):
            row = [(name if i == 0 else "", "bold")]
            for plan in plans:
                family = next((family for family in plan.families if family.name == name), None)
                row.append(_comparison_cell(family, i) if family else ("-", "dim"))
            rows.append(row)
    return columns(rows, [False, *([False] * len(plans))], gap="   ")


def best_plan(plans: Sequence[P]) -> P:
    """The plan with the fewest hosts per group of the axes with most traffic; the first one if several are equal."""

    def weight(plan: PlanData) -> list[int]:
        heavy = [str(axis) for axis in axis_heuristics.heavy_axes(plan.layout.axes)]
        rest = [str(axis) for axis in plan.layout.axes if str(axis) not in heavy]
        return [locality.high for name in heavy + rest for locality in reversed(plan[name].localities)]

    return min(plans, key=weight)


# -- formatting --------------------------------------------------------------------------------------------------------


def format_sizes(box: Mapping[Axis, int]) -> str:
    return " ".join(str(size) if isinstance(axis, int) else f"{axis}={size}" for axis, size in box.items())


def format_changes(sizes: Mapping[Axis, int], changed: Mapping[Axis, int]) -> str:
    """The sizes that changed.

    >>> format_changes({"dp": 4, "tp": 2}, {"dp": 4, "tp": 1}), format_changes({0: 4, 1: 2}, {0: 2, 1: 2})
    ('tp 1', 'axis 0 of 2')
    """
    other = [(axis, size) for axis, size in changed.items() if sizes[axis] != size]
    return ", ".join(f"axis {axis} of {size}" if isinstance(axis, int) else f"{axis} {size}" for axis, size in other)


def format_hold(level: HostLevel) -> str:
    """``8 hosts of 8 hold 64``."""
    return f"{level} {'holds' if level.count == 1 else 'hold'} {level.capacity:,}"


def sample_of(ranks: Sequence[int]) -> tuple[int, ...]:
    """All ranks of a group; of more than ``MAX_SAMPLE``, the first ones and the last.

    >>> sample_of(range(100))
    (0, 1, 2, 3, 4, 5, 6, 99)
    """
    return tuple(ranks) if len(ranks) <= MAX_SAMPLE else (*ranks[: MAX_SAMPLE - 1], ranks[-1])


def format_range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def format_units(low: int, high: int, name: str) -> str:
    return f"{format_range(low, high)} {name}{'s' * (high > 1)}"


def _kind(locality: Locality) -> str:
    return locality.kind + "~" * (not locality.exact)


def _stride(family: FamilyPlan) -> str:
    return "-" if family.size == 1 else "·".join(map(str, family.strides)) or "uneven"


def _comparison_cell(family: FamilyPlan, level: int) -> tuple[str, str]:
    if not family.localities:
        return f"stride {_stride(family)}", ""
    locality = family.localities[level]
    text = format_units(locality.low, locality.high, locality.level)
    if locality.hops_high:
        text += f", {format_range(locality.hops_low, locality.hops_high)}/{family.size} hops"
    return text, STYLES[locality.kind]
