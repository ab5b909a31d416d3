"""Tests that each rank of a mesh runs, with the mesh as their first argument.

@on_mesh(dp=2, tp=2)
def test_size(mesh):
    assert mesh.size("dp") == 2
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from pgmesh import ProcessGroupMesh
from tests.support.worlds import check_sums, groups_of, on_ranks


def on_mesh(**sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a test on a mesh of these sizes. After the test, each group still sums over exactly its ranks."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any) -> None:
            with ProcessGroupMesh(sizes) as mesh:
                test(mesh, *args)
                check_sums(groups_of(mesh))

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])
        return on_ranks(math.prod(sizes.values()))(run)

    return decorate
