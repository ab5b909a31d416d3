"""Parsing of the arguments that the commands share: sizes, hosts, combinations of axes, orders and views."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from pgmesh._util.formatting import format_sizes
from pgmesh._util.validation import fill_sizes
from pgmesh.errors import AxisError, ShapeError
from pgmesh.layout import Axis, Layout
from pgmesh.options import to_timedelta
from pgmesh.planning.text_report import format_hold
from pgmesh.topology.hosts import Topology, parse_topology

Sizes = dict[Axis, int]

SIZE = r"-1|0*[1-9][0-9]*"
"""The form of a size."""


class UsageError(Exception):
    """An invalid command line."""


USAGE_ERRORS = (UsageError, AxisError, ShapeError)
"""The errors that an invalid command line raises."""


# -- declarations ------------------------------------------------------------------------------------------------------


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for the mesh and its topology."""
    text = "the axes, outermost first; one size may be -1 to fill the hosts. Sizes alone are axes 0, 1, ..."
    parser.add_argument("sizes", nargs="+", metavar="AXIS=SIZE", help=text)
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--nodes", metavar="HOSTS", help="8x8 is 8 hosts of 8 ranks; 8,8,4 the ranks of each host")
    hosts.add_argument("--domains", metavar="LEVELS", help="4x18x4 is 4 NVLink domains of 18 hosts of 4 ranks")
    parser.add_argument("--order", metavar="AXES", help="the axes in another order, outermost first: pp,dp,cp,tp")


def add_list(parser: argparse.ArgumentParser, option: str, metavar: str, text: str) -> None:
    """Declare an option with several values. It may be given several times."""
    parser.add_argument(option, nargs="+", action="extend", default=[], metavar=metavar, help=text)


def add_combinations(parser: argparse.ArgumentParser) -> None:
    """Declare the combinations of axes."""
    add_list(parser, "--combinations", "AXES", "combinations of axes to include: dp,cp pp,dp")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for the output."""
    add_json(parser)
    parser.add_argument("--svg", metavar="FILE", help="write a figure; - is standard output")
    text = "the groups along these axes are coloured: dp or dp,cp"
    parser.add_argument("--colour", "--color", metavar="AXES", help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_timeout(parser: argparse.ArgumentParser, default: float, text: str) -> None:
    """Declare ``--timeout``, in seconds."""
    text = f"{text} ({default:g})"
    parser.add_argument("--timeout", type=seconds, default=default, metavar="SECONDS", help=text)


def seconds(text: str) -> float:
    """The type of ``--timeout``."""
    return to_timedelta(float(text)).total_seconds()


# -- the mesh and its hosts --------------------------------------------------------------------------------------------


def parse_mesh(args: argparse.Namespace) -> tuple[Sizes, Topology]:
    """Parse the sizes and the topology. If there are hosts, the sizes fill them."""
    sizes, topology = parse_sizes(args.sizes), parse_topology(args.nodes, args.domains)
    if topology:
        sizes = fill(sizes, topology[0].capacity, format_hold(topology[0]))
    return reorder(sizes, args.order), topology


def layout_of(sizes: Sizes) -> Layout:
    """The layout of sizes without -1."""
    if -1 in sizes.values():
        raise UsageError("a size of -1 fills the hosts, so name the hosts, such as --nodes 8x8.")
    return Layout(sizes)


def parse_sizes(words: Sequence[str]) -> Sizes:
    """Parse sizes: ``pp=2 dp=-1`` for named axes, or ``2 -1`` for numbered ones.

    >>> parse_sizes(["pp=2", "dp=-1"]), parse_sizes(["2", "-1"])
    ({'pp': 2, 'dp': -1}, {0: 2, 1: -1})
    """
    sizes: Sizes = {}
    is_numbered = not any("=" in word for word in words)
    for number, word in enumerate(words):
        name, _, size = word.rpartition("=")
        axis: Axis = number if is_numbered else name
        if not re.fullmatch(SIZE, size) or not (is_numbered or name.isidentifier()):
            raise UsageError(f"sizes are written pp=2, at least 1, or -1 to infer it, not {word!r}.")
        if axis in sizes:
            raise UsageError(f"axis {axis} is given twice.")
        sizes[axis] = int(size)
    if [*sizes.values()].count(-1) > 1:
        raise UsageError(f"one size may be -1, not several: {format_sizes(sizes)}.")
    return sizes


def fill(sizes: Sizes, count: int, count_text: str) -> Sizes:
    """The sizes, with -1 replaced so that they hold ``count`` ranks.

    Args:
        count_text: the count in words, such as ``the world has 4``.

    Raises:
        ShapeError: they do not hold that many. It suggests sizes that do.
    """
    return fill_sizes("", sizes, count, count_text, call_of=lambda _, box: format_sizes(box))


# -- axes, orders and views --------------------------------------------------------------------------------------------


def parse_axes(text: str, layout: Layout) -> tuple[Axis, ...]:
    """Parse axes of a layout, separated by commas.

    Raises:
        AxisError: the layout has no such axis.
    """
    known = {str(axis): axis for axis in layout.axes}
    axes = tuple(known.get(word, word) for word in text.split(","))
    layout.size(*axes)
    return axes


def reorder(sizes: Sizes, order: str | None) -> Sizes:
    """The sizes with their axes in another order, if one is given."""
    if order is None:
        return sizes
    if 0 in sizes:
        raise UsageError("an order is one of names, and these axes are numbered: name them, as in dp=2 tp=4.")
    names = order.split(",")
    if sorted(names) != sorted(map(str, sizes)):
        raise UsageError(f"the order {order} does not name each axis once: the axes are {', '.join(map(str, sizes))}.")
    return {name: sizes[name] for name in names}


def parse_views(args: argparse.Namespace, layout: Layout) -> dict[str, Sizes]:
    """Parse views, such as ``moe: ep=8 edp=-1``."""
    views: dict[str, Sizes] = {}
    for number, text in enumerate(args.view):
        name, _, words = text.rpartition(":")
        name = name.strip() or f"view{number or ''}"
        if name in views:
            raise UsageError(f"two views are named {name!r}.")
        sizes = parse_sizes(words.split())
        if not sizes or 0 in sizes:
            raise UsageError(f"a view is written 'moe: ep=8 edp=-1', not {text!r}.")
        views[name] = fill(sizes, len(layout), f"the mesh has {len(layout):,}")
    return views
