"""Hypothesis tries the same examples on every run, or others with --hypothesis-seed."""

from __future__ import annotations

import pytest
from hypothesis import settings


def pytest_configure(config: pytest.Config) -> None:
    fixed = config.getoption("hypothesis_seed") is None
    settings.register_profile("pgmesh", derandomize=fixed, deadline=None, database=None, print_blob=True)
    settings.load_profile("pgmesh")


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("hypothesis_seed")
    return "examples: " + (
        "the same on every run; --hypothesis-seed=N tries others" if seed is None else f"seed {seed}"
    )
