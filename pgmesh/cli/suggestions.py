"""Corrections of sizes that are not in the notation of the command line (``pp=2`` or ``2``)."""

from __future__ import annotations

import re
from collections.abc import Sequence

SIZE = r"-1|0*[1-9][0-9]*"


def corrected_sizes(words: Sequence[str], size: int) -> list[str]:
    """A valid size near each word; "" if its axis is already there.

    Args:
        size: the size of an axis without a number.

    >>> corrected_sizes(["8", "dp=2", "pp", "dp", "4"], 2)
    ['tp=8', 'dp=2', 'pp=2', '', 'axis=4']
    """
    axes: set[str] = set()
    right: list[str] = []
    named = {word.partition("=")[0] for word in words}
    for word in words:
        name, number = re.search(r"[A-Za-z_][A-Za-z_0-9]*", word), re.search(r"-1|[1-9][0-9]*", word.partition("=")[2])
        number = number or (None if name else re.search(r"[1-9][0-9]*", word))
        free = next((usual for usual in ("dp", "tp", "pp") if usual not in named | axes), "axis")
        axis = name[0] if name else free
        right.append("" if axis in axes else f"{axis}={number[0] if number else size}")
        axes.add(axis)
    return right


def intended_sizes(words: Sequence[str]) -> list[str]:
    """The sizes that words in another notation clearly mean, such as ``dp:2`` or ``2x4``; else an empty list.

    >>> intended_sizes(["dp=2,tp=-1"]), intended_sizes(["dp", "2", "tp:", "4"])
    (['dp=2', 'tp=-1'], ['dp=2', 'tp=4'])
    >>> intended_sizes(["2x4"]), intended_sizes(["dp"])
    (['2', '4'], [])
    """
    text = " ".join(words)
    if re.fullmatch(rf"({SIZE})([x*,; ]+({SIZE}))+", text):
        return re.findall(SIZE, text)
    pair = rf"(?:([A-Za-z_]\w*) ?[=: ] ?|([A-Za-z_]+))({SIZE})"
    whole = re.fullmatch(rf"({pair}[,; ]*)+", text)
    return [f"{spaced or close}={size}" for spaced, close, size in re.findall(pair, text)] if whole else []


def are_valid_sizes(words: Sequence[str]) -> bool:
    """True if all words are sizes in the right notation, with each axis once."""
    if all(re.fullmatch(SIZE, word) for word in words):
        return True
    axes = [axis for axis, _, size in (word.partition("=") for word in words) if re.fullmatch(SIZE, size)]
    return len(axes) == len(words) == len(set(axes)) and all(map(str.isidentifier, axes))
