"""Checks of the sizes and ranks in a call. Invalid ones raise an error, with a corrected call where there is one.

Meshes, layouts, views and plans take sizes in the same ways, and check them in two steps: ``parse_sizes`` makes a
mapping from axes to sizes of the arguments, and ``fill_sizes`` infers a size of -1 and checks the number of ranks.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pgmesh._util.formatting import as_range, count_of, format_call, format_calls, format_ranks
from pgmesh._util.keywords import GROUP_KEYWORDS, RESERVED, meant_sizes
from pgmesh._util.suggestions import A, fit_sizes, infer_size, known_product, start_command
from pgmesh.errors import OptionsError, ShapeError

Sizes = Mapping[Any, int]
"""Sizes by axis in one mapping. The axes have names, or numbers from 0 on."""

Suggest = Callable[[Any], list[tuple[str, str]]]
"""A function from sizes to suggested calls, each with its reason."""


def is_boolean(value: object) -> bool:
    """Check for True or False, of Python, numpy or torch.

    >>> is_boolean(True), is_boolean(1)
    (True, False)
    """
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


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


def number_between(value: Any, least: int, most: float = math.inf) -> int | None:
    """A whole number as an int; None for any other value, and for a number outside these limits.

    >>> number_between(3, 1), number_between(3, 1, 2), number_between("3", 1)
    (3, None, None)
    """
    with contextlib.suppress(TypeError):
        number = whole_number(value)
        return number if least <= number <= most else None
    return None


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
        count: the number of ranks that the sizes have to hold; None if it is unknown.

    Raises:
        ShapeError: a value is no size, or a keyword is no axis.
        OptionsError: a keyword is an option of groups.
    """
    suggest = partial(_valid_calls, who, more or {}, count)
    if shape and isinstance(shape[0], str) and (shape[1:] or sizes):  # a call of init_device_mesh or DeviceMesh
        sizes, shape = {"device_type": shape[0], **sizes}, shape[1:]
    if any(word in RESERVED for word in sizes):
        raise _reserved_error(who, shape, sizes, suggest)
    if len(shape) == 1 and not sizes and isinstance(shape[0], (tuple, list)):
        problem = f"{who}: sizes are given one by one, not as {shape[0]!r}."
        raise ShapeError(f"{problem}\n\n{format_calls(suggest(shape[0]))}".rstrip())
    if (shape and sizes) or (len(shape) > 1 and any(isinstance(part, Mapping) for part in shape)):
        wrong = format_call(who, {}, *shape, **sizes)
        raise ShapeError(f"{wrong}: give all sizes by position, by keyword, or in one mapping.")
    by_position = shape[0] if shape and isinstance(shape[0], Mapping) else dict(enumerate(shape))
    box = _parse_mapping(who, by_position or sizes)
    if not box:
        example = format_call(who, {"dp": 2 if count is None else -1}, **(more or {}))
        raise ShapeError(f"{who} needs at least one axis, such as {example}.")
    return box


def _parse_mapping(who: str, given: Mapping[Any, Any]) -> dict[str | int, int]:
    """The axes and sizes of a mapping as plain ones."""
    box = {_parse_axis(who, axis): parse_size(who, axis, size) for axis, size in given.items()}
    if len(box) < len(given):  # equal numbers of different types
        raise ShapeError(f"{who}: an axis is given twice: {given!r}.")
    if len({isinstance(axis, int) for axis in box}) > 1:
        raise ShapeError(f"{who}: give every axis a name or every axis a number, not both: {given!r}.")
    free = [str(axis) for axis, size in box.items() if size == -1]
    if len(free) > 1:
        raise ShapeError(f"{format_call(who, box)}: at most one size may be -1 (inferred); here are {', '.join(free)}.")
    return box


def is_name(name: object) -> bool:
    """True for the name of a mesh or a world: a printable string without "/", which separates the parts of keys."""
    return isinstance(name, str) and name != "" and name.isprintable() and "/" not in name


