"""``pgmesh plan``: the groups and hosts of a layout, without running anything."""

from __future__ import annotations

import argparse
import math
import shlex

from pgmesh._util.formatting import format_sizes
from pgmesh.cli import arguments, output
from pgmesh.drawing import styled_text, svg
from pgmesh.drawing.styled_text import Line
from pgmesh.layout import Axis
from pgmesh.planning import axis_heuristics, text_report
from pgmesh.planning.plan import Plan, best_plan, comparison_lines, figures_of, lines_of, plan
from pgmesh.planning.text_report import layout_of
from pgmesh.topology.hosts import Topology

EXAMPLES = """\
examples:
  pgmesh plan pp=2 dp=4 cp=2 tp=4 --nodes 8x8
  pgmesh plan tp=4 dp=16 --nodes 8x8 --compare dp,tp
  pgmesh plan pp=2 dp=4 tp=8 --nodes 8x8 --view "moe: pp=2 edp=-1 ep=8"
  pgmesh plan --suggest tp=8 cp=2 --nodes 8x8
  pgmesh plan pp=4 dp=-1 tp=8 --domains 4x18x4 --svg plan.svg

A stride is the distance of neighbours in ranks. A group is intra if it is on
one host, inter if each of its ranks is on a different host, else mixed. Hops
out are the steps of a ring over a group that leave a host. Nothing is sent,
and torch is not loaded."""


def add(parser: argparse.ArgumentParser) -> None:
    arguments.add_mesh(parser)
    arguments.add_combinations(parser)
    arguments.add_list(parser, "--view", "VIEW", 'other axes over the same ranks: "moe: edp=-1 ep=8"')
    arguments.add_list(parser, "--compare", "ORDER", "other orders of the axes, in one table")
    parser.add_argument("--suggest", action="store_true", help="order the axes by traffic; dp fills the hosts")
    arguments.add_output(parser)


def run(args: argparse.Namespace) -> int:
    sizes, topology = arguments.parse_mesh(args, fit=not args.suggest)
    why: list[Line] = []
    if args.suggest:
        sizes = _order_by_traffic(args, sizes, topology)
        why = _reasons(args, sizes)
    layout = layout_of(sizes)
    views = arguments.parse_views(args, layout)
    combinations = [arguments.parse_axes(words, layout) for words in args.combinations]
    colour = arguments.parse_axes(args.colour, layout) if args.colour else ()
    orders = [arguments.reorder(sizes, order) for order in args.compare]
    plans = [
        plan(each, nodes=args.nodes, domains=args.domains, views=views, combinations=combinations)
        for each in dict.fromkeys([layout, *map(layout_of, orders)])
    ]

    def lines(width: int) -> list[Line]:
        return [*why, *(lines_of(plans[0], width) if len(plans) == 1 else _comparison_lines(plans))]

    def drawing() -> str:
        return svg.render([figure for each in plans for figure in figures_of(each, *colour)])

    data = plans[0].data if len(plans) == 1 else lambda: _comparison_data(plans)
    output.write(args, data, lines, drawing)
    return 0


def _order_by_traffic(args: argparse.Namespace, sizes: dict[Axis, int], topology: Topology) -> dict[Axis, int]:
    """The sizes that fill the hosts, ordered by traffic. The axis ``dp`` is added for the ranks that are left."""
    arguments.require_names(sizes, "the traffic of an axis is known by its name")
    is_whole = "dp" in sizes or -1 in sizes.values() or not topology
    if not is_whole and topology[0].capacity != math.prod(sizes.values()):
        sizes["dp"] = -1
    sizes = arguments.fill_hosts(sizes, topology)
    return {axis: sizes[axis] for axis in axis_heuristics.order_by_traffic([*map(str, sizes)])}


def _reasons(args: argparse.Namespace, sizes: dict[Axis, int]) -> list[Line]:
    """The suggested command line, and the traffic of each axis."""
    hosts = [f"--{name} {shlex.quote(vars(args)[name])}" for name in ("nodes", "domains") if vars(args)[name]]
    command = " ".join(["pgmesh plan", format_sizes(sizes), *hosts])
    lines: list[Line] = [[(command, "bold")], [], [("The axes by traffic, innermost first:", "")]]
    rows = []
    for axis, size in reversed(sizes.items()):
        method = axis_heuristics.method_of(axis)
        message = f"{method.name}: {method.traffic}" if method else "unknown name: between pipeline and data"
        rows.append([(f"  {axis}={size}", "bold"), (message, "")])
    return [*lines, *styled_text.columns(rows, [False, False]), []]


def _comparison_lines(plans: list[Plan]) -> list[Line]:
    first = plans[0]
    lines = [[(text_report.title(first.layout, first.topology), "bold")], [], *comparison_lines(plans), []]
    if not first.topology:
        return lines
    best = best_plan(plans)
    return [*lines, [(f"Best by traffic: {best.order}", "green")], *text_report.findings_report(best.findings)]


def _comparison_data(plans: list[Plan]) -> dict[str, object]:
    best = best_plan(plans).order if plans[0].topology else None
    return {"format": 1, "plans": [each.data() for each in plans], "best": best}
