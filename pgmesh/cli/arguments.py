"""Parsing of the arguments that the commands share. Errors suggest corrected command lines that can be run.

A ``CommandLine`` keeps the words that the user typed, so that a suggestion repeats all other arguments. Most functions
take it for that purpose and raise ``UsageError``.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pgmesh._util.formatting import count_of
from pgmesh._util.suggestions import closest_name, nearest_sizes, torchrun_command
from pgmesh.cli.suggestions import SIZE, are_valid_sizes, corrected_sizes, intended_sizes
from pgmesh.errors import PgmeshError
from pgmesh.layout import Axis, Layout
from pgmesh.planning import text_report
from pgmesh.planning.plan import layout_of
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
        width = max((len(line) for line, _ in suggestions), default=0)
        lines = [f"  {line:{width}}   # {why}" if why else f"  {line}" for line, why in suggestions]
        super().__init__("\n".join([message, *[""] * bool(suggestions), *lines]))


@dataclass(frozen=True)
class CommandLine:
    """The words of a command line, without ``pgmesh``. Its methods return the line as text with some words replaced."""

    words: tuple[str, ...]

    def with_changes(self, changes: Mapping[str, str | None], *more: str) -> str:
        """The line with some words replaced, left out (None) or added.

        >>> CommandLine(("plan", "dp=3", "--nodes=2x4")).with_changes({"dp=3": "dp=2", "2x4": "1x4"})
        'pgmesh plan dp=2 --nodes=1x4'
        """
        words: list[str] = []
        for word in self.words:
            option, equals, value = word.partition("=")
            if word in changes:
                changed = changes[word]
            elif option.startswith("--") and equals and value in changes:
                changed = None if changes[value] is None else f"{option}={changes[value]}"
            else:
                changed = word
            words += [] if changed is None else [changed]
        return shlex.join(["pgmesh", *words, *more])

    def with_run(self, run: Sequence[str], changed: Sequence[str]) -> str:
        """The line with the last occurrence of consecutive words replaced; unchanged if there is none.

        >>> CommandLine(("show", "--rank", "2", "2", "2")).with_run(["2", "2"], ["2", "4"])
        'pgmesh show --rank 2 2 4'
        """
        n, at = len(run), self._last(run)
        if at < 0:
            return self.with_changes({})
        return CommandLine((*self.words[:at], *changed, *self.words[at + n :])).with_changes({})

    def contains_run(self, run: Sequence[str]) -> bool:
        """True if these words are in the line, consecutively."""
        return self._last(run) >= 0

    def _last(self, run: Sequence[str]) -> int:
        """The index of the last occurrence of consecutive words; -1 if there is none."""
        n = len(run)
        return max((i for i in range(len(self.words) - n + 1) if self.words[i : i + n] == (*run,)), default=-1)

    def with_last(self, word: str, changed: str) -> str:
        """The line with the last occurrence of a word replaced."""
        at = max(i for i, other in enumerate(self.words) if other == word)
        return CommandLine((*self.words[:at], changed, *self.words[at + 1 :])).with_changes({})


@dataclass(frozen=True)
class ParsedMesh:
    """The mesh and the topology of a command line."""

    command_line: CommandLine
    sizes: dict[Axis, int]
    topology: Topology
    layout: Layout


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for the mesh and its topology."""
    parser.add_argument(
        "sizes",
        nargs="*",
        metavar="AXIS=SIZE",
        help="the axes, outermost first; one size may be -1 to fill the hosts. Sizes alone are axes 0, 1, ...",
    )
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--nodes", metavar="HOSTS", help="8x8 is 8 hosts of 8 ranks; 8,8,4 the ranks of each host")
    hosts.add_argument("--domains", metavar="LEVELS", help="4x18x4 is 4 NVLink domains of 18 hosts of 4 ranks")
    parser.add_argument("--order", metavar="AXES", help="the axes in another order, outermost first: pp,dp,cp,tp")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for the output."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", metavar="FILE", help="write a figure; - is standard output")
    parser.add_argument("--html", metavar="FILE", help="write a page with the figure and the numbers")
    parser.add_argument(
        "--colour", "--color", metavar="AXES", help="the groups along these axes are coloured: dp or dp,cp"
    )


