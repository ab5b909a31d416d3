"""Sizes and ranks as a user gives them: checked and completed; errors suggest a corrected call."""

from __future__ import annotations

import contextlib
import math
import operator
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from keyword import iskeyword
from typing import Any, TypeVar, Union

from pgmesh.errors import OptionsError, ShapeError
from pgmesh.options import GroupOptions

A = TypeVar("A", str, Union[str, int])

Sizes = Mapping[Any, int]
"""Sizes by axis in one mapping: any name, or the numbers of numbered axes."""

SHORT = 400
"""Ranks that take more characters than this are not printed in a suggested call."""

_EXAMPLES: dict[str, tuple[str, object]] = {
    "backend": ("backend", "gloo"),
    "timeout": ("timeout", 600),
    "high_priority": ("high_priority", True),
    "nccl": ("nccl", {"max_ctas": 8}),
    "description": ("description", "gradients"),
    "options": ("timeout", 600),
    "pg_options": ("high_priority", True),
    "backend_override": ("backend", "gloo"),
}
"""Options of groups, by our names and others': our name, and a value for a suggested call."""

_SHAPES = ("mesh_shape", "shape", "sizes", "dims")
_NAMES = ("mesh_dim_names", "dim_names", "axis_names", "names", "axes")

NOT_AXES = {
    **{
        word: f"{'is an option' if word == own else 'stands for options'} of groups"
        for word, (own, _) in _EXAMPLES.items()
    },
    "tag": "tells groups on the same ranks apart",
    **dict.fromkeys(("device", "device_type", "device_id"), "follows from the backend of a group"),
    **dict.fromkeys(_SHAPES, "stands for all sizes"),
    **dict.fromkeys((*_NAMES, "axis", "dim", "ndim"), "stands for the axes"),
    **dict.fromkeys(("mesh", "device_mesh"), "is an argument of interop.from_device_mesh"),
    **dict.fromkeys(("world_size", "store", "init_method", "init_backend"), "belongs to the world"),
    **dict.fromkeys(("rank", "local_rank"), "belongs to the process"),
    **dict.fromkeys(("group", "process_group"), "is made by the mesh, or given to mesh.adopt"),
    "ranks": "is left out: a view keeps the ranks of its mesh",
    "name": "is an argument of ProcessGroupMesh: a view has the name of its mesh",
    "layout": "is made from the sizes",
}
"""Keywords that are never axes, each with what it is. A mapping may name an axis so."""


_BOOLS = ("b", "torch.bool")  # numpy's kind, torch's name


