"""Suggestions for error messages: sizes that hold a number of ranks, names that exist, and commands that start ranks.

Meshes, layouts, plans, recipes and the command line infer sizes with ``infer_size``. If it returns None, ``fit_sizes``
finds sizes that do hold the ranks. ``closest_name`` finds the name for every "Did you mean".
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import TypeVar, Union

A = TypeVar("A", str, Union[str, int])


# -- sizes ----------------------------------------------------------------------------------------------------------


def divisors(count: int) -> list[int]:
    """The divisors of a number, in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    return low + [count // n for n in reversed(low) if n * n != count]


def largest_divisor(count: int, most: int) -> int:
    """The largest divisor of a number that is at most ``most``.

    >>> largest_divisor(12, 5)
    4
    """
    return max(n for n in divisors(count) if n <= most)


def known_product(sizes: Mapping[A, int]) -> int:
    """The product of the sizes that are not -1.

    >>> known_product({"dp": -1, "cp": 2, "tp": 4})
    8
    """
    return math.prod(size for size in sizes.values() if size != -1)


def infer_size(sizes: Mapping[A, int], count: int) -> dict[A, int] | None:
    """The sizes with -1 inferred; None if they do not hold exactly ``count`` ranks. At most one size is -1.

    >>> infer_size({"dp": -1, "tp": 2}, 8), infer_size({"dp": 2, "tp": 2}, 8)
    ({'dp': 4, 'tp': 2}, None)
    """
    rest, remainder = divmod(count, known_product(sizes))
    if remainder or (rest != 1 and -1 not in sizes.values()):
        return None
    return {axis: rest if size == -1 else size for axis, size in sizes.items()}


def fit_sizes(sizes: Mapping[A, int], count: int) -> tuple[dict[A, int], A, str]:
    """Sizes near these that hold exactly ``count`` ranks. Of several sizes of -1, only the first is inferred.

    The sizes shrink to divisors, the innermost first. One axis gets the remaining factor: that of size -1, or one with
    dp in its name, or the first.

    Returns:
        The sizes, an axis whose size may be given as -1, and the reason for a comment.

    >>> fit_sizes({"pp": 2, "dp": 4}, 6)
    ({'pp': 2, 'dp': 3}, 'dp', 'dp is then 3')
    >>> fit_sizes({"dp": -1, "tp": 3}, 8)
    ({'dp': 4, 'tp': 2}, 'dp', 'dp is then 4')
    """
    free = [axis for axis in sizes if sizes[axis] == -1]
    inferred = (free or sorted(sizes, key=lambda axis: "dp" not in str(axis)))[0]
    right, left = dict(sizes), count
    for axis in reversed(right):
        right[axis] = 1 if axis == inferred else largest_divisor(left, abs(right[axis]))
        left //= right[axis]
    right[inferred] = left
    return right, inferred, f"{'axis ' if isinstance(inferred, int) else ''}{inferred} is then {left}"


# -- ranks ----------------------------------------------------------------------------------------------------------


def example_ranks(sizes: Mapping[str | int, int]) -> range:
    """Example ranks for sizes with one -1: about 8, and at least twice the product of the other sizes."""
    product = known_product(sizes)
    return range(product * max(2, 8 // product))


def start_command(ranks: int) -> tuple[str, str]:
    """The command that starts a script on this many ranks of one host, and its reason."""
    return f"torchrun --nproc-per-node {ranks} script.py", f"start {ranks} ranks: a script by itself is a world of 1"


# -- names ----------------------------------------------------------------------------------------------------------


def closest_name(wrong: object, names: Collection[str]) -> str | None:
    """The name that was probably meant: the same letters in another order or case, or a similar name.

    Of names that are equally similar it is one with the same first letter.

    >>> closest_name("dpp", ["pp", "dp", "tp"]), closest_name("pt", ["pp", "tp"]), closest_name("x", ["pp", "tp"])
    ('dp', 'tp', None)
    """
    folded = {name.casefold(): name for name in names}
    word = str(wrong).casefold()

    def likeness(name: str) -> tuple[bool, float, bool]:
        ratio = difflib.SequenceMatcher(None, name, word).ratio()
        return sorted(name) == sorted(word), ratio, name[:1] == word[:1]

    best = max(folded, key=likeness, default="")
    return folded.get(best) if likeness(best) >= (False, 0.6, False) else None  # 0.6 as in get_close_matches


def did_you_mean(name: str | None) -> str:
    """The question for the end of a sentence; empty without a name.

    >>> did_you_mean("tp"), did_you_mean(None)
    (" Did you mean 'tp'?", '')
    """
    return f" Did you mean {name!r}?" if name else ""
