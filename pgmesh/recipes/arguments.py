"""Arguments of recipes: parsing, checks, and errors that suggest a correct call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pgmesh._util.formatting import count_of, format_call, format_calls, join_words
from pgmesh._util.suggestions import (
    describe_misfit,
    fit_sizes,
    infer_size,
    known_product,
    start_command,
    torchrun_command,
)
from pgmesh._util.validation import parse_sizes, whole_number
from pgmesh.errors import ShapeError
from pgmesh.layout import Layout

if TYPE_CHECKING:
    from pgmesh.recipes.arrangement import Arrangement


def parse_recipe_sizes(who: str, /, **sizes: object) -> dict[str, int]:
    """Sizes as integers of at least 1, and at most one -1. Those that are None are left out.

    Raises:
        ShapeError: a value is no size.
    """
    given = {axis: size for axis, size in sizes.items() if size is not None}
    return {str(axis): size for axis, size in parse_sizes(who, (), given).items()}


@dataclass(frozen=True)
class RecipeCall:
    """The call of a recipe. ``str`` returns it as text.

    Args:
        who: the function, such as "recipes.megatron".
        ranks: the ranks of the arrangement.
        given: the arguments after the world. Those that are None are not written.

    >>> print(RecipeCall.of("recipes.megatron", 16, tp=2, cp=None))
    recipes.megatron(16, tp=2)
    """

    who: str
    ranks: range
    given: Mapping[str, object]

    @classmethod
    def of(cls, who: str, world: object, first: object = 0, /, **given: object) -> RecipeCall:
        """The call for ``world`` ranks, starting with ``first``.

        Raises:
            ShapeError: ``world`` is not a positive integer, or ``first`` is negative.
        """
        try:
            count, start = whole_number(world), whole_number(first)
        except TypeError:
            count = start = 0
        if count < 1 or start < 0:
            text = repr(world) if first == 0 else f"{world!r} from {first!r} on"
            raise ShapeError(f"{who}: the world is a number of ranks, such as {who}(8), not {text}.")
        return cls(who, range(start, start + count), given)

    def __str__(self) -> str:
        return self.with_changes()

    def with_changes(self, **changes: object) -> str:
        """The call with some arguments changed or added, as text."""
        return format_call(self.who, {}, len(self.ranks), **{**self.given, **changes})

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

        >>> RecipeCall.of("recipes.megatron", 16, tp=2, pp=4).fill_sizes({"tp": 2, "pp": 4, "dp": -1})
        {'tp': 2, 'pp': 4, 'dp': 2}
        """
        count = len(self.ranks) if count is None else count
        filled = infer_size(sizes, count)
        if filled is not None:
            return filled
        right, inferred, why = fit_sizes(sizes, count)
        changed = {axis: size for axis, size in {**right, inferred: -1}.items() if size != sizes[axis]}
        ways = [(self.with_changes(**changed, **changes), why)]
        if len(self.ranks) == 1:
            ways = [start_command(known_product(sizes)), *ways]
        call = self.with_changes(**{axis: size for axis, size in sizes.items() if size > 1})
        raise ShapeError(f"{describe_misfit(call, sizes, count, f'{holder} has {count}')}\n\n{format_calls(ways)}")

    def parse_order(
        self, order: object, default: str, direction: str, sizes: Mapping[str, Mapping[str, int]]
    ) -> list[str]:
        """The axes that an order names, as a list. Those that it omits, all of size 1, are at the end.

        Args:
            order: axes joined by ``-``.
            default: an order of all axes.
            direction: meaning of the order, for errors, such as "fastest axis first".
            sizes: axis sizes of each mesh. The key follows the axis in errors: "" or "of experts ". An axis larger
                than 1 must be named.

        Raises:
            ShapeError: an axis does not exist, is named twice, or is missing.

        >>> call = RecipeCall.of("recipes.oslo", 8)
        >>> call.parse_order("data-tensor", "pipeline-data-tensor", "outermost axis first", {})
        ['data', 'tensor', 'pipeline']
        """
        known, asked = default.split("-"), str(order).lower().split("-")
        unknown = [axis for axis in asked if axis not in known]
        twice = [axis for axis in asked if asked.count(axis) > 1]
        missing = [
            f"{axis} {what}has size {size}, but the order does not name it"
            for what, each in sizes.items()
            for axis, size in each.items()
            if axis not in asked and size != 1
        ]
        if unknown:
            problem = f"the order names {join_words(unknown, 'or')}; it may name {', '.join(known)}"
        elif twice:
            problem = f"the order names {twice[0]} more than once"
        elif missing:
            problem = missing[0]
        else:
            return [*asked, *(axis for axis in known if axis not in asked)]
        raise ShapeError(f"{self}: {problem}.\n\n  order={default!r}   # {direction}")

    def arrange(
        self, of: Any, name: str | None, box: Mapping[str, int], arrange: Callable[[Any], Arrangement]
    ) -> Arrangement:
        """The arrangement over a mesh. All checks run over a Layout first, so that an error creates no mesh.

        Args:
            of: class of the mesh. Default: ProcessGroupMesh.
            name: name of the mesh.
            box: the axes and their sizes.
            arrange: checks the arguments and returns the arrangement over a layout or a mesh.

        Raises:
            ShapeError: the world has fewer ranks.
        """
        plan = arrange(Layout(**box, ranks=self.ranks))
        if of is Layout and name is None:
            return plan
        if of is None:
            from pgmesh.groups.world import world_rank_and_size
            from pgmesh.mesh import ProcessGroupMesh

            of = ProcessGroupMesh
            self._check_world(world_rank_and_size()[1])
        return arrange(of(**box, ranks=self.ranks, **({} if name is None else {"name": name})))

    def _check_world(self, world: int) -> None:
        """Raise ShapeError if the world lacks some of the ranks."""
        if self.ranks[-1] < world:
            return
        count = len(self.ranks)
        first = f" from {self.ranks[0]} on" * bool(self.ranks[0])
        ways = [
            (f"{torchrun_command(self.ranks[-1] + 1)} script.py", "start enough ranks"),
            (f"{self.who}({world}, ...)", "or arrange the ranks of this world"),
        ]
        problem = f"{self.who}({count}, ...) arranges {count_of(count, 'rank')}{first}, but the world has {world}."
        raise ShapeError(f"{problem}\n\n{format_calls(ways)}")
