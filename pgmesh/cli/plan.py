"""``pgmesh plan``: the groups, hosts and costs of a layout, without running anything."""

from __future__ import annotations

import argparse
import json
import sys

from pgmesh.cli import arguments, output
from pgmesh.cli.arguments import CommandLine, ParsedMesh
from pgmesh.drawing import styled_text
from pgmesh.drawing.styled_text import Line
from pgmesh.planning import axis_heuristics, text_report
from pgmesh.planning.plan import Plan, layout_of, plan, suggest

EXAMPLES = """\
examples:
  pgmesh plan pp=2 dp=4 cp=2 tp=4 --nodes 8x8
  pgmesh plan tp=4 dp=16 --nodes 8x8 --compare dp,tp
  pgmesh plan pp=2 dp=4 tp=8 --nodes 8x8 --view "moe: pp=2 edp=-1 ep=8"
  pgmesh plan --suggest tp=8 cp=2 --nodes 8x8
  pgmesh plan pp=4 dp=-1 tp=8 --domains 4x18x4 --svg plan.svg

A stride is the distance of neighbours in ranks. A group is intra if it is on
one host, inter if each of its ranks is on a different host, else mixed. Nothing
is sent, and torch is not loaded."""


def add(parser: argparse.ArgumentParser) -> None:
    arguments.add_mesh(parser)
    parser.add_argument(
        "--family",
        nargs="+",
        action="extend",
        default=[],
        metavar="AXES",
        help="combinations of axes to include: dp,cp",
    )
    parser.add_argument(
        "--view",
        nargs="+",
        action="extend",
        default=[],
        metavar="VIEW",
        help='other axes over the same ranks: "moe: edp=-1 ep=8"',
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        action="extend",
        default=[],
        metavar="ORDER",
        help="other orders of the axes, in one table",
    )
    parser.add_argument("--suggest", action="store_true", help="order the axes by traffic; dp fills the hosts")
    parser.add_argument("--picture", action="store_true", help="draw the mesh in the terminal too")
    arguments.add_output(parser)


def run(args: argparse.Namespace, command_line: CommandLine) -> int:
    args.view, command_line = arguments.join_views(args.view, command_line)
    output.check(args, command_line)
    for words in (args.view, args.compare, args.family):  # a size after an option is a size of the mesh
        args.sizes += [word for word in words if "=" in word and ":" not in word and " " not in word]
        words[:] = [word for word in words if word not in args.sizes]
    mesh = arguments.parse_mesh(args, command_line, fit=not args.suggest)
    why: list[Line] = []
    if args.suggest:
        mesh, why = _suggested(mesh, args)
    views = arguments.parse_views(args.view, mesh)
    families = [arguments.parse_axes(text, mesh.layout, command_line) for text in args.family]
    colour = arguments.parse_axes(args.colour, mesh.layout, command_line) if args.colour else ()
    orders = [arguments.reorder(mesh.sizes, order, command_line) for order in args.compare]
    layouts = dict.fromkeys([mesh.layout, *(layout_of(order) for order in orders)])
    plans = [plan(layout, nodes=args.nodes, domains=args.domains, views=views, families=families) for layout in layouts]
    saved = _save(plans, args, colour)
    if args.json:
        data = plans[0].data() if len(plans) == 1 else _comparison_data(plans)
        print(json.dumps(data, indent=2))
    elif "-" not in (args.svg, args.html):
        width = styled_text.width_of(sys.stdout)
        lines = [*why, *(text_report.full_report(plans[0], width) if len(plans) == 1 else _comparison_lines(plans))]
        if args.picture:
            lines += [[], *_figure_lines(plans[0], colour, width)]
        styled_text.write([*lines, *([[], *saved] if saved else [])], sys.stdout)
    return 0


def _suggested(mesh: ParsedMesh, args: argparse.Namespace) -> tuple[ParsedMesh, list[Line]]:
    """The mesh with its axes ordered by traffic, and lines with the reasons."""
    arguments.require_names(mesh.sizes, mesh.command_line, "the traffic of an axis is known by its name")
    whole = "dp" in mesh.sizes or -1 in mesh.sizes.values() or not mesh.topology
    if not whole and mesh.topology[0].capacity != len(mesh.layout):
        mesh.sizes["dp"] = -1
    sizes = arguments.fill(mesh.sizes, mesh.topology, arguments.hosts_argument(args), mesh.command_line)
    layout = suggest({str(axis): size for axis, size in sizes.items()}, mesh.topology)
    ordered = dict(zip(layout.axes, layout.shape))
    hosts = ["--nodes", args.nodes] if args.nodes else ["--domains", args.domains] if args.domains else []
    line = CommandLine(("plan", *(f"{axis}={size}" for axis, size in ordered.items()), *hosts)).with_changes({})
    why: list[Line] = [[(line, "bold")], []]
    rows = []
    for axis in reversed(layout.axes):
        method = axis_heuristics.method_of(axis)
        message = f"{method.name}: {method.traffic}" if method else "unknown name: between pipeline and data"
        rows.append([(f"  {axis}={ordered[axis]}", "bold"), (message, "")])
    why += [
        [("The axes by traffic, innermost first:", "")],
        *styled_text.columns(rows, [False, False]),
        [],
    ]
    return ParsedMesh(mesh.command_line, ordered, mesh.topology, layout), why


def _comparison_lines(plans: list[Plan]) -> list[Line]:
    lines = [[(text_report.title(plans[0]), "bold")], [], *text_report.comparison(plans), []]
    if not plans[0].topology:
        return lines
    best = text_report.best_plan(plans)
    return [*lines, [(f"Best by traffic: {best.order}", "green")], *text_report.findings(best)]


def _comparison_data(plans: list[Plan]) -> dict[str, object]:
    best = text_report.best_plan(plans).order if plans[0].topology else None
    return {"format": 1, "plans": [each.data() for each in plans], "best": best}


def _save(plans: list[Plan], args: argparse.Namespace, colour: tuple[str | int, ...]) -> list[Line]:
    """Write the SVG and HTML files; return a line for each file."""
    lines: list[Line] = []
    if args.svg or args.html:
        from pgmesh.drawing import svg  # only loaded when needed
        from pgmesh.planning import html

        drawn = [figure for each in plans for figure in html.figures(each, *colour)]
        if args.svg and output.save(svg.drawing(*drawn).svg(), args.svg):
            lines.append([(f"SVG written to {args.svg}", "")])
        if args.html and output.save(html.page(plans, *colour), args.html):
            lines.append([(f"HTML written to {args.html}", "")])
    return lines


def _figure_lines(one: Plan, colour: tuple[str | int, ...], width: int) -> list[Line]:
    """The lines of the mesh's figure, then those of its views."""
    from pgmesh.drawing import terminal
    from pgmesh.planning import html

    host = one.topology[0] if one.topology else None
    coloured = styled_text.is_coloured(sys.stdout)
    axes = colour or html.colour_axes(one.layout)
    lines = terminal.lines(one.layout, *axes, host=host, width=width, coloured=coloured)
    for name, view in one.views:
        drawn = terminal.lines(view, *html.colour_axes(view), host=host, width=width, coloured=coloured)
        lines += [[], [(f"{name}:", "bold")], *drawn]
    return lines
