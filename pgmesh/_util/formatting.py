"""Calls, values, ranks, counts and lines of code as text, for error messages and reprs.

``format_call`` and ``format_value`` write Python that can be run as printed. The others write text for messages.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from keyword import kwlist
from typing import Any

from pgmesh._util.keywords import RESERVED

SHORT = 400
"""Maximum characters of an argument in a suggested call. A longer one is replaced by a variable name."""


_SKIPPED = (os.path.dirname(os.path.dirname(__file__)) + os.sep, contextlib.__file__)


class Text(str):
    """Text that a formatted call contains without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def format_call(who: str, box: Mapping[str | int, object], /, *first: object, **more: object) -> str:
    """The call that has these values for these axes, as text.

    Axes 0..n-1 are positional, names are keywords, and others are one mapping.

    Args:
        who: the function, method or class. ``plan`` always gets a mapping, and ``mesh.at`` one for numbered axes.
        box: the value by axis, such as its size.
        first: positional arguments before the axes.
        more: further arguments. Those that are None are left out.

    >>> format_call("ProcessGroupMesh", {"dp": 2, "tp": 2}, ranks=range(4), name=None)
    'ProcessGroupMesh(dp=2, tp=2, ranks=range(4))'
    >>> format_call("Layout", {"timeout": 2, "data-parallel": 4}), format_call("Layout", {1: 2, 2: 2})
    ("Layout({'timeout': 2, 'data-parallel': 4})", 'Layout({1: 2, 2: 2})')
    >>> format_call("at", {"pp": 1}), format_call("at", {0: [1, 2]}), format_call("recipes.megatron", {}, 8, tp=2)
    ('at(pp=1)', 'at({0: [1, 2]})', 'recipes.megatron(8, tp=2)')
    """
    words, verb = [format_value(value) for value in first], who.rpartition(".")[2]
    values = {axis: format_value(value) for axis, value in box.items()}
    if verb != "plan" and all(is_keyword_name(axis) and axis not in RESERVED for axis in box):
        words += [f"{axis}={value}" for axis, value in values.items()]
    elif verb not in ("plan", "at") and list(box) == list(range(len(box))):
        words += values.values()
    elif box:
        words.append(f"{{{', '.join(f'{axis!r}: {value}' for axis, value in values.items())}}}")
    words += [f"{word}={format_value(value)}" for word, value in more.items() if value is not None]
    return f"{who}({', '.join(words)})"


def is_keyword_name(axis: str | int) -> bool:
    """Check that an axis can be the keyword of a call.

    >>> is_keyword_name("dp"), is_keyword_name("class"), is_keyword_name("data-parallel"), is_keyword_name(0)
    (True, False, False, False)
    """
    return isinstance(axis, str) and axis.isascii() and axis.isidentifier() and axis not in (*kwlist, "__debug__")


def format_value(value: object) -> str:
    """The expression of a value. Sequences of more than 64 integers are written with ranges, functions by name.

    >>> format_value(range(4)), format_value((*range(50), *range(60, 90, 2)))
    ('range(4)', '(*range(50), *range(60, 90, 2))')
    """
    if isinstance(value, range):
        return f"range({len(value)})" if value == range(len(value)) else repr(value)
    if isinstance(value, timedelta):
        return f"timedelta(seconds={value.total_seconds():.15g})"
    if not isinstance(value, (tuple, list)) or len(value) <= 64:
        return getattr(value, "__name__", repr(value))
    words: list[str] = []
    run: list[int] = []  # evenly spaced
    for number in [*value, None]:
        if number is not None and (len(run) < 2 or number - run[-1] == run[1] - run[0]):
            run.append(number)
            continue
        straight = as_range(tuple(run)) if len(run) > 3 else None
        words += [f"*{format_value(straight)}"] if straight else map(str, run)
        run = [number]
    return f"({', '.join(words)},)" if len(words) == 1 else f"({', '.join(words)})"


