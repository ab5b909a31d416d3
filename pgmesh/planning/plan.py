"""Predict the groups of a layout, their hosts and their costs, without processes.

``plan`` checks its arguments and describes each family: all groups along one combination of axes. ``_family`` computes
a family from the strides of the layout, not from a list of its groups. Irregular layouts are counted rank by rank; see
``topology.locality``.
``_findings`` reports axes with heavy traffic whose groups span several hosts or domains. It suggests the axis order of
``axis_heuristics`` if the family then spans fewer hosts; at a tie, if its rings leave a host less often.

>>> print(plan(layout, nodes="2x4"))
8 ranks: pp=2 dp=2 tp=2 on 2 hosts of 4
<BLANKLINE>
family  size  groups  stride  hosts         ring hops that leave  one group
pp         2       4       4      2  inter                2 of 2  0, 4
dp         2       4       2      1  intra                0 of 2  0, 2
tp         2       4       1      1  intra                0 of 2  0, 1
<BLANKLINE>
A rank that uses each family holds 3 communicators, the world's not counted:
  NCCL  1.6 to 9.8 GB of GPU memory, by NVIDIA/nccl issues 2363, 964 and 1685
  Gloo  6 threads, 18 descriptors and 210 to 255 KB of memory, as measured
<BLANKLINE>
Good: tp stays inside one host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Union

from pgmesh._util.formatting import Text, count_of, format_call, format_calls, join_words, shorten
from pgmesh._util.suggestions import example_ranks, fit_sizes, largest_divisor
from pgmesh._util.validation import Sizes, fill_sizes, parse_sizes
from pgmesh.drawing import styled_text, svg
from pgmesh.errors import ShapeError
from pgmesh.layout import Axis, Layout
from pgmesh.planning import axis_heuristics, costs, html, text_report
from pgmesh.planning.data import FamilyPlan, Finding, PlanData
from pgmesh.topology.hosts import HostLevel, Topology, parse_topology
from pgmesh.topology.locality import MAX_ENUMERATED, Locality, locality_of, strided_runs

if TYPE_CHECKING:
    from pgmesh.mesh import ProcessGroupMesh


@dataclass(frozen=True, repr=False)
class Plan(PlanData):
    """The result of ``plan``. It can be printed, compared with ``==`` or in a table, drawn, and converted to JSON.

    >>> ours = plan(layout, nodes="2x4")
    >>> ours == plan(layout, nodes="2x4"), ours["tp"].groups, ours["pp"].localities[0].high
    (True, 4, 2)
    """

    def compare(self, *others: Plan) -> str:
        """A table of this plan and others: the hosts that each family spans.

        >>> print(plan(layout, nodes="2x4").compare(plan(Layout(tp=2, dp=2, pp=2), nodes="2x4")))
             pp,dp,tp            tp,dp,pp
        pp   2 hosts, 2/2 hops   1 host
        dp   1 host              1 host
        tp   1 host              2 hosts, 2/2 hops
        """
        return styled_text.plain(text_report.comparison([self, *others]))

    def data(self) -> dict[str, Any]:
        """The plan as JSON data."""
        return {
            "format": 1,
            "ranks": len(self.layout),
            "order": list(self.layout.axes),
            "shape": list(self.layout.shape),
            "views": {name: dict(zip(map(str, view.axes), view.shape)) for name, view in self.views},
            "levels": [{"name": level.name, "runs": [list(run) for run in level.runs]} for level in self.topology],
            "families": [
                {
                    "name": family.name,
                    "view": family.view,
                    "axes": list(family.axes),
                    "size": family.size,
                    "groups": family.groups,
                    "strides": list(family.strides),
                    "sample": list(family.sample),
                    "sample_is_whole": family.is_whole,
                    "same_as": family.same_as,
                    "levels": [{**asdict(locality), "kind": locality.kind} for locality in family.localities],
                }
                for family in self.families
            ],
            "communicators": self.communicators,
            "costs": [
                {
                    "backend": cost.backend,
                    "of": cost.of,
                    "bytes_each": [cost.low, cost.high],
                    "bytes": [cost.low * self.communicators, cost.high * self.communicators],
                    "sources": [asdict(source) for source in cost.sources],
                }
                for cost in costs.COSTS
            ],
            "findings": [asdict(finding) for finding in self.findings],
        }

    def json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.data(), indent=2)

    def svg(self, *axes: Axis) -> str:
        """The mesh and its views as SVG. The groups along ``axes`` are coloured.

        >>> plan(layout, nodes="2x4").svg("dp").count('<rect class="cell"')
        8
        """
        return svg.drawing(*html.figures(self, *axes)).svg()

    def html(self, *axes: Axis) -> str:
        """The figures, the tables and the sources of the numbers as an HTML page, without scripts."""
        return html.page([self], *axes)

    def _repr_html_(self) -> str:
        return html.part(self)

    def __str__(self) -> str:
        return styled_text.plain(text_report.full_report(self))

    def __repr__(self) -> str:
        return f"<Plan of {text_report.title(self)}>"


Planned = Union[Layout, "ProcessGroupMesh", Sizes, int]


def plan(
    layout: Planned | None = None,
    *shape: int,
    ranks: Iterable[int] | None = None,
    nodes: str | Sequence[int] | None = None,
    domains: str | Sequence[int] | None = None,
    views: Mapping[str, Sizes] | None = None,
    families: Iterable[Sequence[Axis]] = (),
    **sizes: int,
) -> Plan:
    """Predict the groups of a layout, their hosts and their costs, without processes.

    Sizes must fill all hosts. So must a Layout of the ranks 0 to n - 1, unless it is a slice. A mesh, a slice, or a
    Layout of other ranks may use only some of the hosts.

    Args:
        layout: a Layout, a mesh, or the sizes as for ``Layout``. One size may be -1, which fills the hosts.
        shape: further sizes of numbered axes.
        ranks: as for ``Layout``, with sizes.
        nodes: the hosts. ``"8x8"`` is 8 hosts of 8 ranks; ``"8,8,4"`` or ``[8, 8, 4]`` lists the ranks of each host.
        domains: instead of ``nodes``, nested levels. ``"4x18x4"`` is 4 domains of 18 hosts of 4 ranks.
        views: other axes over the same ranks: ``{"moe": {"edp": -1, "ep": 8}}``.
        families: combinations of axes to include in addition to the single axes: ``[("dp", "cp")]``.
        sizes: the sizes of named axes.

    Raises:
        ShapeError: invalid sizes, more ranks than the hosts hold, hosts that are not filled, or views of another size.
        AxisError: a family has an unknown axis.

    >>> print(plan(tp=4, dp=2, nodes="2x4").findings[0].text)
    tp spans 2 hosts: 2 of 4 hops of a ring leave the host.
    """
    families, nodes, domains = [*families], _as_list(nodes), _as_list(domains)
    topology = parse_topology(nodes, domains)
    if views is not None and not isinstance(views, Mapping):
        example = {"moe": {"edp": -1, "ep": 8}}
        raise ShapeError(f"plan: views is a mapping of sizes by name, such as {example}, not {views!r}.")
    arguments = {"nodes": nodes, "domains": domains, "views": views, "families": families}
    more = {word: Text(repr(value)) for word, value in arguments.items() if value}
    base = getattr(layout, "layout", layout)
    if isinstance(base, Layout):
        if shape or sizes or ranks is not None:
            unexpected = [*map(repr, shape), *(f"keyword argument {word!r}" for word in {**sizes, "ranks": ranks})]
            raise TypeError(f"plan() with a layout got an unexpected {unexpected[0]}")
    else:
        given: tuple[Any, ...] = shape if layout is None else (layout, *shape)
        if ranks is None:
            layout = base = layout_of(_fill_free_size(parse_sizes("plan", given, sizes, more), topology, more))
        else:
            layout = base = Layout(*given, ranks=ranks, **sizes)
    _check_hosts(base, topology, base is layout, more, views or {})
    view_layouts = tuple((name, base.view(axes)) for name, axes in (views or {}).items())
    requested = [("", base, axes) for axes in [*((axis,) for axis in base.axes), *map(tuple, families)]]
    requested += [(name, view, (axis,)) for name, view in view_layouts for axis in view.axes]
    found: dict[str, FamilyPlan] = {}
    known: dict[object, str] = {}
    for name, whole, axes in requested:
        family = _family(name, whole, axes, topology, known)
        found.setdefault(family.name, family)
    findings = _findings(base, [*found.values()], topology, view_layouts)
    return Plan(base, topology, tuple(found.values()), tuple(findings), view_layouts)


def _as_list(hosts: Any) -> Any:
    """Convert an array to a list; return text and lists as they are."""
    return hosts.tolist() if hasattr(hosts, "tolist") else hosts


def _fill_free_size(box: dict[Axis, int], topology: Topology, more: Mapping[str, object]) -> dict[Axis, int]:
    """The sizes, with -1 replaced so that they fill the hosts."""
    if -1 not in box.values():
        return box
    if not topology:
        call = format_call("plan", box, **{"nodes": f"1x{len(example_ranks(box))}", **more})
        raise ShapeError(f"{format_call('plan', box)} cannot infer the size of -1: give it hosts, such as {call}.")
    host = topology[0]
    return fill_sizes("plan", box, host.capacity, text_report.format_hold(host), suggest_ranks=False, more=more)


def layout_of(sizes: Sizes) -> Layout:
    """The layout of these sizes. Axes may have any names."""
    return Layout.of(dict(sizes), range(math.prod(sizes.values())))


def _highest_rank(layout: Layout) -> int:
    """The highest rank."""
    if None in layout.strides:
        return max(layout.ranks())
    return layout.rank_of([-1 if (stride or 0) > 0 else 0 for stride in layout.strides])


def _check_hosts(
    layout: Layout, topology: Topology, must_fill: bool, more: Mapping[str, object], views: Mapping[str, Sizes]
) -> None:
    """Raise ShapeError if the hosts do not hold all ranks.

    Args:
        must_fill: True if the ranks 0 to n - 1, unless they are a slice, have to fill the hosts.
        more: the other arguments of ``plan``, which suggested calls repeat.
    """
    if not topology:
        return
    host, count, last = topology[0], len(layout), _highest_rank(layout)
    if not must_fill or layout.is_slice or last + 1 != count:
        if last >= host.capacity:
            ranks = f"rank{'s' * (host.capacity > 1)}"
            raise ShapeError(f"{text_report.format_hold(host)} {ranks}, but there is a rank {last:,}.")
        return
    if count == host.capacity:
        return
    box = dict(zip(layout.axes, layout.shape))
    nearest, _, _ = fit_sizes(box, host.capacity)
    suggestions: list[tuple[str, str]] = []
    if layout.ranks_in_order() == range(count) and _holds(layout_of(nearest), views):
        suggestions.append(
            (_call(format_call("Layout", nearest), more), f"with {text_report.format_changes(box, nearest)}")
        )
    if "domains" not in more or not suggestions:
        hosts = {word: value for word, value in more.items() if word != "domains"}
        call = _call(shorten(repr(layout), "layout"), {**hosts, "nodes": repr(hosts_filled_by(host, count).spell())})
        suggestions.append((call, f"{'or ' * bool(suggestions)}on {count_of(count, 'rank')}"))
    raise ShapeError(
        f"{shorten(repr(layout), 'the layout')} holds {count_of(count, 'rank')}, but "
        f"{text_report.format_hold(host)}.\n\n{format_calls(suggestions)}"
    )


def _holds(layout: Layout, views: Mapping[str, Sizes]) -> bool:
    """True if a layout has all of these views."""
    try:
        return all(layout.view(sizes) for sizes in views.values())
    except ShapeError:
        return False


def _call(layout: str, more: Mapping[str, object]) -> str:
    """The call of ``plan`` for a layout, as source text."""
    return f"plan({', '.join([layout, *(f'{word}={value}' for word, value in more.items())])})"


def hosts_filled_by(host: HostLevel, count: int) -> HostLevel:
    """The first hosts that ``count`` ranks fill. If there are too few, hosts of the last size are added."""
    runs: list[tuple[int, int]] = []
    for n, size in (*host.runs[:-1], (count, host.runs[-1][1])):
        whole = min(n, count // size)
        count -= whole * size
        runs += [(whole, size)] * bool(whole)
        if whole < n:
            break
    return HostLevel(host.name, (*runs, *[(1, count)] * bool(count)))


def _family(
    view: str, layout: Layout, axes: tuple[Axis, ...], topology: Topology, known: dict[object, str]
) -> FamilyPlan:
    """One family. ``known`` has the name of the first family for each set of groups."""
    group = layout.along(layout.rank_of([0] * len(layout.axes)), *axes)  # its axes are in the order of the mesh
    family = FamilyPlan(
        view,
        group.axes,
        len(group),
        len(layout) // len(group),
        _strides(group),
        text_report.sample_of(group.ranks_in_order()),
        tuple(locality_of(layout, group.axes, level) for level in topology),
        "",
    )
    if len(group) == 1:
        return family
    same = known.setdefault(_group_identity(layout, family), family.name)
    return family if same == family.name else replace(family, same_as=same)


def _strides(layout: Layout) -> tuple[int, ...]:
    """The strides of a layout, with contiguous axes merged into one; empty if a stride is not constant."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(layout.shape, layout.strides):
        if stride is None:
            return ()
        if size > 1:
            inside = merged.pop()[0] if merged and merged[-1][1] == size * stride else 1
            merged.append((inside * size, stride))
    return tuple(stride for _, stride in merged)


