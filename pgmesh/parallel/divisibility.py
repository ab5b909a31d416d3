"""Equal shares, or the error that says which would be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pgmesh.errors import ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh


def format_sizes(mesh: ProcessGroupMesh, axes: Iterable[Axis]) -> str:
    """Axes with their sizes, for a message: "dp=2 x cp=2"."""
    return " x ".join(f"{'axis ' * isinstance(axis, int)}{axis}={mesh.size(axis)}" for axis in axes)


def nearest_multiples(count: int, unit: int) -> str:
    """The multiples next to a number, in words.

    >>> nearest_multiples(30, 8), nearest_multiples(3, 8)
    ('24 or 32', '8')
    """
    return " or ".join(str(n) for n in (count // unit * unit, (count // unit + 1) * unit) if n)


def divide_along_axes(
    count: int, what: str, unit: str, mesh: ProcessGroupMesh, axes: Sequence[Axis], alternative: str = ""
) -> int:
    """How many each rank along the axes gets.

    Args:
        way: another way out.

    Raises:
        ShapeError: they do not divide. It says how many would.
    """
    return divide_evenly(count, what, unit, mesh.size(*axes), format_sizes(mesh, axes), alternative)


def divide_evenly(count: int, what: str, unit: str, n: int, along: str, alternative: str = "") -> int:
    """The same for so many ranks along what the words say."""
    if count % n:
        raise ShapeError(
            f"{what} cannot be shared out evenly along {along}: {count} is not divisible by {n}.\n\n"
            f"  {nearest_multiples(count, n)} {unit} would do{alternative}"
        )
    return count // n
