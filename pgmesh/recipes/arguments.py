"""The arguments of recipes: their checks, and the error of a call that a recipe refuses.

A recipe raises ``Refused`` with the problem, and with other arguments that would be right. The decorator ``recipe``
makes a ShapeError of it, which suggests the call with these arguments. It tries that call first: if the recipe refuses
it too, it is changed again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ParamSpec

from pgmesh._util.formatting import Text, count_of, format_call, format_calls, join_words
from pgmesh._util.suggestions import fit_sizes, infer_size, known_product
from pgmesh._util.validation import parse_size, whole_number
from pgmesh.errors import ShapeError
from pgmesh.layout import Layout
from pgmesh.recipes.arrangement import Arrangement

P = ParamSpec("P")

MOST_CHANGES = 8
"""How often a suggested call is changed until the recipe accepts it."""


class Refused(Exception):
    """The arguments of a recipe are incompatible.

    Args:
        problem: what is wrong.
        why: the reason for the changes, for a comment.
        changes: arguments that would be right.
    """

    def __init__(self, problem: str, why: str = "", **changes: object) -> None:
        super().__init__(problem)
        self.why, self.changes = why, changes


def recipe(function: Callable[P, Arrangement], words: Mapping[str, str] = {}) -> Callable[P, Arrangement]:
    """A decorator of recipes: ``Refused`` becomes a ShapeError, and the arrangement knows its call.

    Args:
        function: the recipe.
        words: the argument here for each keyword of the system's own function. An error translates a call with them.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> Arrangement:
        if words.keys() & keywords.keys():
            known = signature.parameters
            foreign = join_words([word for word in keywords if word not in known], "or")
            ours = {words.get(word, word): value for word, value in keywords.items()}
            given = {"world": Text("torch.distributed.get_world_size()"), **dict(zip(known, args)), **ours}
            call = call_of(function, {word: value for word, value in given.items() if word in known})
            raise ShapeError(f"recipes.{function.__name__} has no argument {foreign}.\n\n  {call}")
        arguments = signature.bind(*args, **keywords).arguments
        call = call_of(function, {name: value for name, value in arguments.items() if name != "of"})
        try:
            return replace(function(*args, **keywords), call=call)
        except Refused as refused:
            problem = f"{call}: {refused}"
        if arguments["world"] == 1:
            problem += " A script by itself is a world of 1: torchrun and other launchers start more ranks."
        raise ShapeError("\n\n".join([problem, *suggested_calls(function, arguments)]))

    return checked


def call_of(function: Callable[..., object], arguments: Mapping[str, Any], **changes: object) -> str:
    """The call of a recipe as text. Arguments that equal their default are left out, unless they were changed.

    >>> from pgmesh import recipes
    >>> call_of(recipes.megatron, {"world": 16, "tp": 2, "cp": 4}, cp=1)
    'recipes.megatron(16, tp=2, cp=1)'
    """
    known = inspect.signature(function).parameters
    given = {name: value for name, value in arguments.items() if value != known[name].default} | changes
    texts = {name: _readable(name, value) for name, value in given.items()}
    return format_call(f"recipes.{function.__name__}", {}, texts.pop("world"), **texts)


def _readable(name: str, value: object) -> object:
    """The value of an argument; the argument's name in place of a function without a name, such as a lambda."""
    has_name = str(getattr(value, "__name__", "")).isidentifier()
    return Text(name) if callable(value) and not has_name else value


def suggested_calls(function: Callable[..., Arrangement], arguments: Mapping[str, Any]) -> list[str]:
    """The nearest call that the recipe accepts, as text with its reason; none if it was not found."""
    changes: dict[str, object] = {}
    why = ""
    for _ in range(MOST_CHANGES):
        try:
            function(**{**arguments, **changes, "of": Layout})  # a plan: it creates nothing
        except Refused as refused:
            changes, why = {**changes, **refused.changes}, refused.why
        except Exception:  # of a function that the user passed, too
            break
        else:
            return [format_calls([(call_of(function, arguments, **changes), why)])]
    return []


# -- checks --------------------------------------------------------------------------------------------------------


def parse_world(world: object, first: object = 0) -> range:
    """The ranks of an arrangement.

    Raises:
        Refused: the world is not a positive integer, or the first rank is negative.
    """
    try:
        start, count = whole_number(first), whole_number(world)
    except TypeError:
        start = count = -1
    if start < 0 or count < 1:
        raise Refused(f"the world is a number of ranks, such as 8, not {world!r} from rank {first!r} on.")
    return range(start, start + count)


def parse_sizes(sizes: Mapping[str, int | None]) -> dict[str, int]:
    """Sizes as integers of at least 1, or -1. Those that are None are left out.

    Raises:
        ShapeError: a value is no size.
    """
    return {axis: parse_size("recipes", axis, size) for axis, size in sizes.items() if size is not None}


def fill_sizes(
    given: Mapping[str, int | None], count: int, holder: str = "the world", **more: object
) -> dict[str, int]:
    """The sizes with -1 inferred, without those that are None.

    Args:
        given: the sizes by axis. The first one of -1 is the remaining size.
        count: number of ranks that they hold.
        holder: the name for these ranks, for errors.
        more: further changes in a suggested call.

    Raises:
        Refused: several sizes are -1, or the sizes do not hold exactly ``count`` ranks.
        ShapeError: a value is no size.
    """
    sizes = parse_sizes(given)
    rest, *others = [axis for axis, size in sizes.items() if size == -1] or [""]
    filled = None if others else infer_size(sizes, count)
    if filled is not None:
        return filled
    if others:
        fitting, why = fit_sizes({axis: size for axis, size in sizes.items() if axis != rest}, count)[0], ""
        problem = f"{rest} is the remaining size, so {join_words(others)} cannot be -1."
    else:
        fitting, inferred, why = fit_sizes(sizes, count)
        fitting[inferred] = -1
        product = known_product(sizes)
        problem = f"the sizes hold {count_of(product, 'rank')}, but {holder} has {count}."
        if rest:
            problem = f"{holder} has {count}, and {count} is not divisible by {product}."
    changes = {axis: size for axis, size in fitting.items() if size != sizes[axis]}
    raise Refused(problem, why, **{**changes, **more})


def parse_order(order: object, default: str, direction: str, sizes: Mapping[str, int]) -> list[str]:
    """The axes that an order names, as a list. Those that it omits, all of size 1, are at the end.

    Args:
        order: axes joined by ``-``.
        default: an order of all axes.
        direction: meaning of the order, for errors, such as "fastest axis first".
        sizes: the sizes by axis. An axis larger than 1 must be named.

    Raises:
        Refused: an axis does not exist, is named twice, or is missing.
    """
    known, asked = default.split("-"), str(order).lower().split("-")
    unnamed = {axis: size for axis, size in sizes.items() if axis not in asked}
    problems = [
        *(f"the order names {axis}; it may name {', '.join(known)}" for axis in asked if axis not in known),
        *(f"the order names {axis} more than once" for axis in asked if asked.count(axis) > 1),
        *(f"{axis} has size {size}, but the order does not name it" for axis, size in unnamed.items() if size > 1),
    ]
    if problems:
        raise Refused(f"{problems[0]}.", direction, order=default)
    return [*asked, *(axis for axis in known if axis not in asked)]
