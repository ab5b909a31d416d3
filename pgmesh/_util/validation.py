"""Validate the sizes and ranks in a call. Invalid ones raise an error, with a corrected call where there is one.

``parse_sizes`` is the single entry for the sizes of meshes, layouts, views and plans. ``fill_sizes`` then infers a -1.
``_util.keywords`` lists the reserved keywords, which cannot be axes. ``_util.suggestions`` computes sizes that fit.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pgmesh._util.formatting import as_range, format_call, format_calls, format_ranks, format_value
from pgmesh._util.keywords import NAME_KEYWORDS, OPTION_EXAMPLES, RESERVED, SHAPE_KEYWORDS
from pgmesh._util.suggestions import suggested_calls
from pgmesh.errors import OptionsError, ShapeError
from pgmesh.options import GroupOptions

Sizes = Mapping[Any, int]
"""Sizes by axis in one mapping. The axes have names, or numbers from 0 on."""


_BOOLS = ("b", "torch.bool")  # numpy's kind, torch's name


def is_boolean(value: object) -> bool:
    """Check for True or False, of Python, numpy or torch.

    >>> is_boolean(True), is_boolean(1)
    (True, False)
    """
    dtype = getattr(value, "dtype", None)
    return isinstance(value, bool) or (dtype is not None and (getattr(dtype, "kind", "") or str(dtype)) in _BOOLS)


def whole_number(value: Any) -> int:
    """A value as an int.

    Raises:
        TypeError: the value is no integer. True and False count as no integers.

    >>> whole_number(3)
    3
    """
    if type(value) is not int and is_boolean(value):
        raise TypeError(f"{value!r} is no number")
    return operator.index(value)


def parse_sizes(
    who: str,
    shape: Sequence[Any],
    sizes: Mapping[str, Any],
    more: Mapping[str, object] | None = None,
    count: int | None = None,
) -> dict[str | int, int]:
    """Sizes by axis: each an integer of at least 1, and at most one -1.

    Args:
        who: the function or class called, for messages.
        shape: the positional arguments: the sizes of numbered axes, or one mapping of all sizes.
        sizes: the keyword arguments.
        more: the other arguments of the call, which suggested calls repeat.
        count: the number of ranks if it is known, to check suggested calls against.

    Raises:
        ShapeError: a value is no size, or a keyword is no axis.
        OptionsError: a keyword is an option of groups.
    """
    more = more or {}
    if any(word in RESERVED for word in sizes):
        raise _not_axes(who, shape, sizes, more, count)
    mappings = [size for size in shape if isinstance(size, Mapping)]
    if mappings and (len(shape) > 1 or sizes):
        raise _not_both(who, shape, sizes, more, count)
    if shape and sizes:
        raise ShapeError(
            f"{who}: give every size by position or every size by name, not both: "
            f"{', '.join(map(str, shape))} stand{'s' * (len(shape) == 1)} next to {', '.join(sizes)}."
        )
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        raise _all_in_one(who, shape[0], more, count)
    given: Mapping[Any, Any] = mappings[0] if mappings else sizes or dict[Any, Any](enumerate(shape))
    box: dict[str | int, int] = {}
    for axis, size in given.items():
        name = _take_axis(who, axis)
        if name in box:  # equal numbers of different types
            raise ShapeError(f"{who}: axis {name} is given twice.")
        box[name] = parse_size(who, name, size)
    if not box:
        size = 2 if who == "Layout" and "ranks" not in more else -1
        raise ShapeError(f"{who} needs at least one axis, such as {format_call(who, {'dp': size}, **more)}.")
    if len({isinstance(axis, int) for axis in box}) > 1:
        raise ShapeError(f"{who}: give every axis a name or every axis a number, not both: {given!r}.")
    for axis in sizes:
        if not axis.isidentifier():
            call = format_call(who, box, **more)
            raise ShapeError(f"{who}: an axis is named by a word, such as dp, not {axis!r}.\n\n  {call}")
    if sum(size == -1 for size in box.values()) > 1:
        free = ", ".join(str(axis) for axis, size in box.items() if size == -1)
        raise ShapeError(f"{format_call(who, box)}: at most one size may be -1 (inferred); here are {free}.")
    return box


def _take_axis(who: str, axis: Any) -> str | int:
    """An axis as a plain str or int; ShapeError if it is neither a printable name nor a number."""
    if isinstance(axis, str):
        if axis and axis.isprintable():
            return str.__str__(axis)  # a member of an enum becomes a plain str
    else:
        with contextlib.suppress(TypeError):
            if (number := whole_number(axis)) >= 0:
                return number
    raise ShapeError(f"{who}: an axis is a word that can be printed, or a number from 0 on, not {axis!r}.")


def _not_axes(
    who: str, shape: Sequence[Any], sizes: Mapping[str, Any], more: Mapping[str, object], count: int | None
) -> ShapeError | OptionsError:
    """The error for reserved keywords. It suggests calls only if all other arguments are valid sizes."""
    words = [word for word in sizes if word in RESERVED]
    says = f"{who}: " + " ".join(f"{word} is no axis; it {RESERVED[word]}." for word in words)
    options = dict(_option(word, sizes[word]) for word in words if word in OPTION_EXAMPLES)
    about_groups = bool(options) or "tag" in sizes
    box = _good_sizes(who, _meant_sizes(shape, sizes), count)
    ways = [format_call(who, box, **more)] if box else []
    if about_groups and who in ("Layout", "plan"):
        says += " A layout has no groups."
    elif about_groups and box:
        mesh, first = "part" if who == "view" else "mesh", next(iter(box))
        ways = [f"{mesh} = {'mesh.' * (who == 'view')}{ways[0]}"]
        if options:
            keywords = ", ".join(f"{word}={format_value(value)}" for word, value in options.items())
            each = f"for axis in {mesh}.axes: " if len(box) > 1 else ""
            ways.append(f"{each}{mesh}.configure({'axis' if each else repr(first)}, {keywords})")
        if "tag" in sizes:
            tag = sizes["tag"] if isinstance(sizes["tag"], str) and sizes["tag"] else "own"
            ways.append(f"{mesh}.group({first!r}, tag={tag!r})")
    elif not about_groups and not shape and (named := _good_sizes(who, sizes, count)):
        ways.append(f"{format_call(who, named, **more)}   # with axes of these names")
    error = OptionsError if about_groups else ShapeError
    return error(says + "\n" * bool(ways) + "".join(f"\n  {way}" for way in ways))


def _meant_sizes(shape: Sequence[Any], sizes: Mapping[str, Any]) -> Any:
    """Find the sizes in a call with reserved keywords, to suggest a corrected call.

    They may be positional, axis keywords, or the value of a keyword in ``SHAPE_KEYWORDS``. Names of axes come from a
    keyword in ``NAME_KEYWORDS``. None if there are no sizes, several sets of sizes, or names that do not match them.
    """
    first: Any = shape
    if len(shape) == 2 and isinstance(shape[0], str) and isinstance(shape[1], (tuple, list)):
        first = shape[1]  # after torch's device_type
    elif len(shape) == 1 and isinstance(shape[0], (Mapping, tuple, list)):
        first = shape[0]
    axes = {axis: size for axis, size in sizes.items() if axis not in RESERVED}
    given = [*filter(len, (first, axes)), *(sizes[word] for word in SHAPE_KEYWORDS if word in sizes)]
    names = [sizes[word] for word in NAME_KEYWORDS if word in sizes]
    if len(given) != 1 or not names or isinstance(given[0], Mapping):
        return given[0] if len(given) == 1 else None
    if not all(isinstance(each, (tuple, list)) for each in (*names, *given)):
        return None
    words = [name for name in names[0] if isinstance(name, str)]
    return dict(zip(words, given[0])) if len({*words}) == len(names[0]) == len(given[0]) else None


def _good_sizes(who: str, given: Any, count: int | None) -> dict[str | int, int]:
    """Return the sizes in a mapping, a sequence or one number if they are valid, else {}.

    If ``count`` is given, the sizes must also hold ``count`` ranks. With a -1, the other sizes must divide ``count``.
    """
    sizes = given if isinstance(given, (Mapping, tuple, list)) else (given,)
    try:
        box = parse_sizes(who, (sizes,) if isinstance(sizes, Mapping) else (dict(enumerate(sizes)),), {})
    except ShapeError:
        return {}
    fixed = math.prod(size for size in box.values() if size != -1)
    if -1 in box.values():
        fits = count % fixed == 0 if count else who != "Layout"  # a layout has no world to fill
    else:
        fits = count in (None, fixed)
    return box if fits else {}


def _option(word: str, value: object) -> tuple[str, object]:
    """The name and the value of an option for a suggested call. An invalid value is replaced by an example."""
    name, example = OPTION_EXAMPLES[word]
    with contextlib.suppress(OptionsError):
        if name == word and value is not None and GroupOptions(**{word: value}):  # type: ignore[arg-type]
            return name, value
    return name, example


def _not_both(
    who: str, shape: Sequence[Any], sizes: Mapping[str, Any], more: Mapping[str, object], count: int | None
) -> ShapeError:
    """The error for a mapping next to other sizes, with the one call that has all of them."""
    parts = [each for each in (*shape, sizes) if isinstance(each, Mapping)]
    axes = [axis for part in parts for axis in part]
    first = {axis: next(part[axis] for part in parts if axis in part) for axis in axes}
    last = {axis: next(part[axis] for part in reversed(parts) if axis in part) for axis in axes}
    twice = "".join(
        f" Axis {axis} is {first[axis]!r} and {last[axis]!r}." for axis in first if first[axis] != last[axis]
    )
    boxes = [_good_sizes(who, each, count) for each in ([first, last] if twice else [first])]
    good = len(parts) > len(shape) and all(boxes)
    lines = [f"\n  {format_call(who, box, **more)}" for box in boxes if good]
    return ShapeError(
        f"{who}: give all sizes in one mapping, or all as keywords.{twice}" + "\n" * good + "".join(lines)
    )


def _all_in_one(who: str, given: Sequence[Any], more: Mapping[str, object], count: int | None) -> ShapeError:
    """The error for all sizes in one tuple or list, as other libraries take them."""
    box = _good_sizes(who, given, count)
    call = f"\n\n  {format_call(who, box, **more)}" if box else ""
    return ShapeError(f"{who}: sizes are given one by one, not as {given!r}.{call}")


def parse_size(who: str, axis: str | int, size: Any) -> int:
    try:
        size = whole_number(size)
    except TypeError:
        raise ShapeError(f"{who}: the size of axis {axis} is a whole number, not {size!r}.") from None
    if size < 1 and size != -1:
        raise ShapeError(f"{who}: the size of axis {axis} is {size}; a size is at least 1, or -1 to infer it.")
    return int(size)


def parse_ranks(who: str, ranks: Iterable[int]) -> range | tuple[int, ...]:
    """Ranks in the order given, as a range if they are evenly spaced.

    Raises:
        ShapeError: the ranks are empty, negative, repeated or not integers.
    """
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
    straight = as_range(ranks)
    if straight is None and len(set(ranks)) != len(ranks):
        seen: set[int] = set()
        twice = sorted({rank for rank in ranks if rank in seen or seen.add(rank)})  # type: ignore[func-returns-value]
        raise ShapeError(f"{who}: each rank may appear once, but ranks repeats {format_ranks(twice)}.")
    return straight or tuple(ranks)


def fill_sizes(
    who: str,
    box: dict[str | int, int],
    count: int,
    count_text: str,
    *,
    suggest_ranks: bool = True,
    more: Mapping[str, object] | None = None,
) -> dict[str | int, int]:
    """The sizes with -1 inferred from ``count`` ranks.

    Args:
        count_text: the count in words, such as "the world has 8".
        suggest_ranks: suggest ``ranks=`` and other worlds too.
        more: the other arguments of the call, which suggested calls repeat.

    Raises:
        ShapeError: the sizes do not hold exactly ``count`` ranks.
    """
    more = more or {}
    fixed = math.prod(size for size in box.values() if size != -1)
    if -1 in box.values():
        if count % fixed == 0:
            return {axis: count // fixed if size == -1 else size for axis, size in box.items()}
        problem = f"{format_call(who, box)} cannot be filled: {count_text}, and {count} is not divisible by {fixed}."
    elif fixed == count:
        return box
    else:
        problem = f"{format_call(who, box)} holds {fixed} rank{'s' * (fixed > 1)}, but {count_text}."
    ways = suggested_calls(who, box, fixed, count, suggest_ranks, more)
    raise ShapeError(f"{problem}\n\n{format_calls(ways)}")


def fill_sizes_for(
    who: str, box: dict[str | int, int], ranks: Collection[int], more: Mapping[str, object]
) -> dict[str | int, int]:
    """The sizes with -1 inferred from a list of ranks. Raises ShapeError if they hold another number."""
    count_text = f"{len(ranks)} rank{'s are' if len(ranks) > 1 else ' is'} given"
    return fill_sizes(who, box, len(ranks), count_text, suggest_ranks=False, more=more)