class Text(str):
    """Text that stands in a call as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def spell(who: str, box: Mapping[str | int, int], **more: object) -> str:
    """The call that makes a box, as text. Positional for axes 0..n-1, keywords where legal, else a mapping.

    ``plan`` takes a mapping alone.

    >>> spell("ProcessGroupMesh", {"dp": 2, "tp": 2}, ranks=range(4))
    'ProcessGroupMesh(dp=2, tp=2, ranks=range(4))'
    >>> spell("Layout", {"timeout": 2, "data-parallel": 4}), spell("Layout", {1: 2, 2: 2})
    ("Layout({'timeout': 2, 'data-parallel': 4})", 'Layout({1: 2, 2: 2})')
    """
    if who != "plan" and list(box) == list(range(len(box))):
        words = [str(size) for size in box.values()]
    elif who != "plan" and all(is_word(axis) and axis not in NOT_AXES for axis in box):
        words = [f"{axis}={size}" for axis, size in box.items()]
    else:
        words = [f"{{{', '.join(f'{axis!r}: {size}' for axis, size in box.items())}}}"]
    words += [f"{word}={written(value)}" for word, value in more.items()]
    return f"{who}({', '.join(words)})"


def is_word(axis: str | int) -> bool:
    """Whether an axis can be the keyword of a call.

    >>> is_word("dp"), is_word("class"), is_word("data-parallel"), is_word(0)
    (True, False, False, False)
    """
    if not isinstance(axis, str) or not axis.isidentifier() or iskeyword(axis) or axis == "__debug__":
        return False
    return axis.isascii() or unicodedata.normalize("NFKC", axis) == axis  # which Python's parser reads in its place


def written(value: object) -> str:
    """A value as the expression that makes it. Runs of more than 64 integers are written as ranges.

    >>> written(range(4)), written((*range(50), *range(60, 90, 2)))
    ('range(4)', '(*range(50), *range(60, 90, 2))')
    """
    if isinstance(value, range):
        return f"range({len(value)})" if value == range(len(value)) else repr(value)
    if isinstance(value, timedelta):
        return f"timedelta(seconds={value.total_seconds():.15g})"
    if not isinstance(value, (tuple, list)) or len(value) <= 64:
        return repr(value)
    parts: list[str] = []
    start = 0
    while start < len(value):
        end = start + 1
        step = value[end] - value[start] if end < len(value) else 0
        while end < len(value) and step and value[end] - value[end - 1] == step:
            end += 1
        if end - start < 4:
            end = start + 1
            parts.append(str(value[start]))
        else:
            parts.append(f"*{written(range(value[start], value[start] + step * (end - start), step))}")
        start = end
    return f"({', '.join(parts)},)" if len(parts) == 1 else f"({', '.join(parts)})"


def arguments(ranks: range | tuple[int, ...] | None, **more: object) -> dict[str, object]:
    """The arguments beside the sizes, as suggested calls repeat them: without None, and long ranks as ``ranks``."""
    kept = {} if ranks is None else {"ranks": Text(brief(written(ranks), "ranks"))}
    return {**kept, **{word: value for word, value in more.items() if value is not None}}


def brief(text: str, instead: str) -> str:
    """``text``, or ``instead`` if longer than SHORT."""
    return text if len(text) <= SHORT else instead


def is_boolean(value: object) -> bool:
    """Whether a value is True or False, of Python, numpy or torch.

    >>> is_boolean(True), is_boolean(1)
    (True, False)
    """
    dtype = getattr(value, "dtype", None)
    return isinstance(value, bool) or (dtype is not None and (getattr(dtype, "kind", "") or str(dtype)) in _BOOLS)


def whole_number(value: Any) -> int:
    """A value as a whole number.

    Raises:
        TypeError: it is none; True and False are none.

    >>> whole_number(3)
    3
    """
    if type(value) is not int and is_boolean(value):
        raise TypeError(f"{value!r} is no number")
    return operator.index(value)


def some(ranks: Iterable[object], most: int = 8) -> str:
    """Ranks for a message, the middle left out where there are many.

    >>> some(range(4)), some(range(100))
    ('0, 1, 2, 3', '0, 1, 2, 3, 4, 5, 6, ..., 99')
    """
    ranks = ranks if isinstance(ranks, (range, tuple, list)) else tuple(ranks)
    if len(ranks) <= most:
        return ", ".join(map(str, ranks))
    return ", ".join(map(str, ranks[: most - 1])) + f", ..., {ranks[-1]}"


def ranks_in_words(ranks: Collection[object], most: int = 8) -> str:
    """Ranks for a message, with the word before them.

    >>> ranks_in_words([2]), ranks_in_words([2, 3])
    ('rank 2', 'ranks 2, 3')
    """
    return f"rank{'s' * (len(ranks) != 1)} {some(ranks, most)}"


def many(count: int, noun: str) -> str:
    """So many of a thing.

    >>> many(1, "rank"), many(2048, "rank")
    ('1 rank', '2,048 ranks')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def calls_in_lines(ways: Sequence[tuple[str, str]]) -> str:
    """Calls that would be right, for the end of a message: a line for each, its reason beside it.

    >>> print(calls_in_lines([("plan(4)", "with dp 2"), ("plan(16)", "or on 16 ranks")]))
      plan(4)    # with dp 2
      plan(16)   # or on 16 ranks
    """
    width = max((len(call) for call, _ in ways), default=0)
    return "\n".join(f"  {call:<{width}}   # {why}" for call, why in ways)


