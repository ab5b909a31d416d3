"""Corrections of sizes that are not in the notation of the command line (``pp=2`` or ``2``)."""

from __future__ import annotations

import re
from collections.abc import Sequence

SIZE = r"-1|0*[1-9][0-9]*"
USUAL_NAMES = ("dp", "tp", "pp", "axis")


def corrected_sizes(words: Sequence[str], example: int, named: bool = False) -> list[str]:
    """The sizes that words in another notation probably mean. An axis that is given twice keeps its first size.

    Args:
        example: the size of an axis without a valid number.
        named: True if each size needs a name.

    >>> corrected_sizes(["8", "dp:2", "pp", "dp", "4"], 2)
    ['tp=8', 'dp=2', 'pp=2']
    >>> corrected_sizes(["2x4"], 2), corrected_sizes(["dp2,", "tp", "=", "0"], 2)
    (['2', '4'], ['dp=2', 'tp=2'])
    >>> corrected_sizes(["pp=x", "dp=1.5", "tp=1e3"], 2)
    ['pp=2', 'dp=2', 'tp=1000']
    """
    text = re.sub(r"(?<=[=:])[^\W\d]\w*\b(?!\s*[=:])", "", " ".join(words))  # a word is no size
    text = re.sub(r"(?<![\w.])\d+(\.\d*|e\d\b)", lambda number: f"{float(number[0]):.0f}", text)
    text = re.sub("(?<=[0-9])[x*](?=[0-9])", " ", text)
    found = re.findall(r"([^\W\d]\w*)[=:\s]+(-?\d+)\w*|([^\W\d]+)(-?\d*)|(-?\d+)", text)
    pairs = [(name or short, size or close or alone) for name, size, short, close, alone in found] or [("dp", "")]
    numbers = [size if re.fullmatch(SIZE, size) else str(example) for _, size in pairs]
    names = {name for name, _ in pairs} - {""}
    if not names and not named:
        return numbers
    sizes: dict[str, str] = {}
    for (name, _), number in zip(pairs, numbers):
        free = next((usual for usual in USUAL_NAMES if usual not in names | {*sizes}), "axis")
        sizes.setdefault(name or free, number)
    return [f"{name}={number}" for name, number in sizes.items()]
