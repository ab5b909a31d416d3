"""Even division of rows, heads and layers over ranks. The error suggests the nearest counts that divide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pgmesh.errors import ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh


def format_sizes(mesh: ProcessGroupMesh, axes: Iterable[Axis]) -> str:
    """Axes with their sizes, for a message: "dp=2 x cp=2"."""
    names = {axis: f"axis {axis}" if isinstance(axis, int) else axis for axis in axes}
    return " x ".join(f"{name}={mesh.size(axis)}" for axis, name in names.items())


def nearest_multiples(count: int, unit: int) -> str:
    """The multiples of ``unit`` around ``count``, for a message.

    >>> nearest_multiples(30, 8), nearest_multiples(3, 8)
    ('24 or 32', '8')
    """
    return " or ".join(str(n) for n in (count // unit * unit, (count // unit + 1) * unit) if n)


def divide_along_axes(
    count: int, what: str, unit: str, mesh: ProcessGroupMesh, axes: Sequence[Axis], alternative: str = ""
) -> int:
    """``count`` divided by the number of ranks along the axes.

    Args:
        count: the number to divide.
        what: subject of the error message, such as "a batch of 6 rows".
        unit: plural noun of the counted things, such as "rows".
        mesh: the mesh.
        axes: the axes.
        alternative: a further suggestion, at the end of the message.

    Raises:
        ShapeError: the count is not divisible. The message has the nearest counts that are.
    """
    return divide_evenly(count, what, unit, mesh.size(*axes), format_sizes(mesh, axes), alternative)


def divide_evenly(count: int, what: str, unit: str, n: int, along: str, alternative: str = "") -> int:
    """``count`` divided by ``n`` ranks; ``along`` describes them in the message. See ``divide_along_axes``."""
    if count % n:
        raise ShapeError(
            f"{what} cannot be split evenly along {along}: {count} is not divisible by {n}.\n\n"
            f"  {nearest_multiples(count, n)} {unit} would do{alternative}"
        )
    return count // n
