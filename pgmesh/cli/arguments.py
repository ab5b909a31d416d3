"""Parsing of the arguments that the commands share. Errors suggest corrected command lines that can be run.

A suggestion repeats all other arguments, as ``spell`` writes them. So most functions take ``args``, the arguments of
the command, and raise ``UsageError``.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence

from pgmesh._util.formatting import count_of, format_calls
from pgmesh._util.suggestions import closest_name, describe_misfit, fit_sizes, infer_size, known_product
from pgmesh.cli.suggestions import SIZE, corrected_sizes
from pgmesh.errors import PgmeshError
from pgmesh.layout import Axis, Layout
from pgmesh.planning.plan import hosts_filled_by
from pgmesh.planning.text_report import format_changes, format_hold, format_sizes
from pgmesh.topology.hosts import HostLevel, Topology, parse_topology

USUAL_AXES = {1: ("dp",), 2: ("dp", "tp"), 3: ("pp", "dp", "tp"), 4: ("pp", "dp", "cp", "tp")}
"""The usual names of axes, by their number, for suggestions."""


class UsageError(Exception):
    """An invalid command line.

    Args:
        message: the problem, with the numbers.
        suggestions: pairs of a valid command line and a comment on it.
    """

    def __init__(self, message: str, *suggestions: tuple[str, str]) -> None:
        super().__init__("\n\n".join(filter(None, (message, format_calls(suggestions)))))


def spell(args: argparse.Namespace, changes: Mapping[str, str] = {}, sizes: Iterable[str] | None = None) -> str:
    """The command line with these arguments, the sizes first. Options with their default value are left out.

    Args:
        changes: the new value for each value of an option that changes.
        sizes: the new sizes. Default: those in ``args``.
    """
    words = [args.command, *(args.sizes if sizes is None else sizes)]
    for name, value in vars(args).items():
        if name not in ("command", "parser", "sizes") and value != args.parser.get_default(name):
            values = value if isinstance(value, list) else [str(value)] * (value is not True)
            words += [f"--{name}", *(changes.get(word, word) for word in values)]
    return shlex.join(["pgmesh", *words])


# -- declarations ------------------------------------------------------------------------------------------------------


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for the mesh and its topology."""
    text = "the axes, outermost first; one size may be -1 to fill the hosts. Sizes alone are axes 0, 1, ..."
    parser.add_argument("sizes", nargs="*", metavar="AXIS=SIZE", help=text)
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--nodes", metavar="HOSTS", help="8x8 is 8 hosts of 8 ranks; 8,8,4 the ranks of each host")
    hosts.add_argument("--domains", metavar="LEVELS", help="4x18x4 is 4 NVLink domains of 18 hosts of 4 ranks")
    parser.add_argument("--order", metavar="AXES", help="the axes in another order, outermost first: pp,dp,cp,tp")


def add_list(parser: argparse.ArgumentParser, option: str, metavar: str, text: str) -> None:
    """Declare an option with several values. It may be given several times."""
    parser.add_argument(option, nargs="+", action="append", default=[], metavar=metavar, help=text)


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


def sort_words(args: argparse.Namespace) -> None:
    """Move sizes that were typed after an option with several values, and join views that were typed without quotes.

    The first word after an option is always its value, also if it has the form of a size, as in ``--view ep=8``.

    >>> args = argparse.Namespace(sizes=[], view=[["moe:", "ep=8", "edp=-1"], ["b: x=8"]])
    >>> args.combinations = [["dp,tp", "dp=8"]]
    >>> sort_words(args)
    >>> args
    Namespace(sizes=['dp=8'], view=['moe: ep=8 edp=-1', 'b: x=8'], combinations=['dp,tp'])
    """
    for option in ("view", "compare", "combinations"):
        values: list[str] = []
        for words in getattr(args, option, []):
            is_open = False  # True inside a view without quotes
            for number, word in enumerate(words):
                if number == 0 or "=" not in word or " " in word or ":" in word:
                    values.append(word)
                    is_open = " " not in word and ("=" in word or word.endswith(":"))
                elif is_open:
                    values[-1] += f" {word}"
                else:
                    args.sizes.append(word)
        if option in args:
            setattr(args, option, values)


# -- the mesh and its hosts --------------------------------------------------------------------------------------------


