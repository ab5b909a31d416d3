"""The mesh of tests that need no other rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pgmesh import ProcessGroupMesh
from tests.support.fake_world import fake_rank


@pytest.fixture
def mesh() -> Iterator[ProcessGroupMesh]:
    """A mesh pp=2, dp=2, tp=2, named "actor", on rank 5."""
    with fake_rank(5, 8), ProcessGroupMesh(pp=2, dp=2, tp=2, name="actor") as mesh:
        yield mesh