def _group_identity(layout: Layout, family: FamilyPlan) -> object:
    """A value that is equal for families with the same groups: their strides, or the groups of an irregular layout."""
    if None not in strided_runs(layout, family.axes):
        return (family.sample[0], family.size, family.strides, len(layout), _strides(layout))
    if len(layout) <= MAX_ENUMERATED:
        return frozenset(frozenset(block) for block in layout.partition(*family.axes))
    return object()


# -- findings ----------------------------------------------------------------------------------------------------------


def _findings(
    layout: Layout, families: list[FamilyPlan], topology: Topology, views: tuple[tuple[str, Layout], ...]
) -> list[Finding]:
    """Findings about the locality of groups with much traffic, most traffic first, with their fixes."""
    if not topology:
        ranks = largest_divisor(layout.size(), 8)
        hosts = f"--nodes {layout.size() // ranks}x{ranks}"
        return [Finding("The hosts are not given, so the locality of the groups is unknown.", False, hosts)]
    number = min(1, len(topology) - 1)
    level = topology[number]
    findings, good = [], []
    for name, whole in (("", layout), *views):
        mine = {family.axes[0]: family for family in families if family.view == name and len(family.axes) == 1}
        heavier = 1
        for axis in axis_heuristics.heavy_axes(mine):
            family = mine[axis]
            if family.localities[number].high > 1:
                findings.append(_leaving_finding(family, family.localities[number], whole, level, heavier))
            elif family.size > 1:
                good.append(family.name)
            heavier *= family.size
    if good and not any(finding.bad for finding in findings):
        text = f"Good: {join_words(good)} stay{'s' * (len(good) == 1)} inside one {level.name}."
        findings.insert(0, Finding(text, False))
    return findings