def parse_mesh(args: argparse.Namespace, command_line: CommandLine, *, fit: bool = True) -> ParsedMesh:
    """Parse the mesh and the topology.

    Args:
        fit: True if the sizes have to fill the hosts exactly.
    """
    sizes = _parse_numbered_sizes(args.sizes, command_line) or _as_axes(_parse_named_sizes(args.sizes, command_line))
    topology = parse_hosts(args, sizes, command_line)
    if not sizes:
        command, *rest = command_line.words
        line = CommandLine((command, "pp=2", "dp=2", "tp=2", *rest))  # not after --view, which would take them
        raise UsageError("the sizes of the axes are missing.", (line.with_changes({}), "for example"))
    if fit:
        sizes = fill(sizes, topology, hosts_argument(args), command_line)
    if args.order is not None:
        sizes = reorder(sizes, args.order, command_line)
    fixed = {axis: size for axis, size in sizes.items() if size != -1}
    return ParsedMesh(command_line, sizes, topology, layout_of(sizes if fit else fixed or {"dp": 1}))


def parse_hosts(args: argparse.Namespace, sizes: Mapping[Axis, int], command_line: CommandLine) -> Topology:
    """Parse the topology of a command line; an error suggests hosts that fit the sizes."""
    try:
        return parse_topology(args.nodes, args.domains)
    except PgmeshError as error:
        count = math.prod(size for size in sizes.values() if size != -1)
        hosts, of = (count, 8) if -1 in sizes.values() else (count // 8, 8) if count % 8 == 0 else (1, count)
        right = f"{hosts}x{of}" if args.domains is None else f"1x{hosts}x{of}"
        numbers = [int(number) for number in re.findall("[1-9][0-9]*", hosts_argument(args))]
        if len(numbers) == 2 + (args.domains is not None) and sizes:  # such as 8*8 and 8 x 8
            room = math.prod(numbers)
            right = "x".join(map(str, numbers)) if _fits(sizes, room) else right
        raise UsageError(
            str(error), (command_line.with_changes({hosts_argument(args): right}), "for example")
        ) from None


def _fits(sizes: Mapping[Axis, int], room: int) -> bool:
    """True if the sizes hold exactly ``room`` ranks, or can be filled to."""
    fixed = math.prod(size for size in sizes.values() if size != -1)
    return room % fixed == 0 if -1 in sizes.values() else room == fixed


def hosts_argument(args: argparse.Namespace) -> str:
    """The value of ``--nodes`` or ``--domains``; "" if neither was given."""
    return (args.domains if args.nodes is None else args.nodes) or ""


def parse_axes(text: str, layout: Layout, command_line: CommandLine) -> tuple[Axis, ...]:
    """Parse axes of a layout, separated by commas."""
    names = [name for name in re.split(r"[,\s]+", text) if name]
    by_name = {str(axis): axis for axis in layout.axes}
    known = list(by_name)
    unknown = [name for name in names if name not in known]
    if unknown or not names or len(set(names)) < len(names):
        right = list(
            dict.fromkeys(
                name if name in known else closest_name(name, known) or known[-1] for name in names or known[-1:]
            )
        )
        message = (
            f"there is no axis {unknown[0]!r}"
            if unknown
            else f"{text!r} names an axis twice"
            if names
            else "no axis is named"
        )
        raise UsageError(
            f"{message}: the axes are {', '.join(known)}.", (command_line.with_changes({text: ",".join(right)}), "")
        )
    return tuple(by_name[name] for name in names)


def join_views(views: Sequence[str], command_line: CommandLine) -> tuple[list[str], CommandLine]:
    """Join views that were typed without quotes into one word each; return them and the changed command line.

    >>> join_views(["moe:", "ep=8", "edp=-1"], CommandLine(("plan", "dp=8", "--view", "moe:", "ep=8", "edp=-1")))[0]
    ['moe: ep=8 edp=-1']
    """
    words: list[str] = []
    joined: list[str] = []
    is_open = False
    for word in command_line.words:
        if is_open and "=" in word and not word.startswith("-"):
            words[-1] += f" {word}"
            continue
        joined += words[-1:] if is_open else []
        words.append(word)
        is_open = word in views and word.endswith(":") and " " not in word
    joined += words[-1:] if is_open else []
    whole: list[str] = []
    rest = list(views)
    while rest:
        parts = joined[0].split(" ") if joined else []
        fits = parts == rest[: len(parts)] != []
        whole.append(joined.pop(0) if fits else rest[0])
        del rest[: len(parts) if fits else 1]
    return whole, CommandLine(tuple(words))


def parse_views(words: Iterable[str], mesh: ParsedMesh) -> dict[str, dict[str, int]]:
    """Parse views, such as ``moe: ep=8 edp=-1``."""
    views: dict[str, dict[str, int]] = {}
    for text in words:
        name, colon, sizes = (part.strip() for part in text.rpartition(":"))
        name = name or f"view{len(views) or ''}"
        box = _parse_named_sizes(sizes.split(), mesh.command_line, view=text)
        if not box:
            right = f"{name}: ep=-1"
            raise UsageError(
                f"a view is written 'moe: ep=8 edp=-1', not {text!r}.",
                (mesh.command_line.with_changes({text: right}), ""),
            )
        if name in views:
            better = mesh.command_line.with_last(text, f"{name}2: {sizes}")
            raise UsageError(f"two views are named {name!r}.", (better, ""))
        views[name] = _fill_view(name, box, len(mesh.layout), text, colon, mesh.command_line)
    return views


def _fill_view(
    name: str, box: dict[str, int], count: int, text: str, colon: str, command_line: CommandLine
) -> dict[str, int]:
    """The sizes of a view, with -1 replaced."""
    fixed = math.prod(size for size in box.values() if size != -1)
    free = [axis for axis, size in box.items() if size == -1]
    if len(free) > 1:
        fault = f"has {len(free)} sizes of -1; one may be"
    elif free and count % fixed:
        fault = f"cannot be filled: the mesh has {count_of(count, 'rank')}, and {fixed:,} does not divide it"
    elif not free and fixed != count:
        fault = f"holds {count_of(fixed, 'rank')}, but the mesh has {count:,}"
    else:
        return {axis: count // fixed if size == -1 else size for axis, size in box.items()}
    right = text_report.format_sizes(nearest_sizes(box, count, free[:1]))
    better = command_line.with_changes({text: f"{name}: {right}" if colon else right})
    raise UsageError(f"view {name!r}: {text_report.format_sizes(box)} {fault}.", (better, ""))


def require_names(sizes: Mapping[Axis, int], command_line: CommandLine, why: str, order: str = "") -> dict[str, int]:
    """The sizes by name; UsageError for numbered axes.

    Args:
        why: the reason that names are needed.
        order: the word that orders the axes, which is then suggested with names too.
    """
    if 0 not in sizes:
        return {str(axis): size for axis, size in sizes.items()}
    names = USUAL_AXES.get(len(sizes)) or tuple(f"axis{number}" for number in sizes)
    numbers = [int(number) for number in re.split(r"[,\s]+", order) if number.isdecimal()]
    right = ",".join(names[i] for i in numbers) if sorted(numbers) == list(range(len(names))) else ",".join(names)
    words = CommandLine(tuple(right if word == order else word for word in command_line.words))
    full = [str(size) for size in sizes.values()]
    runs = [full, *([*full[:i], "-1", *full[i + 1 :]] for i in range(len(full)))]  # one size may have been typed as -1
    suggestions = [
        (words.with_run(run, [f"{a}={n}" for a, n in zip(names, run)]), "for example")
        for run in runs
        if words.contains_run(run)
    ]
    raise UsageError(f"{why}, and these axes are numbered: name them.", *suggestions[:1])


def reorder(sizes: Mapping[Axis, int], order: str, command_line: CommandLine) -> dict[Axis, int]:
    """The sizes with their axes in another order."""
    names = [name for name in re.split(r"[,\s]+", order) if name]
    return _as_axes(
        _reordered(require_names(sizes, command_line, "an order is one of names", order), names, order, command_line)
    )


def _reordered(sizes: dict[str, int], names: Sequence[str], order: str, command_line: CommandLine) -> dict[str, int]:
    """The sizes in the order of ``names``, which has to have each axis once."""
    if sorted(names) == sorted(sizes):
        return {name: sizes[name] for name in names}
    known = dict.fromkeys(name if name in sizes else closest_name(name, list(sizes)) for name in names)
    right = [name for name in known if name]
    right = [axis for axis in sizes if axis not in right] + right
    unknown = [name for name in names if name not in sizes]
    missing = [axis for axis in sizes if axis not in names]
    faults = [f"there is no axis {text_report.join_words(unknown)}"] if unknown else []
    faults += [f"{text_report.join_words(missing)} {'is' if len(missing) == 1 else 'are'} missing"] if missing else []
    faults += ["an axis is named twice"] if len(set(names)) < len(names) else []
    raise UsageError(
        f"the order {order} does not name each axis ({', '.join(sizes)}) once: {'; '.join(faults)}.",
        (command_line.with_changes({order: ",".join(right)}), ""),
    )


def _as_axes(sizes: Mapping[str, int]) -> dict[Axis, int]:
    return dict(zip(sizes, sizes.values()))


def _parse_numbered_sizes(words: Sequence[str], command_line: CommandLine) -> dict[Axis, int]:
    """Parse sizes without names; return none if one has a name."""
    if not all(re.fullmatch("-?[0-9]+", word) for word in words):
        return {}
    wrong = [word for word in words if not re.fullmatch(SIZE, word)]
    if wrong:
        better = command_line.with_run(words, ["2" if word in wrong else word for word in words])
        raise UsageError(f"a size is at least 1, or -1 to infer it, not {wrong[0]}.", (better, "for example"))
    return {number: int(word) for number, word in enumerate(words)}


def _parse_named_sizes(words: Sequence[str], command_line: CommandLine, view: str | None = None) -> dict[str, int]:
    """Parse sizes by name.

    Args:
        view: the text of the view with these sizes; None for those of the mesh.
    """
    sizes: dict[str, int] = {}
    for word in words:
        axis, _, size = word.partition("=")
        good = axis.isidentifier() and re.fullmatch(SIZE, size)
        if not good:
            _raise_intended(words, word, command_line, view)
        if not good or axis in sizes:
            right = corrected_sizes(words, 2 if view is None else 1 if "-1" in view else -1)
            message = (
                f"axis {axis} is given twice"
                if good
                else f"sizes are written pp=2, at least 1, or -1 to infer it, not {word!r}"
            )
            raise UsageError(f"{message}.", (_corrected_line(words, right, command_line, view), "for example"))
        sizes[axis] = int(size)
    return sizes


def _corrected_line(words: Sequence[str], right: Sequence[str], command_line: CommandLine, view: str | None) -> str:
    """The command line with corrected sizes, of the mesh or of a view."""
    given = [size for size in right if size]
    if view is not None:
        name, colon, _ = view.rpartition(":")
        return command_line.with_changes({view: f"{name}{colon}{' ' * bool(colon)}{' '.join(given)}"})
    if command_line.contains_run(words):
        return command_line.with_run(words, given)
    # Options are between the words, so each word is replaced by itself.
    return command_line.with_changes({word: size or None for word, size in zip(words, right)})


def _raise_intended(words: Sequence[str], wrong: str, command_line: CommandLine, view: str | None) -> None:
    """Raise UsageError if the sizes that were intended are clear, from the wrong word or from all words together."""
    for some in ([wrong], words):
        sizes = intended_sizes(some)
        whole = sizes if some is words else [other for word in words for other in (sizes if word == wrong else [word])]
        if (
            not sizes or not are_valid_sizes(whole) or not (view is None or "=" in whole[0])
        ):  # axes of a view have names
            continue
        if view is not None or command_line.contains_run(words):
            message = f"sizes are written {' '.join(sizes)}, not {' '.join(some)!r}."
            raise UsageError(message, (_corrected_line(words, whole, command_line, view), ""))


def fill(
    sizes: dict[Axis, int], topology: Topology, hosts: str, command_line: CommandLine, whole: str | None = None
) -> dict[Axis, int]:
    """The sizes, with -1 replaced; UsageError if they do not fill the hosts.

    Args:
        hosts: the word of the command line with the hosts.
        whole: a text with the number of ranks; by default that of the hosts.
    """
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    if not topology:
        if free:
            raise UsageError(
                f"{_format_size(free[0], -1)} fills the hosts, so name the hosts.",
                (command_line.with_changes({}, "--nodes", f"{fixed}x8"), "for example"),
            )
        return sizes
    host, count = topology[0], topology[0].capacity
    if len(free) == 1 and count % fixed == 0:
        return {axis: count // fixed if size == -1 else size for axis, size in sizes.items()}
    if not free and fixed == count:
        return sizes
    whole = whole or f"{host} {'holds' if host.count == 1 else 'hold'} {count:,}"
    if len(free) > 1:
        message = f"at most one size may be -1; these are {text_report.join_words(free)}."
    elif free:
        why = f"{whole} rank{'s' * (count > 1)}, and {fixed:,} does not divide it"
        message = f"{text_report.format_sizes(sizes)} cannot be filled: {why}."
    else:
        message = f"{text_report.format_sizes(sizes)} holds {count_of(fixed, 'rank')}, but {whole}."
    right = nearest_sizes(sizes, count, free[:1])
    other = [axis for axis in sizes if right[axis] != sizes[axis]]
    if 0 in sizes:
        better = command_line.with_run([*map(str, sizes.values())], [*map(str, right.values())])
    else:
        better = command_line.with_changes(
            {_format_size(axis, sizes[axis]): _format_size(axis, right[axis]) for axis in other}
        )
    changed = ", ".join(
        f"axis {axis} of {right[axis]}" if axis in range(len(sizes)) else f"{axis} {right[axis]}" for axis in other
    )
    suggestions = [(better, f"with {changed}")] if better != command_line.with_changes({}) else []
    if host.name == "world" and count == 1:  # only one rank was started
        suggestions.insert(
            0, (f"{torchrun_command(fixed)} -m {command_line.with_changes({})}", f"on {count_of(fixed, 'rank')}")
        )
    room = _hosts_for(fixed, host, topology)
    if not free and room and host.name != "world":
        suggestions.append((command_line.with_changes({hosts: room}), f"or on {count_of(fixed, 'rank')}"))
    raise UsageError(message, *suggestions)


def _format_size(axis: Axis, size: int) -> str:
    """One size in the notation of the command line."""
    return str(size) if isinstance(axis, int) else f"{axis}={size}"


def _hosts_for(ranks: int, host: HostLevel, topology: Topology) -> str | None:
    """Hosts of the same size that hold ``ranks`` ranks, in the notation of the command line; None if there are none."""
    if len(host.runs) > 1 or ranks % topology[-1].largest:
        return None
    if len(topology) == 1:
        return f"{ranks // host.largest}x{host.largest}"
    numbers = [ranks // topology[-1].largest]
    numbers += [outer.largest // inner.largest for outer, inner in zip(topology[:0:-1], topology[-2::-1])]
    return "x".join(map(str, [*numbers, host.largest]))
