"""``pgmesh plan``: the groups and hosts of a layout, without running anything."""

from __future__ import annotations

import argparse

from pgmesh.cli import arguments, output
from pgmesh.planning.plan import lines_of, plan

EXAMPLES = """\
examples:
  pgmesh plan pp=2 dp=4 cp=2 tp=4 --nodes 8x8
  pgmesh plan tp=4 dp=16 --nodes 8x8 --order dp,tp
  pgmesh plan pp=2 dp=4 tp=8 --nodes 8x8 --view "moe: pp=2 edp=-1 ep=8"
  pgmesh plan pp=4 dp=-1 tp=8 --domains 4x18x4 --svg plan.svg

A stride is the distance of neighbours in ranks. A group is intra if it is on
one host, inter if each of its ranks is on a different host, else mixed. Hops
out are the steps of a ring over a group that leave a host. Nothing is sent,
and torch is not loaded."""


def add(parser: argparse.ArgumentParser) -> None:
    arguments.add_mesh(parser)
    arguments.add_combinations(parser)
    arguments.add_list(parser, "--view", "VIEW", 'other axes over the same ranks: "moe: edp=-1 ep=8"')
    arguments.add_output(parser)


def run(args: argparse.Namespace) -> int:
    sizes, _ = arguments.parse_mesh(args)
    layout = arguments.layout_of(sizes)
    planned = plan(
        layout,
        nodes=args.nodes,
        domains=args.domains,
        views=arguments.parse_views(args, layout),
        combinations=[arguments.parse_axes(words, layout) for words in args.combinations],
    )
    colour = arguments.parse_axes(args.colour, layout) if args.colour else ()
    output.write(args, planned.data, lambda width: lines_of(planned, width), lambda: planned.svg(*colour))
    return 0
