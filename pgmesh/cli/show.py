"""``pgmesh show``: the coord, the groups and the neighbours of one rank, with a figure."""

from __future__ import annotations

import argparse
import json
import sys

from pgmesh.cli import arguments, output
from pgmesh.cli.arguments import CommandLine, UsageError
from pgmesh.drawing import figures, styled_text, svg, terminal
from pgmesh.planning import html
from pgmesh.planning.rank_report import rank_report_of

EXAMPLES = """\
examples:
  pgmesh show --rank 13 pp=2 dp=4 cp=2 tp=4 --nodes 8x8
  pgmesh show --rank 13 pp=2 dp=4 cp=2 tp=4 --colour dp --svg rank13.svg"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int, required=True, metavar="RANK", help="the rank in the world")
    arguments.add_mesh(parser)
    arguments.add_output(parser)


def run(args: argparse.Namespace, command_line: CommandLine) -> int:
    output.check(args, command_line)
    mesh = arguments.parse_mesh(args, command_line)
    layout, rank = mesh.layout, args.rank
    if rank not in layout:
        last = len(layout) - 1
        nearest = str(min(max(rank, 0), last))
        raise UsageError(
            f"there is no rank {rank:,}: the ranks are 0 to {last:,}.",
            (command_line.with_changes({str(rank): nearest}), ""),
        )
    report = rank_report_of(layout, rank, mesh.topology)
    axes = arguments.parse_axes(args.colour, layout, command_line) if args.colour else html.colour_axes(layout)
    host = mesh.topology[0] if mesh.topology else None
    drawn = figures.make_figure(layout, *axes, host=host, mark=rank)
    saved = []
    for file, text in ((args.svg, svg.drawing(drawn).svg), (args.html, lambda: html.rank_page(report, drawn))):
        if file and output.save(text(), file):
            saved.append([(f"Figure written to {file}", "")])
    if args.json:
        print(json.dumps(report.data(), indent=2))
    elif "-" not in (args.svg, args.html):
        width = styled_text.width_of(sys.stdout)
        coloured = styled_text.is_coloured(sys.stdout)
        lines = terminal.lines(layout, *axes, host=host, mark=rank, width=width, coloured=coloured)
        styled_text.write([*report.lines(width), [], *lines, *([[], *saved] if saved else [])], sys.stdout)
    return 0
