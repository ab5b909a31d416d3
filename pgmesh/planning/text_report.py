"""The text of a plan: a table of its combinations of axes, the number of communicators, and the findings."""

from __future__ import annotations

from collections.abc import Sequence

from pgmesh._util.formatting import count_of, format_sizes
from pgmesh.drawing.styled_text import Line, columns_with_ranks, wrapped
from pgmesh.layout import Layout
from pgmesh.planning.data import CombinationPlan, Finding
from pgmesh.topology.hosts import HostLevel, Topology
from pgmesh.topology.locality import Locality

Combinations = Sequence[CombinationPlan]

MAX_SAMPLE = 8
"""The number of ranks that are listed of a group."""

STYLES = {"intra": "green", "mixed": "yellow", "inter": ""}


def title(layout: Layout, topology: Topology) -> str:
    """``64 ranks: pp=2 dp=4 cp=2 tp=4 on 8 hosts of 8``."""
    text = count_of(len(layout), "rank")
    if layout.axes:
        text += f": {sizes_text(layout)}"
    if topology:
        text += f" on {' in '.join(map(str, topology))}"
    return text


def sizes_text(layout: Layout) -> str:
    """``pp=2 dp=4 cp=2 tp=4``."""
    return format_sizes(dict(zip(layout.axes, layout.shape)))


# -- the table of combinations -----------------------------------------------------------------------------------------


def table(combinations: Combinations, topology: Topology, width: int = 80) -> list[Line]:
    """A row for each combination of axes: its groups, and their units, kind and hops on each level."""
    head = ["axes", "size", "groups", "stride"]
    for level in topology:
        head += [f"{level.name}s", "", "hops out"]
    rows = [[(word, "dim") for word in head]]
    for plan in combinations:
        numbers = [f"{plan.size:,}", f"{plan.groups:,}", _stride(plan)]
        row = [(plan.name, "bold"), *((number, "") for number in numbers)]
        for locality in plan.localities:
            row += _locality_cells(locality, plan.size)
        rows.append(row)
    right = [False, True, True, True, *([True, False, True] * len(topology))]
    groups = [(plan.sample, plan.size) for plan in combinations]
    return columns_with_ranks(rows, right, "one group", groups, width)


def _locality_cells(locality: Locality, size: int) -> Line:
    """The cells of one level: the number of units, the kind, and the hops that leave."""
    units = format_range(locality.low, locality.high)
    hops = f"{format_range(locality.hops_low, locality.hops_high)} of {size:,}" if size > 1 else "-"
    return [(units, ""), (locality.kind, STYLES[locality.kind]), (hops, "")]


def _stride(plan: CombinationPlan) -> str:
    if plan.size == 1:
        return "-"
    return "·".join(map(str, plan.strides)) or "uneven"


# -- communicators and findings ----------------------------------------------------------------------------------------


def communicators_report(communicators: int, combinations: Combinations, width: int = 80) -> list[Line]:
    """The number of communicators of a rank, and the groups that share one."""
    if not communicators:
        return [[("Each group has one rank: no communicators.", "")]]
    held = count_of(communicators, "communicator")
    lines = wrapped(f"A rank that uses all of these holds {held}, the world's not counted.", width)
    same = [f"{plan.name} is {plan.same_as}" for plan in combinations if plan.same_as]
    if same:
        lines += wrapped(f"One group under two names is one communicator: {'; '.join(same)}.", width)
    return lines


def findings_report(findings: Sequence[Finding], width: int = 80) -> list[Line]:
    """The findings, problems in red; then the fixes."""
    lines: list[Line] = []
    results: dict[str, list[str]] = {}  # of each fix
    for finding in findings:
        style = "green" if finding.text.startswith("Good") else ""
        lines += wrapped(finding.text, width, "red" if finding.bad else style)
        if finding.fix:
            results.setdefault(finding.fix, []).append(finding.result)
    for fix, found in results.items():
        comment = f"   # {'; '.join(found)}" if any(found) else ""
        lines.append([(f"  {fix}", "bold"), (comment, "dim")])
    return lines


# -- sizes, ranges and samples -----------------------------------------------------------------------------------------


def format_hold(level: HostLevel) -> str:
    """``8 hosts of 8 hold 64``."""
    return f"{level} {'holds' if level.count == 1 else 'hold'} {level.capacity:,}"


def sample_of(ranks: Sequence[int]) -> tuple[int, ...]:
    """All ranks of a group; of more than ``MAX_SAMPLE``, the first ones and the last.

    >>> sample_of(range(100))
    (0, 1, 2, 3, 4, 5, 6, 99)
    """
    if len(ranks) <= MAX_SAMPLE:
        return tuple(ranks)
    return (*ranks[: MAX_SAMPLE - 1], ranks[-1])


def format_range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def format_units(low: int, high: int, name: str) -> str:
    """``1 host``, ``2 to 4 hosts``."""
    return f"{format_range(low, high)} {name if high == 1 else f'{name}s'}"
