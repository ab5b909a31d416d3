"""Arguments of recipes: parsing, checks, and errors that suggest a correct call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pgmesh._util.formatting import format_call
from pgmesh._util.validation import fill_sizes, parse_sizes
from pgmesh.errors import ShapeError


@dataclass(frozen=True)
class RecipeCall:
    """The call of a recipe. ``str`` returns it as text.

    Args:
        who: the function, such as "recipes.megatron".
        ranks: the ranks of the arrangement.
        given: the arguments after the world. Those that are None are not written.
    """

    who: str
    ranks: range
    given: Mapping[str, object]

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
        if not isinstance(world, int) or world < 1 or first < 0:
            raise ShapeError(f"{who}: the world is a number of ranks, such as 8, not {world!r} from rank {first!r} on.")
        known = inspect.signature(recipe).parameters
        given = {name: value for name, value in arguments.items() if value != known[name].default}
        return cls(
            who, range(first, first + world), {name: given[name] for name in given if name not in ("world", "of")}
        )

    def __str__(self) -> str:
        return self.with_changes()

    def with_changes(self, **changes: object) -> str:
        """The call with some arguments changed or added, as text."""
        return format_call(self.who, {}, len(self.ranks), **{**self.given, **changes})

    def parse_sizes(self, **sizes: int | None) -> dict[str, int]:
        """Sizes as integers of at least 1, and at most one -1. Those that are None are left out.

        Raises:
            ShapeError: a value is no size.
        """
        given = {axis: size for axis, size in sizes.items() if size is not None}
        return {str(axis): size for axis, size in parse_sizes(self.who, (), given).items()}

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
            ShapeError: the sizes do not hold exactly ``count`` ranks.
        """
        count = len(self.ranks) if count is None else count

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