def parse_mesh(args: argparse.Namespace, *, fit: bool = True) -> tuple[dict[Axis, int], Topology]:
    """Parse the sizes and the topology.

    Args:
        fit: True if the sizes have to fill the hosts exactly.
    """
    sizes = parse_sizes(args.sizes, lambda right: spell(args, sizes=right))
    topology = parse_hosts(args, sizes)
    if not sizes:
        example = spell(args, sizes=("pp=2", "dp=2", "tp=2"))
        raise UsageError("the sizes of the axes are missing.", (example, "for example"))
    if fit:
        sizes = fill_hosts(args, sizes, topology)
    return reorder(args, sizes, args.order) if args.order is not None else sizes, topology


def parse_sizes(words: Sequence[str], spell_line: Callable[[list[str]], str], view: bool = False) -> dict[Axis, int]:
    """Parse sizes, such as ``pp=2`` or ``2``.

    Args:
        spell_line: returns the command line with corrected sizes.
        view: True for the sizes of a view, which have names.
    """
    sizes: dict[Axis, int] = {}
    is_numbered = not view and all(re.fullmatch("-?[0-9]+", word) for word in words)
    for number, word in enumerate(words):
        name, _, size = word.rpartition("=")
        axis: Axis = number if is_numbered else name
        is_valid = re.fullmatch(SIZE, size) and (is_numbered or name.isidentifier())
        if is_valid and axis not in sizes:
            sizes[axis] = int(size)
            continue
        fault = f"sizes are written pp=2, at least 1, or -1 to infer it, not {word!r}."
        right = corrected_sizes(words, (1 if "-1" in " ".join(words) else -1) if view else 2, named=view)
        raise UsageError(f"axis {axis} is given twice." if is_valid else fault, (spell_line(right), "for example"))
    return sizes


def parse_hosts(args: argparse.Namespace, sizes: Mapping[Axis, int]) -> Topology:
    """Parse the topology of a command line; an error suggests hosts that fit the sizes."""
    try:
        return parse_topology(args.nodes, args.domains)
    except PgmeshError as error:
        count = math.prod(size if size != -1 else 8 for size in sizes.values())
        right = f"1x1x{count}" if args.domains else hosts_filled_by(HostLevel("host", ((1, 8),)), count).spell()
        raise UsageError(str(error), (spell(args, {hosts_argument(args): right}), "for example")) from None


def hosts_argument(args: argparse.Namespace) -> str:
    """The value of ``--nodes`` or ``--domains``; "" if neither was given."""
    return (args.domains if args.nodes is None else args.nodes) or ""


def fill_hosts(args: argparse.Namespace, sizes: dict[Axis, int], topology: Topology) -> dict[Axis, int]:
    """The sizes, with -1 replaced so that they fill the hosts."""
    fixed = known_product(sizes)
    if topology:
        room = hosts_filled_by(topology[0], fixed).spell()
        other = [] if args.domains or -1 in sizes.values() else [spell(args, {args.nodes: room})]
        return fill(args, sizes, topology[0].capacity, format_hold(topology[0]), *other)
    if -1 in sizes.values():
        better = f"{spell(args)} --nodes {fixed}x8"
        raise UsageError("a size of -1 fills the hosts, so name the hosts.", (better, "for example"))
    return sizes


def fill(args: argparse.Namespace, sizes: dict[Axis, int], count: int, whole: str, *other: str) -> dict[Axis, int]:
    """The sizes, with -1 replaced so that they hold ``count`` ranks.

    Args:
        whole: the number of ranks as text, such as ``the world has 4``.
        other: other command lines to suggest if the sizes do not hold that many, with as many ranks as they hold.
    """
    fault, right = check_sizes(sizes, count, whole)
    if not fault:
        return right
    lines = [(spell(args, sizes=format_sizes(right).split()), f"with {format_changes(sizes, right)}")]
    fixed = known_product(sizes)
    raise UsageError(fault, *lines, *((line, f"or on {count_of(fixed, 'rank')}") for line in other))


def check_sizes(sizes: dict[Axis, int], count: int, whole: str) -> tuple[str, dict[Axis, int]]:
    """The reason that sizes do not hold ``count`` ranks, or "", and the nearest sizes that do, with -1 replaced."""
    text, free = format_sizes(sizes), [axis for axis, size in sizes.items() if size == -1]
    filled = infer_size(sizes, count) if len(free) < 2 else None
    if filled is not None:
        return "", filled
    several = f"{text} has {len(free)} sizes of -1; one may be."
    fault = several if len(free) > 1 else describe_misfit(text, sizes, count, whole)
    return fault, fit_sizes(sizes, count)[0]