def take_sizes(
    who: str,
    shape: Sequence[Any],
    sizes: Mapping[str, Any],
    more: Mapping[str, object] | None = None,
    count: int | None = None,
) -> dict[str | int, int]:
    """Sizes by axis, each a whole number of at least 1, or -1 at most once.

    Args:
        shape: what was given by position: the sizes of numbered axes, or one mapping of all sizes.
        sizes: what was given by keyword.
        more: the other arguments of the call, which suggested calls repeat.
        count: the number of ranks, if it is known: it tells which suggested calls would do.

    Raises:
        ShapeError: sizes that are none, or a keyword that is no axis.
        OptionsError: a keyword that is an option of groups.
    """
    more = more or {}
    if any(word in NOT_AXES for word in sizes):
        raise _not_axes(who, shape, sizes, more, count)
    mappings = [size for size in shape if isinstance(size, Mapping)]
    if mappings and (len(shape) > 1 or sizes):
        raise _not_both(who, shape, sizes, more, count)
    if shape and sizes:
        raise ShapeError(
            f"{who}: give every size by position or every size by name, not both: "
            f"{', '.join(map(str, shape))} stand{'s' * (len(shape) == 1)} beside {', '.join(sizes)}."
        )
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        raise _all_in_one(who, shape[0], more, count)
    given: Mapping[Any, Any] = mappings[0] if mappings else sizes or dict[Any, Any](enumerate(shape))
    box: dict[str | int, int] = {}
    for axis, size in given.items():
        name = _take_axis(who, axis)
        if name in box:  # numbers that are equal, but not for Python's dict
            raise ShapeError(f"{who}: axis {name} is given twice.")
        box[name] = take_size(who, name, size)
    if not box:
        size = 2 if who == "Layout" and "ranks" not in more else -1
        raise ShapeError(f"{who} needs at least one axis, such as {spell(who, {'dp': size}, **more)}.")
    if len({isinstance(axis, int) for axis in box}) > 1:
        raise ShapeError(f"{who}: give every axis a name or every axis a number, not both: {given!r}.")
    for axis in sizes:
        if not axis.isidentifier():
            call = spell(who, box, **more)
            raise ShapeError(f"{who}: an axis is named by a word, such as dp, not {axis!r}.\n\n  {call}")
    if sum(size == -1 for size in box.values()) > 1:
        free = ", ".join(str(axis) for axis, size in box.items() if size == -1)
        raise ShapeError(f"{spell(who, box)}: at most one size is -1, what is left; here are {free}.")
    return box


def _take_axis(who: str, axis: Any) -> str | int:
    """The name or the number of an axis."""
    if isinstance(axis, str):
        if axis and axis.isprintable():
            return str.__str__(axis)  # also of a member of an enum
    else:
        with contextlib.suppress(TypeError):
            if (number := whole_number(axis)) >= 0:
                return number
    raise ShapeError(f"{who}: an axis is a word that can be printed, or a number from 0 on, not {axis!r}.")


def _not_axes(
    who: str, shape: Sequence[Any], sizes: Mapping[str, Any], more: Mapping[str, object], count: int | None
) -> ShapeError | OptionsError:
    """The error for keywords that are never axes. It suggests a call only if all other arguments are good sizes."""
    words = [word for word in sizes if word in NOT_AXES]
    says = f"{who}: " + " ".join(f"{word} is no axis; it {NOT_AXES[word]}." for word in words)
    options = dict(_option(word, sizes[word]) for word in words if word in _EXAMPLES)
    about_groups = bool(options) or "tag" in sizes
    box = _good_sizes(who, _meant_sizes(shape, sizes), count)
    ways = [spell(who, box, **more)] if box else []
    if about_groups and who in ("Layout", "plan"):
        says += " A layout has no groups."
    elif about_groups and box:
        mesh, first = "part" if who == "view" else "mesh", next(iter(box))
        ways = [f"{mesh} = {'mesh.' * (who == 'view')}{ways[0]}"]
        if options:
            keywords = ", ".join(f"{word}={written(value)}" for word, value in options.items())
            each = f"for axis in {mesh}.axes: " if len(box) > 1 else ""
            ways.append(f"{each}{mesh}.configure({'axis' if each else repr(first)}, {keywords})")
        if "tag" in sizes:
            tag = sizes["tag"] if isinstance(sizes["tag"], str) and sizes["tag"] else "own"
            ways.append(f"{mesh}.group({first!r}, tag={tag!r})")
    elif not about_groups and not shape and (named := _good_sizes(who, sizes, count)):
        ways.append(f"{spell(who, named, **more)}   # with axes of these names")
    error = OptionsError if about_groups else ShapeError
    return error(says + "\n" * bool(ways) + "".join(f"\n  {way}" for way in ways))


