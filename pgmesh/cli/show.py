"""``pgmesh show``: the coord, the groups and the neighbours of one rank, with a figure."""

from __future__ import annotations

import argparse
import sys

from pgmesh.cli import arguments, output
from pgmesh.cli.arguments import UsageError
from pgmesh.drawing import styled_text, svg, text
from pgmesh.drawing.figures import make_figure
from pgmesh.drawing.styled_text import Line
from pgmesh.planning.axis_heuristics import axes_to_colour
from pgmesh.planning.rank_report import rank_report_of

EXAMPLES = """\
examples:
  pgmesh show --rank 13 pp=2 dp=4 cp=2 tp=4 --nodes 8x8
  pgmesh show --rank 13 pp=2 dp=4 cp=2 tp=4 --colour dp --svg rank13.svg"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int, required=True, metavar="RANK", help="the rank in the world")
    arguments.add_mesh(parser)
    arguments.add_output(parser)


def run(args: argparse.Namespace) -> int:
    sizes, topology = arguments.parse_mesh(args)
    layout, rank = arguments.layout_of(sizes), args.rank
    if rank not in layout:
        raise UsageError(f"there is no rank {rank:,}: the ranks are 0 to {len(layout) - 1:,}.")
    report = rank_report_of(layout, rank, topology)
    axes = arguments.parse_axes(args.colour, layout) if args.colour else axes_to_colour(layout)
    host = topology[0] if topology else None

    def lines(width: int) -> list[Line]:
        coloured = styled_text.is_coloured(sys.stdout)
        picture = text.lines(layout, *axes, host=host, mark=rank, width=width, coloured=coloured)
        return [*report.lines(width), [], *picture]

    def drawing() -> str:
        return svg.render([make_figure(layout, *axes, host=host, mark=rank)])

    output.write(args, report.data, lines, drawing)
    return 0
