"""What the doctests of pgmesh/ are shown on."""

from __future__ import annotations

from typing import Any

import pytest

from pgmesh import Layout


@pytest.fixture(autouse=True)
def _shown(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["layout"] = Layout(pp=2, dp=2, tp=2)