def _meant_sizes(shape: Sequence[Any], sizes: Mapping[str, Any]) -> Any:
    """The one mapping or sequence that holds all sizes of a call with keywords that are never axes; else None."""
    first: Any = shape
    if len(shape) == 2 and isinstance(shape[0], str) and isinstance(shape[1], (tuple, list)):
        first = shape[1]  # after torch's device_type
    elif len(shape) == 1 and isinstance(shape[0], (Mapping, tuple, list)):
        first = shape[0]
    axes = {axis: size for axis, size in sizes.items() if axis not in NOT_AXES}
    given = [*filter(len, (first, axes)), *(sizes[word] for word in _SHAPES if word in sizes)]
    names = [sizes[word] for word in _NAMES if word in sizes]
    if len(given) != 1 or not names or isinstance(given[0], Mapping):
        return given[0] if len(given) == 1 else None
    if not all(isinstance(each, (tuple, list)) for each in (*names, *given)):
        return None
    words = [name for name in names[0] if isinstance(name, str)]
    return dict(zip(words, given[0])) if len({*words}) == len(names[0]) == len(given[0]) else None


def _good_sizes(who: str, given: Any, count: int | None) -> dict[str | int, int]:
    """The sizes in a mapping, a sequence or one number; {} unless they are good and hold ``count`` ranks, if given."""
    sizes = given if isinstance(given, (Mapping, tuple, list)) else (given,)
    try:
        box = take_sizes(who, (sizes,) if isinstance(sizes, Mapping) else (dict(enumerate(sizes)),), {})
    except ShapeError:
        return {}
    fixed = math.prod(size for size in box.values() if size != -1)
    if -1 in box.values():
        fits = count % fixed == 0 if count else who != "Layout"  # which has no world to fill
    else:
        fits = count in (None, fixed)
    return box if fits else {}


def _option(word: str, value: object) -> tuple[str, object]:
    """The name and the value of an option in a suggested call: an example where the value is none."""
    name, example = _EXAMPLES[word]
    with contextlib.suppress(OptionsError):
        if name == word and value is not None and GroupOptions(**{word: value}):  # type: ignore[arg-type]
            return name, value
    return name, example


def _not_both(
    who: str, shape: Sequence[Any], sizes: Mapping[str, Any], more: Mapping[str, object], count: int | None
) -> ShapeError:
    """The error for a mapping and other sizes, with the one call that has all of them."""
    parts = [each for each in (*shape, sizes) if isinstance(each, Mapping)]
    axes = [axis for part in parts for axis in part]
    first = {axis: next(part[axis] for part in parts if axis in part) for axis in axes}
    last = {axis: next(part[axis] for part in reversed(parts) if axis in part) for axis in axes}
    twice = "".join(
        f" Axis {axis} is {first[axis]!r} and {last[axis]!r}." for axis in first if first[axis] != last[axis]
    )
    boxes = [_good_sizes(who, each, count) for each in ([first, last] if twice else [first])]
    good = len(parts) > len(shape) and all(boxes)
    lines = [f"\n  {spell(who, box, **more)}" for box in boxes if good]
    return ShapeError(
        f"{who}: give all sizes in one mapping, or all as keywords.{twice}" + "\n" * good + "".join(lines)
    )


