"""Arguments of recipes: parsing, checks, and errors that suggest a correct call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pgmesh._util.formatting import Text, format_call, join_words
from pgmesh._util.suggestions import fit_sizes
from pgmesh._util.validation import fill_sizes, parse_size, whole_number
from pgmesh.errors import ShapeError


@dataclass(frozen=True)
class RecipeCall:
    """The call of a recipe. ``str`` returns it as text.

    Args:
        who: the function, such as "recipes.megatron".
        ranks: the ranks of the arrangement.
        given: the arguments after the world but ``of``. Those that are None are not written. A function without a name
            is the variable of the argument's name.
        mesh_class: the argument ``of``, which only suggested calls have.
    """

    who: str
    ranks: range
    given: Mapping[str, object]
    mesh_class: object = None

    @classmethod
    def of(cls, recipe: Callable[..., object], arguments: Mapping[str, Any]) -> RecipeCall:
        """The call of a recipe. Arguments that equal their default are not written.

        Args:
            recipe: the function.
            arguments: its arguments by name: ``locals()`` in its first line. ``rank_offset`` is the first rank.

        Raises:
            ShapeError: the world is not a positive integer, or the first rank is negative.

        >>> from pgmesh import recipes
        >>> print(RecipeCall.of(recipes.megatron, {"world": 16, "tp": 2, "cp": 1}))
        recipes.megatron(16, tp=2)
        """
        who, world, first = f"recipes.{recipe.__name__}", arguments["world"], arguments.get("rank_offset", 0)
        try:
            start, count = whole_number(first), whole_number(world)
        except TypeError:
            start = count = -1
        if start < 0 or count < 1:
            raise ShapeError(f"{who}: the world is a number of ranks, such as 8, not {world!r} from rank {first!r} on.")
        known = inspect.signature(recipe).parameters
        given = {name: value for name, value in arguments.items() if value != known[name].default}
        others = {name: readable(name, value) for name, value in given.items() if name not in ("world", "of")}
        return cls(who, range(start, start + count), others, given.get("of"))

    def __str__(self) -> str:
        return format_call(self.who, {}, len(self.ranks), **self.given)

    def with_changes(self, **changes: object) -> str:
        """A suggested call: this one with some arguments changed or added, as text."""
        return format_call(self.who, {}, len(self.ranks), **{**self.given, **changes}, of=self.mesh_class)

    def parse_sizes(self, **sizes: int | None) -> dict[str, int]:
        """Sizes as integers of at least 1, or -1. Those that are None are left out.

        Raises:
            ShapeError: a value is no size.
        """
        return {axis: parse_size(self.who, axis, size) for axis, size in sizes.items() if size is not None}

    def fill_sizes(
        self, sizes: Mapping[str, int], count: int | None = None, holder: str = "the world", **changes: object
    ) -> dict[str, int]:
        """The sizes with -1 inferred. An axis of size -1 need not be an argument.

        Args:
            sizes: the sizes by axis.
            count: number of ranks that the sizes hold. Default: the world.
            holder: the name for these ranks, for errors.
            changes: further changes in a suggested call.

        Raises:
            ShapeError: several sizes are -1, or the sizes do not hold exactly ``count`` ranks.
        """
        count = len(self.ranks) if count is None else count
        rest, *free = [axis for axis, size in sizes.items() if size == -1] or [""]
        if free:
            fitting, _, _ = fit_sizes({**sizes, rest: 1}, count)
            meant = {axis: size for axis, size in fitting.items() if axis in self.given and size != sizes[axis]}
            problem = f"{self}: {rest} is the remaining size, so {join_words(free)} cannot be -1."
            raise ShapeError(f"{problem}\n\n  {self.with_changes(**{**meant, **changes})}")

        def call_with(who: str, box: Mapping[str, int], **more: object) -> str:
            return self.with_changes(**{axis: size for axis, size in box.items() if size != sizes[axis]}, **more)

        text, is_world = f"{holder} has {count}", len(self.ranks) == 1
        return fill_sizes(self.who, sizes, count, text, is_world=is_world, more=changes, call_of=call_with)

    def parse_order(self, order: object, default: str, direction: str, sizes: Mapping[str, int]) -> list[str]:
        """The axes that an order names, as a list. Those that it omits, all of size 1, are at the end.

        Args:
            order: axes joined by ``-``.
            default: an order of all axes.
            direction: meaning of the order, for errors, such as "fastest axis first".
            sizes: the sizes by axis. An axis larger than 1 must be named.

        Raises:
            ShapeError: an axis does not exist, is named twice, or is missing.
        """
        known, asked = default.split("-"), str(order).lower().split("-")
        unnamed = {axis: size for axis, size in sizes.items() if axis not in asked}
        problems = [
            *(f"the order names {axis}; it may name {', '.join(known)}" for axis in asked if axis not in known),
            *(f"the order names {axis} more than once" for axis in asked if asked.count(axis) > 1),
            *(f"{axis} has size {size}, but the order does not name it" for axis, size in unnamed.items() if size > 1),
        ]
        if problems:
            raise ShapeError(f"{self}: {problems[0]}.\n\n  order={default!r}   # {direction}")
        return [*asked, *(axis for axis in known if axis not in asked)]


def readable(name: str, value: object) -> object:
    """The value of an argument; the argument's name in place of a function without a name, such as a lambda."""
    has_name = str(getattr(value, "__name__", "")).isidentifier()
    return Text(name) if callable(value) and not has_name else value