def other_arguments(ranks: range | tuple[int, ...] | None, **more: object) -> dict[str, object]:
    """Arguments other than the sizes, for a suggested call. Long ranks are the variable ``ranks``."""
    return {"ranks": None if ranks is None else Text(shorten(format_value(ranks), "ranks")), **more}


def shorten(text: str, instead: str) -> str:
    """``text``, or ``instead`` if it is longer than SHORT."""
    return text if len(text) <= SHORT else instead


def format_ranks(ranks: Iterable[object], most: int = 8) -> str:
    """Ranks for a message, shortened to ``most`` of them.

    >>> format_ranks(range(4)), format_ranks(range(100))
    ('0, 1, 2, 3', '0, 1, 2, 3, 4, 5, 6, ..., 99')
    """
    ranks = ranks if isinstance(ranks, (range, tuple, list)) else tuple(ranks)
    if len(ranks) <= most:
        return ", ".join(map(str, ranks))
    return ", ".join(map(str, ranks[: most - 1])) + f", ..., {ranks[-1]}"


def name_ranks(ranks: Collection[object], most: int = 8) -> str:
    """Ranks for a message, after the word "rank" or "ranks".

    >>> name_ranks([2]), name_ranks([2, 3])
    ('rank 2', 'ranks 2, 3')
    """
    return f"rank{'s' * (len(ranks) != 1)} {format_ranks(ranks, most)}"


def count_of(count: int, noun: str) -> str:
    """A count and its noun.

    >>> count_of(1, "rank"), count_of(2048, "rank")
    ('1 rank', '2,048 ranks')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_sizes(sizes: Mapping[Any, int]) -> str:
    """Sizes by axis, for a report. Those of numbered axes are written alone.

    >>> format_sizes({"pp": 2, "dp": 4}), format_sizes({0: 2, 1: 4})
    ('pp=2 dp=4', '2 4')
    """
    return " ".join(str(size) if isinstance(axis, int) else f"{axis}={size}" for axis, size in sizes.items())


def format_seconds(seconds: float) -> str:
    """A timeout for a message, also one of which a moment has passed.

    >>> format_seconds(30), format_seconds(29.9918), format_seconds(2.5), format_seconds(0.05)
    ('30 s', '30 s', '2.5 s', '0.05 s')
    """
    return f"{round(seconds, 1 if seconds >= 1 else 2):g} s"


def join_words(words: Iterable[object], last: str = "and") -> str:
    """Words joined by commas, with another word before the last one.

    >>> join_words(["a", "b", "c"]), join_words([1, 2, 4], "or")
    ('a, b and c', '1, 2 or 4')
    """
    *most, end = map(str, words)
    return f"{', '.join(most)} {last} {end}" if most else end


def format_calls(calls: Sequence[tuple[str, str]]) -> str:
    """Corrected calls for the end of a message, one a line, each with its reason if that is not empty.

    >>> print(format_calls([("plan(4)", "with dp 2"), ("plan(16)", "or on 16 ranks")]))
      plan(4)    # with dp 2
      plan(16)   # or on 16 ranks
    """
    width = max((len(call) for call, _ in calls), default=0)
    return "\n".join(f"  {call:<{width}}   # {why}" if why else f"  {call}" for call, why in calls)


def as_range(values: range | tuple[int, ...]) -> range | None:
    """The range that has these values; None if they are not evenly spaced.

    >>> as_range((4, 6, 8)), as_range((4, 6, 7))
    (range(4, 10, 2), None)
    """
    if isinstance(values, range):
        return values
    step = values[1] - values[0] if len(values) > 1 else 1
    straight = range(values[0], values[0] + len(values) * step, step or 1)
    return straight if values[-1] in straight and tuple(straight) == values else None


def call_site() -> str:
    """File and line of the innermost frame outside this package and its ``with`` blocks: the call of the user."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    file = frame.f_code.co_filename.rpartition(os.sep)[2]
    return f"{file.encode(errors='backslashreplace').decode()}:{frame.f_lineno}"  # a file name may be no UTF-8
