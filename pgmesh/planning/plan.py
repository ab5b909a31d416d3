"""Predict the groups of a layout and their hosts, without processes.

``plan`` checks its arguments and describes all groups along each axis and along combinations of axes.
``planning.combinations`` computes these, and ``planning.findings`` judges the axes with much traffic.

>>> print(plan(layout, nodes="2x4"))
8 ranks: pp=2 dp=2 tp=2 on 2 hosts of 4
<BLANKLINE>
axes  size  groups  stride  hosts         hops out  one group
pp       2       4       4      2  inter    2 of 2  0, 4
dp       2       4       2      1  intra    0 of 2  0, 2
tp       2       4       1      1  intra    0 of 2  0, 1
<BLANKLINE>
A rank that uses all of these holds 3 communicators, the world's not counted.
<BLANKLINE>
Good: tp stays inside one host.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pgmesh._util.formatting import Text, count_of, format_call, shorten
from pgmesh._util.suggestions import example_ranks
from pgmesh._util.validation import Sizes, fill_sizes, parse_sizes
from pgmesh.drawing import styled_text, svg
from pgmesh.drawing.figures import make_figure
from pgmesh.drawing.styled_text import Line
from pgmesh.errors import RankError, ShapeError
from pgmesh.layout import Axis, Layout
from pgmesh.planning import text_report
from pgmesh.planning.axis_heuristics import axes_to_colour
from pgmesh.planning.combinations import Known, combination_plan
from pgmesh.planning.data import CombinationPlan, Finding
from pgmesh.planning.findings import findings_of
from pgmesh.planning.text_report import format_hold
from pgmesh.topology.hosts import HostLevel, Topology, parse_topology

if TYPE_CHECKING:
    from pgmesh.mesh import ProcessGroupMesh


@dataclass(frozen=True, repr=False)
class Plan:
    """The result of ``plan``. It can be printed, compared with ``==``, drawn, and converted to JSON.

    ``plan["tp"]`` and ``plan["dp x cp"]`` are the groups along these axes, ``plan["moe: ep"]`` those of a view.

    Args:
        layout: the mesh.
        topology: the levels of hosts, innermost first; empty if they are unknown.
        combinations: the groups along each axis and each combination of axes, first of the mesh, then of its views.
        findings: what is good and bad about the hosts, with the fixes.
        views: each view with its name.

    >>> ours = plan(layout, nodes="2x4")
    >>> ours == plan(layout, nodes="2x4"), ours["tp"].groups, ours["pp"].localities[0].high
    (True, 4, 2)
    """

    layout: Layout
    topology: Topology
    combinations: tuple[CombinationPlan, ...]
    findings: tuple[Finding, ...]
    views: tuple[tuple[str, Layout], ...] = ()

    def __getitem__(self, name: Axis) -> CombinationPlan:
        by_name = {each.name: each for each in self.combinations}
        if str(name) not in by_name:
            raise RankError(f"there are no groups along {name!r}; there are {', '.join(by_name)}.")
        return by_name[str(name)]

    @property
    def communicators(self) -> int:
        """The communicators of a rank that uses each combination once. Groups of one rank are not counted.

        >>> plan(layout, views={"moe": {"ep": 4, "edp": 2}}).communicators  # edp's groups are tp's
        4
        """
        return len([each for each in self.combinations if each.size > 1 and not each.same_as])

    def data(self) -> dict[str, Any]:
        """The plan as JSON data."""
        return {
            "format": 1,
            "ranks": len(self.layout),
            "order": list(self.layout.axes),
            "shape": list(self.layout.shape),
            "views": {name: dict(zip(map(str, view.axes), view.shape)) for name, view in self.views},
            "levels": [asdict(level) for level in self.topology],
            "combinations": [{"name": each.name, **asdict(each)} for each in self.combinations],
            "communicators": self.communicators,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.data(), indent=2)

    def svg(self, *axes: Axis) -> str:
        """The mesh and its views as SVG. The groups along ``axes`` of the mesh are coloured.

        >>> plan(layout, nodes="2x4").svg("dp").count('<rect class="cell"')
        8
        """
        host = self.topology[0] if self.topology else None
        figures = [make_figure(self.layout, *(axes or axes_to_colour(self.layout)), host=host)]
        for name, view in self.views:
            title = f"{name}: {text_report.sizes_text(view)}"
            figures.append(make_figure(view, *axes_to_colour(view), host=host, title=title))
        return svg.render(figures)

    def _repr_html_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return styled_text.plain(lines_of(self))

    def __repr__(self) -> str:
        return f"<Plan of {text_report.title(self.layout, self.topology)}>"


def lines_of(plan: Plan, width: int = 80) -> list[Line]:
    """A plan as styled text."""
    return [
        [(text_report.title(plan.layout, plan.topology), "bold")],
        [],
        *text_report.table(plan.combinations, plan.topology, width),
        [],
        *text_report.communicators_report(plan.communicators, plan.combinations, width),
        [],
        *text_report.findings_report(plan.findings, width),
    ]


def plan(
    layout: Layout | ProcessGroupMesh | Sizes | int | None = None,
    *shape: int,
    ranks: Iterable[int] | None = None,
    nodes: str | Sequence[int] | None = None,
    domains: str | Sequence[int] | None = None,
    views: Mapping[str, Sizes] | None = None,
    combinations: Iterable[Sequence[Axis]] = (),
    **sizes: int,
) -> Plan:
    """Predict the groups of a layout and their hosts, without processes.

    Sizes must fill all hosts. So must a Layout of the ranks 0 to n - 1, unless it is a slice. A mesh, a slice, or a
    Layout of other ranks may use only some of the hosts.

    Args:
        layout: a Layout, a mesh, or the sizes as for ``Layout``. One size may be -1, which fills the hosts.
        shape: further sizes of numbered axes.
        ranks: as for ``Layout``, with sizes.
        nodes: the hosts. ``"8x8"`` is 8 hosts of 8 ranks; ``"8,8,4"`` or ``[8, 8, 4]`` lists the ranks of each host.
        domains: instead of ``nodes``, hosts in domains. ``"4x18x4"`` or ``[4, 18, 4]`` is 4 domains of 18 hosts of 4.
        views: other axes over the same ranks: ``{"moe": {"edp": -1, "ep": 8}}``.
        combinations: combinations of axes to include in addition to the single axes: ``[("dp", "cp")]``.
        sizes: the sizes of named axes.

    Raises:
        ShapeError: invalid sizes, more ranks than the hosts hold, hosts that are not filled, or views of another size.
        AxisError: a combination has an unknown axis.

    >>> print(plan(tp=4, dp=2, nodes="2x4").findings[0].text)
    tp spans 2 hosts: 2 of 4 hops of a ring leave the host.
    """
    combinations = [combinations] if isinstance(combinations, str) else [*combinations]
    topology = parse_topology(nodes, domains)
    nodes, domains, views = _plain(nodes), _plain(domains), dict(views or {})
    arguments = {"nodes": nodes, "domains": domains, "views": views, "combinations": combinations}
    more = {word: Text(repr(value)) for word, value in arguments.items() if value}
    base = getattr(layout, "layout", layout)
    if not isinstance(base, Layout):
        given = shape if layout is None else (layout, *shape)
        layout = base = _layout_of_sizes(given, ranks, sizes, topology, more)
    elif shape or sizes or ranks is not None:
        words = {**sizes, "ranks": ranks} if ranks is not None else sizes
        extra = [*map(repr, shape), *(f"{word}={value!r}" for word, value in words.items())]
        raise TypeError(f"plan() takes a layout, or sizes and ranks, not a layout and {', '.join(extra)}")
    if topology:
        _check_hosts(base, topology[0], base is layout, more)
    view_layouts = tuple((name, base.view(_fill_view(base, name, views, more))) for name in views)
    requested: list[tuple[str, Layout, tuple[Axis, ...]]] = [("", base, (axis,)) for axis in base.axes]
    requested += [("", base, (axes,) if isinstance(axes, (str, int)) else tuple(axes)) for axes in combinations]
    requested += [(name, view, (axis,)) for name, view in view_layouts for axis in view.axes]
    known: Known = {}
    found: dict[str, CombinationPlan] = {}
    for name, whole, axes in requested:
        each = combination_plan(name, whole, axes, topology, known)
        found.setdefault(each.name, each)
    findings = findings_of(base, [*found.values()], topology, view_layouts)
    return Plan(base, topology, tuple(found.values()), tuple(findings), view_layouts)


def _layout_of_sizes(
    given: Sequence[Any],
    ranks: Iterable[int] | None,
    sizes: Mapping[str, int],
    topology: Topology,
    more: Mapping[str, object],
) -> Layout:
    """The layout of the sizes in a call of ``plan``, with -1 replaced so that they fill the hosts."""
    if ranks is not None:
        return Layout(*given, ranks=ranks, **sizes)
    box = parse_sizes("plan", given, sizes, more, topology[0].capacity if topology else None)
    if -1 not in box.values():
        return Layout(box)
    if not topology:
        call = format_call("plan", box, **{"nodes": f"1x{len(example_ranks(box))}", **more})
        raise ShapeError(f"{format_call('plan', box)} cannot infer the size of -1: give it hosts, such as {call}.")
    host = topology[0]
    return Layout(fill_sizes("plan", box, host.capacity, format_hold(host), more=more))


def _plain(hosts: str | Sequence[int] | None) -> str | list[int] | None:
    """Hosts for suggested calls: numbers of numpy become plain ones."""
    return hosts if hosts is None or isinstance(hosts, str) else [*map(int, hosts)]


def _fill_view(base: Layout, name: str, views: Mapping[str, Sizes], more: Mapping[str, object]) -> Sizes:
    """The sizes of a view of the mesh, with -1 inferred."""

    def call_of(_: str, box: Sizes, **__: object) -> str:
        return format_call("plan", {}, Text(shorten(repr(base), "layout")), **{**more, "views": {**views, name: box}})

    box, count = parse_sizes("view", (views[name],), {}), len(base)
    return fill_sizes("view", box, count, f"the mesh has {count:,}", call_of=call_of)


# -- layouts that do not fill their hosts ------------------------------------------------------------------------------


def _check_hosts(layout: Layout, host: HostLevel, must_fill: bool, more: Mapping[str, object]) -> None:
    """Raise ShapeError if the hosts do not hold all ranks.

    Args:
        must_fill: True if the ranks 0 to n - 1, unless they are a slice, have to fill the hosts.
        more: the other arguments of ``plan``, which suggested calls repeat.
    """
    count, ranks = len(layout), layout.ranks_in_order()
    last = max(ranks[0], ranks[-1]) if isinstance(ranks, range) else max(ranks)
    if must_fill and not layout.is_slice and last + 1 == count:
        if count != host.capacity:
            text, held = shorten(repr(layout), "layout"), count_of(count, "rank")
            size = host.runs[0][1]  # hosts of this size, and a smaller one for the rest
            runs = [(count // size, size), (1, count % size)]
            nodes = HostLevel(host.name, tuple(run for run in runs if 0 not in run)).spell()
            call = format_call("plan", {}, Text(text), **{**more, "domains": None, "nodes": nodes})
            raise ShapeError(f"{text} holds {held}, but {format_hold(host)}.\n\n  {call}   # hosts for {held}")
    elif last >= host.capacity:
        raise ShapeError(f"{format_hold(host)}, but there is a rank {last:,}.")