def _parse_axis(who: str, axis: Any) -> str | int:
    """An axis as a plain str or int; ShapeError if it is neither a printable name nor a number."""
    if isinstance(axis, str) and axis and axis.isprintable():
        return str.__str__(axis)  # a member of an enum becomes a plain str
    with contextlib.suppress(TypeError):
        if (number := whole_number(axis)) >= 0:
            return number
    raise ShapeError(f"{who}: an axis is a word that can be printed, or a number from 0 on, not {axis!r}.")


def _valid_calls(who: str, more: Mapping[str, object], count: int | None, given: Any) -> list[tuple[str, str]]:
    """The call with these sizes, and no reason; none if they are invalid, or do not hold ``count`` ranks."""
    if not isinstance(given, Mapping):
        given = dict(enumerate(given if isinstance(given, (tuple, list)) else [given]))
    with contextlib.suppress(ShapeError, TypeError):
        box = _parse_mapping(who, given)
        if infer_size(box, count) if count else box and -1 not in box.values():
            return [(format_call(who, box, **more), "")]
    return []


def _reserved_error(who: str, shape: Sequence[Any], sizes: Mapping[str, Any], suggest: Suggest) -> Exception:
    """The error for reserved keywords. It suggests calls if all other arguments are valid sizes."""
    words = [word for word in sizes if word in RESERVED]
    problem = f"{who}: " + " ".join(f"{word} is no axis; it {RESERVED[word]}." for word in words)
    options = [word for word in words if word in GROUP_KEYWORDS]
    calls = suggest(meant_sizes(shape, sizes))
    if not options and not shape:
        calls += [(text, "with axes of these names") for text, _ in suggest(sizes)]
    return (OptionsError if options else ShapeError)(f"{problem}\n\n{format_calls(calls)}".rstrip())


def parse_size(who: str, axis: str | int, size: Any) -> int:
    """A size as an int of at least 1, or -1. Raises ShapeError for other values."""
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
    lowest = min(ranks[0], ranks[-1]) if isinstance(ranks, range) else min(ranks)
    if lowest < 0:
        raise ShapeError(f"{who}: a rank is at least 0, but ranks holds {lowest}.")
    straight = as_range(ranks)
    if straight is None and len(set(ranks)) != len(ranks):
        twice = sorted(rank for rank, times in Counter(ranks).items() if times > 1)
        raise ShapeError(f"{who}: each rank may appear once, but ranks repeats {format_ranks(twice)}.")
    return straight or tuple(ranks)


def fill_sizes(
    who: str,
    box: Mapping[A, int],
    count: int,
    count_text: str,
    *,
    is_world: bool = False,
    more: Mapping[str, object] | None = None,
    call_of: Callable[..., str] = format_call,
) -> dict[A, int]:
    """The sizes with -1 inferred from ``count`` ranks.

    Args:
        count_text: the count in words, such as "the world has 8".
        is_world: True for the ranks of the world: ``ranks=`` and a larger world are suggested too.
        more: the other arguments of the call, which suggested calls repeat.
        call_of: returns the call with some sizes, as text. Its arguments are ``who``, the sizes and ``**more``.

    Raises:
        ShapeError: the sizes do not hold exactly ``count`` ranks.
    """
    filled = infer_size(box, count)
    if filled is not None:
        return filled
    more, product = more or {}, known_product(box)
    fitting, inferred, why = fit_sizes(box, count)
    calls = [(call_of(who, {**fitting, inferred: -1}, **more), why)]
    if is_world and count == 1:
        calls.insert(0, start_command(product))
    elif is_world and product < count and -1 not in box.values():
        named = call_of(who, box, **{**more, "ranks": range(product)})
        calls.append((named, f"or name the {count_of(product, 'rank')} to use"))
    problem = f"{call_of(who, box)} holds {count_of(product, 'rank')}, but {count_text}."
    if -1 in box.values():
        problem = f"{call_of(who, box)} cannot be filled: {count_text}, and {count} is not divisible by {product}."
    raise ShapeError(f"{problem}\n\n{format_calls(calls)}")
