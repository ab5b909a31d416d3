"""Arguments of recipes: parsing, checks, and errors that suggest a correct call."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pgmesh._util.formatting import format_calls
from pgmesh._util.suggestions import divisors, torchrun_command
from pgmesh._util.validation import parse_size
from pgmesh.errors import ShapeError
from pgmesh.layout import Layout

if TYPE_CHECKING:
    from pgmesh.recipes.arrangement import Arrangement


def format_recipe_call(recipe: str, world: int, /, **given: object) -> str:
    """The call of a recipe as text, without arguments that are None.

    >>> format_recipe_call("megatron", 16, tp=2, cp=None)
    'recipes.megatron(16, tp=2)'
    """
    words = [f"{word}={getattr(value, '__name__', repr(value))}" for word, value in given.items() if value is not None]
    return f"recipes.{recipe}({', '.join([str(world), *words])})"


def build_arrangement(
    recipe: str,
    of: Any,
    box: Mapping[str, int],
    ranks: range,
    name: str | None,
    arrange: Callable[[Any], Arrangement],
) -> Arrangement:
    """The arrangement of a recipe over a mesh. All checks run over a Layout first, so that an error creates no mesh.

    Args:
        recipe: name of the recipe, for errors.
        of: class of the mesh. Default: ProcessGroupMesh.
        box: the axes and their sizes.
        ranks: the ranks of the mesh.
        name: name of the mesh.
        arrange: checks the arguments and returns the arrangement over a layout or a mesh.

    Raises:
        ShapeError: the world has fewer ranks.
    """
    plan = arrange(Layout(**box, ranks=ranks))
    if of is Layout and name is None:
        return plan
    if of is None:
        from pgmesh.groups.world import world_rank_and_size
        from pgmesh.mesh import ProcessGroupMesh

        of = ProcessGroupMesh
        _, world_size = world_rank_and_size()
        if ranks[-1] >= world_size:
            first = f" from {ranks[0]} on" * bool(ranks[0])
            ways = [
                (f"{torchrun_command(ranks[-1] + 1)} script.py", "start enough ranks"),
                (f"recipes.{recipe}({world_size}, ...)", "or arrange the ranks of this world"),
            ]
            count = format_rank_count(len(ranks))
            raise ShapeError(
                f"recipes.{recipe}({len(ranks)}, ...) arranges {count}{first}, but the world has {world_size}."
                f"\n\n{format_calls(ways)}"
            )
    return arrange(of(**box, ranks=ranks, **({} if name is None else {"name": name})))


def parse_world(recipe: str, world: object, first: object = 0) -> range:
    """The ranks of an arrangement: ``world`` ranks, starting with ``first``.

    Raises:
        ShapeError: ``world`` is not a positive integer, or ``first`` is negative.
    """
    try:
        count, start = operator.index(world), operator.index(first)  # type: ignore[arg-type]
    except TypeError:
        count, start = 0, 0
    if count < 1 or start < 0:
        text = repr(world) if first == 0 else f"{world!r} from {first!r} on"
        raise ShapeError(f"recipes.{recipe}: the world is a number of ranks, such as recipes.{recipe}(8), not {text}.")
    return range(start, start + count)


def parse_recipe_size(recipe: str, name: str, size: object) -> int:
    """``size`` as an integer of at least 1.

    Raises:
        ShapeError: it is not.
    """
    size = parse_size(f"recipes.{recipe}", name, size)
    if size < 1:
        raise ShapeError(f"recipes.{recipe}: the size of {name} is {size}; a size is at least 1.")
    return size


def remaining_size(
    recipe: str,
    world: int,
    sizes: Mapping[str, int],
    fixed: Mapping[str, int] | None = None,
    given: Mapping[str, object] | None = None,
) -> int:
    """The size of the remaining axis: the world divided by the product of the other sizes.

    Args:
        recipe: name of the recipe, for errors.
        world: number of ranks.
        sizes: sizes of the other axes. Errors suggest a change of the first one that can be corrected.
        fixed: further sizes, which errors do not change. Their product must divide the world.
        given: other arguments of the call, for errors.

    Raises:
        ShapeError: the product does not divide the world.

    >>> remaining_size("megatron", 16, {"tp": 2, "pp": 4})
    2
    """
    fixed, given = fixed or {}, given or {}
    factors = {**sizes, **fixed}
    divisor, left = math.prod(factors.values()), world // math.prod(fixed.values())
    if world % divisor == 0:
        return world // divisor
    suggested, why = dict(sizes), f"sizes that divide {left}"
    for name, size in sizes.items():
        rest = math.prod(sizes.values()) // size
        if left % rest == 0:  # changing this size is enough
            fitting = divisors(left // rest)
            suggested[name] = min(fitting, key=lambda n: (abs(n - size), n))
            why = f"{name} may be {format_choices(fitting)}"
            break
    else:
        for name in sizes:
            suggested[name] = max(n for n in divisors(left) if n <= sizes[name])
            left //= suggested[name]
    product = f"{' x '.join(factors)} is {' x '.join(map(str, factors.values()))} = {divisor}"
    ways = [(format_recipe_call(recipe, world, **{**factors, **suggested}, **given), why)]
    if world == 1:
        ways = [(f"{torchrun_command(divisor)} script.py", "a script by itself is a world of 1: start more"), *ways]
    call_text = format_recipe_call(recipe, world, **factors, **given)
    problem = f"{call_text}: {product}, which does not divide {format_rank_count(world)}."
    raise ShapeError(f"{problem}\n\n{format_calls(ways)}")


def parse_order(
    call_text: str, order: object, default: str, direction: str, sizes: Mapping[str, Mapping[str, int]]
) -> list[str]:
    """The axes that an order names, as a list.

    Args:
        call_text: the call, for errors.
        order: axes joined by ``-``.
        default: an order of all axes.
        direction: meaning of the order, for errors, such as "fastest axis first".
        sizes: axis sizes of each mesh. The key follows the axis in errors: "" or "of experts ". An axis larger than 1
            must be named.

    Raises:
        ShapeError: an axis does not exist, is named twice, or is missing.

    >>> parse_order("recipes.oslo(8)", "data-tensor", "pipeline-data-tensor", "outermost axis first", {})
    ['data', 'tensor']
    """
    known, asked = default.split("-"), str(order).lower().split("-")
    hint = f"\n\n  order={default!r}   # {direction}"
    unknown = [axis for axis in asked if axis not in known]
    if unknown:
        raise ShapeError(
            f"{call_text}: the order names {format_choices(unknown)}; it may name {', '.join(known)}.{hint}"
        )
    if len(set(asked)) != len(asked):
        twice = next(axis for axis in asked if asked.count(axis) > 1)
        raise ShapeError(f"{call_text}: the order names {twice} more than once.{hint}")
    for what, each in sizes.items():
        for axis, size in each.items():
            if axis not in asked and size != 1:
                raise ShapeError(f"{call_text}: {axis} {what}has size {size}, but the order does not name it.{hint}")
    return asked


def format_rank_count(count: int) -> str:
    """A number of ranks as text.

    >>> format_rank_count(1), format_rank_count(2)
    ('1 rank', '2 ranks')
    """
    return f"{count} rank{'s' * (count != 1)}"


def format_choices(values: Iterable[object]) -> str:
    """Values joined by commas and "or".

    >>> format_choices([1, 2, 4])
    '1, 2 or 4'
    """
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
