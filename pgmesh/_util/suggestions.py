"""Suggestions for error messages: sizes that hold a given number of ranks, and corrected calls with these sizes.

The calls are written by ``_util.formatting``. ``closest_name`` finds the name for every "Did you mean".
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar, Union

from pgmesh._util.formatting import format_call

A = TypeVar("A", str, Union[str, int])


def example_ranks(box: Mapping[str | int, int]) -> range:
    """Return example ranks for sizes with one -1: about 8, and at least twice the product of the other sizes."""
    fixed = math.prod(size for size in box.values() if size != -1)
    return range(fixed * max(2, 8 // fixed))


def torchrun_command(ranks: int) -> str:
    """The torchrun command that starts this many ranks, on hosts of 8 if there are more.

    >>> torchrun_command(4), torchrun_command(64)
    ('torchrun --nproc-per-node 4', 'torchrun --nnodes 8 --nproc-per-node 8')
    """
    hosts = ranks // 8 if ranks > 8 and ranks % 8 == 0 else 1
    return f"torchrun{f' --nnodes {hosts}' * (hosts > 1)} --nproc-per-node {ranks // hosts}"


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


def nearest_sizes(sizes: Mapping[A, int], count: int, free: Sequence[A]) -> dict[A, int]:
    """Sizes near these that hold exactly ``count`` ranks.

    If changing one size is enough, only that one changes, preferably of an axis with dp in its name. Otherwise the
    sizes shrink to divisors, and one axis gets the remaining factor.

    Args:
        free: axes of size -1.

    >>> nearest_sizes({"pp": 2, "dp": 4}, 6, []), nearest_sizes({"dp": 4, "tp": 2}, 9, [])
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


def suggested_calls(
    who: str, box: dict[str | int, int], fixed: int, count: int, suggest_ranks: bool, more: Mapping[str, object]
) -> list[tuple[str, str]]:
    """Return pairs of a corrected call and its reason.

    Args:
        who: the function or class called.
        box: the sizes by axis.
        fixed: the product of the sizes that are not -1.
        count: the number of ranks that the sizes must hold.
        suggest_ranks: also suggest ``ranks=`` and, if ``count`` is 1, ways to start or plan ``fixed`` ranks.
        more: the other arguments of the call, which suggested calls repeat.
    """

    def call(changes: dict[str | int, int], **ranks: object) -> str:
        return format_call(who, {**box, **changes}, **ranks, **more)

    ways: list[tuple[str, str]] = []
    if suggest_ranks and count == 1:
        ways.append(
            (f"{torchrun_command(fixed)} script.py", f"start {fixed} ranks: a script by itself is a world of 1")
        )
        if fixed <= 16:
            ways.append((f"launch.spawn(main, {fixed})", "or start them here, such as for a test"))
        else:
            example = {axis: 1 if size == -1 else size for axis, size in box.items()}
            ways.append((format_call("Layout", example), "or plan it without processes"))
    free = [axis for axis, size in box.items() if size == -1]
    for axis, size in box.items():
        rest = fixed // max(size, 1)
        if size == -1 or count % rest:
            continue
        if not free:
            ways.append((call({axis: -1}), f"{'or ' * bool(ways)}infer {_axis(axis)}: {count // rest}"))
        else:
            would = divisors(count // rest)
            near = min(would, key=lambda n: abs(n - size))
            ways.append((call({axis: near}), f"{_axis(axis)} may be {_any_of(would)}"))
        break
    else:  # no single size is enough: the nearest smaller divisors, and one axis for the rest
        changes, filled = nearest_sizes(box, count, free), (free or list(box))[0]
        why = f"sizes that divide {count}; {_axis(filled)} is then {changes[filled]}"
        ways.append((call({**changes, filled: -1}), why))
    if suggest_ranks and fixed < count and not free:
        ways.append((call({}, ranks=range(fixed)), f"or name the {fixed} rank{'s' * (fixed > 1)} to use"))
    return ways


def _any_of(values: list[int]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _axis(axis: str | int) -> str:
    return f"axis {axis}" if isinstance(axis, int) else axis


def closest_name(wrong: object, names: list[str]) -> str | None:
    """The name that was probably meant: the same letters in another order or case, or a similar name."""
    folded = {name.casefold(): name for name in names}
    word = str(wrong).casefold()
    for name in folded:
        if sorted(name) == sorted(word):
            return folded[name]
    close = difflib.get_close_matches(word, folded, n=1)
    return folded[close[0]] if close else None
