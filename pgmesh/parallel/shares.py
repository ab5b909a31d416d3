"""Equal shares, or the error that says which would be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pgmesh.errors import ShapeError
from pgmesh.parallel.base import sizes_of

if TYPE_CHECKING:
    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh


def multiples_near(count: int, unit: int) -> str:
    """The multiples next to a number, in words.

    >>> multiples_near(30, 8), multiples_near(3, 8)
    ('24 or 32', '8')
    """
    return " or ".join(str(n) for n in (count // unit * unit, (count // unit + 1) * unit) if n)


def equal_share(count: int, what: str, unit: str, mesh: ProcessGroupMesh, axes: Sequence[Axis]) -> int:
    """How many each rank along the axes gets.

    Raises:
        ShapeError: they do not divide. It says how many would.
    """
    n = mesh.size(*axes)
    if count % n:
        raise ShapeError(
            f"{what} cannot be shared out evenly along {sizes_of(mesh, axes)}: {count} is not divisible by {n}.\n\n"
            f"  {multiples_near(count, n)} {unit} would do"
        )
    return count // n
