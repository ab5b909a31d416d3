"""Equal shares, or the error that says which would be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pgmesh.errors import ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh


def sizes_of(mesh: ProcessGroupMesh, axes: Iterable[Axis]) -> str:
    """Axes with their sizes, for a message: "dp=2 x cp=2"."""
    return " x ".join(f"{'axis ' * isinstance(axis, int)}{axis}={mesh.size(axis)}" for axis in axes)


def multiples_near(count: int, unit: int) -> str:
    """The multiples next to a number, in words.

    >>> multiples_near(30, 8), multiples_near(3, 8)
    ('24 or 32', '8')
    """
    return " or ".join(str(n) for n in (count // unit * unit, (count // unit + 1) * unit) if n)


def equal_share(count: int, what: str, unit: str, mesh: ProcessGroupMesh, axes: Sequence[Axis], way: str = "") -> int:
    """How many each rank along the axes gets.

    Args:
        way: another way out.

    Raises:
        ShapeError: they do not divide. It says how many would.
    """
    return equal_part(count, what, unit, mesh.size(*axes), sizes_of(mesh, axes), way)


def equal_part(count: int, what: str, unit: str, n: int, along: str, way: str = "") -> int:
    """The same for so many ranks along what the words say."""
    if count % n:
        raise ShapeError(
            f"{what} cannot be shared out evenly along {along}: {count} is not divisible by {n}.\n\n"
            f"  {multiples_near(count, n)} {unit} would do{way}"
        )
    return count // n