def enough(box: Mapping[str | int, int]) -> range:
    """Ranks that fill sizes of which one is -1."""
    fixed = math.prod(size for size in box.values() if size != -1)
    return range(fixed * max(2, 8 // fixed))


def _all_in_one(who: str, given: Sequence[Any], more: Mapping[str, object], count: int | None) -> ShapeError:
    """Sizes as some other libraries' meshes take them, spelled as here."""
    box = _good_sizes(who, given, count)
    call = f"\n\n  {spell(who, box, **more)}" if box else ""
    return ShapeError(f"{who}: sizes are given one by one, not as {given!r}.{call}")


def take_size(who: str, axis: str | int, size: Any) -> int:
    try:
        size = whole_number(size)
    except TypeError:
        raise ShapeError(f"{who}: the size of axis {axis} is a whole number, not {size!r}.") from None
    if size < 1 and size != -1:
        raise ShapeError(f"{who}: the size of axis {axis} is {size}; a size is at least 1, or -1 for what is left.")
    return int(size)


def take_ranks(who: str, ranks: Iterable[int]) -> range | tuple[int, ...]:
    """Ranks in the order given, as a range where they follow one."""
    if not isinstance(ranks, range):
        try:
            given = tuple(ranks)
            ranks = given if {int}.issuperset(map(type, given)) else tuple(map(whole_number, given))
        except TypeError:
            raise ShapeError(f"{who}: ranks are whole numbers, such as ranks=range(4), not {ranks!r}.") from None
    if not ranks:
        raise ShapeError(f"{who}: there is no rank to arrange; ranks is empty.")
    if min(ranks[0], ranks[-1]) < 0 if isinstance(ranks, range) else min(ranks) < 0:
        raise ShapeError(f"{who}: a rank is at least 0, but ranks holds {min(ranks)}.")
    straight = progression(ranks)
    if straight is None and len(set(ranks)) != len(ranks):
        seen: set[int] = set()
        twice = sorted({rank for rank in ranks if rank in seen or seen.add(rank)})  # type: ignore[func-returns-value]
        raise ShapeError(f"{who}: each rank stands in one place, but ranks holds {some(twice)} more than once.")
    return straight or tuple(ranks)


def progression(values: range | tuple[int, ...]) -> range | None:
    """The range that has these values, if there is one.

    >>> progression((4, 6, 8)), progression((4, 6, 7))
    (range(4, 10, 2), None)
    """
    if isinstance(values, range):
        return values
    step = values[1] - values[0] if len(values) > 1 else 1
    if step == 0:
        return None
    straight = range(values[0], values[0] + len(values) * step, step)
    return straight if straight[-1] == values[-1] and tuple(straight) == values else None


def fill(
    who: str,
    box: dict[str | int, int],
    count: int,
    whole: str,
    *,
    pick: bool = True,
    more: Mapping[str, object] | None = None,
) -> dict[str | int, int]:
    """The sizes with -1 put right for ``count`` ranks; ShapeError when they do not hold exactly that many.

    Args:
        whole: how many there are, in words: "the world has 8".
        pick: whether to suggest ``ranks=``.
        more: the other arguments of the call, which suggested calls repeat.
    """
    more = more or {}
    fixed = math.prod(size for size in box.values() if size != -1)
    if -1 in box.values():
        if count % fixed == 0:
            return {axis: count // fixed if size == -1 else size for axis, size in box.items()}
        problem = f"{spell(who, box)} cannot be filled: {whole}, and {count} is not divisible by {fixed}."
    elif fixed == count:
        return box
    else:
        problem = f"{spell(who, box)} holds {fixed} rank{'s' * (fixed > 1)}, but {whole}."
    ways = _ways_out(who, box, fixed, count, pick, more)
    raise ShapeError(f"{problem}\n\n{calls_in_lines(ways)}")


def fill_with(
    who: str, box: dict[str | int, int], ranks: Collection[int], more: Mapping[str, object]
) -> dict[str | int, int]:
    """The sizes with -1 put right for ranks that were named; ShapeError when they do not hold exactly those."""
    whole = f"{len(ranks)} rank{'s are' if len(ranks) > 1 else ' is'} given"
    return fill(who, box, len(ranks), whole, pick=False, more=more)


def _ways_out(
    who: str, box: dict[str | int, int], fixed: int, count: int, pick: bool, more: Mapping[str, object]
) -> list[tuple[str, str]]:
    """Calls that would hold ``count`` ranks, each with its reason."""

    def call(changes: dict[str | int, int], **ranks: object) -> str:
        return spell(who, {**box, **changes}, **ranks, **more)

    ways: list[tuple[str, str]] = []
    if pick and count == 1:
        ways.append((f"{torchrun(fixed)} script.py", f"start {fixed} ranks: a script by itself is a world of 1"))
        if fixed <= 16:
            ways.append((f"launch.spawn(main, {fixed})", "or have it start them here, such as for a test"))
        else:
            whole = {axis: 1 if size == -1 else size for axis, size in box.items()}
            ways.append((spell("Layout", whole), "or plan it without processes"))
    free = [axis for axis, size in box.items() if size == -1]
    for axis, size in box.items():
        rest = fixed // max(size, 1)
        if size == -1 or count % rest:
            continue
        if not free:
            ways.append((call({axis: -1}), f"{'or ' * bool(ways)}let {_axis(axis)} be what is left: {count // rest}"))
        else:
            would = divisors(count // rest)
            near = min(would, key=lambda n: abs(n - size))
            ways.append((call({axis: near}), f"{_axis(axis)} may be {_any_of(would)}"))
        break
    else:  # no one size mends it: the nearest smaller sizes that divide, and one axis for the rest
        changes, filled = nearest(box, count, free), (free or list(box))[0]
        why = f"sizes that divide {count}; {_axis(filled)} is then {changes[filled]}"
        ways.append((call({**changes, filled: -1}), why))
    if pick and fixed < count and not free:
        ways.append((call({}, ranks=range(fixed)), f"or name the {fixed} rank{'s' * (fixed > 1)} to use"))
    return ways


def torchrun(ranks: int) -> str:
    """How a launcher starts so many ranks; many of them on hosts of 8.

    >>> torchrun(4), torchrun(64)
    ('torchrun --nproc-per-node 4', 'torchrun --nnodes 8 --nproc-per-node 8')
    """
    hosts = ranks // 8 if ranks > 8 and ranks % 8 == 0 else 1
    return f"torchrun{f' --nnodes {hosts}' * (hosts > 1)} --nproc-per-node {ranks // hosts}"


def divisors(count: int) -> list[int]:
    """What divides a number, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    return low + [count // n for n in reversed(low) if n * n != count]


def largest_divisor(count: int, most: int) -> int:
    """The largest that divides a number and is at most so much.

    >>> largest_divisor(12, 5)
    4
    """
    return max(n for n in divisors(count) if n <= most)


def nearest(sizes: Mapping[A, int], count: int, free: Sequence[A]) -> dict[A, int]:
    """Sizes near these that hold just so many ranks: one changed where that will do, a data axis if there is one.

    >>> nearest({"pp": 2, "dp": 4}, 6, []), nearest({"dp": 4, "tp": 2}, 9, [])
    ({'pp': 2, 'dp': 3}, {'dp': 9, 'tp': 1})
    """
    right = {axis: size for axis, size in sizes.items() if size != -1}
    if not free:
        for axis in sorted(right, key=lambda axis: ("dp" not in str(axis), list(right).index(axis))):
            rest = math.prod(size for other, size in right.items() if other != axis)
            if count % rest == 0:
                return {**sizes, axis: count // rest}
    left = count
    filled = free[0] if free else next(iter(sizes))
    for axis in reversed([axis for axis in right if axis != filled]):
        right[axis] = largest_divisor(left, right[axis])
        left //= right[axis]
    return {axis: right[axis] if axis != filled and axis in right else left if axis == filled else 1 for axis in sizes}


def _any_of(values: list[int]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _axis(axis: str | int) -> str:
    return f"axis {axis}" if isinstance(axis, int) else axis