# -- axes, orders and views --------------------------------------------------------------------------------------------


def parse_axes(args: argparse.Namespace, text: str, layout: Layout) -> tuple[Axis, ...]:
    """Parse axes of a layout, separated by commas."""
    names = _split(text)
    by_name = {str(axis): axis for axis in layout.axes}
    unknown = [name for name in names if name not in by_name]
    if names and not unknown and len({*names}) == len(names):
        return tuple(by_name[name] for name in names)
    known = list(by_name)
    right = dict.fromkeys(closest_name(name, known) or known[-1] for name in names or known[-1:])
    fault = f"there is no axis {unknown[0]!r}" if unknown else f"{text!r} names no axis, or one twice"
    better = spell(args, {text: ",".join(right)})
    raise UsageError(f"{fault}: the axes are {', '.join(known)}.", (better, ""))


def reorder(args: argparse.Namespace, sizes: Mapping[Axis, int], order: str) -> dict[Axis, int]:
    """The sizes with their axes in another order."""
    require_names(args, sizes, "an order is one of names", order)
    names, axes = _split(order), [str(axis) for axis in sizes]
    if sorted(names) == sorted(axes):
        return {name: sizes[name] for name in names}
    known = dict.fromkeys(closest_name(name, axes) for name in names)
    right = [*(axis for axis in axes if axis not in known), *filter(None, known)]
    fault = f"the order {order} does not name each axis once: the axes are {', '.join(axes)}."
    raise UsageError(fault, (spell(args, {order: ",".join(right)}), ""))


def require_names(args: argparse.Namespace, sizes: Mapping[Axis, int], why: str, order: str = "") -> None:
    """Raise UsageError if the axes are numbered.

    Args:
        why: the reason that names are needed.
        order: the value that orders the axes, which is then suggested with names too.
    """
    if 0 not in sizes:
        return
    names = USUAL_AXES.get(len(sizes)) or tuple(f"axis{number}" for number in sizes)
    numbers = [int(number) for number in _split(order) if number.isdecimal()]
    right = ",".join(names[i] for i in (numbers if sorted(numbers) == [*sizes] else range(len(names))))
    better = spell(args, {order: right}, [f"{name}={size}" for name, size in zip(names, args.sizes)])
    raise UsageError(f"{why}, and these axes are numbered: name them.", (better, "for example"))


def _split(text: str) -> list[str]:
    return [name for name in re.split(r"[,\s]+", text) if name]


def parse_views(args: argparse.Namespace, layout: Layout) -> dict[str, dict[Axis, int]]:
    """Parse views, such as ``moe: ep=8 edp=-1``."""
    views: dict[str, dict[Axis, int]] = {}
    for number, text in enumerate(args.view):
        name = text.rpartition(":")[0].strip() or f"view{number or ''}"
        if name in views:
            args.view[number] = text.replace(name, f"{name}{number + 1}", 1)
            raise UsageError(f"two views are named {name!r}.", (spell(args), ""))
        views[name] = _parse_view(args, name, text, len(layout))
    return views


def _parse_view(args: argparse.Namespace, name: str, text: str, count: int) -> dict[Axis, int]:
    """The sizes of one view of ``count`` ranks."""

    def spell_line(sizes: Iterable[str]) -> str:
        return spell(args, {text: f"{name}: {' '.join(sizes)}"})

    sizes = parse_sizes(text.rpartition(":")[2].split(), spell_line, view=True)
    if not sizes:
        raise UsageError(f"a view is written 'moe: ep=8 edp=-1', not {text!r}.", (spell_line(["ep=-1"]), ""))
    fault, right = check_sizes(sizes, count, f"the mesh has {count:,}")
    if not fault:
        return right
    ways = [(spell_line([format_sizes(right)]), "")]
    rest, remainder = divmod(count, known_product(sizes))
    if not remainder and -1 not in sizes.values():
        free = next((axis for axis in ("edp", "dp") if axis not in sizes), "rest")
        ways = [(spell_line([f"{free}=-1", format_sizes(sizes)]), f"{free} is then {rest}"), *ways]
    raise UsageError(f"view {name!r}: {fault}", *ways)