def _leaving_finding(family: FamilyPlan, locality: Locality, layout: Layout, level: HostLevel, heavier: int) -> Finding:
    """Return the finding for a family with groups that span several units of a level, such as several hosts.

    Args:
        locality: the family's locality on the level.
        layout: the mesh or the view with the family's axis.
        heavier: the product of the sizes of the axes with more traffic.
    """
    size = family.size
    spanned = text_report.format_units(locality.low, locality.high, level.name)
    hops = f"{text_report.format_range(locality.hops_low, locality.hops_high)} of {size} hops of a ring leave"
    hops = "every hop leaves" if locality.hops_low == size else hops
    text = f"{family.name} spans {spanned}: {hops} the {level.name}."
    if locality.intra:
        cut = family.groups - locality.intra
        verb = "spans" if cut == 1 else "span"
        most = f"{'up to ' * (locality.high > 2)}{locality.high} {level.name}s"
        about = "" if locality.exact else "About "
        text = f"{about}{cut:,} of {family.groups:,} {family.name} groups {verb} {most}, across an edge."
    order = axis_heuristics.order_by_traffic([str(axis) for axis in layout.axes])
    if order != layout.axes and _strides(layout) == (1,) and 0 in layout:
        moved = layout_of({axis: layout.size(axis) for axis in order})
        after = locality_of(moved, family.axes, level)
        if (after.high, after.hops_high, -after.intra) < (locality.high, locality.hops_high, -locality.intra):
            view = f"--view '{family.view}: {text_report.format_sizes({axis: moved.size(axis) for axis in order})}'"
            result = f"{family.name} on {text_report.format_units(after.low, after.high, level.name)}"
            return Finding(text, True, view if family.view else f"--order {','.join(order)}", result)
    if size > level.largest:
        best = -(-size // level.largest)
        text += f" A {level.name} holds {count_of(level.largest, 'rank')} at most, so {size:,} take {best:,} at best."
        return Finding(text, heavier == 1 or locality.high > best)
    if heavier * size > level.largest:
        return Finding(f"{text} The axes with more traffic fill the {level.name}: no order keeps both on one.", False)
    together = f"{size} ranks do"
    if heavier > 1:
        together = f"With the axes of more traffic they are {heavier * size} ranks, which do"
    wrong = sorted({unit for _, unit in level.runs if unit % (heavier * size)})
    units = f"a {level.name}" if len(wrong) == 1 else f"{level.name}s"
    return Finding(f"{text} {together} not divide {units} of {join_words(wrong)}." if wrong else text, True)
