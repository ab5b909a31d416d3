"""Sizes and ranks as a user gives them: checked, completed, or answered with the call that would be right."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Union

from pgmesh.errors import ShapeError

A = TypeVar("A", str, Union[str, int])


def spell(who: str, box: dict[str | int, int], **more: object) -> str:
    """The call that makes a box, as text.

    >>> spell("ProcessGroupMesh", {"dp": 2, "tp": 2}, ranks=range(4))
    'ProcessGroupMesh(dp=2, tp=2, ranks=range(4))'
    """
    words = [str(size) if isinstance(axis, int) else f"{axis}={size}" for axis, size in box.items()]
    words += [f"{word}={_plain(value)}" for word, value in more.items()]
    return f"{who}({', '.join(words)})"


def _plain(value: object) -> str:
    if value is ...:
        return "..."
    return f"range({len(value)})" if isinstance(value, range) and value == range(len(value)) else repr(value)


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


def take_sizes(who: str, shape: tuple[int, ...], sizes: dict[str, int]) -> dict[str | int, int]:
    """Sizes by axis, each a whole number of at least 1, or -1 at most once."""
    if shape and sizes:
        raise ShapeError(
            f"{who}: give every size by position or every size by name, not both: "
            f"{', '.join(map(str, shape))} stand{'s' * (len(shape) == 1)} beside {', '.join(sizes)}."
        )
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, dict)):
        raise _all_in_one(who, shape[0])
    box: dict[str | int, int] = dict(enumerate(shape))
    box.update(sizes)
    if not box:
        raise ShapeError(f"{who} needs at least one axis, such as {who}(dp=2).")
    for axis, size in box.items():
        if isinstance(axis, str) and not axis.isidentifier():
            raise ShapeError(f"{who}: an axis is named by a word, such as dp, not {axis!r}.")
        box[axis] = take_size(who, axis, size)
    if sum(size == -1 for size in box.values()) > 1:
        free = ", ".join(str(axis) for axis, size in box.items() if size == -1)
        raise ShapeError(f"{spell(who, box)}: at most one size is -1, what is left; here are {free}.")
    return box


def _all_in_one(who: str, given: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> ShapeError:
    """Sizes as some other libraries' meshes take them, spelled as here."""
    box = given if isinstance(given, dict) else dict(enumerate(given))
    good = box and all(isinstance(size, int) for size in box.values())
    return ShapeError(f"{who}: sizes are given one by one, not as {given!r}." + f"\n\n  {spell(who, box)}" * bool(good))


def take_size(who: str, axis: str | int, size: Any) -> int:
    try:
        size = operator.index(size)
    except TypeError:
        raise ShapeError(f"{who}: the size of axis {axis} is a whole number, not {size!r}.") from None
    if size < 1 and size != -1:
        raise ShapeError(f"{who}: the size of axis {axis} is {size}; a size is at least 1, or -1 for what is left.")
    return int(size)


def take_ranks(who: str, ranks: Iterable[int]) -> range | tuple[int, ...]:
    """Ranks in the order given, as a range where they follow one."""
    if not isinstance(ranks, range):
        try:
            ranks = tuple(map(operator.index, ranks))
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


def fill(who: str, box: dict[str | int, int], count: int, whole: str, *, pick: bool = True) -> dict[str | int, int]:
    """The sizes with -1 put right for ``count`` ranks; ShapeError when they do not hold exactly that many.

    Args:
        whole: how many there are, in words: "the world has 8".
        pick: whether naming fewer ranks with ``ranks=`` would be a way out.
    """
    fixed = math.prod(size for size in box.values() if size != -1)
    if -1 in box.values():
        if count % fixed == 0:
            return {axis: count // fixed if size == -1 else size for axis, size in box.items()}
        problem = f"{spell(who, box)} cannot be filled: {whole}, and {count} is not divisible by {fixed}."
    elif fixed == count:
        return box
    else:
        problem = f"{spell(who, box)} holds {fixed} rank{'s' * (fixed > 1)}, but {whole}."
    ways = _ways_out(who, box, fixed, count, pick)
    raise ShapeError(f"{problem}\n\n{calls_in_lines(ways)}")


def fill_with(who: str, box: dict[str | int, int], ranks: Collection[int]) -> dict[str | int, int]:
    """The sizes with -1 put right for ranks that were named; ShapeError when they do not hold exactly those."""
    whole = f"{len(ranks)} rank{'s are' if len(ranks) > 1 else ' is'} given"
    return fill(who, box, len(ranks), whole, pick=False)


def _ways_out(who: str, box: dict[str | int, int], fixed: int, count: int, pick: bool) -> list[tuple[str, str]]:
    """Calls that would hold ``count`` ranks, each with its reason."""
    given: dict[str, Any] = {"ranks": ...} if who == "Layout" else {}

    def call(changes: dict[str | int, int], **more: object) -> str:
        return spell(who, {**box, **changes}, **{**given, **more})

    ways: list[tuple[str, str]] = []
    if pick and count == 1:
        ways.append((f"{torchrun(fixed)} script.py", f"start {fixed} ranks: a script by itself is a world of 1"))
        if fixed <= 16:
            ways.append((f"launch.spawn(main, {fixed})", "or have it start them here, such as for a test"))
        else:
            ways.append((spell("Layout", box, **given), "or plan it without processes"))
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
