"""Sizes and ranks as a user gives them: checked, completed, or answered with the call that would be right."""

from __future__ import annotations

import dataclasses
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

_OPTIONS: dict[str, Any] = {
    "backend": "gloo",
    "timeout": timedelta(seconds=30),
    "high_priority": True,
    "nccl": {"max_ctas": 8},
    "description": "gradients",
}
_INSTEAD = {"options": "timeout", "pg_options": "high_priority", "backend_override": "backend"}
_SHAPES = ("mesh_shape", "shape", "sizes", "dims")
_NAMES = ("mesh_dim_names", "dim_names", "axis_names", "names", "axes")

NOT_AXES = {
    **dict.fromkeys((field.name for field in dataclasses.fields(GroupOptions)), "is an option of groups"),
    **dict.fromkeys(_INSTEAD, "stands for options of groups"),
    "tag": "tells groups on the same ranks apart",
    **dict.fromkeys(("device", "device_type", "device_id"), "follows from the backend of a group"),
    **dict.fromkeys(_SHAPES, "stands for all sizes"),
    **dict.fromkeys((*_NAMES, "axis", "dim", "ndim"), "stands for the axes"),
    **dict.fromkeys(("mesh", "device_mesh"), "is an argument of interop.from_device_mesh"),
    **dict.fromkeys(("world_size", "store", "init_method", "init_backend"), "belongs to the world"),
    **dict.fromkeys(("rank", "local_rank"), "belongs to the process"),
    **dict.fromkeys(("group", "process_group"), "is made by the mesh, or given to mesh.adopt"),
    "ranks": "is the same in a view",
    "name": "is an argument of ProcessGroupMesh",
    "layout": "is made from the sizes",
}
"""Keywords that are never axes, each with what it is. A mapping may name an axis so."""


_BOOLS = ("b", "torch.bool")  # numpy's kind, torch's name


class Text(str):
    """Text that stands in a call as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def spell(who: str, box: Mapping[str | int, int], **more: object) -> str:
    """The call that makes a box, as text: by position or keyword where that means the same, else as a mapping.

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
    """A value as the expression that makes it; of many whole numbers, those that follow a range as one.

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
    """Ranks as text for a message: another expression where they would take too much room."""
    return text if len(text) <= SHORT else instead


def is_truth(value: object) -> bool:
    """Whether a value is True or False, of Python, numpy or torch.

    >>> is_truth(True), is_truth(1)
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
    if type(value) is not int and is_truth(value):
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
        raise _not_both(who, shape, sizes, more)
    if shape and sizes:
        raise ShapeError(
            f"{who}: give every size by position or every size by name, not both: "
            f"{', '.join(map(str, shape))} stand{'s' * (len(shape) == 1)} beside {', '.join(sizes)}."
        )
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        raise _all_in_one(who, shape[0], more)
    given: Mapping[Any, Any] = mappings[0] if mappings else sizes or dict[Any, Any](enumerate(shape))
    box: dict[str | int, int] = {}
    for axis, size in given.items():
        name = _take_axis(who, axis)
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
    elif _is_whole(axis) and axis >= 0:
        return operator.index(axis)
    raise ShapeError(f"{who}: an axis is a word that can be printed, or a number from 0 on, not {axis!r}.")


def _not_axes(
    who: str, shape: Sequence[Any], sizes: Mapping[str, Any], more: Mapping[str, object], count: int | None
) -> ShapeError | OptionsError:
    """The error for keywords that are never axes, with the calls that do what they mean."""
    words = [word for word in sizes if word in NOT_AXES]
    says = f"{who}: " + " ".join(f"{word} is no axis; it {NOT_AXES[word]}." for word in words)
    box, options = _meant_sizes(shape, sizes), _meant_options(sizes)
    about_groups = bool(options) or "tag" in sizes
    if not box and not shape and not {*_SHAPES, *_NAMES} & {*words}:
        box = {"dp": -1}
    world = sizes.get("world_size", 0)
    ranks = range(world) if who == "Layout" and _is_whole(world) and world > 0 else None
    ways = [_with_ranks(who, box, more, ranks)] if box else []
    if about_groups and who == "Layout":
        says += " A layout has no groups."
    elif about_groups:
        mesh = "part" if who == "view" else "mesh"
        ways = [f"{mesh} = {'mesh.' * (who == 'view')}{way}" for way in ways]
        first = repr(next(iter(box), "dp"))
        if options:
            keywords = ", ".join(f"{word}={written(value)}" for word, value in options.items())
            each = f"for axis in {mesh}.axes: " if len(box) > 1 else ""
            ways.append(f"{each}{mesh}.configure({'axis' if each else first}, {keywords})")
        if "tag" in sizes:
            tag = sizes["tag"] if isinstance(sizes["tag"], str) and sizes["tag"] else "own"
            ways.append(f"{mesh}.group({first}, tag={tag!r})")
    elif not shape and all(map(_is_size, sizes.values())) and _fits(sizes, count):
        named = f"{_with_ranks(who, {**sizes}, more, None)}   # with axes of these names"
        ways = [*ways * _fits(box, count), named]
    error = OptionsError if about_groups else ShapeError
    return error(says + "\n" * bool(ways) + "".join(f"\n  {way}" for way in ways))


