"""Names that every doctest may use: the running example, pp=2, dp=2, tp=2, on rank 5 of a fake world of 8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def running_example(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> Iterator[None]:
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    import pgmesh  # not above: pytest's own process, which only hands out tests, would import torch
    from tests.support.fake_world import fake_rank

    with fake_rank(5, 8):
        doctest_namespace.update({name: getattr(pgmesh, name) for name in pgmesh.__all__})
        doctest_namespace["layout"] = pgmesh.Layout(pp=2, dp=2, tp=2)
        doctest_namespace["mesh"] = pgmesh.ProcessGroupMesh(pp=2, dp=2, tp=2, name="example")
        yield