def _with_ranks(who: str, box: Mapping[Any, int], more: Mapping[str, object], ranks: range | None) -> str:
    """A call that makes a box; of a layout of which a size is left, with ranks."""
    if who == "Layout" and -1 in box.values() and "ranks" not in more:
        more = {"ranks": ranks or enough(box), **more}
    return spell(who, box, **more)


def _fits(box: Mapping[Any, int], count: int | None) -> bool:
    """Whether sizes hold just so many ranks, or as many as one likes."""
    fixed = math.prod(size for size in box.values() if size != -1)
    free = sum(size == -1 for size in box.values())
    return free < 2 and (count is None or (count % fixed == 0 if free else count == fixed))


def _meant_sizes(shape: Sequence[Any], sizes: Mapping[str, Any]) -> dict[Any, int]:
    """The sizes of a call with keywords that are never axes; {} where they are not plain."""
    box: dict[Any, Any] = {axis: size for axis, size in sizes.items() if axis not in NOT_AXES}
    inner = [each for each in shape if isinstance(each, (Mapping, list, tuple))]
    given = next((sizes[word] for word in _SHAPES if word in sizes), inner[0] if inner else shape)
    names = next((sizes[word] for word in _NAMES if word in sizes), ())
    if not box and isinstance(given, Mapping):
        box = dict(given)
    elif not box and isinstance(given, (list, tuple)):
        named = isinstance(names, (list, tuple)) and len({name for name in names if isinstance(name, str)})
        box = dict(zip(names if named == len(given) else range(len(given)), given))
    return box if all(map(_is_size, box.values())) else {}


def _meant_options(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The options of groups among keywords, each with a value that is good."""
    options: dict[str, Any] = {}
    for word, value in sizes.items():
        if word in _OPTIONS:
            options[word] = value
        elif word in _INSTEAD:
            inside = value.keywords() if isinstance(value, GroupOptions) else value
            inside = inside if isinstance(inside, Mapping) else {}
            known = {option: inside[option] for option in _OPTIONS if inside.get(option) is not None}
            options.update(known or {_INSTEAD[word]: None})
    return {option: _good(option, value) for option, value in options.items()}


def _good(option: str, value: Any) -> Any:
    """The value of an option of groups, or an example where it is none."""
    if option == "timeout" and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = timedelta(seconds=value)
    try:
        GroupOptions(**{option: value})
    except OptionsError:
        return _OPTIONS[option]
    return _OPTIONS[option] if value is None else value


def _not_both(who: str, shape: Sequence[Any], sizes: Mapping[str, Any], more: Mapping[str, object]) -> ShapeError:
    """The error for a mapping and other sizes, with the one call that has all of them."""
    parts = [each for each in (*shape, sizes) if isinstance(each, Mapping)]
    axes = [axis for part in parts for axis in part]
    first = {axis: next(part[axis] for part in parts if axis in part) for axis in axes}
    last = {axis: next(part[axis] for part in reversed(parts) if axis in part) for axis in axes}
    twice = "".join(
        f" Axis {axis} is {first[axis]!r} and {last[axis]!r}." for axis in first if first[axis] != last[axis]
    )
    boxes = [first, last] if twice else [first]
    good = len(parts) > len(shape) and all(_is_size(size) for box in boxes for size in box.values())
    lines = [f"\n  {spell(who, box, **more)}" for box in boxes if good]
    return ShapeError(f"{who}: give all sizes in one mapping, or none in any.{twice}" + "\n" * good + "".join(lines))


def _is_whole(number: Any) -> bool:
    try:
        whole_number(number)
    except TypeError:
        return False
    return True


def _is_size(size: Any) -> bool:
    return _is_whole(size) and (size == -1 or size >= 1)


def enough(box: Mapping[str | int, int]) -> range:
    """Ranks that fill sizes of which one is -1."""
    fixed = math.prod(size for size in box.values() if size != -1)
    return range(fixed * max(2, 8 // fixed))


def _all_in_one(who: str, given: Sequence[Any], more: Mapping[str, object]) -> ShapeError:
    """Sizes as some other libraries' meshes take them, spelled as here."""
    good = given and all(map(_is_size, given))
    call = f"\n\n  {spell(who, dict(enumerate(given)), **more)}" if good else ""
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
        pick: whether naming fewer ranks with ``ranks=`` would be a way out.
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
        left, changes = count, dict[str | int, int]()
        filled = (free or list(box))[0]
        for axis in reversed([axis for axis in box if axis != filled]):
            changes[axis] = largest_divisor(left, box[axis])
            left //= changes[axis]
        ways.append((call({filled: -1, **changes}), f"sizes that divide {count}; {_axis(filled)} is then {left}"))
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
